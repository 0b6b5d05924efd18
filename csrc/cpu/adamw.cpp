// AdamW over a list of tensors on the CPU (formula in trainwright/adamw.h, driver in cpu/optimizer.h).
//
// Bytes per parameter: fp32 28 (p, m, v read and written, g read); bf16 parameter and gradient with an
// fp32 master 30 (the master too; the parameter is only written, but its line is fetched first), with
// split16 and bf16 state 18, all bf16 14; int8 state 16.1 with fp32 and 10.1 with bf16 parameters.
// Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "trainwright/adamw.h"

#include "cpu/adam_family.h"

TW_DECLARE_KERNEL(adamw, OptimizerArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

struct AdamWRule : AdamW, AdamLoops<AdamWRule> {
  template<class S>
  static S adamw(const S& s) {
    return s;
  }
  template<class V, class S>
  static V gradient(V, V grad, const S& s) {
    return grad * s.multiplier;
  }
};

}  // namespace

void adamw(const OptimizerArgs& a) { run_optimizer<AdamWRule>(a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(adamw, AdamW::info)

#endif
