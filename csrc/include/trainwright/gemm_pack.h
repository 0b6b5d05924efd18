// Panels of the operands of gemm.h: W rows of A, or W columns of B, side by side for each step of k,
// so that a micro-kernel reads both in one direction. Packing widens to the type of the sums.
#pragma once
#include <utility>

#include "trainwright/vec.h"

TW_BEGIN

// One side of the product: element (p, k), p a row of A or a column of B, is data[p * stride + k *
// k_stride].
struct GemmOperand {
  const void* data;
  int64_t stride, k_stride;
  DType dtype;
};

// Transposes L registers of L lanes: exchanges blocks of 1, 2, 4 ... lanes between pairs of them.
template<int W, class V, size_t... I>
TW_HD void exchange_lanes(V& x, V& y, std::index_sequence<I...>) {
  constexpr int L = sizeof...(I);
  const V a = x, b = y;
  x = __builtin_shufflevector(a, b, ((I & W) ? L + int(I) - W : int(I))...);
  y = __builtin_shufflevector(a, b, ((I & W) ? L + int(I) : int(I) + W)...);
}
template<int L, int W = 1, class V>
TW_HD void transpose(V (&r)[L]) {
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i)
    if (!(i & W)) exchange_lanes<W>(r[i], r[i | W], std::make_index_sequence<L>{});
  if constexpr (2 * W < L) transpose<L, 2 * W>(r);
}

// Stores x to p: all lanes, or only n of them where the rest would overwrite what is there already.
template<int n, class S>
TW_HD void store_lanes(S* p, vec<S> x) {
  memcpy(p, &x, sizeof(S) * (n < lanes<S> ? n : lanes<S>));
}

// How a micro-kernel has its panels made: `panels` of them, `pitch` steps apart, from `depth` k.
// source is element (0, 0); `count` elements along p exist, and what is missing becomes 0.
template<class S>
using PackFn = void (*)(S* dst, const void* source, int64_t stride, int64_t k_stride, int64_t count,
                        int64_t panels, int64_t depth, int64_t pitch);

// One k a step: dst[(panel * pitch + k) * W + p]. Writes no more than `depth` steps.
template<class S, int W, class T>
void pack_panels(S* dst, const void* source, int64_t stride, int64_t k_stride, int64_t count,
                 int64_t panels, int64_t depth, int64_t pitch) {
  constexpr int L = lanes<S>;
  const T* src = static_cast<const T*>(source);
  if (stride == 1) {  // p is contiguous: widen rows of p
    constexpr int padded = (W + L - 1) / L * L;
    constexpr int64_t AHEAD = 8;
    for (int64_t k = 0; k < depth; ++k) {
      const T* from = src + k * k_stride;
      S* to = dst + k * W;
      // Rows lie far apart: the hardware sees no stream to fetch ahead.
      for (int64_t i = 0; i < count && i < panels * W; i += 64 / int(sizeof(T)))
        __builtin_prefetch(from + AHEAD * k_stride + i);
      for (int64_t left = count, j = 0; j < panels; ++j, left -= W, from += W, to += pitch * W) {
        if (left >= padded) {
#pragma GCC unroll 4
          for (int i = 0; i < padded; i += L)
            if (i + L <= W)
              store_lanes<L>(to + i, vload<S>(from + i));
            else
              store_lanes<W % L ? W % L : L>(to + i, vload<S>(from + i));
        } else {
          for (int i = 0; i < W; ++i) to[i] = i < left ? load_as<S>(from[i]) : S(0);
        }
      }
    }
    return;
  }
  for (int64_t j = 0; j < panels; ++j, src += W * stride, dst += pitch * W, count -= W) {
    const int64_t width = count < W ? count : W;
    int64_t k = 0;
    if (k_stride == 1) {  // k is contiguous: transpose squares of L rows
      // Two bf16 travel as one 32-bit lane and part after the transpose.
      constexpr int PAIR = sizeof(T) == 2 && sizeof(S) == 4 && std::is_same_v<T, bf16> ? 2 : 1;
      for (; k + PAIR * L <= depth; k += PAIR * L) {
#pragma GCC unroll 4
        for (int p0 = 0; p0 < W; p0 += L) {
          constexpr int tail = W % L;
          vec<S> r[L];
#pragma GCC unroll 16
          for (int i = 0; i < L; ++i) {
            if (p0 + i < W && p0 + i < width) {
              const T* from = src + (p0 + i) * stride + k;
              if constexpr (PAIR == 2)
                memcpy(&r[i], from, sizeof r[i]);
              else
                r[i] = vload<S>(from);
            } else {
              r[i] = vec<S>{};
            }
          }
          transpose<L>(r);
          S* to = dst + k * W + p0;
#pragma GCC unroll 16
          for (int i = 0; i < L; ++i) {
            if constexpr (PAIR == 2) {
              const vu u = (vu)r[i];
              const vf even = (vf)(u << 16), odd = (vf)(u & 0xffff0000u);
              if (p0 + L <= W) {
                store_lanes<L>(to + (2 * i) * W, even);
                store_lanes<L>(to + (2 * i + 1) * W, odd);
              } else {
                store_lanes<tail ? tail : L>(to + (2 * i) * W, even);
                store_lanes<tail ? tail : L>(to + (2 * i + 1) * W, odd);
              }
            } else if (p0 + L <= W) {
              store_lanes<L>(to + i * W, r[i]);
            } else {
              store_lanes<tail ? tail : L>(to + i * W, r[i]);
            }
          }
        }
      }
    }
    for (; k < depth; ++k)
      for (int p = 0; p < W; ++p)
        dst[k * W + p] = p < width ? load_as<S>(src[p * stride + k * k_stride]) : S(0);
  }
}

template<class S, int W>
PackFn<S> pack_function(DType t) {
  if constexpr (sizeof(S) == 8) {
    return &pack_panels<S, W, double>;
  } else {
    return t == DType::f32    ? &pack_panels<S, W, float>
           : t == DType::bf16 ? &pack_panels<S, W, bf16>
                              : &pack_panels<S, W, f16>;
  }
}

// Two k a step, for instructions that multiply pairs of bf16: dst[(panel * pitch + i) * W + p] holds
// (p, 2i) and (p, 2i + 1) in the bits of a float. The half of an odd depth and the steps up to
// `pitch` are 0.
template<int W>
void pack_pairs(float* dst, const void* source, int64_t stride, int64_t k_stride, int64_t count,
                int64_t panels, int64_t depth, int64_t pitch) {
  const int64_t pairs = depth / 2;
  const bf16* src = static_cast<const bf16*>(source);
  for (int64_t j = 0; j < panels; ++j) {
    const bf16* last = src + j * W * stride + 2 * pairs * k_stride;
    float* rest = dst + (j * pitch + pairs) * W;
    memset(rest, 0, static_cast<size_t>((pitch - pairs) * W) * sizeof(float));
    if (depth % 2)
      for (int64_t p = 0; p < W && p < count - j * W; ++p)
        memcpy(rest + p, last + p * stride, sizeof(bf16));
  }
  // Pairs that lie next to each other move as floats do.
  if (k_stride == 1 && stride % 2 == 0 && stride != 2)
    return pack_panels<float, W, float>(dst, source, stride / 2, 1, count, panels, pairs, pitch);
  constexpr int L = lanes<float>;
  for (int64_t j = 0; j < panels; ++j, src += W * stride, dst += pitch * W, count -= W) {
    const int64_t width = count < W ? count : W;
    for (int64_t i = 0; i < pairs; ++i) {
      const bf16 *even = src + 2 * i * k_stride, *odd = even + k_stride;
      char* to = reinterpret_cast<char*>(dst + i * W);
      int64_t p = 0;
      if (stride == 1) {  // interleave two rows of p
        __builtin_prefetch(even + 16 * k_stride);
        __builtin_prefetch(odd + 16 * k_stride);
        for (; p + L <= width && p + L <= W; p += L) {
          vh low, high;
          memcpy(&low, even + p, sizeof low);
          memcpy(&high, odd + p, sizeof high);
          const vu pair = widen_bits(low) | widen_bits(high) << 16;
          memcpy(to + 4 * p, &pair, sizeof pair);
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

TW_END
