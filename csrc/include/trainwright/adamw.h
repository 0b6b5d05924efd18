// One AdamW update (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019), with
// the gradient as it comes from the loss scaler and the norm clip:
//   g = multiplier * grad          multiplier = clip / loss scale, negative to maximise
//   m += (1 - beta1) (g - m),  v += (1 - beta2) (g^2 - v),  [amsgrad: h = max(h, v), else h = v]
//   p = (1 - lr wd) p - lr / (1 - beta1^t) * m / (sqrt(h / (1 - beta2^t)) + eps)
// The scalars are computed in double from the parameter's own step count t; elements in A = float
// (double for double). Like all optimizers it is compiled without fused multiply-adds, so that every
// backend rounds the same operations and gives the same bits.
#pragma once
#include <math.h>

#include "trainwright/optimizer.h"
#include "trainwright/vec_sqrt.h"

TW_BEGIN

template<class A>
struct AdamWScalars {
  A multiplier, keep, blend1, beta2, blend2, inv_root2, eps, rate;
};

// base^t for 0 <= base < 1 and t >= 1.
TW_HD double beta_power(double base, double t) {
#if defined(__CUDA_ARCH__)
  return exp2(t * log2(base));  // pow() would be a call
#else
  return pow(base, t);
#endif
}

template<class A>
TW_HD AdamWScalars<A> adamw_scalars(double lr, double beta1, double beta2, double eps,
                                    double weight_decay, double step, double multiplier) {
  return {static_cast<A>(multiplier),  static_cast<A>(1.0 - lr * weight_decay),
          static_cast<A>(1.0 - beta1), static_cast<A>(beta2),
          static_cast<A>(1.0 - beta2), static_cast<A>(1.0 / sqrt(1.0 - beta_power(beta2, step))),
          static_cast<A>(eps),         static_cast<A>(lr / (1.0 - beta_power(beta1, step)))};
}

// Adam's and AdamW's states are m, v and, with flag 1, the largest v so far (AMSGrad).
constexpr OptimizerInfo adam_family(int hyper) {
  return {hyper, 3, {{true, 0}, {false, 0}, {false, 1}}};
}
struct AdamW {
  // lr, beta1, beta2, eps, weight decay, maximize
  static constexpr OptimizerInfo info = adam_family(6);
  template<class A>
  static TW_HD AdamWScalars<A> scalars(const double* h, double step, double multiplier) {
    return adamw_scalars<A>(h[0], h[1], h[2], h[3], h[4], step, multiplier);
  }
};

// The update with a finished gradient g, in parts, so that a loop can take those that wait for a root or a
// quotient some elements later. V is A or a vector of A; root = sqrt(h).
template<class V, class A>
TW_HD void adamw_moments(V g, V& m, V& v, const AdamWScalars<A>& s) {
  m = m + s.blend1 * (g - m);
  v = s.beta2 * v + s.blend2 * (g * g);
}
template<class V, class A>
TW_HD V adamw_quotient(V m, V root, const AdamWScalars<A>& s) {
  return m / (root * s.inv_root2 + s.eps);
}
template<class V, class A>
TW_HD V adamw_parameter(V p, V quotient, const AdamWScalars<A>& s) {
  return s.keep * p - s.rate * quotient;
}

// In one; `largest(v)` gives h.
template<class V, class A, class Largest>
TW_HD V adamw_apply(V p, V g, V& m, V& v, const AdamWScalars<A>& s, Largest&& largest) {
  adamw_moments<V>(g, m, v, s);
  return adamw_parameter<V>(p, adamw_quotient<V>(m, vsqrt(largest(v)), s), s);
}

template<class V, class A, class Largest>
TW_HD V adamw_update(V p, V grad, V& m, V& v, const AdamWScalars<A>& s, Largest&& largest) {
  return adamw_apply<V>(p, grad * s.multiplier, m, v, s, largest);
}

TW_END
