// 8-bit states (block8 of trainwright/state_format.h) on the CPU: runs of whole or partial blocks, which the
// tiles of an optimizer are made of, and StateCodes, the operand of an update loop that takes codes as
// they lie.
#pragma once
#include <tuple>
#include <utility>

#include "cpu/optimizer_formats.h"

TW_BEGIN
namespace {

typedef uint8_t vb
    __attribute__((vector_size(TW_VEC_BYTES / 4)));  // as many bytes as vf has floats
typedef int8_t vsb __attribute__((vector_size(TW_VEC_BYTES / 4)));

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
#elif TW_VEC_BYTES == 64
  return (vi)(kSigned ? _mm512_cvtepi8_epi32((__m128i)c) : _mm512_cvtepu8_epi32((__m128i)c));
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
#elif TW_VEC_BYTES == 64
  c = (vb)_mm512_cvtepi32_epi8((__m512i)code);
#else
  c = __builtin_convertvector(code, vb);
#endif
  if constexpr (std::is_same_v<K, Full>)
    memcpy(codes, &c, sizeof c);
  else
    memcpy(codes, &c, static_cast<size_t>(k));
}

template<bool kSigned, int kScaled = 0>
inline vf code_value(vi code, float unit) {
  const vf w = __builtin_convertvector(code, vf);
  return kSigned ? block8_signed_value<kScaled>(w, unit) : block8_unsigned_value<kScaled>(w, unit);
}
template<bool kSigned, bool kStochastic, bool kFinite>
inline vi value_code(vf x, float inverse, vu noise = vu{}) {
  return kSigned ? block8_signed_code<kStochastic, kFinite>(x, inverse, noise)
                 : block8_unsigned_code<kStochastic, kFinite>(x, inverse, noise);
}

// The bits of the largest |x|: as integers they are ordered like |x|, with NaN on top.
template<bool kSigned>
inline uint32_t largest_bits(const float* x, int64_t n) {
  constexpr int64_t L = lanes<float>;
  const auto magnitude = [](vf y) { return kSigned ? as_bits(y) & 0x7fffffffu : as_bits(y); };
  vu a = {}, b = {};
  int64_t done = 0;
  for (; done + 2 * L <= n; done += 2 * L) {
    a = larger(a, magnitude(vload<float>(x + done)));
    b = larger(b, magnitude(vload<float>(x + done + L)));
  }
  for_lanes<float>(n - done, [&](int64_t i, auto k) {
    a = larger(a, magnitude(vload<float>(x + done + i, k)));
  });
  a = larger(a, b);
  typedef uint32_t four __attribute__((vector_size(16)));
  four parts[TW_VEC_BYTES / 16];
  memcpy(parts, &a, sizeof a);
  four m = parts[0];
  for (int k = 1; k < TW_VEC_BYTES / 16; ++k) m = larger(m, parts[k]);
  m = larger(m, __builtin_shuffle(m, four{2, 3, 0, 1}));
  return larger(m[0], m[1]);
}
template<bool kSigned>
float scale_of(const float* x, int64_t n) {
  return block8_scale(bits_float(largest_bits<kSigned>(x, n)));
}

// ---- runs ---------------------------------------------------------------------------------------
// Codes and scales from the start of a block.
template<bool kSigned>
void decode_run(const uint8_t* codes, const float* scales, int64_t n, float* out) {
  for (int64_t begin = 0; begin < n; begin += kStateBlock) {
    const int64_t size = kStateBlock < n - begin ? kStateBlock : n - begin;
    const float unit = block8_unit(*scales++);
    for_lanes<float>(size, [&](int64_t i, auto k) {
      const vi c = load_codes<kSigned>(codes + begin + i, k);
      vstore<float>(out + begin + i, code_value<kSigned>(c, unit), k);
    });
  }
}

template<bool kSigned, bool kStochastic>
void encode_run(const float* x, int64_t n, const uint32_t* words, uint8_t* codes, float* scales) {
  for (int64_t begin = 0; begin < n; begin += kStateBlock) {
    const int64_t size = kStateBlock < n - begin ? kStateBlock : n - begin;
    const float scale = *scales++ = scale_of<kSigned>(x + begin, size);
    const float inverse = block8_inverse(scale);
    for_lanes<float>(size, [&](int64_t i, auto k) {
      vu noise = {};
      if constexpr (kStochastic) {
        const vu w = load_words(words + begin + i, k);
        noise = kSigned ? signed_noise(w) : unsigned_noise(w);
      }
      const vf y = vload<float>(x + begin + i, k);
      store_codes(codes + begin + i, value_code<kSigned, kStochastic, false>(y, inverse, noise), k);
    });
  }
}
template<bool kSigned>
void encode_run(const float* x, int64_t n, const uint32_t* words, uint8_t* codes, float* scales) {
  words ? encode_run<kSigned, true>(x, n, words, codes, scales)
        : encode_run<kSigned, false>(x, n, words, codes, scales);
}

// ---- two registers ------------------------------------------------------------------------------
// Codes of 2 lanes<float> elements. kInterleaved: the registers are those of Pairs (trainwright/vec.h); else
// they are the first and the second half.
typedef uint8_t pair_bytes __attribute__((vector_size(TW_VEC_BYTES / 2)));
typedef int8_t signed_pair_bytes __attribute__((vector_size(TW_VEC_BYTES / 2)));
typedef int16_t signed_halves __attribute__((vector_size(TW_VEC_BYTES)));

template<bool kSigned>
inline vu load_code_pairs(const uint8_t* codes) {  // 16 bits for each
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
template<bool kSigned, bool kInterleaved>
inline EvenOdd decode_pairs(const uint8_t* codes, float unit) {
  if constexpr (kInterleaved) {  // each code in the high half of its lane: times 2^16
    const vu pairs = load_code_pairs<kSigned>(codes);
    return {code_value<kSigned, 16>((vi)(pairs << 16), unit),
            code_value<kSigned, 16>((vi)(pairs & 0xffff0000u), unit)};
  } else {
    return {code_value<kSigned>(load_codes<kSigned>(codes, Full{}), unit),
            code_value<kSigned>(load_codes<kSigned>(codes + lanes<float>, Full{}), unit)};
  }
}
template<bool kSigned, bool kInterleaved>
inline void store_code_pairs(uint8_t* codes, vi even, vi odd) {
#if TW_VEC_BYTES == 32
  const __m256i words = kInterleaved ? (__m256i)low_halves((vu)even, (vu)odd)
                                     : _mm256_packs_epi32((__m256i)even, (__m256i)odd);
  const __m256i bytes =
      kSigned ? _mm256_packs_epi16(words, words) : _mm256_packus_epi16(words, words);
  const __m256i low =
      kInterleaved ? _mm256_permute4x64_epi64(bytes, 0x08)
                   : _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_castsi256_si128(low));
#else
  if constexpr (kInterleaved) {
    const vu pairs = low_halves((vu)even, (vu)odd);
#if TW_VEC_BYTES == 64
    const pair_bytes c = (pair_bytes)_mm512_cvtepi16_epi8((__m512i)pairs);
#else
    const pair_bytes c = __builtin_convertvector((halves)pairs, pair_bytes);
#endif
    memcpy(codes, &c, sizeof c);
  } else {
    store_codes(codes, even, Full{});
    store_codes(codes + lanes<float>, odd, Full{});
  }
#endif
}
inline EvenOdd load_pair(const float* x) {
  return {vload<float>(x), vload<float>(x + lanes<float>)};
}
template<bool kSigned, bool kInterleaved, bool kFinite>
inline void encode_pairs(EvenOdd x, float inverse, uint8_t* codes) {
  store_code_pairs<kSigned, kInterleaved>(codes,
                                          value_code<kSigned, false, kFinite>(x.even, inverse),
                                          value_code<kSigned, false, kFinite>(x.odd, inverse));
}
// A block whose values lie as registers.
template<bool kSigned, bool kInterleaved>
void encode_block(const float* x, float inverse, uint8_t* codes) {
  for (int64_t i = 0; i < kStateBlock; i += 2 * lanes<float>)
    encode_pairs<kSigned, kInterleaved, false>(load_pair(x + i), inverse, codes + i);
}

}  // namespace

// ---- operands of an update loop -----------------------------------------------------------------
// One state of one block. A load decodes; a store keeps the value, until the scale of the block is known.
template<bool kSigned, bool kInterleaved>
struct StateCodes {
  const uint8_t* codes;
  float unit;
  float* values;

  StateCodes operator+(int64_t i) const { return {codes + i, unit, values + i}; }
  explicit operator bool() const { return codes; }
};
// The values that were kept. A load encodes them too: the loop that takes them has roots and quotients to
// wait for, and time to spare.
template<bool kSigned, bool kInterleaved>
struct StateValues {
  const float* values;
  float inverse;
  uint8_t* codes;

  StateValues operator+(int64_t i) const { return {values + i, inverse, codes + i}; }
  explicit operator bool() const { return values; }
};
template<bool kSigned, bool kInterleaved>
inline constexpr bool in_pairs<StateCodes<kSigned, kInterleaved>> = true;
template<bool kSigned, bool kInterleaved>
inline constexpr bool only_in_pairs<StateCodes<kSigned, kInterleaved>> = true;
template<bool kSigned, bool kInterleaved>
inline constexpr bool in_pairs<StateValues<kSigned, kInterleaved>> = true;
template<bool kSigned, bool kInterleaved>
inline constexpr bool only_in_pairs<StateValues<kSigned, kInterleaved>> = true;

template<class A, bool kSigned, bool kInterleaved>
TW_HD EvenOdd vload(StateCodes<kSigned, kInterleaved> s, Pairs) {
  return decode_pairs<kSigned, kInterleaved>(s.codes, s.unit);
}
template<class A, bool kSigned, bool kInterleaved>
TW_HD void vstore(StateCodes<kSigned, kInterleaved> s, EvenOdd x, Pairs) {
  vstore<A>(s.values, x.even);
  vstore<A>(s.values + lanes<float>, x.odd);
}
template<class A, bool kSigned, bool kInterleaved>
TW_HD EvenOdd vload(StateValues<kSigned, kInterleaved> s, Pairs) {
  const EvenOdd x = load_pair(s.values);
  encode_pairs<kSigned, kInterleaved, true>(x, s.inverse, s.codes);
  return x;
}

// An operand whose two registers are the first and the second half.
template<class P>
struct InOrder {
  P p;
  InOrder operator+(int64_t i) const { return {p + i}; }
};
template<class P>
inline constexpr bool in_pairs<InOrder<P>> = true;
template<class A, class P>
TW_HD EvenOdd vload(InOrder<P> p, Pairs) {
  return {vload<A>(p.p, Full{}), vload<A>(p.p + lanes<A>, Full{})};
}
template<class A, class P>
TW_HD void vstore(InOrder<P> p, EvenOdd x, Pairs) {
  vstore<A>(p.p, x.even, Full{});
  vstore<A>(p.p + lanes<A>, x.odd, Full{});
}

TW_END
