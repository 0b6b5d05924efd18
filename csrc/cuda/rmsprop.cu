// RMSprop over a list of tensors on CUDA (formula in trainwright/rmsprop.h, driver in cuda/optimizer.cuh).
//
// Bytes per parameter: fp32 20, and 8 more for each of momentum and centered. Bound: memory bandwidth.
// Counted on the virtual GPU; not yet timed on a GPU.
//
// build: no fused multiply-add
#include "trainwright/rmsprop.h"

#include "cuda/optimizer_binding.cuh"

namespace tw {

struct RmspropRule : Rmsprop {
  template<class A, class S>
  static __device__ __forceinline__ A update(A p, A g, A* s, int flags, const S& k) {
    A *b = s + 1, *a = s + 2,
      *none = nullptr;  // a pointer chosen at run time would need local memory
    if (flags & 1)
      return flags & 2 ? rmsprop_update(p, g, s[0], b, a, k)
                       : rmsprop_update(p, g, s[0], b, none, k);
    return flags & 2 ? rmsprop_update(p, g, s[0], none, a, k)
                     : rmsprop_update(p, g, s[0], none, none, k);
  }
};

}  // namespace tw

TW_CUDA_OPTIMIZER(rmsprop, tw::ElementUpdate<tw::RmspropRule>)
