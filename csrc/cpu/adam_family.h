// The loop over a run of elements that Adam and AdamW share. States: m, v and, with flag 1, the
// largest v so far (AMSGrad).
#pragma once
#include "cpu/optimizer.h"

namespace tw {
constexpr OptimizerInfo adam_family(int hyper) {
  return {hyper, 3, {{true, 0}, {false, 0}, {false, 1}}};
}
}  // namespace tw

#ifdef TW_CPU_ISA
TW_BEGIN
namespace {

// update(p, g, m, v, largest) returns the new p.
template<bool kAmsgrad, class A, class P, class G, class T, class Update>
void adam_run(int64_t n, P* p, const G* g, T* const* states, Update&& update) {
  for_lanes<A>(n, [&](int64_t i, auto k) {
    vec<A> m = vload<A>(states[0] + i, k), v = vload<A>(states[1] + i, k);
    const vec<A> q = update(vload<A>(p + i, k), vload<A>(g + i, k), m, v, [&](vec<A> x) {
      if constexpr (kAmsgrad) {
        x = vmax<A>(vload<A>(states[2] + i, k), x);
        vstore<A>(states[2] + i, x, k);
      }
      return x;
    });
    vstore<A>(states[0] + i, m, k);
    vstore<A>(states[1] + i, v, k);
    vstore<A>(p + i, q, k);
  });
}
template<class A, class P, class G, class T, class Update>
void adam_run(int flags, int64_t n, P* p, const G* g, T* const* states, Update&& update) {
  flags & 1 ? adam_run<true, A>(n, p, g, states, update)
            : adam_run<false, A>(n, p, g, states, update);
}

}  // namespace
TW_END
#endif
