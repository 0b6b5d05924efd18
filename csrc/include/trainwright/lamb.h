// One LAMB update (You et al., "Large batch optimization for deep learning", ICLR 2020), bias
// corrected, decay inside the update, no clamp:
//   g = multiplier * grad          multiplier = clip / loss scale, negative to maximise
//   m += (1 - beta1) (g - m),  v += (1 - beta2) (g^2 - v)
//   u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + wd p
//   p = p - lr ratio u,   ratio = |p| / |u| over the whole parameter, 1 if either norm is 0
// Two passes. The first stores m and v and adds up the squares of p and u, block by block in double;
// the second recomputes u. Both take m and v as they are stored, after rounding.
// Bytes per parameter in fp32: 16 + 8 in the first pass, 12 + 4 in the second: 40.
#pragma once
#include "trainwright/adamw.h"

TW_BEGIN

template<class A>
struct LambScalars {
  A multiplier, blend1, beta2, blend2, inv_root2, eps, unbias1, decay;
};

template<class A>
TW_HD LambScalars<A> lamb_scalars(double beta1, double beta2, double eps, double weight_decay,
                                  double step, double multiplier) {
  return {static_cast<A>(multiplier),
          static_cast<A>(1.0 - beta1),
          static_cast<A>(beta2),
          static_cast<A>(1.0 - beta2),
          static_cast<A>(1.0 / sqrt(1.0 - beta_power(beta2, step))),
          static_cast<A>(eps),
          static_cast<A>(1.0 / (1.0 - beta_power(beta1, step))),
          static_cast<A>(weight_decay)};
}

struct Lamb {
  // lr, beta1, beta2, eps, weight decay, maximize; states: m, v
  static constexpr OptimizerInfo info = {6, 2, {{true, 0}, {false, 0}}};
  template<class A>
  static TW_HD LambScalars<A> scalars(const double* h, double step, double multiplier) {
    return lamb_scalars<A>(h[1], h[2], h[3], h[4], step, multiplier);
  }
};

// V is A or a vector of A.
template<class V, class A>
TW_HD void lamb_moments(V grad, V& m, V& v, const LambScalars<A>& s) {
  const V g = grad * s.multiplier;
  m = m + s.blend1 * (g - m);
  v = s.beta2 * v + s.blend2 * (g * g);
}
template<class V, class A>
TW_HD V lamb_direction(V p, V m, V v, const LambScalars<A>& s) {
  return m * s.unbias1 / (vsqrt(v) * s.inv_root2 + s.eps) + s.decay * p;
}
// lr * ratio, from the sums of squares of p and u.
TW_HD double lamb_rate(double lr, double p_squares, double u_squares) {
  if (p_squares == 0.0 || u_squares == 0.0) return lr;
  return lr * (sqrt(p_squares) / sqrt(u_squares));
}
template<class V, class A>
TW_HD V lamb_apply(V p, V u, A rate) {
  return p - rate * u;
}

TW_END
