// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 128 random
// bits from a 64-bit key and a 128-bit counter, with no state. The random number of an element
// therefore depends on (seed, logical coordinates) alone, whatever the tile size, thread count or
// backend.
#pragma once
#include "trainwright/config.h"

TW_BEGIN

struct Philox4 {
  uint32_t v[4];
};

TW_HD uint32_t mulhi_u32(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

TW_HD Philox4 philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint32_t hi0 = mulhi_u32(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
    const uint32_t hi1 = mulhi_u32(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The four numbers that belong to elements 4*block .. 4*block+3 of stream `stream`.
TW_HD Philox4 philox_block(uint64_t seed, uint64_t block, uint64_t stream) {
  return philox(seed, static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32));
}

// Uniform in [0, 1) with 24 bits, exact in float.
TW_HD float uniform01(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 5.9604644775390625e-8f;
}

TW_END
