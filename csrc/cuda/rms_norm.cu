// RMS norm on CUDA (formula in trainwright/rms_norm.h; kernels in cuda/norm.cuh).
//
// Bytes per element: forward 2s (4s with residual), backward 3s (4s; s = element size); w, and in
// backward dw, once per block. Bound: memory bandwidth. Accesses are 16 bytes where C and the pointers
// allow, one element otherwise. Counted on the virtual GPU (tests/vgpu/test_counts.py): bytes within 2%
// of that; not yet timed on a GPU.
#include "trainwright/rms_norm.h"

#include "cuda/norm_binding.cuh"

namespace tw {

template<class A>
struct RmsNorm {
  struct Stats {
    A rstd;
  };
  struct Row {  // factors of a row
    A rstd, mean_gx;
  };
  static constexpr int kSums = 1;     // over a row in backward: of g x
  static constexpr int kColumns = 1;  // dw

  // each(f) calls f(x) for this thread's elements of a row, sum(x) sums over the row.
  template<class Each, class Sum>
  static __device__ __forceinline__ Stats stats(Each&& each, Sum&& sum, int64_t C, A eps) {
    A squares[1] = {};
    each([&](A x) { squares[0] += x * x; });
    sum(squares);
    return {rms_rstd<A>(squares[0], C, eps)};
  }
  static __device__ __forceinline__ void add(A (&sums)[kSums], A g, A x, const Stats&) {
    sums[0] += g * x;
  }
  static __device__ __forceinline__ Row row(const Stats& s, const A (&sums)[kSums], int64_t C) {
    return {s.rstd, sums[0] / static_cast<A>(C)};
  }
  static __device__ __forceinline__ A xhat(A x, const Row& row) { return x * row.rstd; }
  static __device__ __forceinline__ A y(A x, const Row& row, A w, A) {
    return rms_y(x, row.rstd, w);
  }
  static __device__ __forceinline__ A dx(A g, A x, A, const Row& row) {
    return rms_dx(g, x, row.rstd, row.mean_gx);
  }
};

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

std::tuple<Tensor, Tensor, Tensor> rms_norm_fwd_cuda(const Tensor& x,
                                                     const std::optional<Tensor>& residual,
                                                     const std::optional<Tensor>& weight,
                                                     double eps, double weight_offset) {
  return norm_fwd<RmsNorm>("rms_norm", x, residual, weight, std::nullopt, eps, weight_offset);
}

std::tuple<Tensor, Tensor> rms_norm_bwd_cuda(const Tensor& dy, const std::optional<Tensor>& dsum,
                                             const Tensor& x, const std::optional<Tensor>& weight,
                                             const Tensor& rstd, double weight_offset, bool need_dx,
                                             bool need_dw) {
  return norm_bwd<RmsNorm>("rms_norm", dy, dsum, x, weight, rstd, weight_offset, need_dx, need_dw);
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("rms_norm_fwd", TORCH_BOX(&tw::rms_norm_fwd_cuda));
  m.impl("rms_norm_bwd", TORCH_BOX(&tw::rms_norm_bwd_cuda));
}
