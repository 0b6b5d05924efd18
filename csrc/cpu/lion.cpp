// Lion over a list of tensors on the CPU (formula in trainwright/lion.h, driver in cpu/optimizer.h).
//
// Bytes per parameter: fp32 20, all bf16 10. Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "trainwright/lion.h"

#include "cpu/optimizer.h"

TW_DECLARE_KERNEL(lion, OptimizerArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

struct LionRule : Lion {
  template<class A, class S, class P, class G, class States>
  static void run(const S& s, int, int64_t n, P p, G g, const States& states) {
    auto sm = state<0>(states);
    for_operands<A, P, G, decltype(sm)>(n, [=](int64_t i, auto k) {
      auto x = vload<A>(p + i, k), grad = vload<A>(g + i, k), m = vload<A>(sm + i, k);
      each([s](auto& x, auto& grad, auto& m) { x = lion_update(x, grad, m, s); }, x, grad, m);
      vstore<A>(p + i, x, k);
      vstore<A>(sm + i, m, k);
    });
  }
};

}  // namespace

void lion(const OptimizerArgs& a) { run_optimizer<LionRule>(a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(lion, Lion::info)

#endif
