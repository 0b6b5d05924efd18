// The torch side of the norms.
#pragma once
#include <array>

#include "cuda/binding.cuh"
#include "cuda/norm.cuh"

namespace tw {

template<template<class> class Norm>
void check_rows(const char* op, const Tensor& x, int64_t C) {
  constexpr int K = Norm<float>::kColumns;
  TW_CHECK_CONTIGUOUS(x);
  const int64_t most = dtype_of(x) == DType::f64 ? kLongestRow<double, K> : kLongestRow<float, K>;
  STD_TORCH_CHECK(C <= most, op, ": C must be at most ", most, ", got ", C);
}

inline DType dtype_or_f32(const std::optional<Tensor>& t) { return t ? dtype_of(*t) : DType::f32; }

// y, x + residual, statistics: (N) or (N, how many).
template<template<class> class Norm>
std::tuple<Tensor, Tensor, Tensor> norm_fwd(const char* op, const Tensor& x,
                                            const std::optional<Tensor>& residual,
                                            const std::optional<Tensor>& weight,
                                            const std::optional<Tensor>& bias, double eps,
                                            double weight_offset) {
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  check_rows<Norm>(op, x, C);
  const OnDevice here(x);
  constexpr int S = kNormStats<Norm, float>;
  Tensor y = empty(shape_of(x), x);
  Tensor sum = residual ? empty(shape_of(x), x) : empty({0}, x);
  Tensor stats =
      empty(S == 1 ? std::vector<int64_t>{N} : std::vector<int64_t>{N, S}, x, acc_dtype(x));
  if (N == 0) return {y, sum, stats};
  NormFwd a = {device_data(x),
               device_data(residual),
               device_data(weight),
               device_data(bias),
               device_data(y),
               residual ? device_data(sum) : nullptr,
               device_data(stats),
               N,
               C,
               eps,
               weight_offset,
               dtype_or_f32(weight),
               dtype_or_f32(bias),
               false};
  a.wide = aligned16(a.x, a.residual, a.weight, a.bias, a.y, a.sum);
  with_float_type(dtype_of(x),
                  [&](auto t) { launch_norm_fwd<Norm, decltype(t)>(a, stream_of(x)); });
  check_launch("norm_fwd_kernel");
  return {y, sum, stats};
}

// dx and the gradients of weight and, if the norm has one, bias, (C) in acc type; empty if not needed.
template<template<class> class Norm>
auto norm_bwd(const char* op, const Tensor& dy, const std::optional<Tensor>& dsum, const Tensor& x,
              const std::optional<Tensor>& weight, const Tensor& stats, double weight_offset,
              bool need_dx, bool need_dw) {
  constexpr int K = Norm<float>::kColumns;
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  check_rows<Norm>(op, x, C);
  TW_CHECK_CONTIGUOUS(dy);
  const OnDevice here(x);
  Tensor dx = empty(need_dx ? shape_of(x) : std::vector<int64_t>{0}, x);
  NormBwd<K> a = {device_data(dy),
                  device_data(dsum),
                  device_data(x),
                  device_data(weight),
                  device_data(stats),
                  need_dx ? device_data(dx) : nullptr,
                  {},
                  N,
                  C,
                  0,
                  weight_offset,
                  dtype_or_f32(weight),
                  false};
  a.wide = aligned16(a.dy, a.dsum, a.x, a.weight, a.dx);
  std::vector<Tensor> columns;
  with_float_type(dtype_of(x), [&](auto t) {
    using T = decltype(t);
    a.slots = N > 0 ? norm_bwd_slots<T, K>(N, C, a.wide) : 0;
    for (int k = 0; k < K; ++k) {
      columns.push_back(empty({need_dw ? a.slots : 0, need_dw ? C : 0}, x, acc_dtype(x)));
      if (need_dw) a.partials[k] = device_data(columns.back());
    }
    if (N > 0) launch_norm_bwd<Norm, T>(a, stream_of(x));
  });
  check_launch("norm_bwd_kernel");
  const auto summed = [&](int k) {  // (slots, C) -> (C), in a fixed order
    const std::vector<int64_t> slots = {0};
    return torch::stable::sum(columns[static_cast<size_t>(k)], slots, false, std::nullopt);
  };
  if constexpr (K == 1)
    return std::tuple<Tensor, Tensor>{dx, summed(0)};
  else
    return std::tuple<Tensor, Tensor, Tensor>{dx, summed(0), summed(1)};
}

}  // namespace tw
