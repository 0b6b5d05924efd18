// Adam over a list of tensors on the CPU (formula in trainwright/adam.h, driver in cpu/optimizer.h).
//
// Bytes per parameter and bound: as AdamW.
//
// build: no fused multiply-add
#include "trainwright/adam.h"

#include "cpu/adam_family.h"

TW_DECLARE_KERNEL(adam, OptimizerArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

struct AdamRule : Adam {
  template<class A, class S, class P, class G, class States>
  static void run(const S& s, int flags, int64_t n, P p, G g, const States& states) {
    adam_run<A>(s.adamw, flags, n, p, g, states,
                [s](auto x, auto grad) { return adam_gradient(x, grad, s); });
  }
};

}  // namespace

void adam(const OptimizerArgs& a) { run_optimizer<AdamRule>(a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(adam, Adam::info)

#endif
