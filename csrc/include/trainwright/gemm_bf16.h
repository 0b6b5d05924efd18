// bf16 products of trainwright/gemm.h with AVX512-BF16: vdpbf16ps adds two products to each sum, so
// that bf16 operands run at up to twice the fp32 rate, from panels of half the size.
//
// A step of its panels is two k: a lane holds the pair (p, 2i), (p, 2i + 1) in the bits of a float. So the blocking,
// the skinny path and the epilogue are the same code.
//
// Numerics. Products of bf16 are exact in fp32. The instruction rounds to nearest even after each of the two, but reads
// subnormal operands as 0 and flushes subnormal results to 0, whatever the rounding mode of the thread is: what is below
// 1.2e-38 is lost, where the fp32 path keeps it. k ascends, two at a time, for any M, N, strides and
// threads: so a row still has the same bits in any batch. TRAINWRIGHT_CPU_BF16=fp32 turns the instruction off.
#pragma once
#include "trainwright/gemm_fma.h"

#if TW_VEC_BYTES == 64 && defined(__x86_64__)
#define TW_DOT_BF16 1

TW_BEGIN

struct DotTile {
  static constexpr int MR = FmaTile<float>::MR, NR = FmaTile<float>::NR;
  static constexpr int64_t STEP = 2, UNIT = 1;
  struct Session {};
  using MicroFn = FmaTile<float>::MicroFn;
  static MicroFn micro(int64_t rows);
  static PackFn<float> pack_a(DType) { return &pack_pairs<MR>; }
  static PackFn<float> pack_b(DType) { return &pack_pairs<NR>; }
};

template<int ROWS>
__attribute__((target("avx512bf16"))) void dot_kernel(int64_t kc, const float* a, const float* b,
                                                      float* tile, bool add) {
  constexpr int MR = DotTile::MR, NR = DotTile::NR;
  static_assert(NR == 32);
  __m512 c[ROWS][2];
#pragma GCC unroll 14
  for (int i = 0; i < ROWS; ++i) {
    c[i][0] = c[i][1] = _mm512_setzero_ps();
    __builtin_prefetch(tile + i * NR);
    __builtin_prefetch(tile + i * NR + 16);
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < kc; ++k, a += MR, b += NR) {
    const auto b0 = (__m512bh)_mm512_loadu_ps(b), b1 = (__m512bh)_mm512_loadu_ps(b + 16);
#pragma GCC unroll 14
    for (int i = 0; i < ROWS; ++i) {
      const auto x = (__m512bh)_mm512_set1_ps(a[i]);
      c[i][0] = _mm512_dpbf16_ps(c[i][0], x, b0);
      c[i][1] = _mm512_dpbf16_ps(c[i][1], x, b1);
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < 2; ++j) {
      float* to = tile + i * NR + 16 * j;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(c[i][j], _mm512_loadu_ps(to)) : c[i][j]);
    }
}

template<size_t... I>
DotTile::MicroFn dot_function(int64_t rows, std::index_sequence<I...>) {
  static constexpr DotTile::MicroFn table[] = {&dot_kernel<int(I) + 1>...};
  return table[rows - 1];
}
inline DotTile::MicroFn DotTile::micro(int64_t rows) {
  return dot_function(rows, std::make_index_sequence<MR>{});
}

TW_END
#endif
