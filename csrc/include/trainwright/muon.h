// Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) around its
// Newton-Schulz iteration (trainwright/newton_schulz.h), as torch.optim.Muon has it:
//   g = multiplier * grad                     multiplier = clip / loss scale
//   b = b + (1 - mu) (g - b)                  momentum buffer
//   u = b + (1 - mu) (g - b) with the new b   (nesterov), else b
//   p = (1 - lr wd) p - lr ratio O            O = orthogonalised u, ratio by the matrix's shape
// Scalars in double, elements in A = float (double for double). Files that include this are built
// without fused multiply-add: all backends give the same bits.
#pragma once
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

// V is A or a vector of A. Updates b; returns u.
template<class V, class A>
TW_HD V muon_momentum(V grad, V& b, const MuonMomentum<A>& s) {
  const V g = grad * s.multiplier;
  b = muon_towards(b, g, s);
  return s.nesterov ? muon_towards(b, g, s) : b;
}

template<class A>
struct MuonRate {
  A keep, rate;  // 1 - lr wd, lr ratio
};

template<class V, class A>
TW_HD V muon_update(V p, V o, const MuonRate<A>& s) {
  return s.keep * p - s.rate * o;
}

TW_END
