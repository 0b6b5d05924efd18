// What Adam and AdamW share. States: m, v and, with flag 1, the largest v so far (AMSGrad).
#pragma once
#include "cuda/optimizer_binding.cuh"

namespace tw {

constexpr OptimizerInfo adam_family(int hyper) {
  return {hyper, 3, {{true, 0}, {false, 0}, {false, 1}}};
}

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
