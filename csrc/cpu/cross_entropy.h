// A tile of a row of logits on the CPU: its state added, its gradient written (formulas in trainwright/cross_entropy.h; what
// memory sees is in cross_entropy.cpp).
#pragma once
#include "cpu/kernel.h"
#include "trainwright/cross_entropy.h"

namespace tw {

struct CrossEntropyTile {
  const void* logits;     // (N, columns), the columns first ... first + columns - 1 of the row
  const int64_t* target;  // (N)
  const void* weight;     // (classes) in acc type, or null
  int64_t N, columns, first, classes, ignore_index;
  double label_smoothing, z_loss, softcap;
  DType dtype;
};

struct CrossEntropyStateArgs {
  CrossEntropyTile tile;
  double* state;  // (N, 4), updated; the tile with first = 0 starts it
};

struct CrossEntropyGradArgs {
  CrossEntropyTile tile;
  const double* lse;     // (N)
  const void* upstream;  // in acc type, element n * upstream_stride
  int64_t upstream_stride;
  const double* scale;  // (2) factors of the upstream gradient for loss and z-loss
  void* grad;           // (N, columns); may be the logits themselves
};

// Forward of whole rows; with `grad`, the gradient for a given upstream gradient as well.
struct CrossEntropyRowsArgs {
  CrossEntropyTile tile;
  double* lse;          // (N)
  double* loss;         // (N), unscaled and without z-loss
  void* grad;           // (N, columns) or null
  const double* scale;  // (2), for grad
  double upstream;      // for grad
};

}  // namespace tw

TW_DECLARE_KERNEL(cross_entropy_state, CrossEntropyStateArgs)
TW_DECLARE_KERNEL(cross_entropy_grad, CrossEntropyGradArgs)
TW_DECLARE_KERNEL(cross_entropy_rows, CrossEntropyRowsArgs)

#ifdef TW_CPU_ISA
#include "cpu/rows.h"
#include "trainwright/vec_math.h"

TW_BEGIN
namespace {

constexpr int64_t BLOCK = 2048;  // 8 KiB of floats: a quarter of the smallest L1

// exp(d) for d <= 0 (or barely above, from rounding): no overflow to handle, 0 below e^-87, NaN stays.
// 2^(d log2 e) = 2^n 2^r with |r| <= 1/2; minimax polynomial for 2^r, relative error 2e-9 before rounding; n is added to
// the exponent bits.
TW_HD vf exp_nonpositive(vf d) {
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: its low mantissa bits receive n
  const vf t = d * 1.44269504088896341f + magic;
  const vf n = t - magic;
  const vf r = d * 1.44269504088896341f - n;
  vf p = splat(1.5403530e-4f);
  p = p * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.f;
  const vf y = (vf)((vi)p + ((vi)t << 23));
  return d < -87.f ? vf{} : y;
}
TW_HD vec<double> exp_nonpositive(vec<double> d) { return vexp(d); }

// z of a logit. SOFTCAP is known at compile time so that the plain loop carries nothing of it.
template<bool SOFTCAP, class A>
struct Cap {
  A cap, inverse;
  explicit Cap(double c)
      : cap(static_cast<A>(c)), inverse(SOFTCAP ? static_cast<A>(1 / c) : A(0)) {}
  TW_HD vec<A> operator()(vec<A> x) const {
    if constexpr (SOFTCAP) return vtanh(x * inverse) * cap;
    return x;
  }
  TW_HD A operator()(A x) const { return (*this)(splat<A>(x))[0]; }
  TW_HD vec<A> slope(vec<A> z) const {  // dz/dx
    const vec<A> y = z * inverse;
    return A(1) - y * y;
  }
};

CrossEntropyOptions options_of(const CrossEntropyTile& a, double weight_total) {
  return {a.classes, a.ignore_index, a.label_smoothing, a.z_loss, a.softcap, weight_total};
}

template<class A>
double weight_total(const CrossEntropyTile& a) {
  if (!a.weight) return static_cast<double>(a.classes);
  double total = 0;
  for (int64_t j = 0; j < a.classes; ++j) total += static_cast<const A*>(a.weight)[j];
  return total;
}

template<class A>
double weight_at(const CrossEntropyTile& a, int64_t t) {
  return a.weight && t >= 0 && t < a.classes
             ? static_cast<double>(static_cast<const A*>(a.weight)[t])
             : 1;
}

// The largest of n elements; NaN is passed over (the sum of exponentials carries it).
template<class A, class T>
A block_max(const T* x, int64_t n) {
  vec<A> m[4];
  for (auto& v : m) v = splat<A>(-INFINITY);
  int64_t i = 0;
  for (; i + 4 * lanes<A> <= n; i += 4 * lanes<A>)
    for (int k = 0; k < 4; ++k) {
      const vec<A> v = vload<A>(x + i + k * lanes<A>);
      m[k] = v > m[k] ? v : m[k];
    }
  for (int k = 1; k < 4; ++k) m[0] = m[k] > m[0] ? m[k] : m[0];
  A largest = m[0][0];
  for (int k = 1; k < lanes<A>; ++k) largest = m[0][k] > largest ? m[0][k] : largest;
  for (; i < n; ++i) {
    const A v = load_as<A>(x[i]);
    largest = v > largest ? v : largest;
  }
  return largest;
}

// Adds one tile of a row to its state.
template<bool SOFTCAP, class T>
void add_tile(CrossEntropyState& s, const CrossEntropyTile& a, const T* x, int64_t t) {
  using A = acc_t<T>;
  const Cap<SOFTCAP, A> capped(a.softcap);
  const A* weight = a.weight ? static_cast<const A*>(a.weight) + a.first : nullptr;
  const bool smooth = a.label_smoothing != 0;
  for (int64_t block = 0; block < a.columns; block += BLOCK) {
    const int64_t n = a.columns - block < BLOCK ? a.columns - block : BLOCK;
    const T* xb = x + block;
    const A largest = capped(block_max<A>(xb, n));
    if (largest > s.max) {
      s.sum_exp *= exp(s.max - static_cast<double>(largest));
      s.max = static_cast<double>(largest);
    }
    // All -inf so far (a masked vocabulary): any finite reference gives exp(-inf) = 0.
    const A m = s.max == -INFINITY ? A(0) : static_cast<A>(s.max);
    vec<A> sum{};
    if (!smooth) {
      for_lanes<A>(n, [&](int64_t i, auto k) {
        sum += keep<A>(exp_nonpositive(capped(vload<A>(xb + i, k)) - m), k, A(0));
      });
    } else {
      // sum w z = sum w (z - m) + m sum w: small terms in A, the large one in double.
      vec<A> sum_wd{}, sum_w{};
      for_lanes<A>(n, [&](int64_t i, auto k) {
        const vec<A> d = capped(vload<A>(xb + i, k)) - m;
        const vec<A> w =
            keep<A>(weight ? vload<A>(weight + block + i, k) : splat<A>(A(1)), k, A(0));
        sum += keep<A>(exp_nonpositive(d), k, A(0));
        sum_wd += keep<A>(d, k, A(0)) * w;
        sum_w += w;
      });
      s.sum_wz += static_cast<double>(hsum<A>(sum_wd)) +
                  static_cast<double>(m) * static_cast<double>(hsum<A>(sum_w));
    }
    s.sum_exp += static_cast<double>(hsum<A>(sum));
  }
  if (t >= a.first && t < a.first + a.columns)
    s.target = static_cast<double>(capped(load_as<A>(x[t - a.first])));
}

// Gradient of one tile of a row. `grad` may be `x`.
template<bool SOFTCAP, class T>
void grad_tile(T* grad, const CrossEntropyTile& a, const T* x, int64_t t,
               const CrossEntropyCoefficients<acc_t<T>>& c) {
  using A = acc_t<T>;
  const Cap<SOFTCAP, A> capped(a.softcap);
  const bool here = t >= a.first && t < a.first + a.columns;
  const T x_t = here ? x[t - a.first] : T{};
  const bool stream =
      grad != x && a.N * a.columns * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
  const auto each = [&](auto&& less) {  // less(i, k): what is taken off a p
    const auto at = [&](int64_t i, auto k) {
      const vec<A> z = capped(vload<A>(x + i, k));
      vec<A> g = exp_nonpositive(z - c.lse) * c.softmax - less(i, k);
      if constexpr (SOFTCAP) g *= capped.slope(z);
      return g;
    };
    if (stream)
      for_lanes_aligned<A>(grad, a.columns,
                           [&](int64_t i, auto k) { put<A>(grad + i, at(i, k), k, true); });
    else
      for_lanes<A>(a.columns, [&](int64_t i, auto k) { vstore<A>(grad + i, at(i, k), k); });
  };
  const A* weight = a.weight ? static_cast<const A*>(a.weight) + a.first : nullptr;
  if (c.weight == A(0))
    each([](int64_t, auto) { return vec<A>{}; });
  else if (!weight)
    each([&](int64_t, auto) { return splat<A>(c.weight); });
  else
    each([&](int64_t i, auto k) { return vload<A>(weight + i, k) * c.weight; });
  if (here) {  // again with the target's own term, rounded once
    const vec<A> z = splat<A>(capped(load_as<A>(x_t)));
    vec<A> g = exp_nonpositive(z - c.lse) * c.softmax -
               (c.weight == A(0) ? A(0)
                : weight         ? weight[t - a.first] * c.weight
                                 : c.weight) -
               c.target;
    if constexpr (SOFTCAP) g *= capped.slope(z);
    grad[t - a.first] = store_as<T>(g[0]);
  }
  if (stream) stream_fence();
}

template<bool SOFTCAP, class T>
void run_state(const CrossEntropyStateArgs& a, int64_t begin, int64_t end) {
  const CrossEntropyTile& tile = a.tile;
  for (int64_t n = begin; n < end; ++n) {
    CrossEntropyState s{-INFINITY, 0, 0, NAN};
    if (tile.first > 0) memcpy(&s, a.state + 4 * n, sizeof s);
    if (tile.target[n] != tile.ignore_index)
      add_tile<SOFTCAP, T>(s, tile, static_cast<const T*>(tile.logits) + n * tile.columns,
                           tile.target[n]);
    memcpy(a.state + 4 * n, &s, sizeof s);
  }
}

template<bool SOFTCAP, class T>
void run_grad(const CrossEntropyGradArgs& a, double total, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const CrossEntropyTile& tile = a.tile;
  for (int64_t n = begin; n < end; ++n) {
    const int64_t t = tile.target[n];
    T* grad = static_cast<T*>(a.grad) + n * tile.columns;
    if (t == tile.ignore_index) {
      memset(static_cast<void*>(grad), 0, static_cast<size_t>(tile.columns) * sizeof(T));
      continue;
    }
    const double g = static_cast<double>(static_cast<const A*>(a.upstream)[n * a.upstream_stride]);
    const auto c = cross_entropy_coefficients<A>(a.lse[n], weight_at<A>(tile, t), g * a.scale[0],
                                                 g * a.scale[1], options_of(tile, total));
    grad_tile<SOFTCAP, T>(grad, tile, static_cast<const T*>(tile.logits) + n * tile.columns, t, c);
  }
}

template<bool SOFTCAP, class T>
void run_rows(const CrossEntropyRowsArgs& a, double total, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const CrossEntropyTile& tile = a.tile;
  const CrossEntropyOptions options = options_of(tile, total);
  const A upstream = static_cast<A>(a.upstream);
  for (int64_t n = begin; n < end; ++n) {
    const int64_t t = tile.target[n];
    double loss = 0, lse = 0;
    if (t != tile.ignore_index) {
      CrossEntropyState s{-INFINITY, 0, 0, NAN};
      add_tile<SOFTCAP, T>(s, tile, static_cast<const T*>(tile.logits) + n * tile.columns, t);
      lse = cross_entropy_lse(s);
      loss = cross_entropy_loss(s, lse, weight_at<A>(tile, t), options);
    }
    a.lse[n] = lse;
    a.loss[n] = loss;
    if (a.grad) run_grad<SOFTCAP, T>({tile, a.lse, &upstream, 0, a.scale, a.grad}, total, n, n + 1);
  }
}

}  // namespace

TW_END
#endif
