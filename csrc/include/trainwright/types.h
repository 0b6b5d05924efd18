// Storage types and their conversions. 16-bit floats are plain structs around their bits, so that
// the same code serves g++, nvcc and any torch version; arithmetic is always done in float or
// double.
#pragma once
#include "trainwright/config.h"

#if !defined(__CUDACC__)
#include <cstring>
#endif

namespace tw {

// Values are those of torch's ScalarType, so a binding can cast.
enum class DType : int32_t {
  u8 = 0,
  i8 = 1,
  i16 = 2,
  i32 = 3,
  i64 = 4,
  f16 = 5,
  f32 = 6,
  f64 = 7,
  bf16 = 15
};

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr int64_t dtype_bytes(DType t) {
  return t == DType::f64 || t == DType::i64   ? 8
         : t == DType::f32 || t == DType::i32 ? 4
         : t == DType::u8 || t == DType::i8   ? 1
                                              : 2;
}

}  // namespace tw

TW_BEGIN

// The type that arithmetic on T is done in.
template<class T>
struct AccOf {
  using type = float;
};
template<>
struct AccOf<double> {
  using type = double;
};
template<class T>
using acc_t = typename AccOf<T>::type;

TW_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
#endif
}
TW_HD float bits_float(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  memcpy(&x, &u, 4);
  return x;
#endif
}

// Round to nearest, ties to even; NaN stays NaN (quiet).
TW_HD bf16 to_bf16(float x) {
#if defined(__CUDA_ARCH__)
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
#endif
}
TW_HD float to_float(bf16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

TW_HD float to_float(f16 x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t mag = x.bits & 0x7fffu;
  if (mag >= 0x7c00u) return bits_float(sign | 0x7f800000u | (mag & 0x3ffu) << 13);  // inf, NaN
  if (mag < 0x400u)
    return bits_float(sign | float_bits(static_cast<float>(mag) * 5.9604644775390625e-8f));
  return bits_float(sign | ((mag << 13) + 0x38000000u));
#endif
}
TW_HD f16 to_f16(float x) {
#if defined(__CUDA_ARCH__)
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};   // NaN
  if (mag >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to inf
  if (mag < 0x38800000u) {                                                 // subnormal or zero
    const float scaled =
        bits_float(mag) + 0.5f;  // the addition rounds to a multiple of 2^-24, ties to even
    return {static_cast<uint16_t>(sign | (float_bits(scaled) - 0x3f000000u))};
  }
  const uint32_t rounded = mag + 0xfffu + ((mag >> 13) & 1u) - 0x38000000u;
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
#endif
}

#if defined(__CUDACC__)
// Two floats rounded to bf16 or f16, the first in the low half.
template<class T>
__device__ __forceinline__ uint32_t pair_bits(float low, float high);
template<>
__device__ __forceinline__ uint32_t pair_bits<bf16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template<>
__device__ __forceinline__ uint32_t pair_bits<f16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

template<class A, class T>
TW_HD A load_as(T x) {
  if constexpr (sizeof(T) == 2)
    return static_cast<A>(to_float(x));
  else
    return static_cast<A>(x);
}
template<class T, class A>
TW_HD T store_as(A x);
template<>
TW_HD float store_as<float, float>(float x) {
  return x;
}
template<>
TW_HD float store_as<float, double>(double x) {
  return static_cast<float>(x);
}
template<>
TW_HD double store_as<double, float>(float x) {
  return x;
}
template<>
TW_HD double store_as<double, double>(double x) {
  return x;
}
template<>
TW_HD bf16 store_as<bf16, float>(float x) {
  return to_bf16(x);
}
template<>
TW_HD f16 store_as<f16, float>(float x) {
  return to_f16(x);
}
template<>
TW_HD bf16 store_as<bf16, double>(double x) {
  return to_bf16(static_cast<float>(x));
}
template<>
TW_HD f16 store_as<f16, double>(double x) {
  return to_f16(static_cast<float>(x));
}

// Calls f with a value of the C++ type of `t` (a tag; use decltype). Floating types only; false if
// it is another.
template<class F>
inline bool with_float_type(DType t, F&& f) {
  switch (t) {
    case DType::f32:
      f(float{});
      return true;
    case DType::bf16:
      f(bf16{});
      return true;
    case DType::f16:
      f(f16{});
      return true;
    case DType::f64:
      f(double{});
      return true;
    default:
      return false;
  }
}

TW_END
