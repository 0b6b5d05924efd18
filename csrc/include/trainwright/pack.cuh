// Device code only: a run of VEC elements that moves as one 16-byte access (VEC * sizeof(T) == 16)
// or element by element (VEC == 1), and sums over a warp and a block.
#pragma once
#include "trainwright/types.h"

TW_BEGIN

template<class T, int VEC>
struct alignas(VEC * sizeof(T)) Pack {
  T v[VEC];
};
template<int VEC, class T>
__device__ __forceinline__ Pack<T, VEC> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, VEC>*>(p);
}
template<int VEC, class T>
__device__ __forceinline__ void store_pack(T* p, Pack<T, VEC> x) {
  *reinterpret_cast<Pack<T, VEC>*>(p) = x;
}

template<class A>
__device__ __forceinline__ A warp_sum(A x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
// Sum over the block, in every thread. blockDim.x is a multiple of 32, at most 1024. `shared` holds
// 32 values; it may be used again for the next sum without a barrier in between only if another
// buffer is passed.
template<class A>
__device__ __forceinline__ A block_sum(A x, A* shared) {
  x = warp_sum(x);
  const int warps = blockDim.x / 32;
  if (warps == 1) return x;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : A(0);
  return warp_sum(x);
}

TW_END
