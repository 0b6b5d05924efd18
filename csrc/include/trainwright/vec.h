// One SIMD register of the instruction set that this file is compiled for, as a GCC vector type: 16
// bytes (baseline x86, NEON), 32 (AVX2) or 64 (AVX-512). Arithmetic uses the operators; `mask ? a :
// b` selects. A kernel is written once on vec<float> or vec<double>; loads widen and stores round
// from any storage type.
#pragma once
#include <math.h>

#include "trainwright/types.h"

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define TW_VEC_BYTES 64
#elif defined(__AVX2__)
#define TW_VEC_BYTES 32
#else
#define TW_VEC_BYTES 16
#endif

TW_BEGIN

template<class A>
struct VecOf;
template<>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(TW_VEC_BYTES)));
};
template<>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(TW_VEC_BYTES)));
};
template<>
struct VecOf<int32_t> {
  typedef int32_t type __attribute__((vector_size(TW_VEC_BYTES)));
};
template<>
struct VecOf<uint32_t> {
  typedef uint32_t type __attribute__((vector_size(TW_VEC_BYTES)));
};
template<class A>
using vec = typename VecOf<A>::type;
template<class A>
inline constexpr int lanes = TW_VEC_BYTES / static_cast<int>(sizeof(A));

using vf = vec<float>;
using vi = vec<int32_t>;
using vu = vec<uint32_t>;
typedef uint16_t vh
    __attribute__((vector_size(TW_VEC_BYTES / 2)));  // as many 16-bit lanes as vf has floats

template<class A>
TW_HD vec<A> splat(A x) {
  return x - vec<A>{};
}  // x - 0: keeps NaN, inf and -0

// ---- bits ---------------------------------------------------------------------------------------
TW_HD vu widen_bits(vh h) {  // GCC 12 makes four instructions of a conversion to 32 bytes
#if TW_VEC_BYTES == 64
  return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif TW_VEC_BYTES == 32
  return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, vu);
#endif
}
TW_HD vf widen(bf16, vh h) { return (vf)(widen_bits(h) << 16); }
TW_HD vh narrow(bf16, vf x) {  // round to nearest even, NaN kept
  const vu u = (vu)x;
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vu nan = (u >> 16) | 0x40u;
  const vu r = (vu)(x != x) ? nan : rounded;
#if TW_VEC_BYTES == 32
  const __m256i p =
      _mm256_packus_epi32((__m256i)r, (__m256i)r);  // r < 2^16: packs within each half
  return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(p, 0xd8));
#else
  return __builtin_convertvector(r, vh);
#endif
}
TW_HD vf widen(f16, vh h) {
#if TW_VEC_BYTES == 64
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif TW_VEC_BYTES == 32
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  vf x;
  for (int i = 0; i < lanes<float>; ++i) x[i] = to_float(f16{h[i]});
  return x;
#endif
}
TW_HD vh narrow(f16, vf x) {
#if TW_VEC_BYTES == 64
  return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif TW_VEC_BYTES == 32
  return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  vh h;
  for (int i = 0; i < lanes<float>; ++i) h[i] = to_f16(x[i]).bits;
  return h;
#endif
}

// ---- load and store -----------------------------------------------------------------------------
// vload<A>(p): lanes<A> elements at p, any alignment, widened to A. vload<A>(p, n): only the first
// n (0 <= n < lanes), the rest 0; nothing past p + n is touched.
template<class A, class T>
TW_HD vec<A> vload(const T* p) {
  if constexpr (sizeof(T) == sizeof(A)) {
    vec<A> x;
    memcpy(&x, p, sizeof x);
    return x;
  } else if constexpr (sizeof(T) == 2 && sizeof(A) == 4) {
    vh h;
    memcpy(&h, p, sizeof h);
    return widen(T{}, h);
  } else {
    vec<A> x;
    for (int i = 0; i < lanes<A>; ++i) x[i] = load_as<A>(p[i]);
    return x;
  }
}
template<class A, class T>
TW_HD vec<A> vload(const T* p, int64_t n) {
  T buffer[lanes<A>] = {};
  memcpy(buffer, p, static_cast<size_t>(n) * sizeof(T));
  return vload<A>(buffer);
}
template<class A, class T>
TW_HD void vstore(T* p, vec<A> x) {
  if constexpr (sizeof(T) == sizeof(A)) {
    memcpy(p, &x, sizeof x);
  } else if constexpr (sizeof(T) == 2 && sizeof(A) == 4) {
    const vh h = narrow(T{}, x);
    memcpy(p, &h, sizeof h);
  } else {
    for (int i = 0; i < lanes<A>; ++i) p[i] = store_as<T>(x[i]);
  }
}
template<class A, class T>
TW_HD void vstore(T* p, vec<A> x, int64_t n) {
  T buffer[lanes<A>];
  vstore<A>(buffer, x);
  memcpy(p, buffer, static_cast<size_t>(n) * sizeof(T));
}

// Calls body(i, n) for i = 0, L, 2L, ...: n is a compile-time-visible `Full` for whole registers
// and an int64_t count for the tail, so that `vload<A>(p + i, n)` compiles to a plain load in the
// main loop.
struct Full {};
template<class A, class T>
TW_HD vec<A> vload(const T* p, Full) {
  return vload<A>(p);
}
template<class A, class T>
TW_HD void vstore(T* p, vec<A> x, Full) {
  vstore<A>(p, x);
}
template<class A, class F>
TW_HD void for_lanes(int64_t size, F&& body) {
  int64_t i = 0;
  for (; i + lanes<A> <= size; i += lanes<A>) body(i, Full{});
  if (i < size) body(i, size - i);
}

// ---- two registers of floats from one of bf16 ---------------------------------------------------
// A register of bf16 is the floats of its elements with an even index, shifted up, and those with an
// odd index, masked: no lane moves, neither here nor on the way back. So a loop over nothing but
// 16-bit operands needs about half of the instructions. vload<float>(p, Pairs{}) gives a EvenOdd; `each`
// applies a function of vectors to both halves.
struct Pairs {};
typedef uint16_t halves __attribute__((vector_size(TW_VEC_BYTES)));
struct EvenOdd {
  vf even, odd;
};
TW_HD bool any_nan(vf a, vf b) {  // in either
#if TW_VEC_BYTES == 64
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
#elif TW_VEC_BYTES == 32
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q)) != 0;
#else
  const vi nan = (vi)((a != a) | (b != b));
  return (nan[0] | nan[1] | nan[2] | nan[3]) != 0;
#endif
}
// The low halves of `even`, shifted down, and the high halves of `odd`.
TW_HD vu high_halves(vu even, vu odd) {
#if TW_VEC_BYTES == 32
  return (vu)_mm256_blend_epi16((__m256i)(even >> 16), (__m256i)odd, 0xaa);
#else
  return (even >> 16) | (odd & 0xffff0000u);
#endif
}
TW_HD vu low_halves(vu even, vu odd) {
#if TW_VEC_BYTES == 32
  return (vu)_mm256_blend_epi16((__m256i)even, (__m256i)(odd << 16), 0xaa);
#else
  return (even & 0xffffu) | (odd << 16);
#endif
}
template<class A>
TW_HD EvenOdd vload(const bf16* p, Pairs) {
  vu u;
  memcpy(&u, p, sizeof u);
  return {(vf)(u << 16), (vf)(u & 0xffff0000u)};
}
// high, rounded up where low is above one half, or one half and high is odd; 16 bits each.
TW_HD vu round_halves(vu high, vu low) {
#if TW_VEC_BYTES == 64
  const __m512i one = _mm512_set1_epi16(1), h = (__m512i)high;
  const __m512i above = _mm512_subs_epu16((__m512i)low, _mm512_andnot_si512(h, one));
  return (vu)_mm512_add_epi16(h, _mm512_srli_epi16(above, 15));
#elif TW_VEC_BYTES == 32
  const __m256i one = _mm256_set1_epi16(1), h = (__m256i)high;
  const __m256i above = _mm256_subs_epu16((__m256i)low, _mm256_andnot_si256(h, one));
  return (vu)_mm256_add_epi16(h, _mm256_srli_epi16(above, 15));
#else
  const halves h = (halves)high, l = (halves)low;
  return (vu)(h - (halves)((l | (h & 1)) > 0x8000));
#endif
}
TW_HD void store_rounded(bf16* p, vu even, vu odd) {  // floats that are not NaN, or of which only
  const vu h = round_halves(high_halves(even, odd), low_halves(even, odd));  // the high half is set
  memcpy(p, &h, sizeof h);
}
template<class A>
TW_HD void vstore(bf16* p, EvenOdd x, Pairs) {  // as `narrow`: to nearest even, NaN kept
  vu even = (vu)x.even, odd = (vu)x.odd;
  if (__builtin_expect(any_nan(x.even, x.odd), 0)) {  // no part of a NaN may round it
    even = (vu)(x.even != x.even) ? (even | 0x400000u) & 0xffff0000u : even;
    odd = (vu)(x.odd != x.odd) ? (odd | 0x400000u) & 0xffff0000u : odd;
  }
  store_rounded(p, even, odd);
}
template<class F, class... V>
TW_HD void each(F&& f, V&... x) {
  f(x...);
}
template<class F, class... Rest>
TW_HD void each(F&& f, EvenOdd& x, Rest&... rest) {
  f(x.even, rest.even...);
  f(x.odd, rest.odd...);
}
// for_lanes over operands of types P...: by Pairs as far as there are whole ones, if every operand
// can be loaded so.
template<class P>
inline constexpr bool in_pairs = false;
template<>
inline constexpr bool in_pairs<bf16*> = true;
template<>
inline constexpr bool in_pairs<const bf16*> = true;
template<class P>
inline constexpr bool only_in_pairs = false;  // of a size that is whole pairs
template<class A, class... P, class F>
TW_HD void for_operands(int64_t size, F&& body) {
  int64_t done = 0;
  if constexpr (sizeof(A) == 4 && (in_pairs<P> && ...))
    for (; done + 2 * lanes<A> <= size; done += 2 * lanes<A>) body(done, Pairs{});
  if constexpr (!(only_in_pairs<P> || ...))
    for_lanes<A>(size - done, [&](int64_t i, auto k) { body(done + i, k); });
}

// x with the lanes past the tail replaced by `fill`.
template<class A>
TW_HD vec<A> keep(vec<A> x, Full, A) {
  return x;
}
template<class A>
TW_HD vec<A> keep(vec<A> x, int64_t n, A fill) {
  for (int64_t i = n; i < lanes<A>; ++i) x[i] = fill;
  return x;
}

// ---- reductions ---------------------------------------------------------------------------------
template<class A>
TW_HD A hsum(vec<A> x) {
  A s[lanes<A>];
  memcpy(s, &x, sizeof s);
  for (int w = lanes<A> / 2; w > 0; w /= 2)
    for (int i = 0; i < w; ++i) s[i] += s[i + w];
  return s[0];
}
template<class A>
TW_HD A hmax(vec<A> x) {  // NaN if any lane is NaN
  A m = x[0];
  for (int i = 1; i < lanes<A>; ++i) m = (x[i] > m || x[i] != x[i]) ? x[i] : m;
  return m;
}
// Elementwise maximum that keeps NaN from either side.
template<class A>
TW_HD vec<A> vmax(vec<A> a, vec<A> b) {
  return (a > b) | (a != a) ? a : b;
}

// ---- functions ----------------------------------------------------------------------------------
// exp, within 1 ulp of the true value for float. Results below the smallest normal number become 0;
// overflow gives inf; NaN stays. x = n ln2 + r, |r| <= ln2 / 2; Taylor polynomial of degree 7 in r.
TW_HD vf vexp(vf x) {
  const vf magic =
      splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  vf t = x * 1.44269504088896341f + magic;
  const vf n = t - magic;
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9841269841e-4f);
  p = p * r + 1.3888888889e-3f;
  p = p * r + 8.3333333333e-3f;
  p = p * r + 4.1666666667e-2f;
  p = p * r + 1.6666666667e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.f;
  // Times 2^n: n, in the low bits of t, is added to the exponent of p. p < 1 at n = 128 and p >= 1
  // at n = -126, else one of the two lines below applies.
  vf y = (vf)((vi)p + ((vi)t << 23));
  y = x > 88.7228391f ? splat(INFINITY) : y;
  y = x < -87.3365447f ? splat(0.f) : y;
  return x != x ? x : y;
}
TW_HD vec<double> vexp(vec<double> x) {
  for (int i = 0; i < lanes<double>; ++i) x[i] = exp(x[i]);
  return x;
}

TW_END
