// exp, log, tanh, sigmoid and the normal distribution under one name for float, double and, in host
// code, vec<float> and vec<double>: a template over V works on all four. Scalars and double go to
// the C library; vec<float> is computed here.
//
// Accuracy of vec<float>, on every 137th float: log within 0.8 units in the last place of the true
// value, exp 1.1, tanh 2.5, sigmoid 2.3, cdf 4, pdf 2.6; also where the result is tiny, except that
// results below the smallest normal number may become 0. NaN stays NaN. Held to it by
// tests/ops/test_vec_math.py.
//
// Each polynomial minimises the largest relative error of the finished function: least squares on
// 1500 Chebyshev nodes, reweighted by the error until it is level (Lawson's iteration), against
// 40-digit values.
#pragma once
#include <math.h>

#include "trainwright/types.h"
#if !defined(__CUDACC__)
#include "trainwright/vec.h"
#endif

TW_BEGIN

// The element type of V.
template<class V>
struct ScalarOf {
  using type = V;
};
template<class V>
using scalar_t = typename ScalarOf<V>::type;

TW_HD float vexp(float x) { return expf(x); }
TW_HD double vexp(double x) { return exp(x); }
TW_HD float vlog(float x) { return logf(x); }
TW_HD double vlog(double x) { return log(x); }
TW_HD float vtanh(float x) { return tanhf(x); }
TW_HD double vtanh(double x) { return tanh(x); }

// Distribution function and density of the standard normal distribution; cdf(x) = (1 + erf(x / sqrt
// 2)) / 2 without the cancellation for x < 0.
template<class V>
struct Normal {
  V cdf, pdf;
};
TW_HD Normal<double> vnormal(double x) {
  return {0.5 * erfc(x * -0.70710678118654752440), 0.39894228040143267794 * exp(-0.5 * x * x)};
}
TW_HD Normal<float> vnormal(float x) {
  return {0.5f * erfcf(x * -0.70710678118654752440f),
          0.39894228040143267794f * expf(-0.5f * x * x)};
}

#if !defined(__CUDACC__)

template<>
struct ScalarOf<vec<float>> {
  using type = float;
};
template<>
struct ScalarOf<vec<double>> {
  using type = double;
};

// a * a - square, where square is a * a as rounded: what the rounding lost.
TW_HD vf square_error(vf a, vf square) {
#if TW_VEC_BYTES == 64
  return (vf)_mm512_fmsub_ps((__m512)a, (__m512)a, (__m512)square);
#elif TW_VEC_BYTES == 32
  return (vf)_mm256_fmsub_ps((__m256)a, (__m256)a, (__m256)square);
#else
  const vf high = (vf)((vi)a & static_cast<int32_t>(0xfffff000)), low = a - high;
  return ((high * high - square) + 2.f * high * low) + low * low;
#endif
}

// tanh |x| = e / (e + 2) with e = exp(2|x|) - 1, which keeps the accuracy near 0. 2|x| = n ln2 + r;
// expm1(r) = r + r^2 q(r), q of degree 4; e = 2^n expm1(r) + (2^n - 1).
TW_HD vf vtanh(vf x) {
  const vi sign = (vi)x & static_cast<int32_t>(0x80000000);
  const vf magnitude = (vf)((vi)x ^ sign);
  const vf t = magnitude > 10.f ? splat(20.f) : magnitude * 2.f;  // tanh(10) rounds to 1
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: rounds to an integer
  const vf shifted = t * 1.44269504088896341f + magic;
  const vf n = shifted - magic;
  vf r = t - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf q = splat(1.38825178e-3f);
  q = q * r + 8.36653821e-3f;
  q = q * r + 4.16672006e-2f;
  q = q * r + 1.66665435e-1f;
  q = q * r + 4.9999997e-1f;
  const vf p = r + r * r * q;
  const vf scale = (vf)(((vi)shifted - 0x4b400000 + 127) << 23);
  const vf e = p * scale + (scale - 1.f);
  return (vf)((vi)(e / (e + 2.f)) | sign);
}

// x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt 2);  log(1 + f) = f - f^2 / 2 + f^3 P(f), P of
// degree 8. n ln2 is added in two parts.
TW_HD vf vlog(vf x) {
  const auto subnormal = x < 1.17549435e-38f;
  const vi bits = (vi)(subnormal ? x * 8388608.f : x);  // 2^23
  const vi shifted = bits - 0x3f3504f3;                 // sqrt(1/2)
  const vf n = __builtin_convertvector((shifted >> 23) - (subnormal & 23), vf);
  const vf f = (vf)((shifted & 0x7fffff) + 0x3f3504f3) - 1.f;
  vf p = splat(6.74664006e-2f);
  p = p * f + -1.16756521e-1f;
  p = p * f + 1.18881621e-1f;
  p = p * f + -1.24055892e-1f;
  p = p * f + 1.42195523e-1f;
  p = p * f + -1.66679963e-1f;
  p = p * f + 2.00021192e-1f;
  p = p * f + -2.50000089e-1f;
  p = p * f + 3.33333135e-1f;
  const vf square = f * f;
  vf y = p * f * square + n * -2.12194440e-4f;
  y = y - 0.5f * square;
  y = (y + f) + n * 0.693359375f;
  y = x == 0.f ? splat(-INFINITY) : y;
  y = x == INFINITY ? x : y;
  return x < 0.f ? splat(NAN) : (x != x ? x : y);
}

// With a = |x|:  cdf(-a) = exp(-a^2 / 2) m(a), where m, Mills' ratio over sqrt(2 pi), is smooth:
// m(a) = S(u) / (a + 7/2),  u = a / (a + 7/2) - 2/5, S of degree 9. The rounding error of a^2,
// which exp would magnify in the tail, is put back to first order.
TW_HD Normal<vf> vnormal(vf x) {
  vf a = (vf)((vi)x & 0x7fffffff);
  a = a > 14.f ? splat(14.f) : a;  // cdf(-14) underflows
  const vf square = a * a;
  const vf e = vexp(square * -0.5f);
  const vf density = e - e * (square_error(a, square) * 0.5f);
  const vf inverse = 1.f / (a + 3.5f);
  const vf u = a * inverse - 0.4f;
  vf s = splat(0.0577208325f);
  s = s * u + 0.0570200942f;
  s = s * u + -0.129711166f;
  s = s * u + -0.133395359f;
  s = s * u + 0.311113238f;
  s = s * u + 0.147031277f;
  s = s * u + -1.01526189f;
  s = s * u + 1.55457115f;
  s = s * u + -1.41231465f;
  s = s * u + 0.871099412f;
  const vf tail = density * (s * inverse);
  return {x > 0.f ? 1.f - tail : tail, density * 0.398942280401432678f};
}

TW_HD vec<double> vtanh(vec<double> x) {
  for (int i = 0; i < lanes<double>; ++i) x[i] = tanh(x[i]);
  return x;
}
TW_HD vec<double> vlog(vec<double> x) {
  for (int i = 0; i < lanes<double>; ++i) x[i] = log(x[i]);
  return x;
}
TW_HD Normal<vec<double>> vnormal(vec<double> x) {
  Normal<vec<double>> r;
  for (int i = 0; i < lanes<double>; ++i) {
    const Normal<double> one = vnormal(x[i]);
    r.cdf[i] = one.cdf;
    r.pdf[i] = one.pdf;
  }
  return r;
}

#endif  // !__CUDACC__

// 1 / (1 + exp(-x)); where exp overflows the quotient is 0.
template<class V>
TW_HD V vsigmoid(V x) {
  using A = scalar_t<V>;
  return A(1) / (A(1) + vexp(-x));
}

TW_END
