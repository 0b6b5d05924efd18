// The statistics that a pass over gradients keeps beside its copy: the sum of squares in double,
// and whether anything was not finite. Both are exact in kind: a float squared can neither overflow
// nor vanish in a double, and x - x is 0 for a finite x and NaN otherwise.
#pragma once
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

template<>
struct GradStats<float> {
  typedef float half __attribute__((vector_size(TW_VEC_BYTES / 2)));
  vec<double> low{}, high{};
  vec<float> odd{};
  TW_HD void add(vec<float> x) {
    half h[2];
    memcpy(h, &x, sizeof h);
    const vec<double> a = __builtin_convertvector(h[0], vec<double>);
    const vec<double> b = __builtin_convertvector(h[1], vec<double>);
    low += a * a;
    high += b * b;
    odd += x - x;
  }
  TW_HD double sum() const { return hsum<double>(low + high); }
  TW_HD double not_finite() const { return hsum<float>(odd) == 0.f ? 0.0 : 1.0; }
};

TW_END
