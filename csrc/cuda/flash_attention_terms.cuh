// What the variants of the attention kernels with terms add to the plain ones: softcap, bias, ALiBi, sinks and
// dropout, each a branch that the whole grid takes or not. They act on accumulators as the products leave
// them, 16 MT x N blocks of pairs, whose rows are queries, or keys if KEYS.
//
//   score = softcap(scale q.k) + bias - slope |i + (Tk - Tq) - j|
// A pair is dropped if word j % 4 of philox(seed[0]; j / 4, i, seed[1] + h, b) is at most last_dropped; the lanes that
// need words of the same four compute one each and exchange them.
#pragma once
#include "cuda/flash_attention.cuh"
#include "trainwright/philox.h"

TW_BEGIN

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// tanh to within 1e-7: the cap's own error is that of the score.
__device__ __forceinline__ float tanh_near(float x) {
  return 1.0f - 2.0f / (1.0f + exp2_fast(2.0f * kLog2e * x));
}

// PACKED: row r is query r / group of head h + r % group.
template<bool KEYS, int MT, int N, bool PACKED = false>
struct Pairs {
  const AttentionTerms& terms;
  int Tq, Tk, b, h;
  int row, column;  // of this lane: its first
  int group = 1;

  __device__ __forceinline__ int query(int m, int j, int r) const {
    if (KEYS) return column + 8 * j + r % 2;
    const int of = row + 16 * m + r / 2 * 8;
    return PACKED ? of / group : of;
  }
  __device__ __forceinline__ int head(int m, int r) const {
    return PACKED ? h + (row + 16 * m + r / 2 * 8) % group : h;
  }
  __device__ __forceinline__ int key(int m, int j, int r) const {
    return KEYS ? row + 16 * m + r / 2 * 8 : column + 8 * j + r % 2;
  }
  template<class F>
  __device__ __forceinline__ static void for_each(F&& f) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) f(m, j, r);
  }

  __device__ __forceinline__ int64_t bias_at(int of, int i, int j) const {
    const int64_t* stride = terms.bias_stride;
    return b * stride[0] + of * stride[1] + i * stride[2] + j * stride[3];
  }
  template<class B>
  __device__ __forceinline__ void add_bias(float (&x)[MT][N / 8][4], const B* bias) const {
    for_each([&](int m, int j, int r) {
      const int i = query(m, j, r), k = key(m, j, r);
      if (i >= Tq || k >= Tk) return;
      // -inf hides whatever the product is.
      const float y = load_as<float>(bias[bias_at(head(m, r), i, k)]);
      x[m][j][r] = y == -INFINITY ? y : x[m][j][r] + y;
    });
  }

  // Scores of the products x. f(m, j, r, slope) of each: the derivative of the capped score.
  template<class F>
  __device__ __forceinline__ void score(float (&x)[MT][N / 8][4], F&& f) const {
    const AttentionTerms& a = terms;
    if (a.softcap > 0.0f) {
      const float inner = a.scale / a.softcap;
      for_each([&](int m, int j, int r) {
        const float y = tanh_near(x[m][j][r] * inner);
        x[m][j][r] = a.softcap * y;
        f(m, j, r, 1.0f - y * y);
      });
    } else {
      for_each([&](int m, int j, int r) {
        x[m][j][r] *= a.scale;
        f(m, j, r, 1.0f);
      });
    }
    if (a.bias) {
      if (a.bias_type == DType::f32)
        add_bias(x, static_cast<const float*>(a.bias));
      else if (a.bias_type == DType::bf16)
        add_bias(x, static_cast<const bf16*>(a.bias));
      else if (a.bias_type == DType::f16)
        add_bias(x, static_cast<const f16*>(a.bias));
      else
        add_bias(x, static_cast<const double*>(a.bias));
    }
    if (a.alibi) {
      for_each([&](int m, int j, int r) {
        x[m][j][r] -= alibi_slope(head(m, r)) * distance(query(m, j, r), key(m, j, r));
      });
    }
  }
  __device__ __forceinline__ float alibi_slope(int of) const {
    return terms.alibi[b * terms.alibi_batch + of * terms.alibi_head];
  }
  __device__ __forceinline__ float distance(int i, int j) const {
    return fabsf(static_cast<float>(i + Tk - Tq - j));
  }
  // Whether the bias hides a pair that exists.
  __device__ __forceinline__ bool hides(int of, int i, int j) const {
    return terms.bias &&
           load_one<float>(terms.bias, terms.bias_type, bias_at(of, i, j)) == -INFINITY;
  }

  // One bit for each element of this lane, in the order of for_each: whether it is dropped.
  __device__ __forceinline__ uint32_t dropped() const {
    static_assert(MT * N / 2 <= 32);
    uint32_t bits = 0;
    const uint64_t seed = static_cast<uint64_t>(terms.seed[0]);
    const int first_head = static_cast<int>(terms.seed[1]);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        uint32_t word[4];
        if constexpr (KEYS) {
          // Lanes 4 and 8 apart have the four keys of a counter, each for the same two queries and, 8 keys on,
          // two more: lane w of them computes counter w, and the words are transposed.
          const int w = lane >> 2 & 3;
          const Philox4 x =
              philox(seed, key(m, j, w & 2) / 4, query(m, j, w & 1), first_head + h, b);
          uint32_t v[4] = {x.v[0], x.v[1], x.v[2], x.v[3]};
          swap_with(v[0], v[1], w & 1, 4);
          swap_with(v[2], v[3], w & 1, 4);
          swap_with(v[0], v[2], w & 2, 8);
          swap_with(v[1], v[3], w & 2, 8);
#pragma unroll
          for (int r = 0; r < 4; ++r) word[r] = v[r];
        } else {
          // Two lanes next to each other have the four keys of a counter, in two rows: each computes one.
          const bool odd = lane & 1;
          const int mine = odd ? 2 : 0;
          const Philox4 x =
              philox(seed, key(m, j, 0) / 4, query(m, j, mine), first_head + head(m, mine), b);
          const uint32_t first = exchange(odd ? x.v[0] : x.v[2], 1);
          const uint32_t second = exchange(odd ? x.v[1] : x.v[3], 1);
          word[0] = odd ? first : x.v[0];
          word[1] = odd ? second : x.v[1];
          word[2] = odd ? x.v[2] : first;
          word[3] = odd ? x.v[3] : second;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r)
          if (word[r] <= terms.last_dropped) bits |= 1u << ((m * N / 8 + j) * 4 + r);
      }
    return bits;
  }
  // The lower lane's `second` for the higher one's `first`.
  __device__ __forceinline__ static void swap_with(uint32_t& first, uint32_t& second, bool higher,
                                                   int lanes) {
    const uint32_t got = exchange(higher ? first : second, lanes);
    (higher ? first : second) = got;
  }
};

TW_END
