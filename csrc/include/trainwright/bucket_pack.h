// The statistics that a pass over gradients keeps beside its copy: the sum of squares in double,
// and whether anything was not finite. Both are exact in kind: a float squared can neither overflow
// nor vanish in a double, and x - x is 0 for a finite x and NaN otherwise.
#pragma once
#if defined(__CUDACC__)
#include "trainwright/types.h"

TW_BEGIN

// Of the elements that one thread sees.
template<class A>
struct GradStats {
  double squares = 0.0, odd = 0.0;
  TW_HD void add(A x) {
    const double wide = x;
    squares += wide * wide;
    odd += wide - wide;
  }
  TW_HD double sum() const { return squares; }
  TW_HD double not_finite() const { return odd == 0.0 ? 0.0 : 1.0; }
};

TW_END

#else
#include "trainwright/vec.h"

TW_BEGIN

template<class A>
struct GradStats;

template<>
struct GradStats<double> {
  vec<double> squares{}, odd{};
  TW_HD void add(vec<double> x) {
    squares += x * x;
    odd += x - x;
  }
  TW_HD double sum() const { return hsum<double>(squares); }
  TW_HD double not_finite() const { return hsum<double>(odd) == 0.0 ? 0.0 : 1.0; }
};

#if TW_VEC_BYTES == 64
TW_HD vec<double> low_half(vf x) {
  return (vec<double>)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
}
TW_HD vec<double> high_half(vf x) {
  return (vec<double>)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
}
#elif TW_VEC_BYTES == 32
TW_HD vec<double> low_half(vf x) {
  return (vec<double>)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
}
TW_HD vec<double> high_half(vf x) {
  return (vec<double>)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
}
#else
TW_HD vec<double> low_half(vf x) { return vec<double>{x[0], x[1]}; }
TW_HD vec<double> high_half(vf x) { return vec<double>{x[2], x[3]}; }
#endif

// A sum of squares of finite floats is finite in double, so it tells by itself.
template<>
struct GradStats<float> {
  vec<double> low{}, high{};
  TW_HD void add(vec<float> x) {
    const vec<double> a = low_half(x), b = high_half(x);
    low += a * a;
    high += b * b;
  }
  TW_HD double sum() const { return hsum<double>(low + high); }
  TW_HD double not_finite() const { return sum() - sum() == 0.0 ? 0.0 : 1.0; }
};

TW_END
#endif
