// SGD over a list of tensors on CUDA (formula in trainwright/sgd.h, driver in cuda/optimizer.cuh).
//
// Bytes per parameter: fp32 20 with momentum, 12 without. Bound: memory bandwidth. Counted on the virtual
// GPU; not yet timed on a GPU.
//
// build: no fused multiply-add
#include "trainwright/sgd.h"

#include "cuda/optimizer_binding.cuh"

namespace tw {

struct SgdRule {
  // lr, momentum, dampening, weight decay, nesterov, maximize; state: the momentum buffer, with flag 1
  static constexpr OptimizerInfo info = {6, 1, {{true, 1}}};
  template<class A>
  static __device__ __forceinline__ SgdScalars<A> scalars(const double* h, double step,
                                                          double multiplier) {
    return sgd_scalars<A>(h[0], h[1], h[2], h[3], h[4] != 0.0, step, multiplier);
  }
  template<class A, class S>
  static __device__ __forceinline__ A update(A p, A g, A* s, int flags, const S& k) {
    return flags & 1 ? sgd_update(p, g, s[0], k) : sgd_update(p, g, k);
  }
};

}  // namespace tw

TW_CUDA_OPTIMIZER(sgd, optimizer_cuda<SgdRule>)
