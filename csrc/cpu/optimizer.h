// The CPU driver of all optimizers: one step over a list of tensors, in every storage format.
//
// All tensors together are cut into blocks (trainwright/blocks.h) that the threads share, so a thousand
// small parameters parallelise as well as a few large ones. A block is worked through in tiles that
// stay in L1. In a tile every operand is a run of fp32 (fp64 for fp64 parameters): in place if that is
// how it is stored, otherwise in a buffer that is filled by a converter and written back by another
// (cpu/optimizer_formats.h). So the code grows with the sum of the formats, not with their product;
// any strides are matched by logical index, and nothing outside a view is touched. The common formats
// of contiguous bf16 parameters need no buffers: the update loop converts in registers (`direct`).
//
// An op is a Rule, the struct of its header (trainwright/optimizer.h) and
//   template<class A, class S, class P, class G, class States>
//   static void run(const S& scalars, int flags, int64_t n, P p, G g, const States& states)
//                                  updates p and state<I>(states); a state that is missing is null
#pragma once
#include "cpu/kernel.h"
#include "trainwright/blocks.h"
#include "trainwright/optimizer.h"
#include "trainwright/state_format.h"
#include "trainwright/strided.h"

namespace tw {

struct OptimizerRow {
  void *param, *master, *state[kMaxStates];
  const void* grad;
  float* scale[kMaxStates];
  Strided param_layout, grad_layout, master_layout, state_layout[kMaxStates];
  int64_t n, offset;
  DType dtype, grad_dtype;
  TensorSpec spec;
  const double* hyper;
  double step, multiplier;
};
struct OptimizerArgs {
  const OptimizerRow* rows;
  BlockTable blocks;
  uint64_t seed;
  int64_t* lost;    // null, or {updates that are not zero, those that rounding took away}
  double* partial;  // LAMB: 2 for each block
};

}  // namespace tw

#ifdef TW_CPU_ISA
#include "cpu/state_codes.h"

TW_BEGIN
namespace {

constexpr int64_t kTile =
    512;  // 2 KiB of each operand: five of them and their buffers fill half of L1
static_assert(kTile % kStateBlock == 0 && kBlock % kTile == 0);

constexpr int64_t float_bytes(DType t) { return t == DType::f64 ? 8 : t == DType::f32 ? 4 : 2; }
template<class A>
constexpr DType kFull = sizeof(A) == 8 ? DType::f64 : DType::f32;

// Elements [begin, begin + n) of a tensor of 2-, 4- or 8-byte elements, in place or copied to `raw`.
inline void* gather(void* base, int64_t bytes, Strided layout, int64_t begin, int64_t n,
                    void* raw) {
  const auto read = [&](auto* p) {
    return const_cast<void*>(
        static_cast<const void*>(read_range(p, layout, begin, n, static_cast<decltype(p)>(raw))));
  };
  return bytes == 2   ? read(static_cast<uint16_t*>(base))
         : bytes == 4 ? read(static_cast<uint32_t*>(base))
                      : read(static_cast<uint64_t*>(base));
}
inline void scatter(void* base, int64_t bytes, Strided layout, int64_t begin, int64_t n,
                    const void* raw) {
  const auto write = [&](auto* p) {
    write_range(p, layout, begin, n, static_cast<decltype(p)>(const_cast<void*>(raw)));
  };
  bytes == 2   ? write(static_cast<uint16_t*>(base))
  : bytes == 4 ? write(static_cast<uint32_t*>(base))
               : write(static_cast<uint64_t*>(base));
}

inline bool contiguous(const OptimizerRow& r) {
  int64_t strides = r.param_layout.ndim + r.grad_layout.ndim + r.master_layout.ndim;
  for (const Strided& layout : r.state_layout) strides += layout.ndim;
  return strides == 0;
}

// One tile at a time of one tensor.
template<class A>
class Tile {
 public:
  A* p;
  const A* g;
  A* s[kMaxStates];

  Tile(const OptimizerInfo& info, const OptimizerRow& row, uint64_t seed)
      : info_(info), r_(row), seed_(seed) {
    const bool half = row.dtype == DType::bf16 || row.dtype == DType::f16;
    noisy_parameter_ = row.spec.stochastic && half && row.spec.master == MasterFormat::none;
    noisy_states_ = row.spec.stochastic && row.spec.state != StateFormat::full;
  }

  // Whether every operand is used where it lies.
  bool in_place() const {
    return r_.dtype == kFull<A> && r_.grad_dtype == kFull<A> &&
           r_.spec.state == StateFormat::full && contiguous(r_);
  }

  void open(int64_t begin, int64_t n) {
    begin_ = begin;
    n_ = n;
    words_ = noisy_parameter_ || noisy_states_
                 ? stochastic_words(seed_, r_.offset + begin, n, r_.step, word_buffer_)
                 : nullptr;
    open_parameter();
    g = open_values(const_cast<void*>(r_.grad), r_.grad_dtype, r_.grad_layout, grad_);
    open_states();
  }
  void open_states() {
    for (int i = 0; i < kMaxStates; ++i) open_state(i);
  }
  void open_parameter() {
    if constexpr (sizeof(A) == 4) {
      if (r_.spec.master == MasterFormat::split16) {
        const void* high = gather(r_.param, 2, r_.param_layout, begin_, n_, raw_);
        const void* low = gather(r_.master, 2, r_.master_layout, begin_, n_, raw2_);
        join_run(static_cast<const uint16_t*>(high), static_cast<const uint16_t*>(low), n_, param_);
        p = param_;
        return;
      }
    }
    p = r_.spec.master == MasterFormat::f32
            ? open_values(r_.master, DType::f32, r_.master_layout, param_)
            : open_values(r_.param, r_.dtype, r_.param_layout, param_);
  }
  void open_state(int i) {
    s[i] = nullptr;
    if (!info_.has(i, r_.spec.flags)) return;
    if constexpr (sizeof(A) == 4) {
      if (r_.spec.state == StateFormat::block8) {
        const uint8_t* codes = static_cast<const uint8_t*>(r_.state[i]) + begin_;
        const float* scales = r_.scale[i] + begin_ / kStateBlock;
        info_.state[i].is_signed ? decode_run<true>(codes, scales, n_, state_[i])
                                 : decode_run<false>(codes, scales, n_, state_[i]);
        s[i] = state_[i];
        return;
      }
    }
    const DType type = r_.spec.state == StateFormat::bf16 ? DType::bf16 : kFull<A>;
    s[i] = open_values(r_.state[i], type, r_.state_layout[i], state_[i]);
  }

  void close_parameter() {
    if constexpr (sizeof(A) == 4) {
      if (r_.spec.master == MasterFormat::split16) {
        const bool high_strided = r_.param_layout.ndim != 0,
                   low_strided = r_.master_layout.ndim != 0;
        uint16_t* high = high_strided ? reinterpret_cast<uint16_t*>(raw_)
                                      : static_cast<uint16_t*>(r_.param) + begin_;
        uint16_t* low = low_strided ? reinterpret_cast<uint16_t*>(raw2_)
                                    : static_cast<uint16_t*>(r_.master) + begin_;
        split_run(p, n_, high, low);
        scatter(r_.param, 2, r_.param_layout, begin_, n_, high);
        scatter(r_.master, 2, r_.master_layout, begin_, n_, low);
        return;
      }
      if (r_.spec.master == MasterFormat::f32)
        write_range(static_cast<A*>(r_.master), r_.master_layout, begin_, n_, p);
    }
    if (r_.dtype == kFull<A>) {
      write_range(static_cast<A*>(r_.param), r_.param_layout, begin_, n_, p);
    } else if constexpr (sizeof(A) == 4) {
      void* out = place(r_.param, r_.param_layout);
      narrow_run(p, r_.dtype, n_, noisy_parameter_ ? words_ : nullptr, out);
      scatter(r_.param, 2, r_.param_layout, begin_, n_, out);
    }
  }
  void close_state(int i) {
    if (!s[i]) return;
    if (r_.spec.state == StateFormat::full) {
      write_range(static_cast<A*>(r_.state[i]), r_.state_layout[i], begin_, n_, s[i]);
    } else if constexpr (sizeof(A) == 4) {
      const uint32_t* words = noisy_states_ ? words_ : nullptr;
      const bool is_signed = info_.state[i].is_signed;
      if (r_.spec.state == StateFormat::block8) {
        uint8_t* codes = static_cast<uint8_t*>(r_.state[i]) + begin_;
        float* scales = r_.scale[i] + begin_ / kStateBlock;
        is_signed ? encode_run<true>(s[i], n_, words, codes, scales)
                  : encode_run<false>(s[i], n_, words, codes, scales);
      } else {
        void* out = place(r_.state[i], r_.state_layout[i]);
        is_signed ? narrow_state_run<true>(s[i], n_, words, out)
                  : narrow_state_run<false>(s[i], n_, words, out);
        scatter(r_.state[i], 2, r_.state_layout[i], begin_, n_, out);
      }
    }
  }
  void close_states() {
    for (int i = 0; i < info_.states; ++i) close_state(i);
  }

  // Around an update whose losses are counted.
  void remember() { memcpy(old_, p, static_cast<size_t>(n_) * sizeof(A)); }
  void count_lost(int64_t* lost) {
    const A* now = p;
    memcpy(grad_, now, static_cast<size_t>(n_) * sizeof(A));
    if (r_.spec.master == MasterFormat::none) open_parameter();
    int64_t moved = 0, gone = 0;
    for (int64_t i = 0; i < n_; ++i) {
      moved += grad_[i] != old_[i];
      gone += grad_[i] != old_[i] && p[i] == old_[i];
    }
    __atomic_fetch_add(&lost[0], moved, __ATOMIC_RELAXED);
    __atomic_fetch_add(&lost[1], gone, __ATOMIC_RELAXED);
  }

 private:
  A* open_values(void* base, DType type, Strided layout, A* buffer) {
    if (type == kFull<A>)
      return const_cast<A*>(read_range(static_cast<const A*>(base), layout, begin_, n_, buffer));
    widen_run(gather(base, float_bytes(type), layout, begin_, n_, raw_), type, n_, buffer);
    return buffer;
  }
  // Where the 16-bit values of the tile are written: in place, or to be scattered.
  void* place(void* base, Strided layout) {
    return layout.ndim == 0 ? static_cast<uint16_t*>(base) + begin_ : static_cast<void*>(raw_);
  }

  const OptimizerInfo& info_;
  const OptimizerRow& r_;
  const uint64_t seed_;
  bool noisy_parameter_, noisy_states_;
  int64_t begin_ = 0, n_ = 0;
  const uint32_t* words_ = nullptr;
  alignas(64) A param_[kTile], grad_[kTile], state_[kMaxStates][kTile], old_[kTile];
  alignas(64) unsigned char raw_[8 * kTile], raw2_[2 * kTile];
  uint32_t word_buffer_[kTile + 4 + TW_VEC_BYTES / 2];
};

// Opens [begin, end) tile by tile and calls body(elements). whole: several tiles may be one.
template<class A, class F>
void for_tiles(Tile<A>& tile, int64_t begin, int64_t end, bool whole, F&& body) {
  const int64_t step = whole && tile.in_place() ? end - begin : kTile;
  for (int64_t i = begin; i < end; i += step) {
    const int64_t n = step < end - i ? step : end - i;
    tile.open(i, n);
    body(n);
  }
}

template<class Rule, class A>
auto scalars_of(const OptimizerRow& r) {
  const double multiplier = signed_multiplier(r.hyper[Rule::info.hyper - 1], r.multiplier);
  return Rule::template scalars<A>(r.hyper, r.step, multiplier);
}

template<int I, class T>
T state(const T* states) {
  return states[I];
}

// Whether the update loop itself reads and writes the parameter and the gradient in their formats,
// which takes no buffers: contiguous and rounded to nearest, both bf16, or both fp32 with 8-bit states.
inline bool direct(const OptimizerRow& r) {
  const bool kept =
      r.dtype == DType::bf16 || (r.dtype == DType::f32 && r.spec.state == StateFormat::block8);
  return kept && r.grad_dtype == r.dtype && !r.spec.stochastic && contiguous(r);
}
// Calls f(parameter, gradient).
template<class F>
void with_direct_operands(const OptimizerRow& r, F&& f) {
  if (r.dtype == DType::f32)
    return f(static_cast<float*>(r.param), static_cast<const float*>(r.grad));
  bf16* p = static_cast<bf16*>(r.param);
  const bf16* g = static_cast<const bf16*>(r.grad);
  r.spec.master == MasterFormat::f32 ? f(WithMaster{p, static_cast<float*>(r.master)}, g)
  : r.spec.master == MasterFormat::split16
      ? f(Split16{static_cast<uint16_t*>(r.param), static_cast<uint16_t*>(r.master)}, g)
      : f(p, g);
}
// fp32 or bf16 states, where they lie. The parameter is bf16.
template<class Rule, class T, class S>
void direct_block(const OptimizerRow& r, const S& scalars, int64_t begin, int64_t end) {
  const auto run = [&](auto p, const bf16* g, auto none) {  // `none`: of the type that gives states
    decltype(none) states[kMaxStates];
    for (int i = 0; i < kMaxStates; ++i)
      states[i] = Rule::info.has(i, r.spec.flags)
                      ? decltype(none){static_cast<T*>(r.state[i]) + begin}
                      : decltype(none){};
    Rule::template run<float>(scalars, r.spec.flags, end - begin, p + begin, g + begin, states);
  };
  if constexpr (std::is_same_v<T, bf16>) {
    if (r.spec.master == MasterFormat::none)
      return run(OnlyBf16{static_cast<bf16*>(r.param)}, static_cast<const bf16*>(r.grad),
                 OnlyBf16{});
  }
  with_direct_operands(r, [&](auto p, auto g) {
    if constexpr (std::is_same_v<decltype(g), const bf16*>) run(p, g, static_cast<T*>(nullptr));
  });
}

// Whether a Rule's update is two loops for 8-bit states: `moments`, which stores them, and `parameters`,
// which loads them once more.
template<class Rule, class = void>
inline constexpr bool in_two_loops = false;
template<class Rule>
inline constexpr bool in_two_loops<Rule, std::enable_if_t<Rule::kTwoLoops>> = true;

// The 8-bit states of a block of one tensor: codes to values in the update, values to codes after it.
template<class Rule, bool kInterleaved>
class CodedBlock {
 public:
  static constexpr int kStates = Rule::info.states;
  template<int I>
  static constexpr bool is_signed = Rule::info.state[I].is_signed;

  explicit CodedBlock(const OptimizerRow& r) : r_(r) {}

  void open(int64_t begin) {
    begin_ = begin;
    each([&](auto i) {
      const float unit = block8_unit(r_.scale[i][begin / kStateBlock]);
      std::get<i>(before_) = {codes(i), unit == unit ? unit : NAN, values_[i]};
    });
  }
  const auto& before() const { return before_; }
  // The new scales; what the second loop is given.
  const auto& after() {
    each([&](auto i) {
      const float scale = scale_of<is_signed<i>>(values_[i], kStateBlock);
      r_.scale[i][begin_ / kStateBlock] = scale;
      std::get<i>(after_) = {values_[i], block8_inverse(scale), codes(i)};
    });
    return after_;
  }
  // Encodes what a second loop has not: everything without one, else blocks that are not finite.
  void close(bool encoded) {
    each([&](auto i) {
      const float scale = r_.scale[i][begin_ / kStateBlock];
      if (encoded && scale == scale) return;
      encode_block<is_signed<i>, kInterleaved>(values_[i], block8_inverse(scale), codes(i));
    });
  }

 private:
  template<class F, int... I>
  void each(F&& f, std::integer_sequence<int, I...>) {
    ((Rule::info.has(I, r_.spec.flags) ? f(std::integral_constant<int, I>{}) : void()), ...);
  }
  template<class F>
  void each(F&& f) {
    each(f, std::make_integer_sequence<int, kStates>{});
  }
  uint8_t* codes(int i) const { return static_cast<uint8_t*>(r_.state[i]) + begin_; }
  template<template<bool, bool> class T, int... I>
  static std::tuple<T<is_signed<I>, kInterleaved>...> none(std::integer_sequence<int, I...>);
  using Indices = std::make_integer_sequence<int, kStates>;

  const OptimizerRow& r_;
  int64_t begin_ = 0;
  decltype(none<StateCodes>(Indices{})) before_ = {};
  decltype(none<StateValues>(Indices{})) after_ = {};
  alignas(64) float values_[kStates][kStateBlock];
};
template<int I, class... T>
auto state(const std::tuple<T...>& states) {
  return std::get<I>(states);
}

// 8-bit states of whole blocks.
template<class Rule, bool kInterleaved, class S, class P, class G>
void direct_blocks8(const OptimizerRow& r, const S& scalars, int64_t begin, int64_t end, P p, G g) {
  CodedBlock<Rule, kInterleaved> block(r);
  const int flags = r.spec.flags;
  for (int64_t i = begin; i < end; i += kStateBlock) {
    block.open(i);
    if constexpr (in_two_loops<Rule>) {
      Rule::template moments<float>(scalars, flags, kStateBlock, p + i, g + i, block.before());
      Rule::template parameters<float>(scalars, flags, kStateBlock, p + i, block.after());
    } else {
      Rule::template run<float>(scalars, flags, kStateBlock, p + i, g + i, block.before());
      block.after();
    }
    block.close(in_two_loops<Rule>);
  }
}

template<class Rule, class A>
void optimizer_block(const OptimizerArgs& a, const OptimizerRow& r, int64_t begin, int64_t end) {
  const auto scalars = scalars_of<Rule, A>(r);
  if constexpr (sizeof(A) == 4) {
    if (!a.lost && direct(r)) {
      if (Rule::info.states == 0 || r.spec.state == StateFormat::full)
        return direct_block<Rule, float>(r, scalars, begin, end);
      if (r.spec.state == StateFormat::bf16)
        return direct_block<Rule, bf16>(r, scalars, begin, end);
      const int64_t whole = begin + (end - begin) / kStateBlock * kStateBlock;
      if constexpr (Rule::info.states > 0)
        with_direct_operands(r, [&](auto p, auto g) {
          if constexpr (std::is_same_v<decltype(p),
                                       bf16*>)  // the states' NaNs are plain (CodedBlock)
            direct_blocks8<Rule, true>(r, scalars, begin, whole, OnlyBf16{p}, g);
          else if constexpr (in_pairs<decltype(p)>)
            direct_blocks8<Rule, true>(r, scalars, begin, whole, p, g);
          else
            direct_blocks8<Rule, false>(r, scalars, begin, whole, InOrder<decltype(p)>{p},
                                        InOrder<decltype(g)>{g});
        });
      begin = whole;
    }
  }
  Tile<A> t(Rule::info, r, a.seed);
  for_tiles(t, begin, end, !a.lost, [&](int64_t n) {
    if (a.lost) t.remember();
    Rule::template run<A>(scalars, r.spec.flags, n, t.p, t.g, t.s);
    t.close_parameter();
    t.close_states();
    if (a.lost) t.count_lost(a.lost);
  });
}

template<class Rule>
void run_optimizer(const OptimizerArgs& a) {
  for_blocks(a.blocks, [&](int64_t row, int64_t begin, int64_t end, int64_t) {
    const OptimizerRow& r = a.rows[row];
    r.dtype == DType::f64 ? optimizer_block<Rule, double>(a, r, begin, end)
                          : optimizer_block<Rule, float>(a, r, begin, end);
  });
}

}  // namespace
TW_END

#endif
