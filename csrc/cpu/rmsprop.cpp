// RMSprop over a list of tensors on the CPU (formula in trainwright/rmsprop.h, driver in cpu/optimizer.h).
//
// Bytes per parameter: fp32 20, and 8 more for each of momentum and centered. Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "trainwright/rmsprop.h"

#include "cpu/optimizer.h"

TW_DECLARE_KERNEL(rmsprop, OptimizerArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

struct RmspropRule : Rmsprop {
  template<bool kMomentum, bool kCentered, class A, class P, class G, class States>
  static void loop(const RmspropScalars<A>& s, int64_t n, P p, G g, const States& states) {
    for_operands<A, P, G, decltype(state<0>(states))>(
        n, [=, sv = state<0>(states), sb = state<1>(states), sa = state<2>(states)](int64_t i,
                                                                                    auto k) {
          auto x = vload<A>(p + i, k), grad = vload<A>(g + i, k), v = vload<A>(sv + i, k);
          auto b = v, a = v;
          if constexpr (kMomentum) b = vload<A>(sb + i, k);
          if constexpr (kCentered) a = vload<A>(sa + i, k);
          each(
              [s](auto& x, auto& grad, auto& v, auto& b, auto& a) {
                x = rmsprop_update(x, grad, v, kMomentum ? &b : nullptr, kCentered ? &a : nullptr,
                                   s);
              },
              x, grad, v, b, a);
          vstore<A>(sv + i, v, k);
          if constexpr (kMomentum) vstore<A>(sb + i, b, k);
          if constexpr (kCentered) vstore<A>(sa + i, a, k);
          vstore<A>(p + i, x, k);
        });
  }
  template<class A, class S, class P, class G, class States>
  static void run(const S& s, int, int64_t n, P p, G g, const States& states) {
    if (state<1>(states))
      state<2>(states) ? loop<true, true>(s, n, p, g, states)
                       : loop<true, false>(s, n, p, g, states);
    else
      state<2>(states) ? loop<false, true>(s, n, p, g, states)
                       : loop<false, false>(s, n, p, g, states);
  }
};

}  // namespace

void rmsprop(const OptimizerArgs& a) { run_optimizer<RmspropRule>(a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(rmsprop, Rmsprop::info)

#endif
