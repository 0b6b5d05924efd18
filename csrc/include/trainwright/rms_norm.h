// RMS norm of one row of C elements, in A = float (double for double); CPU and CUDA share it.
//   y = x * rstd * (w + offset),  rstd = 1 / sqrt(mean(x^2) + eps)
//   dx = rstd * (g - x * rstd^2 * mean(g * x))  with g = dy * (w + offset)
//   dw = sum over rows of dy * x * rstd
#pragma once
#include <math.h>

#include "trainwright/types.h"

TW_BEGIN

template<class A>
TW_HD A rms_rstd(A sum_of_squares, int64_t C, A eps) {
  return A(1) / static_cast<A>(sqrt(sum_of_squares / static_cast<A>(C) + eps));
}
// V is A or a vector of A.
template<class V, class A>
TW_HD V rms_y(V x, A rstd, V w) {
  return x * rstd * w;
}
// rstd^3 * mean(g * x), so that dx = rstd * g - x * slope
template<class A>
TW_HD A rms_slope(A rstd, A sum_of_gx, int64_t C) {
  return rstd * rstd * rstd * (sum_of_gx / static_cast<A>(C));
}
template<class V, class A>
TW_HD V rms_dx(V g, V x, A rstd, A mean_gx) {
  return rstd * (g - x * (rstd * rstd * mean_gx));
}

TW_END
