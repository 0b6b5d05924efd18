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
// V is A or a vector of A.
template<class V, class A>
TW_HD V layer_norm_centred(V x, const LayerNormStats<A>& s) {
  return (x - s.mean) - s.low;
}
template<class V, class A>
TW_HD V layer_norm_y(V centred, A rstd, V w, V b) {
  return centred * rstd * w + b;
}
// slope = rstd^2 * mean(g * centred)
template<class V, class A>
TW_HD V layer_norm_dx(V g, V centred, A rstd, A mean_g, A slope) {
  return rstd * ((g - mean_g) - centred * slope);
}

TW_END
