// SGD over a list of tensors on the CPU (formula in trainwright/sgd.h, driver in cpu/optimizer.h).
//
// Bytes per parameter: fp32 20 with momentum, 12 without. Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "cpu/optimizer.h"

namespace tw {
// lr, momentum, dampening, weight decay, nesterov, maximize; state: the momentum buffer, with flag 1
constexpr OptimizerInfo kSgd = {6, 1, {{true, 1}}};
}  // namespace tw

TW_DECLARE_KERNEL(sgd, OptimizerArgs)

#ifdef TW_CPU_ISA

#include "trainwright/sgd.h"

TW_BEGIN
namespace {

struct SgdRule {
  template<class A>
  static SgdScalars<A> scalars(const OptimizerRow& r) {
    const double* h = r.hyper;
    return sgd_scalars<A>(h[0], h[1], h[2], h[3], h[4] != 0.0, r.step,
                          h[5] != 0.0 ? -r.multiplier : r.multiplier);
  }
  template<class A, class S, class P, class G, class T>
  static void run(const S& s, int, int64_t n, P p, G g, const T* states) {
    const T buffer = states[0];
    if (buffer)
      for_lanes<A>(n, [&](int64_t i, auto k) {
        vec<A> b = vload<A>(buffer + i, k);
        vstore<A>(p + i, sgd_update(vload<A>(p + i, k), vload<A>(g + i, k), b, s), k);
        vstore<A>(buffer + i, b, k);
      });
    else
      for_lanes<A>(n, [&](int64_t i, auto k) {
        vstore<A>(p + i, sgd_update(vload<A>(p + i, k), vload<A>(g + i, k), s), k);
      });
  }
};

}  // namespace

void sgd(const OptimizerArgs& a) { run_optimizer<SgdRule>(kSgd, a); }

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(sgd, kSgd)

#endif
