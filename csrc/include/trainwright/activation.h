// The activations that fuse into other ops (linear, swiglu, geglu): value and slope as functions of
// the input. V is float, double or a vector of them.
//
//   relu       max(x, 0)
//   silu       x s(x),  s(x) = 1 / (1 + exp(-x));                slope  s (1 + x (1 - s))
//   gelu       x P(x),  P the normal distribution function;      slope  P + x P'
//   gelu_tanh  x (1 + tanh u) / 2,  u = sqrt(2/pi) (x + 0.044715 x^3). Written as x s(2u), which is
//              the same and keeps its accuracy where tanh u is near -1;  slope  s + x s (1 - s) 2u'
#pragma once
#include "trainwright/vec_math.h"

namespace tw {
enum class Activation : int32_t { none = 0, relu = 1, gelu = 2, gelu_tanh = 3, silu = 4 };
}

TW_BEGIN

template<class V>
struct ValueSlope {
  V value, slope;
};

// s(x) and 1 - s(x), each with its full relative accuracy: the difference would lose 1 - s for x > 0.
template<class V>
struct Logistic {
  V s, rest;
};
template<class V>
TW_HD Logistic<V> logistic(V x) {
  using A = scalar_t<V>;
  const V e = vexp(-x), s = A(1) / (A(1) + e);
  return {s, e < V{} + A(INFINITY) ? e * s : V{} + A(1)};
}

struct Identity {
  template<class V>
  static TW_HD V value(V x) {
    return x;
  }
  template<class V>
  static TW_HD ValueSlope<V> value_slope(V x) {
    return {x, V{} + scalar_t<V>(1)};
  }
};

struct Relu {
  template<class V>
  static TW_HD V value(V x) {
    return x < scalar_t<V>(0) ? V{} : x;  // NaN stays
  }
  template<class V>
  static TW_HD ValueSlope<V> value_slope(V x) {
    const V one = V{} + scalar_t<V>(1);
    return {value(x), x <= scalar_t<V>(0) ? V{} : one};
  }
};

struct Silu {
  template<class V>
  static TW_HD V value(V x) {
    return x * vsigmoid(x);
  }
  template<class V>
  static TW_HD ValueSlope<V> value_slope(V x) {
    const Logistic<V> g = logistic(x);
    const V y = x * g.s;
    return {y, g.s + y * g.rest};
  }
};

struct Gelu {
  template<class V>
  static TW_HD V value(V x) {
    return x * vnormal(x).cdf;
  }
  template<class V>
  static TW_HD ValueSlope<V> value_slope(V x) {
    const Normal<V> n = vnormal(x);
    return {x * n.cdf, n.cdf + x * n.pdf};
  }
};

struct GeluTanh {
  template<class V>
  static TW_HD V value(V x) {
    return x * vsigmoid(gate(x, x * x));
  }
  template<class V>
  static TW_HD ValueSlope<V> value_slope(V x) {
    using A = scalar_t<V>;
    const V square = x * x;
    const Logistic<V> g = logistic(gate(x, square));
    const V y = x * g.s;
    // Past |x| = 30 the second term is 0; without the cut x^2 could be inf and the product NaN.
    const V slope = g.s + y * g.rest * (A(kTwice) + A(3 * kTwice * kCubic) * square);
    const V far = x > A(0) ? V{} + A(1) : V{};
    return {y, square > A(900) ? far : slope};
  }

 private:
  static constexpr double kTwice = 1.59576912160573071176;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = 0.044715;
  template<class V>
  static TW_HD V gate(V x, V square) {  // 2u
    using A = scalar_t<V>;
    return x * (A(kTwice) + A(kTwice * kCubic) * square);
  }
};

// Calls f with the activation as a value of its class (a tag; use decltype).
template<class F>
TW_HD void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::none:
      return f(Identity{});
    case Activation::relu:
      return f(Relu{});
    case Activation::gelu:
      return f(Gelu{});
    case Activation::gelu_tanh:
      return f(GeluTanh{});
    case Activation::silu:
      return f(Silu{});
  }
}

TW_END
