// One Lion update (Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023):
//   g = multiplier * grad          multiplier = clip / loss scale, negative to maximise
//   p = (1 - lr wd) p - lr sign(beta1 m + (1 - beta1) g),   then   m = beta2 m + (1 - beta2) g
// The sign of 0 is 0, that of NaN is NaN.
#pragma once
#include "trainwright/optimizer.h"
#include "trainwright/types.h"

TW_BEGIN

template<class A>
struct LionScalars {
  A multiplier, keep, beta1, blend1, beta2, blend2, rate;
};

template<class A>
TW_HD LionScalars<A> lion_scalars(double lr, double beta1, double beta2, double weight_decay,
                                  double multiplier) {
  return {static_cast<A>(multiplier), static_cast<A>(1.0 - lr * weight_decay),
          static_cast<A>(beta1),      static_cast<A>(1.0 - beta1),
          static_cast<A>(beta2),      static_cast<A>(1.0 - beta2),
          static_cast<A>(lr)};
}

struct Lion {
  // lr, beta1, beta2, weight decay, maximize; state: m
  static constexpr OptimizerInfo info = {5, 1, {{true, 0}}};
  template<class A>
  static TW_HD LionScalars<A> scalars(const double* h, double, double multiplier) {
    return lion_scalars<A>(h[0], h[1], h[2], h[3], multiplier);
  }
};

// V is A or a vector of A. Returns the new parameter; updates m.
template<class V, class A>
TW_HD V lion_update(V p, V grad, V& m, const LionScalars<A>& s) {
  const V g = grad * s.multiplier;
  const V c = s.beta1 * m + s.blend1 * g;
  const V one = V{} + A(1);
  const V below = c < 0 ? -one : c;  // keeps 0 and NaN
  m = s.beta2 * m + s.blend2 * g;
  return s.keep * p - s.rate * (c > 0 ? one : below);
}

TW_END
