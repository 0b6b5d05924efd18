// One step of SGD with momentum as torch defines it (Sutskever et al., "On the importance of
// initialization and momentum in deep learning", ICML 2013, with the learning rate outside):
//   g = multiplier * grad + wd p       multiplier = clip / loss scale, negative to maximise
//   b = g in the first step, else momentum b + (1 - dampening) g
//   p = p - lr d,   d = g + momentum b (nesterov), b, or g without momentum
#pragma once
#include "trainwright/optimizer.h"
#include "trainwright/types.h"

TW_BEGIN

template<class A>
struct SgdScalars {
  A multiplier, decay, momentum, gain, rate;  // gain = 1 - dampening
  bool first, nesterov;
};

template<class A>
TW_HD SgdScalars<A> sgd_scalars(double lr, double momentum, double dampening, double weight_decay,
                                bool nesterov, double step, double multiplier) {
  return {static_cast<A>(multiplier),
          static_cast<A>(weight_decay),
          static_cast<A>(momentum),
          static_cast<A>(1.0 - dampening),
          static_cast<A>(lr),
          step == 1.0,
          nesterov};
}

struct Sgd {
  // lr, momentum, dampening, weight decay, nesterov, maximize; state: the momentum buffer, with flag 1
  static constexpr OptimizerInfo info = {6, 1, {{true, 1}}};
  template<class A>
  static TW_HD SgdScalars<A> scalars(const double* h, double step, double multiplier) {
    return sgd_scalars<A>(h[0], h[1], h[2], h[3], h[4] != 0.0, step, multiplier);
  }
};

// V is A or a vector of A. Returns the new parameter.
template<class V, class A>
TW_HD V sgd_update(V p, V grad, const SgdScalars<A>& s) {
  const V g = grad * s.multiplier + s.decay * p;
  return p - s.rate * g;
}
// With momentum: updates b too.
template<class V, class A>
TW_HD V sgd_update(V p, V grad, V& b, const SgdScalars<A>& s) {
  const V g = grad * s.multiplier + s.decay * p;
  b = s.first ? g : s.momentum * b + s.gain * g;
  return p - s.rate * (s.nesterov ? g + s.momentum * b : b);
}

TW_END
