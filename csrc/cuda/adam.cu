// Adam over a list of tensors on CUDA (formula in trainwright/adam.h, driver in cuda/optimizer.cuh).
//
// Bytes per parameter and bound: as AdamW.
//
// build: no fused multiply-add
#include "trainwright/adam.h"

#include "cuda/adam_family.cuh"

namespace tw {

struct AdamRule : Adam {
  template<class A, class S>
  static __device__ __forceinline__ A update(A p, A g, A* s, int flags, const S& k) {
    return adam_update(p, g, s[0], s[1], k, Largest<A>{s + 2, flags});
  }
};

}  // namespace tw

TW_CUDA_OPTIMIZER(adam, tw::ElementUpdate<tw::AdamRule>)
