// The tensors of an optimizer step on CUDA: a table in device memory, and how the warps of a grid that
// fills the device share the elements of thousands of tensors.
//
// A row says where a tensor's operands lie and how they are stored. It changes only when something
// moves. Rows travel as kernel arguments: nothing is copied from the host, nothing waits, and a captured
// CUDA graph holds all it needs.
//
// Tensors are cut into units; the warps take every so many-th unit. A warp that comes to another tensor
// finds it in the table and computes what its elements share, in double. The last block of a step raises
// the step counts.
#pragma once
#include "cuda/launch.cuh"
#include "cuda/tile.cuh"
#include "trainwright/optimizer.h"

namespace tw {

constexpr int kWarps = 8, kOptimizerThreads = 32 * kWarps;

// Elements of a unit of a tensor of n: whole tiles, one for each lane at most. What is kept for each unit
// (LAMB's sums) is next to nothing beside a large one. From n alone: no sum depends on the device.
inline int unit_elements(int64_t n) {
  int tiles = 4;
  while (tiles < 32 && n >> 20 >= 2 * tiles) tiles *= 2;
  return tiles * kTile;
}
inline int count_units(int64_t n) { return static_cast<int>(divide_up(n, unit_elements(n))); }

struct OptimizerRow {
  void *param, *master, *state[kMaxStates];
  float* scale[kMaxStates];
  const void* grad;
  double* step;
  int64_t n, offset;
  int first_unit;   // units in the rows before it
  int group, unit;  // unit: how many elements
  DType dtype, grad_dtype;
  MasterFormat master_format;
  StateFormat state_format;
  uint8_t flags;
  bool stochastic;
  Layout layout;
};
static_assert(sizeof(OptimizerRow) == 128,
              "MEMORY_COLUMNS in python/trainwright/ops/_optimizer.py");

struct OptimizerTable {
  const OptimizerRow* rows;
  unsigned* finished;  // blocks of the launch; 0 between launches
  int count, units;
  const double* hyper;  // Rule::info.hyper numbers for each group
  const double* rates;  // LAMB: for each row; or null
};

// What a step reads besides.
struct OptimizerStep {
  const double* control;  // multiplier of the gradients, and whether to skip the step; or null
  uint64_t seed;
  double*
      lost;  // two for each warp: updates that are not zero, those that rounding took away; or null
};
__device__ __forceinline__ bool skipped(const double* control) {
  return control && control[1] != 0.0;
}

// ---- filling the table --------------------------------------------------------------------------
struct OptimizerRows {
  static constexpr int kCapacity = 32000 / sizeof(OptimizerRow);  // of 32,764 bytes of arguments
  OptimizerRow rows[kCapacity];
  int count;
};

static __global__ void __launch_bounds__(256, 1)
    optimizer_rows_kernel(const __grid_constant__ OptimizerRows list, OptimizerRow* rows,
                          unsigned* finished) {
  constexpr int words = sizeof(OptimizerRow) / 8;
  for (int i = threadIdx.x; i < list.count * words; i += blockDim.x)
    reinterpret_cast<uint64_t*>(rows)[i] = reinterpret_cast<const uint64_t*>(list.rows)[i];
  if (threadIdx.x == 0) *finished = 0;
}

// rows: `count` of them, on the host, into a table's memory.
inline void launch_optimizer_rows(const OptimizerRow* rows, int64_t count, OptimizerRow* to,
                                  unsigned* finished, cudaStream_t stream) {
  OptimizerRows list;
  for (int64_t first = 0; first < count; first += OptimizerRows::kCapacity) {
    list.count = static_cast<int>(std::min<int64_t>(count - first, OptimizerRows::kCapacity));
    std::copy(rows + first, rows + first + list.count, list.rows);
    optimizer_rows_kernel<<<1, 256, 0, stream>>>(list, to + first, finished);
  }
}

// ---- working through it -------------------------------------------------------------------------
// A row as a warp works on it.
struct WarpRow : OptimizerRow {
  int end_unit;  // the first unit past it
  double now;    // the step count
  double rate;   // LAMB
  // The unit that the warp is at: its number, first element and elements. Here, not in registers, of which a tile has
  // none to spare.
  int now_unit, length;
  int64_t begin;
};
// With the numbers of the op's formula.
template<class Rule, class A>
struct RuleRow : WarpRow {
  decltype(Rule::template scalars<A>(nullptr, 0.0, 0.0)) scalars;
};

// The last row whose first unit is not above `unit`, by the warp together: 32 places at a time.
__device__ __forceinline__ int find_row(const OptimizerTable& table, int unit) {
  int low = 0;
  for (int size = table.count; size > 1;) {
    const int step = (size + 31) / 32, probe = thread_number() % 32 * step;
    const bool below = probe < size && table.rows[low + probe].first_unit <= unit;
    const int last = 31 - __clz(__ballot_sync(0xffffffffu, below));
    low += last * step;
    size = size - last * step < step ? size - last * step : step;
  }
  return low;
}

template<class Rule, class A>
__device__ __forceinline__ void open_row(const OptimizerTable& table, int number,
                                         const double* control, RuleRow<Rule, A>& row) {
  const auto* from = reinterpret_cast<const uint32_t*>(table.rows + number);
  const int lane = thread_number() % 32;
  __syncwarp();
  for (int i = lane; i < static_cast<int>(sizeof(OptimizerRow) / 4); i += 32)
    reinterpret_cast<uint32_t*>(static_cast<OptimizerRow*>(&row))[i] = from[i];
  __syncwarp();
  if (lane == 0) {
    const double* hyper = table.hyper + Rule::info.hyper * row.group;
    const double scale = control ? control[0] : 1.0;
    row.end_unit = row.first_unit + static_cast<int>((row.n + row.unit - 1) / row.unit);
    row.now = *row.step + 1.0;
    row.scalars = Rule::template scalars<A>(hyper, row.now,
                                            signed_multiplier(hyper[Rule::info.hyper - 1], scale));
    if (table.rates) row.rate = table.rates[number];
  }
  __syncwarp();
}

// Calls body(row) for the units of this warp.
template<class Rule, class A, class F>
__device__ __forceinline__ void for_units(const OptimizerTable& table, const double* control,
                                          F&& body) {
  __shared__ RuleRow<Rule, A> rows[kWarps];
  RuleRow<Rule, A>& row = rows[thread_number() / 32];
  if (thread_number() % 32 == 0) row.end_unit = 0;
  __syncwarp();
  for (int unit = blockIdx.x * kWarps + thread_number() / 32; unit < table.units;
       unit = row.now_unit + gridDim.x * kWarps) {
    if (unit >= row.end_unit) open_row<Rule, A>(table, find_row(table, unit), control, row);
    __syncwarp();
    if (thread_number() % 32 == 0) {
      row.now_unit = unit;
      row.begin = int64_t{unit - row.first_unit} * row.unit;
      row.length = static_cast<int>(row.n - row.begin < row.unit ? row.n - row.begin : row.unit);
    }
    __syncwarp();
    body(row);
    __syncwarp();  // what one lane did alone may have taken the warp apart
  }
}

// At the end of a step, by all threads. The last block to come here raises the step counts: every warp has
// read those of its rows by then.
__device__ __forceinline__ void raise_counts(const OptimizerTable& table) {
  __shared__ bool is_last;
  __syncthreads();
  if (thread_number() == 0) {
    __threadfence();
    is_last = atomicInc(table.finished, gridDim.x - 1) == gridDim.x - 1;  // and it is 0 again
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = thread_number(); i < table.count; i += kOptimizerThreads) *table.rows[i].step += 1.0;
}

}  // namespace tw
