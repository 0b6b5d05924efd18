// Small matrix products on tiles that lie in L1/L2, the vectors of one tile row being "lanes":
//
//   C[m][lane] (=, +=, or * factor[lane] +=)  sum over k of  A(m, k) * B[k][lane]
//
// B and C rows are NR = 2 registers wide. A is read one element at a time and broadcast, so it
// needs no packing: row-major (A(m, k) = a[m * lda + k]) or transposed (a[k * lda + m]). A tile of
// MR rows keeps 2 * MR accumulators: MR = 6 fills the 16 registers of AVX2 (12 + 2 of B + 1
// broadcast) and gives 12 FMAs per 8 loads; MR = 12 fills the 32 of AVX-512.
#pragma once
#include <type_traits>

#include "trainwright/vec.h"

TW_BEGIN

template<class A>
inline constexpr int NR = 2 * lanes<A>;
#if TW_VEC_BYTES == 64
inline constexpr int MR = 12;
#else
inline constexpr int MR = 6;
#endif

// Elementwise maximum; a NaN in x is dropped (the caller sees it again in the exponential).
template<class A>
TW_HD vec<A> max_number(vec<A> x, vec<A> m) {
#if TW_VEC_BYTES == 32
  if constexpr (sizeof(A) == 4) return (vec<A>)_mm256_max_ps((__m256)x, (__m256)m);
#elif TW_VEC_BYTES == 64
  if constexpr (sizeof(A) == 4) return (vec<A>)_mm512_max_ps((__m512)x, (__m512)m);
#endif
  return x > m ? x : m;
}

// C = AB, C + AB, C * factor + AB. AB is summed apart and added once: a sum over many tiles is one of
// sums, whose error grows with the length of a tile and the number of tiles, not with their product.
enum class Start { zero, add, scale };

// top: if not null, two registers that become the maximum of themselves and the rows of C.
template<class A, bool TRANSPOSED, Start START, int ROWS>
void tile_rows(int64_t K, const A* a, int64_t lda, const A* b, int64_t ldb, A* c, int64_t ldc,
               const A* factor, A* top) {
  constexpr int L = lanes<A>;
  vec<A> acc[ROWS][2] = {};
  for (int64_t k = 0; k < K; ++k) {
    const vec<A> b0 = vload<A>(b + k * ldb), b1 = vload<A>(b + k * ldb + L);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const vec<A> x = splat(TRANSPOSED ? a[k * lda + m] : a[m * lda + k]);
      acc[m][0] += x * b0;
      acc[m][1] += x * b1;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
    for (int i = 0; i < 2; ++i) {
      A* to = c + m * ldc + i * L;
      vec<A> sum = acc[m][i];
      if constexpr (START == Start::add) sum += vload<A>(to);
      if constexpr (START == Start::scale) sum += vload<A>(to) * vload<A>(factor + i * L);
      vstore<A>(to, sum);
    }
  if constexpr (START == Start::zero && !TRANSPOSED)
    if (top) {
      vec<A> most[2] = {vload<A>(top), vload<A>(top + L)};
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; ++m)
        for (int i = 0; i < 2; ++i) most[i] = max_number<A>(acc[m][i], most[i]);
      vstore<A>(top, most[0]);
      vstore<A>(top + L, most[1]);
    }
}

template<class A, bool TRANSPOSED, Start START>
void tile_gemm(int rows, int64_t K, const A* a, int64_t lda, const A* b, int64_t ldb, A* c,
               int64_t ldc, const A* factor = nullptr, A* top = nullptr) {
#define TW_ROWS(n) \
  case n:          \
    return tile_rows<A, TRANSPOSED, START, n>(K, a, lda, b, ldb, c, ldc, factor, top)
  switch (rows) {
    TW_ROWS(1);
    TW_ROWS(2);
    TW_ROWS(3);
    TW_ROWS(4);
    TW_ROWS(5);
    TW_ROWS(6);
#if TW_VEC_BYTES == 64
    TW_ROWS(7);
    TW_ROWS(8);
    TW_ROWS(9);
    TW_ROWS(10);
    TW_ROWS(11);
    TW_ROWS(12);
#endif
    default:
      return;
  }
#undef TW_ROWS
}

// Calls body(first, rows) for pieces of [begin, end) of at most MR rows, as even as possible: 64
// rows are 9 pieces of 6 and 2 of 5, never a piece too thin to hide the FMA latency.
template<class F>
TW_HD void for_row_tiles(int64_t begin, int64_t end, F&& body) {
  const int64_t size = end - begin;
  if (size <= 0) return;
  const int64_t tiles = (size + MR - 1) / MR, base = size / tiles, longer = size % tiles;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t rows = base + (t < longer);
    body(begin, static_cast<int>(rows));
    begin += rows;
  }
}

// ---- copies between storage and tiles

// dst[r][0 .. ld) = src row r widened, times `factor`, zero past D. Returns whether all are finite.
template<class A, class T>
bool copy_rows(A* dst, int64_t ld, const T* src, int64_t rows, int64_t D, int64_t row_stride,
               int64_t stride) {
  vec<A> odd{};  // becomes NaN at the first inf or NaN: x - x
  for (int64_t r = 0; r < rows; ++r, dst += ld, src += row_stride) {
    if (stride == 1) {
      for_lanes<A>(D, [&](int64_t d, auto n) {
        const vec<A> x = vload<A>(src + d, n);
        odd += x - x;
        vstore<A>(dst + d, x, n);
      });
    } else {
      for (int64_t d = 0; d < D; ++d) {
        const A x = load_as<A>(src[d * stride]);
        dst[d] = x;
        odd[0] += x - x;
      }
    }
    for (int64_t d = D; d < ld; ++d) dst[d] = A(0);
  }
  const A sum = hsum<A>(odd);
  return sum == sum;
}

// dst[c][r] = factor * src[r][c] for r < rows (0 for r up to NR), c < columns: rows become lanes.
template<class A>
void transpose_to_lanes(A* dst, int64_t ld_dst, const A* src, int64_t ld_src, int64_t rows,
                        int64_t columns, A factor) {
  typedef A quad __attribute__((vector_size(4 * sizeof(A))));
  typedef int64_t long4 __attribute__((vector_size(32)));
  typedef int32_t int4 __attribute__((vector_size(16)));
  using index = std::conditional_t<sizeof(A) == 8, long4, int4>;
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) {
      quad x[4];
      for (int i = 0; i < 4; ++i) memcpy(&x[i], src + (r + i) * ld_src + c, sizeof(quad));
      const quad lo0 = __builtin_shuffle(x[0], x[1], index{0, 4, 1, 5});
      const quad hi0 = __builtin_shuffle(x[0], x[1], index{2, 6, 3, 7});
      const quad lo1 = __builtin_shuffle(x[2], x[3], index{0, 4, 1, 5});
      const quad hi1 = __builtin_shuffle(x[2], x[3], index{2, 6, 3, 7});
      const quad y[4] = {__builtin_shuffle(lo0, lo1, index{0, 1, 4, 5}),
                         __builtin_shuffle(lo0, lo1, index{2, 3, 6, 7}),
                         __builtin_shuffle(hi0, hi1, index{0, 1, 4, 5}),
                         __builtin_shuffle(hi0, hi1, index{2, 3, 6, 7})};
      for (int i = 0; i < 4; ++i) {
        const quad z = y[i] * factor;
        memcpy(dst + (c + i) * ld_dst + r, &z, sizeof(quad));
      }
    }
    for (; c < columns; ++c)
      for (int i = 0; i < 4; ++i) dst[c * ld_dst + r + i] = factor * src[(r + i) * ld_src + c];
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) dst[c * ld_dst + r] = factor * src[r * ld_src + c];
  for (; r < NR<A>; ++r)
    for (int64_t c = 0; c < columns; ++c) dst[c * ld_dst + r] = A(0);
}

// ---- softmax pieces

// 2^x for x < 127, within 1 ulp; exactly 0 below -126.5 and at -inf; NaN stays. x = n + r with
// |r| <= 1/2; minimax-quality polynomial of degree 6 in r; adding 1.5 * 2^23 + 127 leaves n + 127
// in the low bits, which shifted by 23 are the bits of 2^n (0 for n = -127).
TW_HD vf exp2_fast(vf x) {
  x = max_number<float>(splat(-127.f), x);
  const vf magic = splat(12583039.f);
  const vf t = x + magic;
  const vf r = x - (t - magic);
  vf p = splat(1.535336206e-4f);
  p = p * r + 1.339887456e-3f;
  p = p * r + 9.618437358e-3f;
  p = p * r + 5.550332471e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472029e-1f;
  p = p * r + 1.f;
  return p * (vf)((vi)t << 23);
}
TW_END
