// Layer norm on CUDA (formula in trainwright/layer_norm.h; kernels in cuda/norm.cuh).
//
// The sum of a row gives its mean; then deviations and their squares are summed together.
// Bytes per element: forward 2s (4s with residual), backward 3s (4s; s = element size); w and b, and in
// backward w, dw and db, once per block. Bound: memory bandwidth. Accesses are 16 bytes where C and the
// pointers allow, one element otherwise. Counted on the virtual GPU (tests/vgpu/test_counts.py): bytes
// within 2% of that; not yet timed on a GPU.
#include "trainwright/layer_norm.h"

#include "cuda/norm_binding.cuh"

namespace tw {

template<class A>
struct LayerNorm {
  using Stats = LayerNormStats<A>;
  using Row = LayerNormRow<A>;
  static constexpr int kSums = 2;     // over a row in backward: of g and of g (x - mean)
  static constexpr int kColumns = 2;  // dw, db

  // each(f) calls f(x) for this thread's elements of a row, sum(x) sums over the row.
  template<class Each, class Sum>
  static __device__ __forceinline__ Stats stats(Each&& each, Sum&& sum, int64_t C, A eps) {
    A total[1] = {}, moments[2] = {};
    each([&](A x) { total[0] += x; });
    sum(total);
    const A mean = total[0] / static_cast<A>(C);
    each([&](A x) {
      const A d = x - mean;
      moments[0] += d;
      moments[1] += d * d;
    });
    sum(moments);
    return layer_norm_stats<A>(mean, moments[0], moments[1], C, eps);
  }
  static __device__ __forceinline__ void add(A (&sums)[kSums], A g, A x, const Stats& s) {
    sums[0] += g;
    sums[1] += g * (x - s.mean);
  }
  static __device__ __forceinline__ Row row(const Stats& s, const A (&sums)[kSums], int64_t C) {
    return layer_norm_row<A>(s, sums[0], sums[1], C);
  }
  static __device__ __forceinline__ A xhat(A x, const Row& row) { return layer_norm_xhat(x, row); }
  static __device__ __forceinline__ A y(A x, const Row& row, A w, A b) {
    return layer_norm_xhat(x, row) * w + b;
  }
  static __device__ __forceinline__ A dx(A g, A, A xhat, const Row& row) {
    return layer_norm_dx(g, xhat, row);
  }
};

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd_cuda(const Tensor& x,
                                                       const std::optional<Tensor>& residual,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias,
                                                       double eps) {
  return norm_fwd<LayerNorm>("layer_norm", x, residual, weight, bias, eps, 0.0);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd_cuda(
    const Tensor& dy, const std::optional<Tensor>& dsum, const Tensor& x,
    const std::optional<Tensor>& weight, const Tensor& stats, bool need_dx, bool need_dw) {
  return norm_bwd<LayerNorm>("layer_norm", dy, dsum, x, weight, stats, 0.0, need_dx, need_dw);
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&tw::layer_norm_fwd_cuda));
  m.impl("layer_norm_bwd", TORCH_BOX(&tw::layer_norm_bwd_cuda));
}
