// One RMSprop update as torch defines it (Tieleman and Hinton, lecture 6.5 of "Neural networks for
// machine learning", 2012; centered: Graves, arXiv 1308.0850):
//   g = multiplier * grad + wd p       multiplier = clip / loss scale, negative to maximise
//   v = alpha v + (1 - alpha) g^2,   centered: a += (1 - alpha) (g - a)
//   r = g / (sqrt(v - a^2) + eps),   a = 0 unless centered
//   p = p - lr r,   or b = momentum b + r and p = p - lr b
// v - a^2, a variance, is taken as 0 where rounding made it negative.
#pragma once
#include "trainwright/optimizer.h"
#include "trainwright/vec_sqrt.h"

TW_BEGIN

template<class A>
struct RmspropScalars {
  A multiplier, decay, alpha, blend, eps, momentum, rate;
};

template<class A>
TW_HD RmspropScalars<A> rmsprop_scalars(double lr, double alpha, double eps, double weight_decay,
                                        double momentum, double multiplier) {
  return {static_cast<A>(multiplier),  static_cast<A>(weight_decay), static_cast<A>(alpha),
          static_cast<A>(1.0 - alpha), static_cast<A>(eps),          static_cast<A>(momentum),
          static_cast<A>(lr)};
}

struct Rmsprop {
  // lr, alpha, eps, weight decay, momentum, maximize; states: v, momentum (flag 1), mean gradient (2)
  static constexpr OptimizerInfo info = {6, 3, {{false, 0}, {true, 1}, {true, 2}}};
  template<class A>
  static TW_HD RmspropScalars<A> scalars(const double* h, double, double multiplier) {
    return rmsprop_scalars<A>(h[0], h[1], h[2], h[3], h[4], multiplier);
  }
};

// V is A or a vector of A. b and a may be null. Returns the new parameter.
template<class V, class A>
TW_HD V rmsprop_update(V p, V grad, V& v, V* b, V* a, const RmspropScalars<A>& s) {
  const V g = grad * s.multiplier + s.decay * p;
  v = s.alpha * v + s.blend * (g * g);
  V variance = v;
  if (a) {
    *a = *a + s.blend * (g - *a);
    variance = v - *a * *a;
    variance = variance < 0 ? variance * A(0) : variance;
  }
  V r = g / (vsqrt(variance) + s.eps);
  if (b) r = *b = s.momentum * *b + r;
  return p - s.rate * r;
}

TW_END
