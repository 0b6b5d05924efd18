// The storage formats of trainwright/state_format.h on runs of contiguous memory, vectorised: what an
// optimizer's tile is read from and written to.
#pragma once
#include <type_traits>

#include "trainwright/philox_lanes.h"
#include "trainwright/state_format.h"
#include "trainwright/vec.h"

TW_BEGIN
namespace {

typedef uint8_t vb
    __attribute__((vector_size(TW_VEC_BYTES / 4)));  // as many bytes as vf has floats
typedef int8_t vsb __attribute__((vector_size(TW_VEC_BYTES / 4)));

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

// ---- 8-bit blocks -------------------------------------------------------------------------------
template<bool kSigned, class K>
inline vi load_codes(const uint8_t* codes, K k) {
  vb c = {};
  if constexpr (std::is_same_v<K, Full>)
    memcpy(&c, codes, sizeof c);
  else
    memcpy(&c, codes, static_cast<size_t>(k));
#if TW_VEC_BYTES == 32
  int64_t eight;
  memcpy(&eight, &c, sizeof eight);
  const __m128i bytes = _mm_cvtsi64_si128(eight);
  return (vi)(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  return kSigned ? __builtin_convertvector((vsb)c, vi) : __builtin_convertvector(c, vi);
#endif
}
template<class K>
inline void store_codes(uint8_t* codes, vi code, K k) {
  vb c;
#if TW_VEC_BYTES == 32
  const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                       0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)code, low);
  const int64_t eight = _mm_cvtsi128_si64(
      _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
  memcpy(&c, &eight, sizeof c);
#else
  c = __builtin_convertvector(code, vb);
#endif
  if constexpr (std::is_same_v<K, Full>)
    memcpy(codes, &c, sizeof c);
  else
    memcpy(codes, &c, static_cast<size_t>(k));
}
// Four registers of codes, one after the other.
template<bool kSigned>
inline void store_codes(uint8_t* codes, vu a, vu b, vu c, vu d) {
#if TW_VEC_BYTES == 32
  const __m256i low = _mm256_packs_epi32((__m256i)a, (__m256i)b),  // by halves
      high = _mm256_packs_epi32((__m256i)c, (__m256i)d);
  const __m256i bytes = kSigned ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(bytes, order));
#else
  store_codes(codes, (vi)a, Full{});
  store_codes(codes + lanes<float>, (vi)b, Full{});
  store_codes(codes + 2 * lanes<float>, (vi)c, Full{});
  store_codes(codes + 3 * lanes<float>, (vi)d, Full{});
#endif
}

// Pairs (trainwright/vec.h) of codes: 16 bits for each, those of `even` in the low halves.
typedef uint8_t pair_bytes __attribute__((vector_size(TW_VEC_BYTES / 2)));
typedef int8_t signed_pair_bytes __attribute__((vector_size(TW_VEC_BYTES / 2)));
typedef int16_t signed_halves __attribute__((vector_size(TW_VEC_BYTES)));
template<bool kSigned>
inline vu load_code_pairs(const uint8_t* codes) {
  pair_bytes c;
  memcpy(&c, codes, sizeof c);
#if TW_VEC_BYTES == 64
  return (vu)(kSigned ? _mm512_cvtepi8_epi16((__m256i)c) : _mm512_cvtepu8_epi16((__m256i)c));
#elif TW_VEC_BYTES == 32
  return (vu)(kSigned ? _mm256_cvtepi8_epi16((__m128i)c) : _mm256_cvtepu8_epi16((__m128i)c));
#else
  if constexpr (kSigned) return (vu) __builtin_convertvector((signed_pair_bytes)c, signed_halves);
  return (vu) __builtin_convertvector(c, halves);
#endif
}
template<bool kSigned>
inline void store_code_pairs(uint8_t* codes, vu a, vu b) {
#if TW_VEC_BYTES == 32
  const __m256i bytes = kSigned ? _mm256_packs_epi16((__m256i)a, (__m256i)b)
                                : _mm256_packus_epi16((__m256i)a, (__m256i)b);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permute4x64_epi64(bytes, 0xd8));
#else
  const auto store = [](uint8_t* p, vu pairs) {
#if TW_VEC_BYTES == 64
    const pair_bytes c = (pair_bytes)_mm512_cvtepi16_epi8((__m512i)pairs);
#else
    const pair_bytes c = __builtin_convertvector((halves)pairs, pair_bytes);
#endif
    memcpy(p, &c, sizeof c);
  };
  store(codes, a);
  store(codes + 2 * lanes<float>, b);
#endif
}

// An update loop's fp32 operand that lies in pairs, as far as there are whole ones, so that neither
// these floats nor 16-bit operands beside them change lanes.
}  // namespace
struct PairedFloats {
  float* x;
  PairedFloats operator+(int64_t i) const { return {x + i}; }
  explicit operator bool() const { return x; }
};
template<>
inline constexpr bool in_pairs<PairedFloats> = true;
template<class A, class K>
TW_HD vf vload(PairedFloats p, K k) {
  return vload<A>(p.x, k);
}
template<class A, class K>
TW_HD void vstore(PairedFloats p, vf x, K k) {
  vstore<A>(p.x, x, k);
}
template<class A>
TW_HD EvenOdd vload(PairedFloats p, Pairs) {
  return {vload<A>(p.x), vload<A>(p.x + lanes<float>)};
}
template<class A>
TW_HD void vstore(PairedFloats p, EvenOdd x, Pairs) {
  vstore<A>(p.x, x.even);
  vstore<A>(p.x + lanes<float>, x.odd);
}
namespace {

// Runs of kCodeRun codes, of one block. kPairs: the floats lie as PairedFloats.
constexpr int64_t kCodeRun = 4 * lanes<float>;
static_assert(kStateBlock % kCodeRun == 0);

template<bool kSigned, int kScaled = 0>
inline vf code_value(vi code, float unit) {
  const vf w = __builtin_convertvector(code, vf);
  return kSigned ? block8_signed_value<kScaled>(w, unit) : block8_unsigned_value<kScaled>(w, unit);
}
template<bool kSigned, bool kStochastic = false>
inline vi value_code(vf x, float inverse, vu noise = vu{}) {
  return kSigned ? block8_signed_code<kStochastic>(x, inverse, noise)
                 : block8_unsigned_code<kStochastic>(x, inverse, noise);
}
template<bool kSigned, bool kPairs>
inline void decode_codes(const uint8_t* codes, float unit, float* x) {
  constexpr int64_t L = lanes<float>;
  if constexpr (kPairs)  // each code in the high half of its lane: times 2^16
    for (int64_t i = 0; i < kCodeRun; i += 2 * L) {
      const vu pairs = load_code_pairs<kSigned>(codes + i);
      vstore<float>(x + i, code_value<kSigned, 16>((vi)(pairs << 16), unit));
      vstore<float>(x + i + L, code_value<kSigned, 16>((vi)(pairs & 0xffff0000u), unit));
    }
  else
    for (int64_t i = 0; i < kCodeRun; i += L)
      vstore<float>(x + i, code_value<kSigned>(load_codes<kSigned>(codes + i, Full{}), unit));
}
template<bool kSigned, bool kPairs>
inline void encode_codes(const float* x, float inverse, uint8_t* codes) {
  constexpr int64_t L = lanes<float>;
  const auto code = [=](int64_t i) {
    return (vu)value_code<kSigned>(vload<float>(x + i), inverse);
  };
  if constexpr (kPairs)
    store_code_pairs<kSigned>(codes, low_halves(code(0), code(L)),
                              low_halves(code(2 * L), code(3 * L)));
  else
    store_codes<kSigned>(codes, code(0), code(L), code(2 * L), code(3 * L));
}

// Codes and scales from the start of a block.
template<bool kSigned>
void decode_run(const uint8_t* codes, const float* scales, int64_t n, float* out) {
  for (int64_t begin = 0; begin < n; begin += kStateBlock) {
    const int64_t size = kStateBlock < n - begin ? kStateBlock : n - begin;
    const float unit = block8_unit(*scales++);
    int64_t i = 0;
    for (; i + kCodeRun <= size; i += kCodeRun)
      decode_codes<kSigned, false>(codes + begin + i, unit, out + begin + i);
    const uint8_t* c = codes + begin + i;
    float* x = out + begin + i;
    for_lanes<float>(size - i, [&](int64_t j, auto k) {
      vstore<float>(x + j, code_value<kSigned>(load_codes<kSigned>(c + j, k), unit), k);
    });
  }
}

// The bits of the largest |x|: as integers they are ordered like |x|, with NaN on top.
inline uint32_t largest_bits(const float* x, int64_t n) {
  constexpr int64_t L = lanes<float>;
  const auto magnitude = [](vf y) { return (vi)(as_bits(y) & 0x7fffffffu); };
  vi a = {}, b = {};
  int64_t done = 0;
  for (; done + 2 * L <= n; done += 2 * L) {
    a = larger(a, magnitude(vload<float>(x + done)));
    b = larger(b, magnitude(vload<float>(x + done + L)));
  }
  for_lanes<float>(n - done, [&](int64_t i, auto k) {
    a = larger(a, magnitude(vload<float>(x + done + i, k)));
  });
  a = larger(a, b);
  typedef int32_t four __attribute__((vector_size(16)));
  four parts[TW_VEC_BYTES / 16];
  memcpy(parts, &a, sizeof a);
  four m = parts[0];
  for (int k = 1; k < TW_VEC_BYTES / 16; ++k) m = larger(m, parts[k]);
  m = larger(m, __builtin_shuffle(m, four{2, 3, 0, 1}));
  return static_cast<uint32_t>(larger(m[0], m[1]));
}

template<bool kSigned, bool kStochastic>
void encode_run(const float* in, int64_t n, const uint32_t* words, uint8_t* codes, float* scales) {
  for (int64_t begin = 0; begin < n; begin += kStateBlock) {
    const int64_t size = kStateBlock < n - begin ? kStateBlock : n - begin;
    const float scale = block8_scale(bits_float(largest_bits(in + begin, size)));
    const float inverse = block8_inverse(scale);
    *scales++ = scale;
    int64_t i = 0;
    if constexpr (!kStochastic)
      for (; i + kCodeRun <= size; i += kCodeRun)
        encode_codes<kSigned, false>(in + begin + i, inverse, codes + begin + i);
    const float* x = in + begin + i;
    uint8_t* c = codes + begin + i;
    for_lanes<float>(size - i, [&](int64_t j, auto k) {
      vu noise = {};
      if constexpr (kStochastic) {
        const vu w = load_words(words + begin + i + j, k);
        noise = kSigned ? signed_noise(w) : unsigned_noise(w);
      }
      store_codes(c + j, value_code<kSigned, kStochastic>(vload<float>(x + j, k), inverse, noise),
                  k);
    });
  }
}
template<bool kSigned>
void encode_run(const float* x, int64_t n, const uint32_t* words, uint8_t* codes, float* scales) {
  words ? encode_run<kSigned, true>(x, n, words, codes, scales)
        : encode_run<kSigned, false>(x, n, words, codes, scales);
}

}  // namespace
TW_END
