// Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) around its
// Newton-Schulz iteration (trainwright/newton_schulz.h), as torch.optim.Muon has it:
//   g = multiplier * grad                     multiplier = clip / loss scale
//   b = b + (1 - mu) (g - b)                  momentum buffer
//   u = b + (1 - mu) (g - b) with the new b   (nesterov), else b
//   p = (1 - lr wd) p - lr ratio O            O = orthogonalised u, ratio by the matrix's shape
// Scalars in double, elements in A = float (double for double). Files that include this are built
// without fused multiply-add: all backends give the same bits.
#pragma once
#include "trainwright/optimizer.h"
#include "trainwright/types.h"

TW_BEGIN

template<class A>
struct MuonMomentum {
  A multiplier, momentum, blend;  // blend = 1 - momentum
  bool nesterov;
};

// From b towards g by `blend`; as torch's lerp exact at the nearer end.
template<class V, class A>
TW_HD V muon_towards(V b, V g, const MuonMomentum<A>& s) {
  return s.blend < A(0.5) ? b + s.blend * (g - b) : g - s.momentum * (g - b);
}

// The first pass as an optimizer op whose "parameter" is u, which is only written. State: b.
struct MuonMomentumOp {
  // momentum, nesterov, maximize
  static constexpr OptimizerInfo info = {3, 1, {{true, 0}}};
  template<class A>
  static TW_HD MuonMomentum<A> scalars(const double* h, double, double multiplier) {
    return {static_cast<A>(multiplier), static_cast<A>(h[0]), static_cast<A>(1.0 - h[0]),
            h[1] != 0.0};
  }
};

// V is A or a vector of A. Updates b; returns u.
template<class V, class A>
TW_HD V muon_direction(V grad, V& b, const MuonMomentum<A>& s) {
  const V g = grad * s.multiplier;
  b = muon_towards(b, g, s);
  return s.nesterov ? muon_towards(b, g, s) : b;
}

// The second pass as one whose "gradient" is O.
template<class A>
struct MuonRate {
  A keep, rate;  // 1 - lr wd, lr ratio
};
struct MuonUpdateOp {
  // lr, weight decay, ratio, maximize
  static constexpr OptimizerInfo info = {4, 0, {}};
  template<class A>
  static TW_HD MuonRate<A> scalars(const double* h, double, double) {
    return {static_cast<A>(1.0 - h[0] * h[1]), static_cast<A>(h[0] * h[2])};
  }
};

template<class V, class A>
TW_HD V muon_apply(V p, V o, const MuonRate<A>& s) {
  return s.keep * p - s.rate * o;
}

TW_END
