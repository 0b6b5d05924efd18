// What a pass over gradients found, block by block, added up in block order.
#pragma once
#include <math.h>

#include "cuda/tensor_list.cuh"

namespace tw {

constexpr int kSumThreads = 512;

// Two sums over the block, in every thread.
__device__ __forceinline__ void block_pair_sum(double (&x)[2]) {
  __shared__ double shared[2][32];
  row_sum(x, shared);
}

enum class Extreme : int { none, largest, smallest };

// The larger or the smaller of two; NaN wins over both.
__device__ __forceinline__ double more_extreme(double a, double b, Extreme extreme) {
  if (a != a || b != b) return a + b;
  return (extreme == Extreme::largest) == (a > b) ? a : b;
}
// Over the block of THREADS threads, in each of them.
template<int THREADS>
__device__ __forceinline__ double block_extreme(double x, Extreme extreme) {
  __shared__ double values[THREADS];
  values[threadIdx.x] = x;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
      values[threadIdx.x] = more_extreme(values[threadIdx.x], values[threadIdx.x + half], extreme);
  }
  __syncthreads();
  return values[0];
}

// {sum of squares or the like, how many threads met something not finite} of block blockIdx.x.
__device__ __forceinline__ void store_stats(double* partial, const double (&x)[2]) {
  reinterpret_cast<double2*>(partial)[blockIdx.x] = {x[0], x[1] == 0.0 ? 0.0 : 1.0};
}

// stats = {sum (or the largest or smallest) of partial[i][0], 1 if any partial[i][1] is not 0}, in
// one block and in an order that depends on `count` alone.
static __global__ void __launch_bounds__(kSumThreads, 1)
    sum_stats_kernel(const double* partial, int64_t count, double* stats, Extreme extreme) {
  double x[2] = {extreme == Extreme::smallest ? static_cast<double>(INFINITY) : 0.0, 0.0};
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) {
    const double2 one = reinterpret_cast<const double2*>(partial)[i];
    x[0] = extreme == Extreme::none ? x[0] + one.x : more_extreme(x[0], one.x, extreme);
    x[1] += one.y;
  }
  const double value = x[0];
  block_pair_sum(x);
  if (extreme != Extreme::none) x[0] = block_extreme<kSumThreads>(value, extreme);
  if (threadIdx.x == 0) {
    stats[0] = x[0];
    stats[1] = x[1] == 0.0 ? 0.0 : 1.0;
  }
}

inline void launch_sum_stats(const double* partial, int64_t count, double* stats, Extreme extreme,
                             cudaStream_t stream) {
  sum_stats_kernel<<<1, kSumThreads, 0, stream>>>(partial, count, stats, extreme);
}

}  // namespace tw
