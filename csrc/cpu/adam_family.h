// The loop over a run of elements that Adam and AdamW share.
#pragma once
#include "cpu/optimizer.h"

#ifdef TW_CPU_ISA
#include <utility>

#include "trainwright/adamw.h"

TW_BEGIN
namespace {

// gradient(p, grad) returns the finished gradient.
template<bool kAmsgrad, class A, class P, class G, class States, class Gradient>
void adam_run(const AdamWScalars<A>& scalars, int64_t n, P p, G g, const States& states,
              Gradient gradient) {
  // Everything by value: what a store may reach would be loaded again after it.
  const auto front = [=, s = scalars, sm = state<0>(states), sv = state<1>(states),
                      sh = state<2>(states)](int64_t i, auto k) {
    auto m = vload<A>(sm + i, k), v = vload<A>(sv + i, k);
    auto grad = vload<A>(g + i, k), x = vload<A>(p + i, k), h = v, root = v;
    if constexpr (kAmsgrad) h = vload<A>(sh + i, k);
    each(
        [=](auto& grad, auto& x, auto& m, auto& v, auto& h, auto& root) {
          root = adamw_moments<vec<A>>(gradient(x, grad), m, v, s, [&](vec<A> y) {
            if constexpr (kAmsgrad) y = h = vmax<A>(h, y);
            return y;
          });
        },
        grad, x, m, v, h, root);
    if constexpr (kAmsgrad) vstore<A>(sh + i, h, k);
    vstore<A>(sm + i, m, k);
    vstore<A>(sv + i, v, k);
    return std::pair(m, root);
  };
  const auto back = [=, s = scalars](int64_t i, auto k, auto carried) {
    auto x = vload<A>(p + i, k);
    auto [m, root] = carried;
    each([=](auto& x, auto& m, auto& root) { x = adamw_parameter<vec<A>>(x, m, root, s); }, x, m,
         root);
    vstore<A>(p + i, x, k);
  };
  for_operands_in_halves<A, P, G, decltype(state<0>(states))>(n, front, back);
}
template<class A, class P, class G, class States, class Gradient>
void adam_run(const AdamWScalars<A>& s, int flags, int64_t n, P p, G g, const States& states,
              Gradient gradient) {
  flags & 1 ? adam_run<true, A>(s, n, p, g, states, gradient)
            : adam_run<false, A>(s, n, p, g, states, gradient);
}

}  // namespace
TW_END
#endif
