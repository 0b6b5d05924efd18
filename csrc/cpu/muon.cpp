// The two passes of Muon over a list of tensors on the CPU (formulas in trainwright/muon.h, driver in
// cpu/optimizer.h); its matrix products are newton_schulz.cpp.
//
// Bytes per parameter, fp32: momentum 16 (gradient, buffer read and written, update written), update 12.
// Bound: memory bandwidth; both together are a few per cent of a step, whose products take 15 m FLOPs and
// more per parameter.
//
// build: no fused multiply-add
#include "trainwright/muon.h"

#include "cpu/optimizer.h"

TW_DECLARE_KERNEL(muon_momentum, OptimizerArgs)
TW_DECLARE_KERNEL(muon_update, OptimizerArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

struct MomentumRule : MuonMomentumOp {
  template<class A, class S, class P, class G, class States>
  static void run(const S& s, int, int64_t n, P p, G g, const States& states) {
    auto sb = state<0>(states);
    for_operands<A, P, G, decltype(sb)>(n, [=](int64_t i, auto k) {
      auto grad = vload<A>(g + i, k), b = vload<A>(sb + i, k);
      each([s](auto& grad, auto& b) { grad = muon_direction(grad, b, s); }, grad, b);
      vstore<A>(p + i, grad, k);
      vstore<A>(sb + i, b, k);
    });
  }
};

struct UpdateRule : MuonUpdateOp {
  template<class A, class S, class P, class G, class States>
  static void run(const S& s, int, int64_t n, P p, G o, const States&) {
    for_operands<A, P, G>(n, [=](int64_t i, auto k) {
      auto x = vload<A>(p + i, k), update = vload<A>(o + i, k);
      each([s](auto& x, auto& update) { x = muon_apply(x, update, s); }, x, update);
      vstore<A>(p + i, x, k);
    });
  }
};

}  // namespace

void muon_momentum(const OptimizerArgs& a) { run_optimizer<MomentumRule>(a); }
void muon_update(const OptimizerArgs& a) { run_optimizer<UpdateRule>(a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(muon_momentum, MuonMomentumOp::info)
TW_OPTIMIZER_BINDINGS(muon_update, MuonUpdateOp::info)

#endif
