// How an optimizer stores a float in fewer bits. Every function takes scalars or vectors and uses only
// operations that round the same everywhere, so that all backends store the same bits.
//
// split16  a bf16 parameter and the 16-bit remainder of its fp32 master:
//          master bits = (parameter bits << 16) + remainder, exact for every finite value and inf. The
//          parameter is the master rounded to nearest, ties away from zero; NaN is stored as 0x7fc00000.
// block8   8-bit codes with one fp32 scale, the largest |x|, for each kStateBlock elements. With
//            y = |x| / scale * 63/64,  w(y) = the float whose bits are (bits of y >> k) + constant
//          the code is w rounded to a whole number. Half of an exponent is half of a logarithm, so w is a
//          root of y, made of straight lines:
//            signed (momentum):         k = 1, w ~ 128 sqrt(y), with the sign of x, in -127 ... 127
//            unsigned (second moment):  k = 2, w ~ 256 sqrt(sqrt(y)),           in 0 ... 255
//          So small values keep a relative precision, no root is drawn, and the way back is a shift the
//          other way. Code 0 is exactly 0, and an unsigned x > 0 never gets it: it would be divided by eps.
//          A scale is at least 2^-90 (or 0 if all are), and NaN if anything in the block is not finite: then
//          the whole block reads as NaN.
// stochastic rounding  up with the probability that makes the mean right, from 16 random bits. An
//          element has one Philox word (stochastic_word): its low half rounds the parameter, its high
//          half the signed states, its high half with the bytes swapped the unsigned ones (so that v and
//          its maximum round alike).
#pragma once
#include <math.h>

#include "trainwright/philox.h"
#include "trainwright/vec_sqrt.h"

namespace tw {
inline constexpr int64_t kStateBlock = 256;

enum class MasterFormat : int32_t { none = 0, f32 = 1, split16 = 2 };
enum class StateFormat : int32_t { full = 0, bf16 = 1, block8 = 2 };  // full: fp32, fp64 for fp64

// One entry of an optimizer op's argument `spec`:
//   group << 8 | flags << 5 | stochastic << 4 | state format << 2 | master format
// flags says which of the op's optional states exist.
struct TensorSpec {
  int64_t group;
  int flags;
  bool stochastic;
  StateFormat state;
  MasterFormat master;
};
constexpr TensorSpec tensor_spec(int64_t bits) {
  return {bits >> 8, static_cast<int>(bits >> 5 & 7), (bits >> 4 & 1) != 0,
          static_cast<StateFormat>(bits >> 2 & 3), static_cast<MasterFormat>(bits & 3)};
}
}  // namespace tw

TW_BEGIN

// ---- the few operations that differ between a scalar and a vector -------------------------------
TW_HD uint32_t as_bits(float x) { return float_bits(x); }
TW_HD float as_float(uint32_t u) { return bits_float(u); }
TW_HD float whole(float x) { return static_cast<float>(static_cast<int32_t>(x)); }  // |x| < 2^31
TW_HD float to_value(uint32_t u) { return static_cast<float>(static_cast<int32_t>(u)); }
// To nearest, ties to even; |x| < 2^22.
TW_HD int32_t nearest(float x) {
  return static_cast<int32_t>(float_bits(x + 12582912.f) - 0x4b400000u);
}
TW_HD uint32_t half_shifted(uint32_t u) {  // the sign stays, the others move down by one
  return (u >> 1 & 0x3fffffffu) | (u & 0x80000000u);
}
// a - b, not below 0, where the low 16 bits of b are 0.
TW_HD uint32_t minus_high(uint32_t a, uint32_t b) { return (a > b ? a : b) - b; }
TW_HD int32_t with_sign(int32_t magnitude, float x) {  // of NaN and -0 too
  return float_bits(x) >> 31 ? -magnitude : magnitude;
}
template<class U>
TW_HD U larger(U a, U b) {
  return a > b ? a : b;
}
template<class U>
TW_HD U smaller(U a, U b) {
  return a < b ? a : b;
}
#if !defined(__CUDACC__)
TW_HD vu as_bits(vf x) { return (vu)x; }
TW_HD vf as_float(vu u) { return (vf)u; }
TW_HD vf whole(vf x) { return __builtin_convertvector(__builtin_convertvector(x, vi), vf); }
TW_HD vf to_value(vu u) { return __builtin_convertvector((vi)u, vf); }
TW_HD vi nearest(vf x) {
#if TW_VEC_BYTES == 64
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif TW_VEC_BYTES == 32
  return (vi)_mm256_cvtps_epi32((__m256)x);
#else
  return (vi)((vu)(x + 12582912.f) - 0x4b400000u);
#endif
}
TW_HD vu half_shifted(vu u) { return (vu)((vi)u >> 1) & 0xbfffffffu; }
TW_HD vu minus_high(vu a, uint32_t b) {
#if TW_VEC_BYTES == 64
  return (vu)_mm512_subs_epu16((__m512i)a, (__m512i)(vu{} + b));
#elif TW_VEC_BYTES == 32
  return (vu)_mm256_subs_epu16((__m256i)a, (__m256i)(vu{} + b));
#else
  return larger(a, vu{} + b) - b;
#endif
}
TW_HD vi with_sign(vi magnitude, vf x) {
#if TW_VEC_BYTES == 32
  return (vi)_mm256_sign_epi32((__m256i)magnitude, (__m256i)x);  // a magnitude of x = 0 is 0
#else
  return (vi)x < 0 ? -magnitude : magnitude;
#endif
}
TW_HD vu larger(vu a, uint32_t b) { return larger(a, vu{} + b); }
TW_HD vu smaller(vu a, uint32_t b) { return smaller(a, vu{} + b); }
#endif

// ---- split16 ------------------------------------------------------------------------------------
// parameter, remainder: 16 bits each, in the low half of U (uint32_t or a vector).
template<class U>
TW_HD auto split16_join(U parameter, U remainder) {
  return as_float((parameter << 16) + ((remainder ^ 0x8000u) - 0x8000u));
}
template<class V>
TW_HD auto split16_bits(V master) {
  const auto u = as_bits(master);
  return master != master ? (u & 0u) + 0x7fc00000u : u;
}
template<class U>
TW_HD U split16_parameter(U bits) {
  return (bits + 0x8000u) >> 16;
}
template<class U>
TW_HD U split16_remainder(U bits) {
  return bits & 0xffffu;
}

// ---- stochastic rounding ------------------------------------------------------------------------
// The random word of element `index` of the whole parameter (row-major) in step `step`.
TW_HD uint32_t stochastic_word(uint64_t seed, int64_t index, double step) {
  const uint64_t i = static_cast<uint64_t>(index);
  const Philox4 x = philox_block(seed, i >> 2, static_cast<uint64_t>(step));
  const uint32_t even = i & 2 ? x.v[2] : x.v[0], odd = i & 2 ? x.v[3] : x.v[1];
  return i & 1 ? odd : even;  // an index would put the four into local memory on a GPU
}
template<class U>
TW_HD U parameter_noise(U word) {
  return word & 0xffffu;
}
template<class U>
TW_HD U signed_noise(U word) {
  return word >> 16;
}
template<class U>
TW_HD U unsigned_noise(U word) {
  return (word >> 24) | ((word >> 8) & 0xff00u);
}

// The bits of a bf16, in the low half.
template<class V, class U>
TW_HD U bf16_stochastic(V x, U noise) {
  const U u = as_bits(x);
  return x != x ? (u >> 16) | 0x40u : (u + noise) >> 16;
}
// A float that fp16 holds exactly (or one that is too large for it: inf).
template<class V, class U>
TW_HD V f16_stochastic(V x, U noise) {
  const U u = as_bits(x);
  const V normal = as_float((u + (noise >> 3)) & 0xffffe000u);
  // Below 2^-14 fp16 counts in steps of 2^-24.
  const V magnitude = as_float(u & 0x7fffffffu);
  const V scaled = magnitude < 6.103515625e-5f ? magnitude * 16777216.f : V{};
  const V low = whole(scaled);
  const V one = V{} + 1.f;
  const V up = to_value(noise) < (scaled - low) * 65536.f ? one : V{};
  const V small = as_float(as_bits((low + up) * 5.9604644775390625e-8f) | (u & 0x80000000u));
  const V rounded = magnitude < 6.103515625e-5f ? small : normal;
  return x != x ? x : rounded;
}

// ---- block8 -------------------------------------------------------------------------------------
inline constexpr float kBlock8Full = 0.984375f;  // the y of the largest |x|: code 127 or 255
inline constexpr float kBlock8Unit = 1.0158730158730159f;  // 1 / that
inline constexpr uint32_t kBlock8FullBits = 0x3f7c0000u;
// What makes the shifted bits of y = 1 those of 128 and of 256.
inline constexpr uint32_t kSignedRoot = 0x43000000u - (0x3f800000u >> 1);
inline constexpr uint32_t kUnsignedRoot = 0x43800000u - (0x3f800000u >> 2);

// From the largest |x| of the block (NaN if there is one).
TW_HD float block8_scale(float largest) {
  if (!(largest < INFINITY)) return NAN;
  if (largest == 0.f) return 0.f;
  return largest > 8.0779356694631609e-28f ? largest : 8.0779356694631609e-28f;  // 2^-90
}
// What y is multiplied by, and what |x| is multiplied by. The latter is 0 for a block without codes.
TW_HD float block8_unit(float scale) { return scale * kBlock8Unit; }
TW_HD float block8_inverse(float scale) { return scale > 0.f ? kBlock8Full / scale : 0.f; }

// The y of a code, which comes as a float, times 2^kScaled; 0 for 0, whose bits would wrap.
template<int kScaled = 0, class V>
TW_HD V block8_signed_inverse_root(V code) {
  constexpr uint32_t least = (kSignedRoot + (kScaled << 23)) << 1;
  const auto u = as_bits(code), twice = u << 1;
  return as_float(minus_high(twice, least) | (u & 0x80000000u));
}
template<int kScaled = 0, class V>
TW_HD V block8_unsigned_inverse_root(V code) {
  constexpr uint32_t least = kUnsignedRoot + (kScaled << 23);
  return as_float(minus_high(as_bits(code), least) << 2);
}
template<int kScaled = 0, class V>
TW_HD V block8_signed_value(V code, float unit) {
  return block8_signed_inverse_root<kScaled>(code) * unit;
}
template<int kScaled = 0, class V>
TW_HD V block8_unsigned_value(V code, float unit) {
  return block8_unsigned_inverse_root<kScaled>(code) * unit;
}

// w rounded down or, with the probability that makes the mean of the y right, up.
template<class V, class U, class Inverse>
TW_HD V block8_stochastic(V y, V w, U noise, Inverse&& inverse_root) {
  const V low = whole(w), one = V{} + 1.f;
  const V a = inverse_root(low), b = inverse_root(low + 1.f);
  return low + (to_value(noise) * (b - a) < (y - a) * 65536.f ? one : V{});
}

// The code as a whole number, int32_t or a vector. noise: 16 random bits, used if kStochastic. kFinite: of
// a block that has codes, where nothing is far above kBlock8Full.
template<bool kStochastic, bool kFinite = false, class V, class U>
TW_HD auto block8_signed_code(V x, float inverse, U noise) {
  if constexpr (kFinite && !kStochastic)  // with the sign all the way
    return nearest(as_float(half_shifted(as_bits(x * inverse)) + kSignedRoot));
  auto y = as_bits(x * inverse) & 0x7fffffffu;
  if constexpr (!kFinite)
    y = smaller(y, kBlock8FullBits);  // bits are ordered like floats, NaN on top
  V w = as_float((y >> 1) + kSignedRoot);
  if constexpr (kStochastic)
    w = block8_stochastic(as_float(y), w, noise, [](V c) { return block8_signed_inverse_root(c); });
  return with_sign(nearest(w), x);
}
template<bool kStochastic, bool kFinite = false, class V, class U>
TW_HD auto block8_unsigned_code(V x, float inverse, U noise) {
  auto y = as_bits(x * inverse);
  if constexpr (!kFinite) y = smaller(y, kBlock8FullBits);
  V w = as_float((y >> 2) + kUnsignedRoot);
  if constexpr (kStochastic)
    w = block8_stochastic(as_float(y), w, noise,
                          [](V c) { return block8_unsigned_inverse_root(c); });
  const auto code = nearest(w);
  const auto least = smaller(as_bits(x), 1u);  // 1 unless x is 0
  return larger(code, (decltype(code))least);
}

TW_END
