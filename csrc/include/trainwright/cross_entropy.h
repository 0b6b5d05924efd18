// Cross entropy of one row of V logits x with target t, class weights w (1 without), smoothing e, z-loss coefficient q and
// softcap c:
//
//   z = c tanh(x / c)    lse = log sum exp(z)    W = sum w
//   loss = (1 - e) w_t (lse - z_t) + e / V (W lse - sum w z)         z-loss = q lse^2
//   dx_j = (a p_j - b w_j - k [j = t]) (1 - (z_j / c)^2),  p = exp(z - lse)
//   a = u ((1 - e) w_t + e W / V) + 2 q lse v,  b = u e / V,  k = u (1 - e) w_t
//
// where u and v are the upstream gradients of loss and z-loss. lse is kept in double: with its float rounding p would be off
// by ulp(lse), which torch, that keeps z - lse, is not. The rounding is put into a: p a = exp(z - float(lse)) a'. A row may come in several tiles of columns: its running
// state is CrossEntropyState. Sums over a tile are in the logits' accumulator type, sums over tiles in double.
#pragma once
#include <math.h>

#include "trainwright/types.h"

TW_BEGIN

// Four doubles, one row of a (N, 4) tensor: the running maximum m, sum exp(z - m), sum w z, and z of the target. It starts
// as {-inf, 0, 0, NaN}: a target that lies in no tile leaves NaN in the loss.
struct CrossEntropyState {
  double max, sum_exp, sum_wz, target;
};

struct CrossEntropyOptions {
  int64_t classes;       // V of the whole row
  int64_t ignore_index;  // rows with this target give loss 0 and gradient 0, whatever their logits
  double label_smoothing, z_loss;
  double softcap;       // 0: none
  double weight_total;  // W
};

TW_HD double cross_entropy_lse(const CrossEntropyState& s) { return s.max + log(s.sum_exp); }

TW_HD double cross_entropy_loss(const CrossEntropyState& s, double lse, double w_t,
                                const CrossEntropyOptions& o) {
  double loss = (1 - o.label_smoothing) * w_t * (lse - s.target);
  if (o.label_smoothing != 0)
    loss += o.label_smoothing / static_cast<double>(o.classes) * (o.weight_total * lse - s.sum_wz);
  return loss;
}

template<class A>
struct CrossEntropyCoefficients {
  A lse, softmax, weight, target;  // rounded lse; a', b, k above
};

template<class A>
TW_HD CrossEntropyCoefficients<A> cross_entropy_coefficients(double lse, double w_t, double u,
                                                             double v,
                                                             const CrossEntropyOptions& o) {
  const double hard = (1 - o.label_smoothing) * w_t;
  const double soft = o.label_smoothing / static_cast<double>(o.classes);
  const A rounded = static_cast<A>(lse);
  double a = u * (hard + soft * o.weight_total);
  if (o.z_loss != 0) a += 2 * o.z_loss * lse * v;
  a *= exp(static_cast<double>(rounded) - lse);
  return {rounded, static_cast<A>(a), static_cast<A>(u * soft), static_cast<A>(u * hard)};
}

TW_END
