// Square roots of vec<float> and vec<double>, correctly rounded; scalars too, so that a formula can be
// written for either.
#pragma once
#include <math.h>

#include "trainwright/types.h"
#if !defined(__CUDACC__)
#include "trainwright/vec.h"
#endif

TW_BEGIN

TW_HD float vsqrt(float x) { return sqrtf(x); }
TW_HD double vsqrt(double x) { return sqrt(x); }
#if defined(__CUDACC__)
#elif TW_VEC_BYTES == 64
TW_HD vf vsqrt(vf x) { return (vf)_mm512_sqrt_ps((__m512)x); }
TW_HD vec<double> vsqrt(vec<double> x) { return (vec<double>)_mm512_sqrt_pd((__m512d)x); }
#elif TW_VEC_BYTES == 32
TW_HD vf vsqrt(vf x) { return (vf)_mm256_sqrt_ps((__m256)x); }
TW_HD vec<double> vsqrt(vec<double> x) { return (vec<double>)_mm256_sqrt_pd((__m256d)x); }
#else
TW_HD vf vsqrt(vf x) {
  for (int i = 0; i < lanes<float>; ++i) x[i] = sqrtf(x[i]);
  return x;
}
TW_HD vec<double> vsqrt(vec<double> x) {
  for (int i = 0; i < lanes<double>; ++i) x[i] = sqrt(x[i]);
  return x;
}
#endif

TW_END
