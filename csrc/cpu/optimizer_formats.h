// The storage formats of trainwright/state_format.h on runs of contiguous memory, vectorised: what an
// optimizer's tile is read from and written to.
#pragma once
#include <type_traits>

#include "trainwright/philox_lanes.h"
#include "trainwright/state_format.h"
#include "trainwright/vec.h"

TW_BEGIN
namespace {

// ---- random words -------------------------------------------------------------------------------

// Philox words (trainwright/philox.h) of the elements first ... first + n - 1, at the address that is
// returned, in `buffer` of at least n + 4 + 4 * lanes<double> numbers.
inline const uint32_t* stochastic_words(uint64_t seed, int64_t first, int64_t n, double step,
                                        uint32_t* buffer) {
  constexpr int kLanes = TW_VEC_BYTES / 8;
  const uint64_t stream = static_cast<uint64_t>(step);
  vw index = vw{} + (static_cast<uint64_t>(first) >> 2);
  for (int k = 0; k < kLanes; ++k) index[k] += static_cast<uint64_t>(k);
  const int64_t skip = first & 3;
  for (int64_t i = 0; i < n + skip; i += 4 * kLanes) {
    philox_words(buffer + i, seed, index, index >> 32, vw{} + (stream & 0xffffffffu),
                 vw{} + (stream >> 32));
    index += kLanes;
  }
  return buffer + skip;
}

template<class K>
inline vu load_words(const uint32_t* words, K k) {
  return (vu)vload<float>(reinterpret_cast<const float*>(words), k);
}

// ---- 16-bit floats ------------------------------------------------------------------------------
template<class K>
inline void store_half(uint16_t* out, vu bits, K k) {
  vh h;
#if TW_VEC_BYTES == 32
  const __m256i p = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);  // bits < 2^16
  h = (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(p, 0xd8));
#else
  h = __builtin_convertvector(bits, vh);
#endif
  if constexpr (std::is_same_v<K, Full>)
    memcpy(out, &h, sizeof h);
  else
    memcpy(out, &h, static_cast<size_t>(k) * 2);
}
template<class K>
inline vu load_half(const uint16_t* in, K k) {
  vh h = {};
  if constexpr (std::is_same_v<K, Full>)
    memcpy(&h, in, sizeof h);
  else
    memcpy(&h, in, static_cast<size_t>(k) * 2);
  return widen_bits(h);
}

// n values of type T, widened or rounded to A.
template<class A, class T>
void widen_run(const void* in, int64_t n, A* out) {
  const T* x = static_cast<const T*>(in);
  for_lanes<A>(n, [&](int64_t i, auto k) { vstore<A>(out + i, vload<A>(x + i, k), k); });
}
template<class A>
void widen_run(const void* in, DType type, int64_t n, A* out) {
  with_float_type(type, [&](auto tag) { widen_run<A, decltype(tag)>(in, n, out); });
}
// To bf16 or fp16, to nearest or, if there are words, stochastically.
inline void narrow_run(const float* x, DType type, int64_t n, const uint32_t* words, void* out) {
  uint16_t* half = static_cast<uint16_t*>(out);
  if (type == DType::bf16 && !words)
    for_lanes<float>(n, [&](int64_t i, auto k) {
      vstore<float>(reinterpret_cast<bf16*>(half + i), vload<float>(x + i, k), k);
    });
  else if (type == DType::bf16)
    for_lanes<float>(n, [&](int64_t i, auto k) {
      store_half(half + i,
                 bf16_stochastic(vload<float>(x + i, k), parameter_noise(load_words(words + i, k))),
                 k);
    });
  else
    for_lanes<float>(n, [&](int64_t i, auto k) {
      vf y = vload<float>(x + i, k);
      if (words) y = f16_stochastic(y, parameter_noise(load_words(words + i, k)));
      vstore<float>(reinterpret_cast<f16*>(half + i), y, k);
    });
}
// A bf16 state: its noise is not the parameter's.
template<bool kSigned>
inline void narrow_state_run(const float* x, int64_t n, const uint32_t* words, void* out) {
  if (!words) return narrow_run(x, DType::bf16, n, nullptr, out);
  uint16_t* half = static_cast<uint16_t*>(out);
  for_lanes<float>(n, [&](int64_t i, auto k) {
    const vu w = load_words(words + i, k);
    store_half(
        half + i,
        bf16_stochastic(vload<float>(x + i, k), kSigned ? signed_noise(w) : unsigned_noise(w)), k);
  });
}

}  // namespace

// ---- parameters that are two arrays -------------------------------------------------------------
// What an update loop may be given in place of a pointer: loads the master, stores it and the bf16
// parameter.
struct Split16 {
  uint16_t *parameter, *remainder;
  Split16 operator+(int64_t i) const { return {parameter + i, remainder + i}; }
};
template<>
inline constexpr bool in_pairs<Split16> = true;
struct WithMaster {
  bf16* parameter;
  float* master;
  WithMaster operator+(int64_t i) const { return {parameter + i, master + i}; }
};

// A bf16 operand of an update that has no other: the low half of a NaN is 0 then, and rounding need not
// look for it. The numbers that elements share are the same kind of NaN (cpu/optimizer_binding.h).
struct OnlyBf16 {
  bf16* x;
  OnlyBf16 operator+(int64_t i) const { return {x + i}; }
  explicit operator bool() const { return x; }
};
template<>
inline constexpr bool in_pairs<OnlyBf16> = true;

template<class A, class K>
TW_HD auto vload(OnlyBf16 p, K k) {
  return vload<A>(p.x, k);
}
template<class A, class K>
TW_HD void vstore(OnlyBf16 p, vf x, K k) {
  vstore<A>(p.x, x, k);
}
template<class A>
TW_HD void vstore(OnlyBf16 p, EvenOdd x, Pairs) {
  store_rounded(p.x, (vu)x.even, (vu)x.odd);
}

template<class A, class K>
TW_HD vf vload(Split16 p, K k) {
  return split16_join(load_half(p.parameter, k), load_half(p.remainder, k));
}
template<class A, class K>
TW_HD void vstore(Split16 p, vf master, K k) {
  const vu bits = split16_bits(master);
  store_half(p.parameter, split16_parameter(bits), k);
  store_half(p.remainder, split16_remainder(bits), k);
}
// The same in 16 bits: the master's high half is the parameter, less one where the remainder is
// negative.
template<class A>
TW_HD EvenOdd vload(Split16 p, Pairs) {
  halves high, low;
  memcpy(&high, p.parameter, sizeof high);
  memcpy(&low, p.remainder, sizeof low);
  high -= low >> 15;
  return {(vf)low_halves((vu)low, (vu)high), (vf)high_halves((vu)low, (vu)high)};
}
template<class A>
TW_HD void vstore(Split16 p, EvenOdd master, Pairs) {
  vu even = (vu)master.even, odd = (vu)master.odd;
  if (__builtin_expect(any_nan(master.even, master.odd), 0)) {
    even = split16_bits(master.even);
    odd = split16_bits(master.odd);
  }
  const halves low = (halves)low_halves(even, odd);
  const halves high = (halves)high_halves(even, odd) + (low >> 15);
  memcpy(p.parameter, &high, sizeof high);
  memcpy(p.remainder, &low, sizeof low);
}
template<class A, class K>
TW_HD vf vload(WithMaster p, K k) {
  return vload<A>(p.master, k);
}
template<class A, class K>
TW_HD void vstore(WithMaster p, vf master, K k) {
  vstore<A>(p.master, master, k);
  vstore<A>(p.parameter, master, k);
}

namespace {

inline void join_run(const uint16_t* parameter, const uint16_t* remainder, int64_t n, float* out) {
  const Split16 p{const_cast<uint16_t*>(parameter), const_cast<uint16_t*>(remainder)};
  for_lanes<float>(n,
                   [&](int64_t i, auto k) { vstore<float>(out + i, vload<float>(p + i, k), k); });
}
inline void split_run(const float* master, int64_t n, uint16_t* parameter, uint16_t* remainder) {
  const Split16 p{parameter, remainder};
  for_lanes<float>(
      n, [&](int64_t i, auto k) { vstore<float>(p + i, vload<float>(master + i, k), k); });
}

}  // namespace
TW_END
