// How an optimizer stores a float in fewer bits. Every function takes scalars or vectors and uses only
// operations that round the same everywhere, so that all backends store the same bits.
//
// split16  a bf16 parameter and the 16-bit remainder of its fp32 master:
//          master bits = (parameter bits << 16) + remainder, exact for every finite value and inf. The
//          parameter is the master rounded to nearest, ties away from zero; NaN is stored as 0x7fc00000.
// block8   8-bit codes with one fp32 scale, the largest |x|, for each kStateBlock elements:
//            signed (momentum):     x = sign * c^2 * scale / 127^2,  c in 0 ... 127
//            unsigned (second moment): x = c^4 * scale / 255^4,      c in 0 ... 255
//          so that small values keep a relative precision. Code 0 is exactly 0, and an unsigned x > 0
//          never gets it: it would be divided by eps. A scale is at least 2^-90 (or 0 if all are), and
//          NaN if anything in the block is not finite: then the whole block reads as NaN.
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
#if !defined(__CUDACC__)
TW_HD vu as_bits(vf x) { return (vu)x; }
TW_HD vf as_float(vu u) { return (vf)u; }
TW_HD vf whole(vf x) { return __builtin_convertvector(__builtin_convertvector(x, vi), vf); }
TW_HD vf to_value(vu u) { return __builtin_convertvector((vi)u, vf); }
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
inline constexpr float kSignedRange = 16129.f;         // 127^2
inline constexpr float kUnsignedRange = 4228250625.f;  // 255^4

// From the largest |x| of the block (NaN if there is one).
TW_HD float block8_scale(float largest) {
  if (!(largest < INFINITY)) return NAN;
  if (largest == 0.f) return 0.f;
  return largest > 8.0779356694631609e-28f ? largest : 8.0779356694631609e-28f;  // 2^-90
}
// What codes are multiplied by, and what x is multiplied by. 0 for a block that has no codes.
TW_HD float block8_unit(float scale, float range) { return scale / range; }
TW_HD float block8_inverse(float scale, float range) { return scale > 0.f ? range / scale : 0.f; }

template<class V>
TW_HD V block8_signed_value(V code, float unit) {
  return code * as_float(as_bits(code) & 0x7fffffffu) * unit;
}
template<class V>
TW_HD V block8_unsigned_value(V code, float unit) {
  const V square = code * code;
  return square * square * unit;
}

// The code as a whole number in a float. noise: 16 random bits, used if kStochastic.
template<bool kStochastic, class V, class U>
TW_HD V block8_signed_code(V x, float inverse, U noise) {
  const U sign = as_bits(x) & 0x80000000u;
  V y = as_float(as_bits(x) & 0x7fffffffu) * inverse;
  y = y < kSignedRange ? y : V{} + kSignedRange;  // NaN too
  const V t = vsqrt(y);
  V code;
  if constexpr (kStochastic) {
    const V low = whole(t);
    const V one = V{} + 1.f;
    code = low + (to_value(noise) * (low + low + 1.f) < (y - low * low) * 65536.f ? one : V{});
  } else {
    code = whole(t + 0.5f);
  }
  return as_float(as_bits(code) | sign);
}
template<bool kStochastic, class V, class U>
TW_HD V block8_unsigned_code(V x, float inverse, U noise) {
  V s = vsqrt(x * inverse);
  s = s < 65025.f ? s : V{} + 65025.f;  // NaN too
  const V t = vsqrt(s);
  const V one = V{} + 1.f;
  V code;
  if constexpr (kStochastic) {
    const V low = whole(t);
    const V a = low * low, b = (low + 1.f) * (low + 1.f);
    code = low + (to_value(noise) * ((b - a) * (b + a)) < (s - a) * (s + a) * 65536.f ? one : V{});
  } else {
    code = whole(t + 0.5f);
  }
  return (x != 0) & (code < 1.f) ? one : code;
}

TW_END
