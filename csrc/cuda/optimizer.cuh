// The CUDA driver of all optimizers: one step over a list of tensors, in every storage format, in one launch.
//
// optimizer_table.cuh   the tensors and how the warps share them
// optimizer_tile.cuh    what a warp does at a time: a tile, whatever formats its operands are stored in
// Hyper-parameters, step counts, gradient multiplier and skip flag are read from device memory. What is
// counted (lost updates) or summed (LAMB's norms) is kept per warp or unit and added up in order.
//
// An op is a Rule, the struct of its header (trainwright/optimizer.h) and
//   template<class A, class S> static A update(A p, A g, A* states, int flags, const S& scalars)
//     one element; returns the new p and updates the states, of which flags says which exist
//
// int8 state, stochastic rounding, and the count of lost updates (kExtra) make kernels of their own: they need
// more registers.
#pragma once
#include "cuda/optimizer_tile.cuh"
#include "cuda/stats.cuh"

namespace tw {

// Three states in every format take more registers than two blocks have.
template<class Rule, class A, bool kExtra>
constexpr int kBlocksPerMultiprocessor =
    sizeof(A) == 8 || (kExtra && Rule::info.states > 2) ? 1 : 2;

// The counts of this warp.
__device__ __forceinline__ void store_lost(double* lost) {
  if (!lost) return;
  const LostCounts& counts = LostCounts::of_block();
  const int t = thread_number();
  const double sums[2] = {warp_sum(static_cast<double>(counts.moved[t])),
                          warp_sum(static_cast<double>(counts.lost[t]))};
  const int warp = blockIdx.x * kWarps + thread_number() / 32;
  if (thread_number() % 32 == 0) reinterpret_cast<double2*>(lost)[warp] = {sums[0], sums[1]};
}
static __global__ void __launch_bounds__(kSumThreads, 1)
    add_lost_kernel(const double* partial, int64_t count, double* lost, const double* control) {
  if (skipped(control)) return;
  double x[2] = {0.0, 0.0};
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) {
    const double2 one = reinterpret_cast<const double2*>(partial)[i];
    x[0] += one.x;
    x[1] += one.y;
  }
  block_pair_sum(x);
  if (threadIdx.x != 0) return;
  lost[0] += x[0];
  lost[1] += x[1];
}

template<class Rule, class A, bool kExtra>
__global__ void __launch_bounds__(kOptimizerThreads, (kBlocksPerMultiprocessor<Rule, A, kExtra>))
    optimizer_kernel(const OptimizerTable table, const OptimizerStep step) {
  if (skipped(step.control)) return;
  if constexpr (kExtra) LostCounts::of_block().clear();
  for_units<Rule, A>(table, step.control, [&](const auto& row) {
    for_tiles<Rule, A, kExtra>(row, step.seed, [&](auto& t) {
      t.template open<true>();
      A before[kPer];
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        A s[kMaxStates] = {};
#pragma unroll
        for (int i = 0; i < Rule::info.states; ++i) s[i] = t.s[i][k];
        before[k] = t.p[k];
        t.p[k] = Rule::template update<A>(t.p[k], t.g[k], s, row.flags, row.scalars);
#pragma unroll
        for (int i = 0; i < Rule::info.states; ++i) t.s[i][k] = s[i];
      }
      t.close_parameter();
      if constexpr (kExtra) {
        if (step.lost) t.count_lost(before);
      }
      t.template close_states<false>();
    });
  });
  if constexpr (kExtra) store_lost(step.lost);
  raise_counts(table);
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

// Blocks that fill the device, or as many as there is work for; one if there is none but to raise counts.
template<class Rule, class A, bool kExtra>
unsigned optimizer_blocks(int64_t units) {
  const int64_t most = int64_t{multiprocessors()} * kBlocksPerMultiprocessor<Rule, A, kExtra>;
  return static_cast<unsigned>(std::clamp<int64_t>(divide_up(units, kWarps), 1, most));
}
template<class Rule, class A, bool kExtra>
void launch_optimizer(const OptimizerTable& table, const OptimizerStep& step, cudaStream_t stream) {
  optimizer_kernel<Rule, A, kExtra>
      <<<optimizer_blocks<Rule, A, kExtra>(table.units), kOptimizerThreads, 0, stream>>>(table,
                                                                                         step);
}
inline void launch_add_lost(const double* partial, int64_t count, double* lost,
                            const double* control, cudaStream_t stream) {
  add_lost_kernel<<<1, kSumThreads, 0, stream>>>(partial, count, lost, control);
}

}  // namespace tw
