// How the norms lay rows of C elements over threads.
//
// A row belongs to blockDim.x threads; short rows share a block, blockDim.y of them. Pack r of thread t
// is number r * blockDim.x + t of the row; a pack is 16 bytes where C and the pointers allow, else one
// element (VEC = 1). A thread's R packs stay in registers; of rows that are too long for it, or not
// made of 16-byte packs, R = 0: packs are read again from the cache where they are used twice.
#pragma once
#include "cuda/launch.cuh"
#include "trainwright/pack.cuh"

namespace tw {

constexpr int kRowThreads =
    512;  // 128 registers a thread: enough for kRowElements of four operands
template<class T>
constexpr int kRowElements = sizeof(T) == 8 ? 8 : 16;  // in registers
// Bytes of shared memory for column sums in the backward of long rows: every architecture has them.
constexpr int64_t kRowShared = 96 * 1024;
// K column sums.
template<class T, int K>
constexpr int64_t kLongestRow = kRowShared / (K * static_cast<int64_t>(sizeof(acc_t<T>)));

inline dim3 row_block(int64_t C, int per_thread) {
  const int64_t threads = std::max<int64_t>(1, divide_up(C, per_thread));
  if (threads > 32) return {static_cast<unsigned>(divide_up(threads, 32) * 32)};
  unsigned x = 2;  // lanes in pairs, for load_span
  while (x < threads) x *= 2;
  return {x, 128 / x};
}

// Calls f(VEC, R, block) with the first two as types: as few packs per thread as keep a row of C
// elements within kRowThreads.
template<class T, class F>
void with_row_layout(int64_t C, bool wide, F&& f) {
  constexpr int full = 16 / sizeof(T), most = kRowElements<T>;
  if (!wide || C % full != 0)
    f(Int<1>{}, Int<0>{}, row_block(std::min<int64_t>(C, kRowThreads * 4), 4));
  else if (C > kRowThreads * most)
    f(Int<full>{}, Int<0>{}, dim3(kRowThreads));
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

// The pack of x at c, or that of x + residual, stored to `sum` and rounded as it is there.
template<int VEC, class T>
__device__ __forceinline__ Pack<T, VEC> load_sum(const T* x, const T* residual, T* sum, int c) {
  using A = acc_t<T>;
  const Pack<T, VEC> one = load_pack<VEC>(x + c);
  if (!residual) return one;
  const Pack<T, VEC> two = load_once<VEC>(residual + c);
  A v[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) v[i] = load_as<A>(one.v[i]) + load_as<A>(two.v[i]);
  const Pack<T, VEC> both = pack_as<T>(v);
  store_pack(sum + c, both);
  return both;
}

// Column sums of the rows of a block, K of them per element: in registers with R > 0, else in
// `memory`, dynamic shared memory of partial_bytes. A thread touches its own alone until store().
template<class A, int VEC, int R, int K>
struct ColumnSums {
  A sums[R == 0 ? 1 : R][K][VEC];
  A* memory;

  __device__ __forceinline__ static int threads() { return blockDim.x * blockDim.y; }
  __device__ __forceinline__ static int me() { return threadIdx.y * blockDim.x + threadIdx.x; }
  // R = 0: sum k of element i of pack j of this thread.
  __device__ __forceinline__ A& slot(int j, int k, int i) {
    return memory[((j * K + k) * VEC + i) * threads() + me()];
  }

  __device__ __forceinline__ ColumnSums(A* shared, int C) : sums{}, memory(shared) {
    if constexpr (R == 0) {
      for (int j = 0; j * static_cast<int>(blockDim.x) * VEC < C; ++j)
#pragma unroll
        for (int i = 0; i < K * VEC; ++i) slot(j, 0, i) = A(0);
    }
  }
  // Writes sum k to row blockIdx.x of partial[k], each (slots, C); rows of a block in order.
  __device__ __forceinline__ void store(void* const (&partial)[K], int C) {
    const int rows = blockDim.y, end = threadIdx.y == 0 ? C : 0;
    if constexpr (R == 0) {
      __syncthreads();
      for (int j = 0; j * static_cast<int>(blockDim.x) * VEC < C; ++j) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
          A x[VEC];
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            x[i] = slot(j, k, i);
            if (threadIdx.y == 0)
              for (int y = 1; y < rows; ++y) x[i] += (&slot(j, k, i))[y * blockDim.x];
          }
          store_span(row_of(partial[k], C), static_cast<int>(j * blockDim.x + threadIdx.x) * VEC,
                     end, x);
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

// Above 48 KiB of dynamic shared memory the device wants to be asked.
template<class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  if (bytes > 48 * 1024)
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Dynamic shared memory of ColumnSums.
template<class A, int VEC, int R, int K>
int partial_bytes(int64_t C, dim3 block) {
  const int64_t threads = block.x * block.y;
  const int64_t elements = R == 0        ? divide_up(C, block.x * VEC) * VEC * K * threads
                           : block.y > 1 ? VEC * threads
                                         : 0;
  return static_cast<int>(elements * static_cast<int64_t>(sizeof(A)));
}

}  // namespace tw
