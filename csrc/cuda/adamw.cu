// AdamW over a list of tensors on CUDA (formula in trainwright/adamw.h, driver in cuda/optimizer.cuh).
//
// Bytes per parameter: fp32 28 (p, m, v read and written, g read); bf16 parameter and gradient with an
// fp32 master 28 (the parameter is only written), with split16 and bf16 state 18, all bf16 14; int8
// state 16.1 with fp32 and 10.1 with bf16 parameters. Bound: memory bandwidth. Counted on the virtual
// GPU; not yet timed on a GPU.
//
// build: no fused multiply-add
#include "trainwright/adamw.h"

#include "cuda/adam_family.cuh"

namespace tw {

struct AdamWRule : AdamW {
  template<class A, class S>
  static __device__ __forceinline__ A update(A p, A g, A* s, int flags, const S& k) {
    return adamw_update(p, g, s[0], s[1], k, Largest<A>{s + 2, flags});
  }
};

}  // namespace tw

TW_CUDA_OPTIMIZER(adamw, tw::ElementUpdate<tw::AdamWRule>)
