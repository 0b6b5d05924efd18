// Lion over a list of tensors on CUDA (formula in trainwright/lion.h, driver in cuda/optimizer.cuh).
//
// Bytes per parameter: fp32 20, all bf16 10. Bound: memory bandwidth. Counted on the virtual GPU; not yet
// timed on a GPU.
//
// build: no fused multiply-add
#include "trainwright/lion.h"

#include "cuda/optimizer_binding.cuh"

namespace tw {

struct LionRule : Lion {
  template<class A, class S>
  static __device__ __forceinline__ A update(A p, A g, A* s, int, const S& k) {
    return lion_update(p, g, s[0], k);
  }
};

}  // namespace tw

TW_CUDA_OPTIMIZER(lion, tw::ElementUpdate<tw::LionRule>)
