// What describes an optimizer op to every backend: its numbers per parameter group, and its states. Each
// op's header has a struct with an `info` and the numbers of `hyper` as the scalars of its formula,
//   template<class A> static TW_HD auto scalars(const double* hyper, double step, double multiplier)
// to which a backend's Rule adds the update itself.
#pragma once
#include "trainwright/config.h"

namespace tw {
inline constexpr int kMaxStates = 3;

struct OptimizerInfo {
  int hyper;   // numbers per group, "maximize" last
  int states;  // most that a tensor may have
  struct {
    bool is_signed;
    int flag;  // its bit of TensorSpec::flags; 0: every tensor has it
  } state[kMaxStates];
  constexpr bool has(int s, int flags) const {
    return s < states && (state[s].flag == 0 || (state[s].flag & flags) != 0);
  }
};
}  // namespace tw

TW_BEGIN
// What the gradients of a group are multiplied by.
TW_HD double signed_multiplier(double maximize, double multiplier) {
  return maximize != 0.0 ? -multiplier : multiplier;
}
TW_END
