// Philox (trainwright/philox.h) on vectors: the words of several counters at once, in the order of
// the counters. A lane of 64 bits is one counter; its upper half is ignored where it is not cleared.
#pragma once
#include "trainwright/philox.h"
#include "trainwright/vec.h"

TW_BEGIN

typedef uint64_t vw __attribute__((vector_size(TW_VEC_BYTES)));

// The products of the low halves.
TW_HD vw multiply_low(vw a, uint32_t b) {
  const vw factor = vw{} + b;
#if TW_VEC_BYTES == 64
  return (vw)_mm512_mul_epu32((__m512i)a, (__m512i)factor);
#elif TW_VEC_BYTES == 32
  return (vw)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#else
  return (a & 0xffffffffu) * factor;
#endif
}

// Stores the four words of each counter (c0, c1, c2, c3): 2 * TW_VEC_BYTES.
TW_HD void philox_words(uint32_t* to, uint64_t seed, vw c0, vw c1, vw c2, vw c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const vw p0 = multiply_low(c0, 0xD2511F53u), p1 = multiply_low(c2, 0xCD9E8D57u);
    c0 = (p1 >> 32) ^ c1 ^ k0;
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ k1;
    c3 = p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const vw a = (c0 & 0xffffffffu) | (c1 << 32), b = (c2 & 0xffffffffu) | (c3 << 32);
  // Of each counter: a, b, a, b, ...
#if TW_VEC_BYTES == 64
  const vw low = __builtin_shuffle(a, b, vw{0, 8, 1, 9, 2, 10, 3, 11});
  const vw high = __builtin_shuffle(a, b, vw{4, 12, 5, 13, 6, 14, 7, 15});
#elif TW_VEC_BYTES == 32
  const vw low = __builtin_shuffle(a, b, vw{0, 4, 1, 5});
  const vw high = __builtin_shuffle(a, b, vw{2, 6, 3, 7});
#else
  const vw low = {a[0], b[0]}, high = {a[1], b[1]};
#endif
  memcpy(to, &low, sizeof low);
  memcpy(to + sizeof low / 4, &high, sizeof high);
}

// The words of the counters (c0, c1, c2, c3), (c0 + 1, c1, c2, c3), ...
TW_HD void philox_words(uint32_t* to, uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2,
                        uint32_t c3) {
  vw first = vw{} + c0;
  for (int i = 0; i < TW_VEC_BYTES / 8; ++i) first[i] += static_cast<uint64_t>(i);
  philox_words(to, seed, first, vw{} + c1, vw{} + c2, vw{} + c3);
}

TW_END
