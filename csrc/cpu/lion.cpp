// Lion over a list of tensors on the CPU (formula in trainwright/lion.h, driver in cpu/optimizer.h).
//
// Bytes per parameter: fp32 20, all bf16 10. Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "cpu/optimizer.h"

namespace tw {
// lr, beta1, beta2, weight decay, maximize; state: m
constexpr OptimizerInfo kLion = {5, 1, {{true, 0}}};
}  // namespace tw

TW_DECLARE_KERNEL(lion, OptimizerArgs)

#ifdef TW_CPU_ISA

#include "trainwright/lion.h"

TW_BEGIN
namespace {

struct LionRule {
  template<class A>
  static LionScalars<A> scalars(const OptimizerRow& r) {
    const double* h = r.hyper;
    return lion_scalars<A>(h[0], h[1], h[2], h[3], h[4] != 0.0 ? -r.multiplier : r.multiplier);
  }
  template<class A, class S, class P, class G, class T>
  static void run(const S& s, int, int64_t n, P p, G g, const T* states) {
    for_lanes<A>(n, [&](int64_t i, auto k) {
      vec<A> m = vload<A>(states[0] + i, k);
      vstore<A>(p + i, lion_update(vload<A>(p + i, k), vload<A>(g + i, k), m, s), k);
      vstore<A>(states[0] + i, m, k);
    });
  }
};

}  // namespace

void lion(const OptimizerArgs& a) { run_optimizer<LionRule>(kLion, a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(lion, kLion)

#endif
