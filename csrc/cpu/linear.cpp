// The elementwise half of the backward of `linear`, on the CPU: with z the pre-activation,
//
//   dz = dy * act'(z),   dbias = sum over rows of dz
//
// in fp32 (fp64 for fp64); dz is rounded once to the storage type, dbias sums the unrounded values.
// Rows are split into a fixed number of slots whose partial sums are added in order, so that dbias
// has the same bits for any number of threads.
// Bytes per element: 3s (s with no activation; s = element size). Bound: memory bandwidth.
#include "cpu/kernel.h"
#ifdef TW_CPU_ISA
#include "trainwright/activation.h"
#endif

namespace tw {

struct LinearBwdArgs {
  const void *dy, *pre;  // (N, C); pre is null without activation
  void* dz;              // (N, C), or null without activation
  void* partial;         // (slots, C) in acc type, or null: no bias gradient wanted
  int64_t N, C, slots;
  DType dtype;
  int64_t activation;
};

}  // namespace tw

TW_DECLARE_KERNEL(linear_bwd, LinearBwdArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

template<class T, class Act>
void slot_rows(const LinearBwdArgs& a, acc_t<T>* sum, int64_t begin, int64_t end) {
  using S = acc_t<T>;
  for (int64_t n = begin; n < end; ++n) {
    const T* dy = static_cast<const T*>(a.dy) + n * a.C;
    const T* pre = a.pre ? static_cast<const T*>(a.pre) + n * a.C : nullptr;
    T* dz = a.dz ? static_cast<T*>(a.dz) + n * a.C : nullptr;
    for_lanes<S>(a.C, [&](int64_t i, auto k) {
      vec<S> d = vload<S>(dy + i, k);
      if (pre) {
        d *= Act::value_slope(vload<S>(pre + i, k)).slope;
        vstore<S>(dz + i, d, k);
      }
      if (sum) vstore<S>(sum + i, vload<S>(sum + i, k) + d, k);
    });
  }
}

}  // namespace

void linear_bwd(const LinearBwdArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    with_activation(static_cast<Activation>(a.activation), [&](auto act) {
      using T = decltype(tag);
      using S = acc_t<T>;
      const int64_t grain = 1 + 16384 * a.slots / (a.N * a.C + 1);
      parallel_for(0, a.slots, grain, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
          S* sum = a.partial ? static_cast<S*>(a.partial) + s * a.C : nullptr;
          if (sum) memset(sum, 0, static_cast<size_t>(a.C) * sizeof(S));
          slot_rows<T, decltype(act)>(a, sum, s * a.N / a.slots, (s + 1) * a.N / a.slots);
        }
      });
    });
  });
}

TW_END

#else  // ---- torch bindings --------------------------------------------------------------------

namespace tw {
namespace {

std::tuple<Tensor, Tensor> linear_bwd_cpu(const Tensor& dy, const std::optional<Tensor>& pre,
                                          int64_t activation, bool with_bias) {
  TW_CHECK_CONTIGUOUS(dy);
  STD_TORCH_CHECK(0 <= activation && activation <= 4, "linear_bwd: unknown activation");
  STD_TORCH_CHECK((activation == 0) == !pre, "linear_bwd: pre goes with an activation");
  STD_TORCH_CHECK(dy.dim() == 2, "linear_bwd: dy: expected 2 dimensions");
  if (pre)
    STD_TORCH_CHECK(pre->is_contiguous() && pre->scalar_type() == dy.scalar_type() &&
                        shape_of(*pre) == shape_of(dy),
                    "linear_bwd: pre: expected shape and dtype of dy");
  const int64_t N = dy.size(0), C = dy.size(1), slots = 32;
  Tensor dz = pre ? empty({N, C}, dy) : empty({0}, dy);
  Tensor partial = empty({with_bias ? slots : 0, C}, dy, acc_dtype(dy));
  linear_bwd({data(dy), data(pre), pre ? mutable_data(dz) : nullptr,
              with_bias ? mutable_data(partial) : nullptr, N, C, slots, dtype_of(dy), activation});
  if (!with_bias) return {dz, partial};
  const std::vector<int64_t> rows = {0};
  return {dz, torch::stable::sum(partial, rows, false, std::nullopt)};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("linear_bwd", TORCH_BOX(&tw::linear_bwd_cpu));
}

#endif
