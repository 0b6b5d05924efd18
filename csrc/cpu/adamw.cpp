// AdamW over a list of tensors on the CPU (formula in trainwright/adamw.h, driver in cpu/optimizer.h).
//
// Bytes per parameter: fp32 28 (p, m, v read and written, g read); bf16 parameter and gradient with an
// fp32 master 30 (the master too; the parameter is only written, but its line is fetched first), with
// split16 and bf16 state 18, all bf16 14; int8 state 16.1 with fp32 and 10.1 with bf16 parameters.
// Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "cpu/adam_family.h"

namespace tw {
// lr, beta1, beta2, eps, weight decay, maximize
constexpr OptimizerInfo kAdamW = adam_family(6);
}  // namespace tw

TW_DECLARE_KERNEL(adamw, OptimizerArgs)

#ifdef TW_CPU_ISA

#include "trainwright/adamw.h"

TW_BEGIN
namespace {

struct AdamWRule {
  template<class A>
  static AdamWScalars<A> scalars(const OptimizerRow& r) {
    const double* h = r.hyper;
    return adamw_scalars<A>(h[0], h[1], h[2], h[3], h[4], r.step,
                            h[5] != 0.0 ? -r.multiplier : r.multiplier);
  }
  template<class A, class S, class P, class G, class T>
  static void run(const S& s, int flags, int64_t n, P p, G g, const T* states) {
    adam_run<A>(flags, n, p, g, states, [s](auto x, auto grad, auto& m, auto& v, auto largest) {
      return adamw_update(x, grad, m, v, s, largest);
    });
  }
};

}  // namespace

void adamw(const OptimizerArgs& a) { run_optimizer<AdamWRule>(kAdamW, a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(adamw, kAdamW)

#endif
