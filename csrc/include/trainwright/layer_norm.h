// Layer norm of one row of C elements:  y = xhat * w + b,  xhat = (x - mean) * rstd,
// rstd = 1 / sqrt(var + eps), var = mean((x - mean)^2). With g = dy * w:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  dw = sum over rows of dy * xhat,  db = sum of dy.
//
// The mean is kept in two parts: `mean`, as the first pass rounds it, and `low`, the mean of x - mean
// from the second pass. x - mean is exact where x is close to the mean, so rows with a large common
// offset keep full accuracy. All in A = float (double for double).
#pragma once
#include <math.h>

#include "trainwright/types.h"

TW_BEGIN

// What backward needs of a row, in this order in memory.
template<class A>
struct LayerNormStats {
  A mean, low, rstd;
};

// `deviations` and `squares` are the sums over the row of d = x - mean and of d^2.
template<class A>
TW_HD LayerNormStats<A> layer_norm_stats(A mean, A deviations, A squares, int64_t C, A eps) {
  const A n = static_cast<A>(C), low = deviations / n;
  A var = (squares - deviations * low) / n;
  var = var < A(0) ? A(0) : var;  // a constant row, after rounding
  return {mean, low, A(1) / static_cast<A>(sqrt(var + eps))};
}
// The factors of a row, as V = A or a vector of A:  xhat = (x - mean) * rstd - shift,
// dx = g * rstd - (xhat * slope + offset).
template<class V>
struct LayerNormRow {
  V mean, rstd, shift, slope, offset;
};
template<class V>
TW_HD V layer_norm_xhat(V x, const LayerNormRow<V>& c) {
  return (x - c.mean) * c.rstd - c.shift;
}
template<class V>
TW_HD V layer_norm_dx(V g, V xhat, const LayerNormRow<V>& c) {
  return g * c.rstd - (xhat * c.slope + c.offset);
}
// `g_sum` and `gd_sum` are the sums over the row of g and of g * (x - mean); 0 in forward.
template<class V, class A>
TW_HD LayerNormRow<V> layer_norm_row(const LayerNormStats<A>& s, A g_sum, A gd_sum, int64_t C) {
  const A n = static_cast<A>(C), mean_g = g_sum / n;
  const A mean_gx = s.rstd * (gd_sum - s.low * g_sum) / n;
  return {V{} + s.mean, V{} + s.rstd, V{} + s.low * s.rstd, V{} + s.rstd * mean_gx,
          V{} + s.rstd * mean_g};
}

TW_END
