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

struct AdamRule : Adam, AdamLoops<AdamRule> {
  template<class S>
  static auto adamw(const S& s) {
    return s.adamw;
  }
  template<class V, class S>
  static V gradient(V p, V grad, const S& s) {
    return adam_gradient(p, grad, s);
  }
};

}  // namespace

void adam(const OptimizerArgs& a) { run_optimizer<AdamRule>(a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(adam, Adam::info)

#endif
