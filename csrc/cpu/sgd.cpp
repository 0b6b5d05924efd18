// SGD over a list of tensors on the CPU (formula in trainwright/sgd.h, driver in cpu/optimizer.h).
//
// Bytes per parameter: fp32 20 with momentum, 12 without. Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "trainwright/sgd.h"

#include "cpu/optimizer.h"

TW_DECLARE_KERNEL(sgd, OptimizerArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

struct SgdRule : Sgd {
  template<class A, class S, class P, class G, class States>
  static void run(const S& s, int, int64_t n, P p, G g, const States& states) {
    auto buffer = state<0>(states);
    if (buffer)
      for_operands<A, P, G, decltype(buffer)>(n, [=](int64_t i, auto k) {
        auto x = vload<A>(p + i, k), grad = vload<A>(g + i, k), b = vload<A>(buffer + i, k);
        each([s](auto& x, auto& grad, auto& b) { x = sgd_update(x, grad, b, s); }, x, grad, b);
        vstore<A>(p + i, x, k);
        vstore<A>(buffer + i, b, k);
      });
    else
      for_operands<A, P, G, decltype(buffer)>(n, [=](int64_t i, auto k) {
        auto x = vload<A>(p + i, k), grad = vload<A>(g + i, k);
        each([s](auto& x, auto& grad) { x = sgd_update(x, grad, s); }, x, grad);
        vstore<A>(p + i, x, k);
      });
  }
};

}  // namespace

void sgd(const OptimizerArgs& a) { run_optimizer<SgdRule>(a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(sgd, Sgd::info)

#endif
