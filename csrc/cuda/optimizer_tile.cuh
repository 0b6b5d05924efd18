// One tile of an optimizer step on CUDA: the operands of a warp, from memory in any storage format to registers in
// the arithmetic type A, and back. Conversions are branches that are the same for the whole warp: so the
// code grows with the sum of the formats, not with their product.
//
// A tile is a block of the int8 codes: its largest value is found by an exchange between lanes.
#pragma once
#include "cuda/optimizer_table.cuh"

namespace tw {

// Places for the states; one if there are none, since arrays have a size.
template<class Rule>
constexpr int kPlaces = Rule::info.states > 0 ? Rule::info.states : 1;

// False for a rule whose "parameter" is only written.
template<class Rule>
constexpr bool kReadsParameter = true;

// What a thread counts (kExtra), in shared memory; of a list of 2^40 elements fewer than 2^32 are its own.
struct LostCounts {
  // Updates that are not zero, and those of them that rounding took away.
  uint32_t moved[kOptimizerThreads], lost[kOptimizerThreads];
  __device__ __forceinline__ static LostCounts& of_block() {
    __shared__ LostCounts counts;
    return counts;
  }
  __device__ __forceinline__ void clear() {
    const int t = thread_number();
    moved[t] = lost[t] = 0;
  }
};

// The scales of the codes of the unit that a warp is at, in shared memory: of[state][tile].
template<class Rule>
struct UnitScales {
  float of[kPlaces<Rule>][32];

  __device__ __forceinline__ static UnitScales& of_warp() {
    __shared__ UnitScales scales[kWarps];
    return scales[thread_number() / 32];
  }
  __device__ __forceinline__ void load(const WarpRow& row) {
    const int lane = thread_number() % 32;
    each(row, [&](int i) { of[i][lane] = row.scale[i][row.begin / kTile + lane]; });
    __syncwarp();
  }
  __device__ __forceinline__ void store(const WarpRow& row) const {
    const int lane = thread_number() % 32;
    __syncwarp();
    each(row, [&](int i) { row.scale[i][row.begin / kTile + lane] = of[i][lane]; });
  }

 private:
  template<class F>
  static __device__ __forceinline__ void each(const WarpRow& row, F&& f) {
    if (row.state_format != StateFormat::block8) return;
#pragma unroll
    for (int i = 0; i < Rule::info.states; ++i)
      if (row.scale[i] && thread_number() % 32 * kTile < row.length) f(i);
  }
};

template<class Rule, class A, bool kExtra>
class OptimizerTile {
 public:
  static constexpr int kStates = Rule::info.states;
  static constexpr bool kCodes = kExtra && sizeof(A) == 4;
  A p[kPer], g[kPer], s[kPlaces<Rule>][kPer];

  // Tile number `tile` of a unit: elements [begin, begin + count) of the tensor.
  __device__ __forceinline__ OptimizerTile(const WarpRow& row, uint64_t seed, int64_t begin,
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
    Raw<A> value, rest, grad, states[kPlaces<Rule>];
    const bool split = sizeof(A) == 4 && row_.master_format == MasterFormat::split16;
    if constexpr (kReadsParameter<Rule>) {
      if (sizeof(A) == 4 && row_.master_format == MasterFormat::f32)
        load_floats(at_, row_.master, DType::f32, value);
      else
        load_floats(at_, row_.param, row_.dtype, value);
    }
    if constexpr (sizeof(A) == 4)
      if (split) at_.template load<2>(row_.master, rest.template words<2>());
    const bool wide_grad = row_.grad_dtype == DType::f64;
    if constexpr (kGrad)
      if (sizeof(A) == 4 ? !wide_grad : wide_grad)
        load_floats(at_, row_.grad, row_.grad_dtype, grad);
    for_states([&](auto i) { load_state(i, states[i]); });
    if constexpr (kCodes)
      if (noisy_states_ || noisy_parameter_) make_words();

    if constexpr (!kReadsParameter<Rule>) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) p[k] = A(0);
    } else if (split) {
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
          __syncwarp();  // every lane has read the old one
          if (at_.lane == 0) scales_.of[i][tile_] = scale;
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
  __device__ __forceinline__ void count_lost(const A (&before)[kPer]) {
    uint32_t moves = 0, gone = 0;
    A kept[kPer];
    const bool exact = row_.master_format != MasterFormat::none;
    decode_floats(stored_, row_.dtype, kept);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const bool moved = at_.has(k) && p[k] != before[k];
      moves += moved;
      gone += moved && !exact && kept[k] == before[k];
    }
    LostCounts& sums = LostCounts::of_block();
    const int t = thread_number();
    sums.moved[t] += moves;
    sums.lost[t] += gone;
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
        return decode_codes(i, raw, scales_.of[i][tile_]);
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

  const WarpRow& row_;
  const uint64_t seed_;
  const int tile_;
  UnitScales<Rule>& scales_;
  TilePlace<A> at_;
  bool noisy_states_ = false, noisy_parameter_ = false;
  uint32_t words_[kPer] = {};
  Raw<A> stored_;
};

// Calls body(tile) for the tiles of the unit that the warp is at.
template<class Rule, class A, bool kExtra, class F>
__device__ __forceinline__ void for_tiles(const WarpRow& row, uint64_t seed, F&& body) {
  auto& scales = UnitScales<Rule>::of_warp();
  if constexpr (kExtra) scales.load(row);
#pragma unroll 1
  for (int i = 0; i * kTile < row.length; ++i) {
    asm volatile("" ::: "memory");  // what a tile needs of the row it reads anew: registers are few
    const int left = row.length - i * kTile;
    OptimizerTile<Rule, A, kExtra> tile(row, seed, row.begin + i * kTile,
                                        left < kTile ? left : kTile, i, scales);
    body(tile);
  }
  if constexpr (kExtra) scales.store(row);
}

}  // namespace tw
