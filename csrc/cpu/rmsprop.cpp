// RMSprop over a list of tensors on the CPU (formula in trainwright/rmsprop.h, driver in cpu/optimizer.h).
//
// Bytes per parameter: fp32 20, and 8 more for each of momentum and centered. Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "cpu/optimizer.h"

namespace tw {
// lr, alpha, eps, weight decay, momentum, maximize; states: v, momentum (flag 1), mean gradient (2)
constexpr OptimizerInfo kRmsprop = {6, 3, {{false, 0}, {true, 1}, {true, 2}}};
}  // namespace tw

TW_DECLARE_KERNEL(rmsprop, OptimizerArgs)

#ifdef TW_CPU_ISA

#include "trainwright/rmsprop.h"

TW_BEGIN
namespace {

struct RmspropRule {
  template<class A>
  static RmspropScalars<A> scalars(const OptimizerRow& r) {
    const double* h = r.hyper;
    return rmsprop_scalars<A>(h[0], h[1], h[2], h[3], h[4],
                              h[5] != 0.0 ? -r.multiplier : r.multiplier);
  }
  template<bool kMomentum, bool kCentered, class A, class P, class G, class T>
  static void loop(const RmspropScalars<A>& s, int64_t n, P p, G g, const T* states) {
    for_lanes<A>(n, [&](int64_t i, auto k) {
      vec<A> v = vload<A>(states[0] + i, k), b = {}, a = {};
      if constexpr (kMomentum) b = vload<A>(states[1] + i, k);
      if constexpr (kCentered) a = vload<A>(states[2] + i, k);
      const vec<A> q = rmsprop_update(vload<A>(p + i, k), vload<A>(g + i, k), v,
                                      kMomentum ? &b : nullptr, kCentered ? &a : nullptr, s);
      vstore<A>(states[0] + i, v, k);
      if constexpr (kMomentum) vstore<A>(states[1] + i, b, k);
      if constexpr (kCentered) vstore<A>(states[2] + i, a, k);
      vstore<A>(p + i, q, k);
    });
  }
  template<class A, class S, class P, class G, class T>
  static void run(const S& s, int, int64_t n, P p, G g, const T* states) {
    if (states[1])
      states[2] ? loop<true, true>(s, n, p, g, states) : loop<true, false>(s, n, p, g, states);
    else
      states[2] ? loop<false, true>(s, n, p, g, states) : loop<false, false>(s, n, p, g, states);
  }
};

}  // namespace

void rmsprop(const OptimizerArgs& a) { run_optimizer<RmspropRule>(kRmsprop, a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(rmsprop, kRmsprop)

#endif
