// LAMB over a list of tensors on the CPU (formula in trainwright/lamb.h, driver in cpu/optimizer.h).
//
// Two passes: the first updates the moments and adds up the squares of p and of the direction u, per
// block in double; the second, with the ratio of their sums over the tensor, recomputes u and updates
// p. The sums are taken in block order: the same bits for any thread count.
// Bytes per parameter: fp32 40. Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "trainwright/lamb.h"

#include "cpu/optimizer.h"

TW_DECLARE_KERNEL(lamb, OptimizerArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

// The squares of the lanes of x, added to sum in double.
inline void add_squares(vec<double>& sum, vf x) {
  constexpr int half = lanes<double>;
  vec<double> low, high;
  for (int i = 0; i < half; ++i) low[i] = x[i], high[i] = x[half + i];
  sum += low * low + high * high;
}
inline void add_squares(vec<double>& sum, vec<double> x) { sum += x * x; }

template<class A>
void first_pass(const OptimizerArgs& a, const OptimizerRow& r, int64_t begin, int64_t end,
                double* squares) {
  const LambScalars<A> s = scalars_of<Lamb, A>(r);
  vec<double> p_sum = {}, u_sum = {};
  Tile<A> t(Lamb::info, r, a.seed);
  for_tiles(t, begin, end, true, [&](int64_t n) {
    for_lanes<A>(n, [&](int64_t i, auto k) {
      vec<A> m = vload<A>(t.s[0] + i, k), v = vload<A>(t.s[1] + i, k);
      lamb_moments(vload<A>(t.g + i, k), m, v, s);
      vstore<A>(t.s[0] + i, m, k);
      vstore<A>(t.s[1] + i, v, k);
    });
    t.close_states();
    if (r.spec.state != StateFormat::full) t.open_states();
    for_lanes<A>(n, [&](int64_t i, auto k) {
      const vec<A> p = vload<A>(t.p + i, k);
      const vec<A> u = lamb_direction(p, vload<A>(t.s[0] + i, k), vload<A>(t.s[1] + i, k), s);
      add_squares(p_sum, keep(p, k, A(0)));
      add_squares(u_sum, keep(u, k, A(0)));
    });
  });
  squares[0] = hsum<double>(p_sum);
  squares[1] = hsum<double>(u_sum);
}

template<class A>
void second_pass(const OptimizerArgs& a, const OptimizerRow& r, int64_t begin, int64_t end,
                 double rate) {
  const LambScalars<A> s = scalars_of<Lamb, A>(r);
  Tile<A> t(Lamb::info, r, a.seed);
  for_tiles(t, begin, end, !a.lost, [&](int64_t n) {
    if (a.lost) t.remember();
    for_lanes<A>(n, [&](int64_t i, auto k) {
      const vec<A> p = vload<A>(t.p + i, k);
      const vec<A> u = lamb_direction(p, vload<A>(t.s[0] + i, k), vload<A>(t.s[1] + i, k), s);
      vstore<A>(t.p + i, lamb_apply(p, u, static_cast<A>(rate)), k);
    });
    t.close_parameter();
    if (a.lost) t.count_lost(a.lost);
  });
}

}  // namespace

void lamb(const OptimizerArgs& a) {
  for_blocks(a.blocks, [&](int64_t row, int64_t begin, int64_t end, int64_t block) {
    const OptimizerRow& r = a.rows[row];
    double* squares = a.partial + 2 * block;
    r.dtype == DType::f64 ? first_pass<double>(a, r, begin, end, squares)
                          : first_pass<float>(a, r, begin, end, squares);
  });
  for (int64_t row = 0; row < a.blocks.rows;
       ++row) {  // the sums of a row end up in its first block
    double* sums = a.partial + 2 * a.blocks.first[row];
    for (int64_t b = a.blocks.first[row] + 1; b < a.blocks.first[row + 1]; ++b) {
      sums[0] += a.partial[2 * b];
      sums[1] += a.partial[2 * b + 1];
    }
  }
  for_blocks(a.blocks, [&](int64_t row, int64_t begin, int64_t end, int64_t) {
    const OptimizerRow& r = a.rows[row];
    const double* sums = a.partial + 2 * a.blocks.first[row];
    const double rate = lamb_rate(r.hyper[0], sums[0], sums[1]);
    r.dtype == DType::f64 ? second_pass<double>(a, r, begin, end, rate)
                          : second_pass<float>(a, r, begin, end, rate);
  });
}

TW_END

#else  // ---- torch bindings

#include "cpu/optimizer_binding.h"

TW_OPTIMIZER_BINDINGS(lamb, Lamb::info)

#endif
