// LAMB over a list of tensors on CUDA (formula in trainwright/lamb.h, driver in cuda/optimizer.cuh).
//
// moments  updates m and v, and adds up the squares of p and of the direction u for each unit, in double.
// rate     one block per tensor adds up its units in order: the same bits for any launch and device.
// apply    recomputes u and updates p.
// Bytes per parameter: fp32 40, 24 in the first pass and 16 in the last. Bound: memory bandwidth. Counted
// on the virtual GPU; not yet timed on a GPU.
//
// build: no fused multiply-add
#include "trainwright/lamb.h"

#include "cuda/optimizer_binding.cuh"

namespace tw {

using LambRule = Lamb;

// squares: two for each unit.
template<class A, bool kExtra>
__global__ void __launch_bounds__(kOptimizerThreads,
                                  (kBlocksPerMultiprocessor<LambRule, A, kExtra>))
    lamb_moments_kernel(const OptimizerTable table, const OptimizerStep step, double* squares) {
  if (skipped(step.control)) return;
  const auto work = [&](const auto& row) {
    const LambScalars<A>& k = row.scalars;
    double p_squares = 0.0, u_squares = 0.0;
    for_tiles<LambRule, A, kExtra>(row, step.seed, [&](auto& t) {
      t.template open<true>();
#pragma unroll
      for (int i = 0; i < kPer; ++i) lamb_moments(t.g[i], t.s[0][i], t.s[1][i], k);
      t.template close_states<true>();
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (!t.has(i)) continue;
        const double p = t.p[i], u = lamb_direction(t.p[i], t.s[0][i], t.s[1][i], k);
        p_squares += p * p;
        u_squares += u * u;
      }
    });
    p_squares = warp_sum(p_squares);
    u_squares = warp_sum(u_squares);
    if (threadIdx.x % 32 == 0)
      reinterpret_cast<double2*>(squares)[row.now_unit] = {p_squares, u_squares};
  };
  for_units<LambRule, A>(table, step.control, work);
}

static __global__ void __launch_bounds__(kSumThreads, 1)
    lamb_rate_kernel(const OptimizerTable table, const double* squares, double* rates,
                     const double* control) {
  if (skipped(control)) return;
  const OptimizerRow& row = table.rows[blockIdx.x];
  const int units = static_cast<int>((row.n + row.unit - 1) / row.unit);
  double sums[2] = {0.0, 0.0};
  for (int i = threadIdx.x; i < units; i += kSumThreads) {
    const double2 one = reinterpret_cast<const double2*>(squares)[row.first_unit + i];
    sums[0] += one.x;
    sums[1] += one.y;
  }
  block_pair_sum(sums);
  if (threadIdx.x == 0) {
    const double lr = table.hyper[LambRule::info.hyper * row.group];
    rates[blockIdx.x] = lamb_rate(lr, sums[0], sums[1]);
  }
}

template<class A, bool kExtra>
__global__ void __launch_bounds__(kOptimizerThreads,
                                  (kBlocksPerMultiprocessor<LambRule, A, kExtra>))
    lamb_apply_kernel(const OptimizerTable table, const OptimizerStep step) {
  if (skipped(step.control)) return;
  if constexpr (kExtra) LostCounts::of_block().clear();
  for_units<LambRule, A>(table, step.control, [&](const auto& row) {
    const LambScalars<A>& k = row.scalars;
    const A rate = static_cast<A>(row.rate);
    for_tiles<LambRule, A, kExtra>(row, step.seed, [&](auto& t) {
      t.template open<false>();
      A before[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        before[i] = t.p[i];
        const A u = lamb_direction(t.p[i], t.s[0][i], t.s[1][i], k);
        t.p[i] = lamb_apply(t.p[i], u, rate);
      }
      t.close_parameter();
      if constexpr (kExtra) {
        if (step.lost) t.count_lost(before);
      }
    });
  });
  if constexpr (kExtra) store_lost(step.lost);
  raise_counts(table);
}

// ---- launcher and binding -----------------------------------------------------------------------

// squares: two for each unit. rates: one for each row.
template<class A, bool kExtra>
void launch_lamb(OptimizerTable table, const OptimizerStep& step, double* squares, double* rates,
                 cudaStream_t stream) {
  const unsigned blocks = optimizer_blocks<LambRule, A, kExtra>(table.units);
  lamb_moments_kernel<A, kExtra><<<blocks, kOptimizerThreads, 0, stream>>>(table, step, squares);
  lamb_rate_kernel<<<table.count, kSumThreads, 0, stream>>>(table, squares, rates, step.control);
  table.rates = rates;
  lamb_apply_kernel<A, kExtra><<<blocks, kOptimizerThreads, 0, stream>>>(table, step);
}

struct LambUpdate {
  using Rule = LambRule;
  template<class A, bool kExtra>
  static void launch(const OptimizerTable& table, const OptimizerStep& step, const Tensor& like,
                     cudaStream_t stream) {
    const Tensor scratch =
        empty({2 * int64_t{table.units} + table.count}, like, ScalarType::Double);
    double* squares = doubles(scratch);
    launch_lamb<A, kExtra>(table, step, squares, squares + 2 * int64_t{table.units}, stream);
  }
};

}  // namespace tw

TW_CUDA_OPTIMIZER(lamb, tw::LambUpdate)
