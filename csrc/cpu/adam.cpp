// Adam over a list of tensors on the CPU (formula in trainwright/adam.h, driver in cpu/optimizer.h).
//
// Bytes per parameter and bound: as AdamW.
//
// build: no fused multiply-add
#include "cpu/adam_family.h"

namespace tw {
// lr, beta1, beta2, eps, weight decay, decoupled, maximize
constexpr OptimizerInfo kAdam = adam_family(7);
}  // namespace tw

TW_DECLARE_KERNEL(adam, OptimizerArgs)

#ifdef TW_CPU_ISA

#include "trainwright/adam.h"

TW_BEGIN
namespace {

struct AdamRule {
  template<class A>
  static AdamScalars<A> scalars(const OptimizerRow& r) {
    const double* h = r.hyper;
    return adam_scalars<A>(h[0], h[1], h[2], h[3], h[4], h[5] != 0.0, r.step,
                           h[6] != 0.0 ? -r.multiplier : r.multiplier);
  }
  template<class A, class S, class P, class G, class T>
  static void run(const S& s, int flags, int64_t n, P p, G g, const T* states) {
    adam_run<A>(flags, n, p, g, states, [s](auto x, auto grad, auto& m, auto& v, auto largest) {
      return adam_update(x, grad, m, v, s, largest);
    });
  }
};

}  // namespace

void adam(const OptimizerArgs& a) { run_optimizer<AdamRule>(kAdam, a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(adam, kAdam)

#endif
