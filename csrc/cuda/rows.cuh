// How the norms lay rows of C elements over threads.
//
// A row belongs to blockDim.x threads; short rows share a block, blockDim.y of them. Where 16-byte
// accesses are possible a thread has R packs of VEC elements, pack r of thread t is number
// r * blockDim.x + t, and they stay in registers. Otherwise (R = 0) it has the elements t,
// t + blockDim.x, ..., which are read again from the cache where they are used twice.
#pragma once
#include "cuda/launch.cuh"
#include "trainwright/pack.cuh"

namespace tw {

constexpr int kRowThreads =
    512;  // 128 registers a thread: enough for kRowElements of four operands
template<class T>
constexpr int kRowElements = sizeof(T) == 8 ? 8 : 16;  // per thread; so C <= 8192 (4096 for fp64)
template<class T>
constexpr int64_t kLongestRow = kRowThreads * kRowElements<T>;

inline dim3 row_block(int64_t C, int per_thread) {
  const int64_t threads = std::max<int64_t>(1, divide_up(C, per_thread));
  if (threads > 32) return {static_cast<unsigned>(divide_up(threads, 32) * 32)};
  unsigned x = 2;  // lanes in pairs, for load_span
  while (x < threads) x *= 2;
  return {x, 128 / x};
}

// Calls f(VEC, R, block) with the first two as types: as few packs per thread as keep a row of C
// elements within kRowThreads, or VEC = 1, R = 0 where accesses cannot be wide.
template<class T, class F>
void with_row_layout(int64_t C, bool wide, F&& f) {
  constexpr int full = 16 / sizeof(T), most = kRowElements<T>;
  if (!wide || C % full != 0)
    f(Int<1>{}, Int<0>{}, row_block(C, C <= 1024 ? 4 : most));
  else if (C <= 256 * full)
    f(Int<full>{}, Int<1>{}, row_block(C, full));
  else
    f(Int<full>{}, Int<most / full>{}, row_block(C, most));
}

// Blocks of a backward pass: as many as the device holds at once, so that there are few partial sums.
inline int64_t row_slots(int64_t N, int64_t C, int64_t element_bytes) {
  int64_t slots = 0;
  auto count = [&](auto, auto, dim3 block) {
    const int64_t per_device = multiprocessors() * std::max<int64_t>(1, 1024 / (block.x * block.y));
    slots = std::min(divide_up(N, block.y), per_device);
  };
  if (element_bytes == 8)
    with_row_layout<double>(C, true, count);
  else if (element_bytes == 4)
    with_row_layout<float>(C, true, count);
  else
    with_row_layout<bf16>(C, true, count);
  return slots;
}

// Column sums of the rows of a block, K of them per element: in registers with R > 0, else in
// `memory`, dynamic shared memory of partial_bytes. A thread touches its own alone until store().
template<class A, int VEC, int R, int K>
struct ColumnSums {
  A sums[R == 0 ? 1 : R][K][VEC];
  A* memory;

  __device__ __forceinline__ static int threads() { return blockDim.x * blockDim.y; }
  __device__ __forceinline__ static int me() { return threadIdx.y * blockDim.x + threadIdx.x; }
  __device__ __forceinline__ A& slot(int j, int k) {
    return memory[(j * K + k) * threads() + me()];
  }

  __device__ __forceinline__ ColumnSums(A* shared, int C) : sums{}, memory(shared) {
    if constexpr (R == 0) {
      for (int j = 0; j * static_cast<int>(blockDim.x) < C; ++j)
#pragma unroll
        for (int k = 0; k < K; ++k) slot(j, k) = A(0);
    }
  }
  // Writes sum k to row blockIdx.x of partial[k], each (slots, C); rows of a block in order.
  __device__ __forceinline__ void store(void* const (&partial)[K], int C) {
    const int rows = blockDim.y, end = threadIdx.y == 0 ? C : 0;
    if constexpr (R == 0) {
      __syncthreads();
      for (int j = 0; j * static_cast<int>(blockDim.x) < C; ++j) {
        const int c = j * blockDim.x + threadIdx.x;
        if (c >= end) continue;
#pragma unroll
        for (int k = 0; k < K; ++k) {
          A sum = slot(j, k);
          for (int y = 1; y < rows; ++y) sum += (&slot(j, k))[y * blockDim.x];
          row_of(partial[k], C)[c] = sum;
        }
      }
    } else {
      if (R == 1 && rows > 1) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
          __syncthreads();
#pragma unroll
          for (int i = 0; i < VEC; ++i) memory[i * threads() + me()] = sums[0][k][i];
          __syncthreads();
          if (threadIdx.y != 0) continue;
#pragma unroll
          for (int i = 0; i < VEC; ++i)
            for (int y = 1; y < rows; ++y)
              sums[0][k][i] += memory[i * threads() + y * blockDim.x + threadIdx.x];
        }
      }
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int k = 0; k < K; ++k)
          store_span(row_of(partial[k], C), static_cast<int>(r * blockDim.x + threadIdx.x) * VEC,
                     end, sums[r][k]);
    }
  }

 private:
  __device__ __forceinline__ static A* row_of(void* partial, int C) {
    return static_cast<A*>(partial) + blockIdx.x * static_cast<int64_t>(C);
  }
};

// Dynamic shared memory of ColumnSums.
template<class A, int VEC, int R, int K>
int partial_bytes(int64_t C, dim3 block) {
  const int64_t threads = block.x * block.y;
  const int64_t elements = R == 0        ? divide_up(C, block.x) * K * threads
                           : block.y > 1 ? VEC * threads
                                         : 0;
  return static_cast<int>(elements * static_cast<int64_t>(sizeof(A)));
}

}  // namespace tw
