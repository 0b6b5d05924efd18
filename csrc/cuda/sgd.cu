// SGD over a list of tensors on CUDA (formula in trainwright/sgd.h, driver in cuda/optimizer.cuh).
//
// Bytes per parameter: fp32 20 with momentum, 12 without. Bound: memory bandwidth. Counted on the virtual
// GPU; not yet timed on a GPU.
//
// build: no fused multiply-add
#include "trainwright/sgd.h"

#include "cuda/optimizer_binding.cuh"

namespace tw {

struct SgdRule : Sgd {
  template<class A, class S>
  static __device__ __forceinline__ A update(A p, A g, A* s, int flags, const S& k) {
    return flags & 1 ? sgd_update(p, g, s[0], k) : sgd_update(p, g, k);
  }
};

}  // namespace tw

TW_CUDA_OPTIMIZER(sgd, tw::ElementUpdate<tw::SgdRule>)
