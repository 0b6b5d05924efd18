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
void adam_run(int64_t n, P p, G g, const T* states, Update update) {
  // Everything by value: what a store may reach would be loaded again after it.
  for_operands<A, P, G, T>(
      n, [=, sm = states[0], sv = states[1], sh = states[2]](int64_t i, auto k) {
        auto x = vload<A>(p + i, k), m = vload<A>(sm + i, k), v = vload<A>(sv + i, k);
        auto grad = vload<A>(g + i, k), h = v;
        if constexpr (kAmsgrad) h = vload<A>(sh + i, k);
        each(
            [=](auto& x, auto& grad, auto& m, auto& v, auto& h) {
              x = update(x, grad, m, v, [&](vec<A> y) {
                if constexpr (kAmsgrad) y = h = vmax<A>(h, y);
                return y;
              });
            },
            x, grad, m, v, h);
        if constexpr (kAmsgrad) vstore<A>(sh + i, h, k);
        vstore<A>(sm + i, m, k);
        vstore<A>(sv + i, v, k);
        vstore<A>(p + i, x, k);
      });
}
template<class A, class P, class G, class T, class Update>
void adam_run(int flags, int64_t n, P p, G g, const T* states, Update update) {
  flags & 1 ? adam_run<true, A>(n, p, g, states, update)
            : adam_run<false, A>(n, p, g, states, update);
}

}  // namespace
TW_END
#endif
