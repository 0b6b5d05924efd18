// What Adam and AdamW share: the largest v so far (AMSGrad), the state that exists with flag 1.
#pragma once
#include "cuda/optimizer_binding.cuh"

namespace tw {

template<class A>
struct Largest {
  A* so_far;
  int flags;
  __device__ __forceinline__ A operator()(A v) const {
    if (flags & 1) v = *so_far = v > *so_far || v != v ? v : *so_far;
    return v;
  }
};

}  // namespace tw
