// bf16 products of trainwright/gemm.h with AVX512-BF16: vdpbf16ps adds two products to each sum, so
// that bf16 operands run at up to twice the fp32 rate, from panels of half the size.
//
// Panels are those of gemm.h with a step of two k: a lane holds the pair (p, 2k), (p, 2k + 1) in the bits of a float. So
// the blocking, the skinny path and the epilogue are the same code. K is even; an odd one is summed in fp32.
//
// Numerics. Products of bf16 are exact in fp32. The instruction rounds to nearest even after each of the two, but reads
// subnormal operands as 0 and flushes subnormal results to 0, whatever the rounding mode of the thread is: what is below
// 1.2e-38 is lost, where the fp32 path keeps it. k ascends, two at a time, for any M, N, strides and
// threads: so a row still has the same bits in any batch. TRAINWRIGHT_CPU_BF16=fp32 turns the instruction off.
#pragma once
#include <utility>

#include "trainwright/cpu_features.h"
#include "trainwright/vec.h"

#if TW_VEC_BYTES == 64 && defined(__x86_64__)
#define TW_DOT_BF16 1

TW_BEGIN

template<class S, int W, class T>
void pack_panels(S* dst, const void* source, int64_t stride, int64_t k_stride, int64_t count,
                 int64_t panels, int64_t kc);  // gemm.h

// The same for a lane of two k; kc counts pairs.
template<int W>
void pack_pairs(float* dst, const void* source, int64_t stride, int64_t k_stride, int64_t count,
                int64_t panels, int64_t kc) {
  // Pairs lie next to each other: they move as floats do.
  if (k_stride == 1 && stride % 2 == 0 && stride != 2)
    return pack_panels<float, W, float>(dst, source, stride / 2, 1, count, panels, kc);
  const bf16* src = static_cast<const bf16*>(source);
  for (int64_t j = 0; j < panels; ++j, src += W * stride, dst += kc * W, count -= W) {
    const int64_t width = count < W ? count : W;
    for (int64_t k = 0; k < kc; ++k) {
      const bf16 *even = src + 2 * k * k_stride, *odd = even + k_stride;
      char* to = reinterpret_cast<char*>(dst + k * W);
      int64_t p = 0;
      if (stride == 1) {  // interleave two rows of p
        __builtin_prefetch(even + 16 * k_stride);
        __builtin_prefetch(odd + 16 * k_stride);
        for (; p + 16 <= width; p += 16) {
          vu low = (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(even + p)));
          const vu high = (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(odd + p)));
          low |= high << 16;
          memcpy(to + 4 * p, &low, sizeof low);
        }
      }
      for (; p < W; ++p) {
        const uint32_t pair =
            p < width ? uint32_t{even[p * stride].bits} | uint32_t{odd[p * stride].bits} << 16 : 0;
        memcpy(to + 4 * p, &pair, sizeof pair);
      }
    }
  }
}

// micro_kernel (gemm.h): tile (ROWS, NR) = or += panel of A x panel of B, kc pairs.
template<int ROWS, int MR, int NR>
__attribute__((target("avx512bf16"))) void dot_kernel(int64_t kc, const float* a, const float* b,
                                                      float* tile, bool add) {
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

using DotFn = void (*)(int64_t, const float*, const float*, float*, bool);
template<int MR, int NR, size_t... I>
DotFn dot_function(int64_t rows, std::index_sequence<I...>) {
  static constexpr DotFn table[] = {&dot_kernel<int(I) + 1, MR, NR>...};
  return table[rows - 1];
}

TW_END
#endif
