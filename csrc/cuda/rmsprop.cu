// RMSprop over a list of tensors on CUDA (formula in trainwright/rmsprop.h, driver in cuda/optimizer.cuh).
//
// Bytes per parameter: fp32 20, and 8 more for each of momentum and centered. Bound: memory bandwidth.
// Counted on the virtual GPU; not yet timed on a GPU.
//
// build: no fused multiply-add
#include "trainwright/rmsprop.h"

#include "cuda/optimizer_binding.cuh"

namespace tw {

struct RmspropRule {
  // lr, alpha, eps, weight decay, momentum, maximize; states: v, momentum (flag 1), mean gradient (2)
  static constexpr OptimizerInfo info = {6, 3, {{false, 0}, {true, 1}, {true, 2}}};
  template<class A>
  static __device__ __forceinline__ RmspropScalars<A> scalars(const double* h, double,
                                                              double multiplier) {
    return rmsprop_scalars<A>(h[0], h[1], h[2], h[3], h[4], multiplier);
  }
  template<class A, class S>
  static __device__ __forceinline__ A update(A p, A g, A* s, int flags, const S& k) {
    return rmsprop_update(p, g, s[0], flags & 1 ? s + 1 : nullptr, flags & 2 ? s + 2 : nullptr, k);
  }
};

}  // namespace tw

TW_CUDA_OPTIMIZER(rmsprop, optimizer_cuda<RmspropRule>)
