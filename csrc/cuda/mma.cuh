// Tensor-core products of 16-bit types as sm_80 has them, and what feeds them: tiles of rows in shared memory,
// asynchronous copies into them, fragments out of them. Attention and the matrix products are made of these.
//
// A tile has rows of HD elements, 32, 64, 96, 128 or 256. Its 16-byte chunks are permuted within each row by an XOR with
// the row's number, so that the eight rows that ldmatrix reads at once, in whichever direction, and the eight chunks
// that cp.async writes at once, lie in different banks.
//
// Fragments of mma.m16n8k16 (g = lane / 4, t = lane % 4): an accumulator holds rows g and g + 8, columns 2t and 2t + 1
// of its 16 x 8 block; two of them next to each other, rounded, are the left operand of a product over those 16
// columns.
#pragma once
#include "cuda/launch.cuh"
#include "trainwright/pack.cuh"

TW_BEGIN

// ---- tiles --------------------------------------------------------------------------------------

template<int HD>
struct Tile {
  static constexpr int kPitch = 2 * HD;              // bytes of a row
  static constexpr int kXor = HD % 64 == 0 ? 8 : 4;  // chunks that are permuted among themselves
  static_assert(HD % 64 == 0 || HD % 64 == 32);
  __device__ __forceinline__ static int swizzle(int row) {
    return kXor == 8 ? row & 7 : row >> 1 & 3;
  }
  // Of a chunk of 8 elements, in bytes.
  __device__ __forceinline__ static int at(int row, int chunk) {
    return row * kPitch + (chunk ^ swizzle(row)) * 16;
  }
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, of which the first `size` are read and the others become 0.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int size) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Until all but the newest N groups of this thread's copies are there.
template<int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- products -----------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at));
}
__device__ __forceinline__ void load_transposed(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at));
}
template<class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The place in a tile of a lane's row of the four 8 x 8 blocks that ldmatrix reads. Other chunks that the swizzle
// mixes with it are an XOR away, others and other rows a constant.
template<int HD>
struct Lanes {
  static constexpr int kPlaces = Tile<HD>::kXor / 2;
  uint32_t at;

  __device__ __forceinline__ Lanes(int row, int second) : at(Tile<HD>::at(row, second)) {}
  // Blocks 0 and 1 below each other, 2 and 3 beside them: a left operand; a right one, transposed.
  __device__ __forceinline__ static Lanes down() {
    const int lane = threadIdx.x % 32;
    return {lane & 15, lane >> 4};
  }
  // Blocks 0 and 1 beside each other, 2 and 3 below them: a right operand.
  __device__ __forceinline__ static Lanes across() {
    const int lane = threadIdx.x % 32;
    return {(lane & 7) + (lane >> 4) * 8, lane >> 3 & 1};
  }
  // The pairs of chunks in an order in which those a constant apart follow each other: fewer addresses at a time.
  __device__ __forceinline__ static constexpr int ordered(int i) {
    constexpr int groups = HD / 16 / kPlaces;
    return i % groups * kPlaces + i / groups;
  }
  // Chunks 2 pair and 2 pair + 1.
  __device__ __forceinline__ uint32_t of(uint32_t tile, int row, int pair) const {
    return ((tile + at) ^ (pair % kPlaces * 32)) + row * Tile<HD>::kPitch +
           pair / kPlaces * kPlaces * 32;
  }
};

template<int MT, int N>
__device__ __forceinline__ void clear(float (&x)[MT][N][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) x[m][n][r] = 0.0f;
}

TW_END
