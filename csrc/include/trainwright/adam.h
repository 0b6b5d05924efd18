// One Adam update (Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015): that of
// trainwright/adamw.h, but weight decay is added to the gradient,
//   g = multiplier * grad + wd p,
// unless it is decoupled (torch's decoupled_weight_decay), which is AdamW.
#pragma once
#include "trainwright/adamw.h"

TW_BEGIN

template<class A>
struct AdamScalars {
  AdamWScalars<A> adamw;
  A decay;
};

template<class A>
TW_HD AdamScalars<A> adam_scalars(double lr, double beta1, double beta2, double eps,
                                  double weight_decay, bool decoupled, double step,
                                  double multiplier) {
  return {adamw_scalars<A>(lr, beta1, beta2, eps, decoupled ? weight_decay : 0.0, step, multiplier),
          static_cast<A>(decoupled ? 0.0 : weight_decay)};
}

struct Adam {
  // lr, beta1, beta2, eps, weight decay, decoupled, maximize
  static constexpr OptimizerInfo info = adam_family(7);
  template<class A>
  static TW_HD AdamScalars<A> scalars(const double* h, double step, double multiplier) {
    return adam_scalars<A>(h[0], h[1], h[2], h[3], h[4], h[5] != 0.0, step, multiplier);
  }
};

template<class V, class A>
TW_HD V adam_gradient(V p, V grad, const AdamScalars<A>& s) {
  return grad * s.adamw.multiplier + s.decay * p;
}
template<class V, class A, class Largest>
TW_HD V adam_update(V p, V grad, V& m, V& v, const AdamScalars<A>& s, Largest&& largest) {
  return adamw_apply<V>(p, adam_gradient(p, grad, s), m, v, s.adamw, largest);
}

TW_END
