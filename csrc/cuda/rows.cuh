// How the norms lay rows of C elements over threads.
//
// A row belongs to blockDim.x threads; a block has blockDim.y rows at a time, as many as keep it within
// kRowThreads, and walks a range of rows, so that what belongs to columns is read and written once per
// block. Pack r of thread t is number r * blockDim.x + t of the row; a pack is 16 bytes where C and the
// pointers allow, else one element (VEC = 1). A thread's R packs stay in registers; of rows that are
// too long for it, or not made of 16-byte packs, R = 0: packs are read again from the cache where they
// are used twice.
#pragma once
#include "cuda/launch.cuh"
#include "trainwright/pack.cuh"

namespace tw {

constexpr int kRowThreads = 512;
constexpr int kFewestRowThreads = 4;  // even: lanes load in pairs in load_span
// Bytes of shared memory for column sums in the backward of long rows: every architecture has them.
constexpr int64_t kRowShared = 96 * 1024;
// K column sums.
template<class T, int K>
constexpr int64_t kLongestRow = kRowShared / (K * static_cast<int64_t>(sizeof(acc_t<T>)));

inline dim3 row_block(int64_t C, int per_thread) {
  const int64_t threads = divide_up(C, per_thread);
  unsigned x = kFewestRowThreads;
  if (threads > 32)
    x = static_cast<unsigned>(divide_up(threads, 32) * 32);
  else
    while (x < threads) x *= 2;
  return {x, kRowThreads / x};
}

// Calls f(VEC, R, block) with the first two as types: one pack per thread or MOST elements, if a row
// of C fits into kRowThreads then.
template<class T, int MOST, class F>
void with_row_layout(int64_t C, bool wide, F&& f) {
  constexpr int full = 16 / sizeof(T);
  if (!wide || C % full != 0)
    f(Int<1>{}, Int<0>{}, row_block(std::min<int64_t>(C, kRowThreads * 4), 4));
  else if (C > kRowThreads * MOST)
    f(Int<full>{}, Int<0>{}, dim3(kRowThreads));
  else if (C <= 256 * full)
    f(Int<full>{}, Int<1>{}, row_block(C, full));
  else
    f(Int<full>{}, Int<MOST / full>{}, row_block(C, MOST));
}

// Blocks that walk over N rows: `fit` for each multiprocessor, or fewer.
inline int64_t row_slots(int64_t N, dim3 block, int fit) {
  return std::min(divide_up(N, block.y), int64_t{fit} * multiprocessors());
}

// Where the rows of a block begin; they end where those of the next do.
__device__ __forceinline__ int64_t first_row(int64_t N, unsigned block) {
  return block * N / gridDim.x;
}

// Calls f(r, c) for the packs of this thread in a row of C elements, pack r beginning at column c; all
// threads of the row get as many, so c may lie past the end.
template<int VEC, int R, class F>
__device__ __forceinline__ void for_packs(int C, F&& f) {
  const int mine = threadIdx.x * VEC, stride = blockDim.x * VEC;
  if constexpr (R == 0) {
    for (int r = 0; r * stride < C; ++r) f(r, mine + r * stride);
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) f(r, mine + r * stride);
  }
}

// The elements of a vector from c on, or `missing` where there is no vector.
template<int VEC, class A>
__device__ __forceinline__ void load_vector(const void* p, DType dtype, int c, int C, A missing,
                                            A (&out)[VEC]) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) out[i] = missing;
  if (p) load_span<VEC>(p, dtype, c, C, out);
}

// The same in a block of several rows: the threads of the first load, the others get theirs through
// `memory`, VEC * blockDim.x elements. All threads of the block call it.
template<int VEC, class A>
__device__ __forceinline__ void share_vector(const void* p, DType dtype, int c, int C, A missing,
                                             A* memory, A (&out)[VEC]) {
  load_vector(p, dtype, c, threadIdx.y == 0 ? C : 0, missing, out);
  if (!p || blockDim.y == 1) return;
  __syncthreads();  // what was there may still be read
  A* mine = memory + threadIdx.x;
#pragma unroll
  for (int i = 0; i < VEC; ++i)
    if (threadIdx.y == 0) mine[i * blockDim.x] = out[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < VEC; ++i) out[i] = mine[i * blockDim.x];
}

// Column sums of the rows of a block, K of them per element: in registers with R > 0, else in
// `memory`, dynamic shared memory of column_bytes. A thread touches its own alone until store().
template<class A, int VEC, int R, int K>
struct ColumnSums {
  A sums[R == 0 ? 1 : R][K][VEC];
  A* memory;

  __device__ __forceinline__ static int threads() { return blockDim.x * blockDim.y; }
  __device__ __forceinline__ static int me() { return threadIdx.y * blockDim.x + threadIdx.x; }
  // Sum k of element i of pack r of this thread.
  __device__ __forceinline__ A& operator()(int r, int k, int i) {
    if constexpr (R == 0)
      return memory[((r * K + k) * VEC + i) * threads() + me()];
    else
      return sums[r][k][i];
  }

  __device__ __forceinline__ ColumnSums(A* shared, int C) : sums{}, memory(shared) {
    if constexpr (R == 0)
      for_packs<VEC, R>(C, [&](int r, int) {
#pragma unroll
        for (int i = 0; i < K * VEC; ++i) (*this)(r, 0, i) = A(0);
      });
  }
  // Writes sum k to row blockIdx.x of partial[k], each (slots, C); rows of a block in order.
  __device__ __forceinline__ void store(void* const (&partial)[K], int C) {
    const int rows = blockDim.y, end = threadIdx.y == 0 ? C : 0;
    for_packs<VEC, R>(C, [&](int r, int c) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        A x[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[i] = (*this)(r, k, i);
        if (rows > 1) {
          A* others = memory + (R == 0 ? (r * K + k) * VEC * threads() : 0);
          if constexpr (R > 0) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < VEC; ++i) others[i * threads() + me()] = x[i];
          }
          __syncthreads();
#pragma unroll
          for (int i = 0; i < VEC; ++i)
            for (int y = 1; y < rows; ++y)
              if (threadIdx.y == 0) x[i] += others[i * threads() + y * blockDim.x + threadIdx.x];
        }
        A* row = static_cast<A*>(partial[k]) + blockIdx.x * static_cast<int64_t>(C);
        store_span(row, c, end, x);
      }
    });
  }
};

// Dynamic shared memory of ColumnSums.
template<class A, int VEC, int R, int K>
int column_bytes(int64_t C, dim3 block) {
  const int64_t threads = block.x * block.y;
  const int64_t elements = R == 0        ? divide_up(C, block.x * VEC) * VEC * K * threads
                           : block.y > 1 ? VEC * threads
                                         : 0;
  return static_cast<int>(elements * static_cast<int64_t>(sizeof(A)));
}

}  // namespace tw
