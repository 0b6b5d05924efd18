// The CUDA driver of all optimizers: one step over a list of tensors, in every storage format.
//
// begin     one thread per tensor raises its step count and computes what its elements share, in double.
//           Rows of tensors come as kernel arguments and go into a table in device memory: nothing is
//           copied from the host, nothing waits, and a captured CUDA graph holds all it needs.
// update    one launch over thousands of tensors. They are cut into units of kUnit elements; the warps
//           of a grid that fills the device take every so many-th unit, finding the tensor it belongs
//           to in the table, and work through it in tiles (cuda/tile.cuh). Operands are converted in
//           registers, by branches that are the same for the whole warp: so the code grows with the
//           sum of the formats, not with their product.
// A tile is a block of the int8 codes: its largest value is found by an exchange between lanes. What is
// counted (lost updates) or summed (LAMB's norms) is kept per warp or unit and added up in order.
//
// Hyper-parameters, step counts, gradient multiplier and skip flag are read from device memory.
//
// An op is a Rule, the struct of its header (trainwright/optimizer.h) and
//   template<class A, class S> static A update(A p, A g, A* states, int flags, const S& scalars)
//     one element; returns the new p and updates the states, of which flags says which exist
#pragma once
#include "cuda/launch.cuh"
#include "cuda/stats.cuh"
#include "cuda/tile.cuh"
#include "trainwright/optimizer.h"

namespace tw {

constexpr int kUnitTiles = 4;
constexpr int kUnit = kUnitTiles * kTile;
constexpr int kWarps = 8, kOptimizerThreads = 32 * kWarps;

// A tensor, as the host describes it.
struct OptimizerRow {
  void *param, *master, *state[kMaxStates];
  float* scale[kMaxStates];
  const void* grad;
  double* step;
  const double* hyper;
  int64_t n, offset, first_unit;  // units in the rows before it
  DType dtype, grad_dtype;
  MasterFormat master_format;
  StateFormat state_format;
  uint8_t flags;
  bool stochastic;
  Layout layout;
};
// And as the kernels see it.
struct alignas(16) TableRow : OptimizerRow {
  double now;   // the step count
  double rate;  // LAMB
  alignas(16) unsigned char scalars[80];
};
struct OptimizerTable {
  TableRow* rows;
  int64_t* first_unit;  // of each row: for the search
  int count;
  int64_t units;
};
struct OptimizerRows {
  static constexpr int kCapacity = 220;
  OptimizerRow rows[kCapacity];
  int count;
};
static_assert(sizeof(OptimizerRows) <= 32000, "kernel arguments");

// int8 state, stochastic rounding, and the count of lost updates make kernels of their own: they need
// more registers.
struct OptimizerStep {
  const double* control;  // multiplier of the gradients, and whether to skip the step; or null
  uint64_t seed;
  double*
      lost;  // two for each warp: updates that are not zero, those that rounding took away; or null
};
__device__ __forceinline__ bool skipped(const double* control) {
  return control && control[1] != 0.0;
}

template<class Rule>
__global__ void __launch_bounds__(256, 1)
    optimizer_begin_kernel(const __grid_constant__ OptimizerRows list, TableRow* rows,
                           int64_t* first_unit, const double* control) {
  constexpr int words = sizeof(OptimizerRow) / 8;
  for (int i = threadIdx.x; i < list.count * words; i += blockDim.x)
    reinterpret_cast<uint64_t*>(rows + i / words)[i % words] =
        reinterpret_cast<const uint64_t*>(list.rows)[i];
  const int i = threadIdx.x;
  if (i >= list.count) return;
  const OptimizerRow& row = list.rows[i];
  first_unit[i] = row.first_unit;
  if (skipped(control)) return;
  const double step = *row.step + 1.0, scale = control ? control[0] : 1.0;
  const double multiplier = signed_multiplier(row.hyper[Rule::info.hyper - 1], scale);
  *row.step = rows[i].now = step;
  const auto store = [&](const auto& scalars) {
    static_assert(sizeof(scalars) <= sizeof(TableRow::scalars));
    *reinterpret_cast<std::remove_const_t<std::remove_reference_t<decltype(scalars)>>*>(
        rows[i].scalars) = scalars;
  };
  if (row.dtype == DType::f64)
    store(Rule::template scalars<double>(row.hyper, step, multiplier));
  else
    store(Rule::template scalars<float>(row.hyper, step, multiplier));
}

// The last row whose first unit is not above `unit`, by the warp together: 32 places at a time.
__device__ __forceinline__ int find_row(const OptimizerTable& table, int64_t unit) {
  int low = 0;
  for (int size = table.count; size > 1;) {
    const int step = (size + 31) / 32, probe = static_cast<int>(threadIdx.x % 32) * step;
    const bool below = probe < size && table.first_unit[low + probe] <= unit;
    const int last = 31 - __clz(__ballot_sync(0xffffffffu, below));
    low += last * step;
    size = size - last * step < step ? size - last * step : step;
  }
  return low;
}

// Calls body(row, first element, number of elements, unit) for the units of this warp.
template<class F>
__device__ __forceinline__ void for_units(const OptimizerTable& table, F&& body) {
  __shared__ TableRow rows[kWarps];
  TableRow& row = rows[threadIdx.x / 32];
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  int64_t next = 0;  // the first unit past the row
  for (int64_t unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; unit < table.units;
       unit += stride) {
    if (unit >= next) {
      const auto* from = reinterpret_cast<const uint32_t*>(table.rows + find_row(table, unit));
      __syncwarp();
      for (int i = threadIdx.x % 32; i < static_cast<int>(sizeof(TableRow) / 4); i += 32)
        reinterpret_cast<uint32_t*>(&row)[i] = from[i];
      __syncwarp();
      next = row.first_unit + (row.n + kUnit - 1) / kUnit;
    }
    const int64_t begin = (unit - row.first_unit) * kUnit;
    body(row, begin, static_cast<int>(row.n - begin < kUnit ? row.n - begin : kUnit), unit);
    __syncwarp();  // what one lane did alone may have taken the warp apart
  }
}

// ---- one unit of one tensor, a tile at a time ---------------------------------------------------
// The scales of a unit's codes: lane i holds those of tile i.
template<class Rule>
struct UnitScales {
  float of[Rule::info.states];

  __device__ __forceinline__ void load(const TableRow& row, int64_t begin, int n) {
    each(row, n, [&](int i) { of[i] = row.scale[i][begin / kTile + threadIdx.x % 32]; });
  }
  __device__ __forceinline__ void store(const TableRow& row, int64_t begin, int n) const {
    each(row, n, [&](int i) { row.scale[i][begin / kTile + threadIdx.x % 32] = of[i]; });
  }

 private:
  template<class F>
  static __device__ __forceinline__ void each(const TableRow& row, int n, F&& f) {
    if (row.state_format != StateFormat::block8) return;
#pragma unroll
    for (int i = 0; i < Rule::info.states; ++i)
      if (row.scale[i] && static_cast<int>(threadIdx.x % 32) * kTile < n) f(i);
  }
};

template<class Rule, class A, bool kExtra>
class OptimizerTile {
 public:
  static constexpr int kStates = Rule::info.states;
  static constexpr bool kCodes = kExtra && sizeof(A) == 4;
  A p[kPer], g[kPer], s[kStates][kPer];

  // Tile number `tile` of a unit: elements [begin, begin + count) of the tensor.
  __device__ __forceinline__ OptimizerTile(const TableRow& row, uint64_t seed, int64_t begin,
                                           int count, int tile, UnitScales<Rule>& scales)
      : row_(row),
        seed_(seed),
        tile_(tile),
        scales_(scales),
        at_(begin, count, count == kTile ? row.layout : Layout::singles) {
    if constexpr (kCodes) {
      const bool half = row.dtype == DType::bf16 || row.dtype == DType::f16;
      noisy_states_ = row.stochastic && row.state_format != StateFormat::full;
      noisy_parameter_ = row.stochastic && half && row.master_format == MasterFormat::none;
    }
  }

  // Reads the operands; kGrad: the gradient too.
  template<bool kGrad>
  __device__ __forceinline__ void open() {
    Raw<A> value, rest, grad, states[kStates];
    const bool split = sizeof(A) == 4 && row_.master_format == MasterFormat::split16;
    if (sizeof(A) == 4 && row_.master_format == MasterFormat::f32)
      load_floats(at_, row_.master, DType::f32, value);
    else
      load_floats(at_, row_.param, row_.dtype, value);
    if constexpr (sizeof(A) == 4)
      if (split) at_.template load<2>(row_.master, rest.template words<2>());
    const bool wide_grad = row_.grad_dtype == DType::f64;
    if constexpr (kGrad)
      if (sizeof(A) == 4 ? !wide_grad : wide_grad)
        load_floats(at_, row_.grad, row_.grad_dtype, grad);
    for_states([&](auto i) { load_state(i, states[i]); });
    if constexpr (kCodes)
      if (noisy_states_ || noisy_parameter_) make_words();

    if (split) {
      if constexpr (sizeof(A) == 4) {
#pragma unroll
        for (int k = 0; k < kPer; ++k) p[k] = split16_join(half_of(value, k), half_of(rest, k));
      }
    } else {
      decode_floats(value, row_.master_format == MasterFormat::f32 ? DType::f32 : row_.dtype, p);
    }
    if constexpr (kGrad) {
      if (sizeof(A) == 4 ? !wide_grad : wide_grad) {
        decode_floats(grad, row_.grad_dtype, g);
      } else {  // rare: fp64 gradients of other parameters, and the reverse
#pragma unroll
        for (int k = 0; k < kPer; ++k)
          g[k] = at_.has(k) ? load_one<A>(row_.grad, row_.grad_dtype, at_.begin + at_.at(k)) : A(0);
      }
    }
    for_states([&](auto i) { decode_state(i, states[i]); });
  }

  // kReread: s becomes what was stored.
  template<bool kReread>
  __device__ __forceinline__ void close_states() {
    for_states([&](auto i) {
      at_.forget();
      Raw<A> raw;
      if constexpr (kCodes) {
        if (row_.state_format == StateFormat::block8) {
          const float scale = encode_codes(i, raw);
          if (at_.lane == tile_) scales_.of[i] = scale;
          at_.template store<1>(row_.state[i], raw.template words<1>());
          if constexpr (kReread) decode_codes(i, raw, scale);
          return;
        }
        if (noisy_states_) {
#pragma unroll
          for (int k = 0; k < kPer; k += 2)
            set_halves(raw, k / 2, bf16_stochastic(s[i][k], state_noise(i, k)),
                       bf16_stochastic(s[i][k + 1], state_noise(i, k + 1)));
          at_.template store<2>(row_.state[i], raw.template words<2>());
          if constexpr (kReread) decode_floats(raw, DType::bf16, s[i]);
          return;
        }
      }
      const DType type = float_type();
      encode_floats(s[i], type, raw);
      store_floats(at_, row_.state[i], type, raw);
      if constexpr (kReread) decode_floats(raw, type, s[i]);
    });
  }

  __device__ __forceinline__ void close_parameter() {
    at_.forget();
    Raw<A> raw;
    if constexpr (sizeof(A) == 4) {
      if (row_.master_format == MasterFormat::split16) {
        Raw<A> rest;
#pragma unroll
        for (int k = 0; k < kPer; k += 2) {
          const uint32_t a = split16_bits(p[k]), b = split16_bits(p[k + 1]);
          set_halves(raw, k / 2, split16_parameter(a), split16_parameter(b));
          set_halves(rest, k / 2, split16_remainder(a), split16_remainder(b));
        }
        at_.template store<2>(row_.param, raw.template words<2>());
        at_.template store<2>(row_.master, rest.template words<2>());
        return;
      }
      if (row_.master_format == MasterFormat::f32) {
        encode_floats(p, DType::f32, raw);
        store_floats(at_, row_.master, DType::f32, raw);
      }
    }
    if constexpr (kCodes) {
      if (noisy_parameter_) {
#pragma unroll
        for (int k = 0; k < kPer; k += 2) {
          const uint32_t a = parameter_noise(words_[k]), b = parameter_noise(words_[k + 1]);
          if (row_.dtype == DType::bf16)
            set_halves(raw, k / 2, bf16_stochastic(p[k], a), bf16_stochastic(p[k + 1], b));
          else
            raw.w[k / 2] = pair_bits<f16>(f16_stochastic(p[k], a), f16_stochastic(p[k + 1], b));
        }
        at_.template store<2>(row_.param, raw.template words<2>());
        stored_ = raw;
        return;
      }
    }
    encode_floats(p, row_.dtype, raw);
    store_floats(at_, row_.param, row_.dtype, raw);
    if constexpr (kExtra) stored_ = raw;
  }

  // For the parameters as they were before: how many moved, and how many of those were stored as before.
  __device__ __forceinline__ void count_lost(const A (&before)[kPer], int64_t (&lost)[2]) {
    A kept[kPer];
    const bool exact = row_.master_format != MasterFormat::none;
    decode_floats(stored_, row_.dtype, kept);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const bool moved = at_.has(k) && p[k] != before[k];
      lost[0] += moved;
      lost[1] += moved && !exact && kept[k] == before[k];
    }
  }

  __device__ __forceinline__ bool has(int k) const { return at_.has(k); }

 private:
  template<int I>
  static constexpr bool kSigned = Rule::info.state[I].is_signed;
  // Calls f(number as a type) for the states that the tensor has.
  template<class F, int I = 0>
  __device__ __forceinline__ void for_states(F&& f, Int<I> = {}) const {
    if constexpr (I < kStates) {
      constexpr int flag = Rule::info.state[I].flag;
      if (flag == 0 || (row_.flags & flag) != 0) f(Int<I>{});
      for_states(f, Int<I + 1>{});
    }
  }
  __device__ __forceinline__ DType float_type() const {
    if constexpr (sizeof(A) == 8) return DType::f64;
    return row_.state_format == StateFormat::bf16 ? DType::bf16 : DType::f32;
  }

  template<int I>
  __device__ __forceinline__ void load_state(Int<I> i, Raw<A>& raw) const {
    if constexpr (kCodes)
      if (row_.state_format == StateFormat::block8)
        return at_.template load<1>(row_.state[i], raw.template words<1>());
    load_floats(at_, row_.state[i], float_type(), raw);
  }
  template<int I>
  __device__ __forceinline__ void decode_state(Int<I> i, const Raw<A>& raw) {
    if constexpr (kCodes)
      if (row_.state_format == StateFormat::block8)
        return decode_codes(i, raw, __shfl_sync(0xffffffffu, scales_.of[i], tile_));
    decode_floats(raw, float_type(), s[i]);
  }
  template<int I>
  __device__ __forceinline__ void decode_codes(Int<I>, const Raw<A>& raw, float scale) {
    tw::decode_codes<kSigned<I>>(raw, scale, s[I]);
  }
  template<int I>
  __device__ __forceinline__ float encode_codes(Int<I>, Raw<A>& raw) const {
    return noisy_states_ ? tw::encode_codes<kSigned<I>, true>(at_, s[I], words_, raw)
                         : tw::encode_codes<kSigned<I>, false>(at_, s[I], words_, raw);
  }
  template<int I>
  __device__ __forceinline__ uint32_t state_noise(Int<I>, int k) const {
    return kSigned<I> ? signed_noise(words_[k]) : unsigned_noise(words_[k]);
  }
  // The random words of the tile. Four elements next to each other share one call of Philox if they
  // begin at a multiple of four.
  __device__ __forceinline__ void make_words() {
    const int64_t first = row_.offset + at_.begin;
    if (at_.layout != Layout::singles && first % 4 == 0) {
      const auto stream = static_cast<uint64_t>(row_.now);
#pragma unroll
      for (int k = 0; k < kPer; k += 4) {
        const auto block = static_cast<uint64_t>(first + at_.at(k)) >> 2;
        const Philox4 x = philox_block(seed_, block, stream);
#pragma unroll
        for (int j = 0; j < 4; ++j) words_[k + j] = x.v[j];
      }
      return;
    }
#pragma unroll 1
    for (int k = 0; k < kPer; ++k) {  // rolled, through a queue: registers have no index
#pragma unroll
      for (int j = 0; j < kPer - 1; ++j) words_[j] = words_[j + 1];
      words_[kPer - 1] = stochastic_word(seed_, first + at_.at(k), row_.now);
    }
  }

  const TableRow& row_;
  const uint64_t seed_;
  const int tile_;
  UnitScales<Rule>& scales_;
  TilePlace<A> at_;
  bool noisy_states_ = false, noisy_parameter_ = false;
  uint32_t words_[kPer] = {};
  Raw<A> stored_;
};

// Calls body(tile) for the tiles of a unit of n elements.
template<class Rule, class A, bool kExtra, class F>
__device__ __forceinline__ void for_tiles(const TableRow& row, uint64_t seed, int64_t begin, int n,
                                          F&& body) {
  UnitScales<Rule> scales;
  if constexpr (kExtra) scales.load(row, begin, n);
#pragma unroll 1
  for (int i = 0; i * kTile < n; ++i) {
    const int count = n - i * kTile < kTile ? n - i * kTile : kTile;
    OptimizerTile<Rule, A, kExtra> tile(row, seed, begin + i * kTile, count, i, scales);
    body(tile);
  }
  if constexpr (kExtra) scales.store(row, begin, n);
}

// The counts of this warp.
__device__ __forceinline__ void store_lost(double* lost, const int64_t (&counts)[2]) {
  if (!lost) return;
  const double sums[2] = {warp_sum(static_cast<double>(counts[0])),
                          warp_sum(static_cast<double>(counts[1]))};
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) reinterpret_cast<double2*>(lost)[warp] = {sums[0], sums[1]};
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

template<class Rule, class A>
using ScalarsOf = decltype(Rule::template scalars<A>(nullptr, 0.0, 0.0));

// Three states in every format take more registers than two blocks have.
template<class Rule, class A, bool kExtra>
constexpr int kBlocksPerMultiprocessor =
    sizeof(A) == 8 || (kExtra && Rule::info.states > 2) ? 1 : 2;

template<class Rule, class A, bool kExtra>
__global__ void __launch_bounds__(kOptimizerThreads, (kBlocksPerMultiprocessor<Rule, A, kExtra>))
    optimizer_kernel(const OptimizerTable table, const OptimizerStep step) {
  if (skipped(step.control)) return;
  int64_t counts[2] = {0, 0};
  for_units(table, [&](const TableRow& row, int64_t begin, int n, int64_t) {
    const auto& scalars = reinterpret_cast<const ScalarsOf<Rule, A>&>(row.scalars);
    for_tiles<Rule, A, kExtra>(row, step.seed, begin, n, [&](auto& t) {
      t.template open<true>();
      A before[kPer];
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        A s[kMaxStates] = {};
#pragma unroll
        for (int i = 0; i < Rule::info.states; ++i) s[i] = t.s[i][k];
        before[k] = t.p[k];
        t.p[k] = Rule::template update<A>(t.p[k], t.g[k], s, row.flags, scalars);
#pragma unroll
        for (int i = 0; i < Rule::info.states; ++i) t.s[i][k] = s[i];
      }
      t.close_parameter();
      if constexpr (kExtra) {
        if (step.lost) t.count_lost(before, counts);
      }
      t.template close_states<false>();
    });
  });
  if constexpr (kExtra) store_lost(step.lost, counts);
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

// Raises the counts and fills the table. rows: `count` of them, on the host.
template<class Rule>
void launch_optimizer_begin(const OptimizerRow* rows, int64_t count, const OptimizerTable& table,
                            const double* control, cudaStream_t stream) {
  OptimizerRows list;
  for (int64_t first = 0; first < count; first += OptimizerRows::kCapacity) {
    list.count = static_cast<int>(std::min<int64_t>(count - first, OptimizerRows::kCapacity));
    std::copy(rows + first, rows + first + list.count, list.rows);
    optimizer_begin_kernel<Rule>
        <<<1, 256, 0, stream>>>(list, table.rows + first, table.first_unit + first, control);
  }
}

// Blocks that fill the device, or as many as there is work for.
template<class Rule, class A, bool kExtra>
unsigned optimizer_blocks(int64_t units) {
  const int64_t most = int64_t{multiprocessors()} * kBlocksPerMultiprocessor<Rule, A, kExtra>;
  return static_cast<unsigned>(std::min(divide_up(units, kWarps), most));
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
