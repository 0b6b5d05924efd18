// What the forward and the backward kernels of attention share: the base of the softmax, reading and
// writing rows of any dtype, the options that change a score, the list of tasks.
#pragma once
#include "cpu/flash_attention.h"
#include "cpu/tile_gemm.h"
#include "trainwright/philox_lanes.h"
#include "trainwright/scratch.h"
#include "trainwright/vec_math.h"

TW_BEGIN

// Maximum of the scores of rows i0 ... i0 + rows - 1 of a head, in the units of the backward pass, and
// log_base of their sum, computed anew. Defined with the forward kernel.
void flash_attention_row_sums(const FlashAttentionArgs& a, int64_t b, int64_t h, int64_t i0,
                              int64_t rows, void* max, void* log_sum);

namespace {

// The exponential of the softmax: base 2 for float, where it is cheapest, base e for double, where
// it rounds least. kToBase takes a natural logarithm to that base.
template<class R, class A = R>
inline constexpr R kToBase = sizeof(A) == 4 ? R(1.4426950408889634074) : R(1);
TW_HD vf exp_base(vf x) { return exp2_fast(x); }
TW_HD vec<double> exp_base(vec<double> x) { return vexp(x); }
TW_HD float log_base(float x) { return log2f(x); }
TW_HD double log_base(double x) { return log(x); }

// ---- rows ---------------------------------------------------------------------------------------

// Rows of x, from `from` on, widened into a tile and padded with zeros to ld. Whether all are finite.
template<class A>
bool load_rows(A* dst, int64_t ld, const Strided& x, const void* from, int64_t rows,
               int64_t columns) {
  bool finite = true;
  with_float_type(x.dtype, [&](auto tag) {
    finite = copy_rows(dst, ld, static_cast<const decltype(tag)*>(from), rows, columns, x.row,
                       x.element);
  });
  return finite;
}

template<class A>
bool all_finite(const A* x, int64_t n) {
  vec<A> odd{};  // becomes NaN at the first inf or NaN: x - x
  for_lanes<A>(n, [&](int64_t i, auto k) {
    const vec<A> y = vload<A>(x + i, k);
    odd += y - y;
  });
  const A sum = hsum<A>(odd);
  return sum == sum;
}

// Rows of a tile rounded to rows of `dtype` from element `first` of `base` on, `stride` apart.
template<class A>
void store_rows(void* base, DType dtype, int64_t first, int64_t stride, const A* src, int64_t ld,
                int64_t rows, int64_t columns) {
  with_float_type(dtype, [&](auto tag) {
    auto* dst = static_cast<decltype(tag)*>(base) + first;
    for (int64_t r = 0; r < rows; ++r, dst += stride, src += ld)
      for_lanes<A>(columns,
                   [&](int64_t d, auto n) { vstore<A>(dst + d, vload<A>(src + d, n), n); });
  });
}

template<class A>
void multiply(A* x, int64_t n, A factor) {
  for_lanes<A>(n, [&](int64_t i, auto k) { vstore<A>(x + i, vload<A>(x + i, k) * factor, k); });
}

template<class A>
TW_HD vec<A> iota() {
  vec<A> x;
  for (int i = 0; i < lanes<A>; ++i) x[i] = static_cast<A>(i);
  return x;
}

// ---- options ------------------------------------------------------------------------------------

// q is multiplied by this before the products with k. With no option that changes a score, scores
// are kept to the base of the exponential; else as natural logarithms, a capped one over its cap.
TW_HD bool has_terms(const FlashAttentionArgs& a) {
  return a.softcap != 0 || a.alibi || a.bias.data || a.dropout;
}
template<class A>
A q_factor(const FlashAttentionArgs& a) {
  const double base = has_terms(a) ? 1.0 : kToBase<double, A>;
  return static_cast<A>(a.softcap != 0 ? a.scale / a.softcap : a.scale * base);
}
// sum ds * (q * q_factor) times this is the gradient of k.
template<class A>
A dk_factor(const FlashAttentionArgs& a) {
  const double base = has_terms(a) ? 1.0 : 1.0 / kToBase<double, A>;
  return static_cast<A>(a.softcap != 0 ? a.softcap : base);
}
// What kept pairs are multiplied by: dropout leaves the expectation as it is.
template<class A>
A keep_factor(const FlashAttentionArgs& a) {
  const double all = 4294967296.0;
  const double kept = all - static_cast<double>(a.drop);
  return a.dropout && kept > 0 ? static_cast<A>(all / kept) : A(1);
}

// Share of a row's softmax that its sink leaves to the keys.
template<class A>
A sink_share(const FlashAttentionArgs& a, int64_t h, A lse) {
  if (!a.sinks) return A(1);
  if (lse == A(-INFINITY)) return A(0);
  return A(1) / (A(1) + vexp(static_cast<const A*>(a.sinks)[h] - lse));
}

// The options of one head of one sequence.
template<class A>
struct Terms {
  const FlashAttentionArgs& a;
  int64_t b, h, shift;  // shift: Tk - Tq
  bool capped, biased, sloped;
  A cap, slope;

  Terms(const FlashAttentionArgs& args, const Band& band, int64_t batch, int64_t head)
      : a(args), b(batch), h(head), shift(band.Tk - band.Tq) {
    capped = a.softcap != 0, biased = a.bias.data, sloped = a.alibi;
    cap = static_cast<A>(a.softcap);
    slope = sloped ? static_cast<const A*>(a.alibi)[b * a.alibi_b + h * a.alibi_h] : A(0);
  }

  // (rows, keys) from (i, j) on.
  void load_bias(A* dst, int64_t ld, int64_t i, int64_t j, int64_t rows, int64_t keys) const {
    load_rows(dst, ld, a.bias, a.bias.at(b, i, h, j), rows, keys);
  }

  // 1 for the pairs that dropout keeps, 0 for the others.
  void load_keep(A* dst, int64_t ld, int64_t i, int64_t j, int64_t rows, int64_t keys) const {
    constexpr int64_t kWords = 2 * lanes<float>;  // a step of philox_words
    const vu limit = vu{} + static_cast<uint32_t>(a.drop);
    for (int64_t r = 0; r < rows; ++r, dst += ld) {
      if (a.drop >> 32) {
        memset(dst, 0, static_cast<size_t>(keys) * sizeof(A));
        continue;
      }
      for (int64_t n = -(j & 3); n < keys; n += kWords) {
        uint32_t words[kWords];
        philox_words(words, a.seed, static_cast<uint32_t>((j + n) >> 2),
                     static_cast<uint32_t>(i + r), static_cast<uint32_t>(a.first_head + h),
                     static_cast<uint32_t>(b));
        A kept[kWords];
        for (int64_t w = 0; w < kWords; w += lanes<float>) {
          vu x;
          memcpy(&x, words + w, sizeof x);
          const vf keep = x >= limit ? splat(1.f) : vf{};
          for (int l = 0; l < lanes<float>; ++l) kept[w + l] = keep[l];
        }
        const int64_t from = max_of(-n, 0), to = min_of(kWords, keys - n);
        memcpy(dst + n + from, kept + from, static_cast<size_t>(to - from) * sizeof(A));
      }
    }
  }

  // |i + shift - j|, from i - j.
  static TW_HD vec<A> distance(vec<A> x) { return x < A(0) ? -x : x; }
};

// Calls f with the accumulator's type (a tag) and whether an option changes scores (a constant).
template<class F>
void with_variant(const FlashAttentionArgs& a, F&& f) {
  const bool wide = a.dtype == DType::f64;
  if (has_terms(a))
    wide ? f(double{}, std::true_type{}) : f(float{}, std::true_type{});
  else
    wide ? f(double{}, std::false_type{}) : f(float{}, std::false_type{});
}

// ---- tasks --------------------------------------------------------------------------------------

// Blocks of all sequences, numbered in order; the caller counts heads within a sequence.
struct BlockTable {
  int64_t B, size;
  int64_t* first;  // (B + 1)

  BlockTable(const FlashAttentionArgs& a, int64_t block, bool keys, int64_t* memory)
      : B(a.B), size(block), first(memory) {
    first[0] = 0;
    for (int64_t b = 0; b < B; ++b) {
      const Band band = sequence_of(a, b).band;
      first[b + 1] = first[b] + blocks_of(keys ? band.Tk : band.Tq, size);
    }
  }
  int64_t total() const { return first[B]; }
  int64_t count(int64_t b) const { return first[b + 1] - first[b]; }

  // The sequence, head and block of a task; heads: of each sequence.
  struct Place {
    int64_t b, head, block;
  };
  Place place(int64_t task, int64_t heads) const {
    int64_t low = 0, high = B;  // first[low] * heads <= task < first[high] * heads
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first[middle] * heads <= task ? low : high) = middle;
    }
    const int64_t inside = task - first[low] * heads, blocks = count(low);
    return {low, inside / blocks, inside % blocks};
  }
  int64_t number(int64_t b, int64_t heads, int64_t head, int64_t block) const {
    return first[b] * heads + head * count(b) + block;
  }
};

}  // namespace
TW_END
