// Number formats of the PTX ISA, bit exact: f16, bf16, e4m3, e5m2, tf32, f32 and f64 with every rounding mode, saturation
// and flushing of subnormals. Header-only and free of dependencies; files that include it are compiled with
// -ffp-contract=off.
//
// Method: an operation on formats of up to 24 significand bits runs in double with *rounding to odd* (an inexact result gets
// a last bit of one), which keeps enough for any second rounding to be the only one that counts: 53 >= 24 + 2. The second
// rounding, `narrow`, works on integers and serves every format and mode.
#pragma once

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace tw::vgpu {

// To nearest even, towards zero, down, up; to nearest with ties away from zero (cvt.rna).
enum class Rounding : uint8_t { rn, rz, rm, rp, rna };

// ---- formats

// `pad` low bits of a register are not part of the number; `infinity` 0 means that the format has none.
struct F16 {
  using bits = uint16_t;
  static constexpr int exponent = 5, mantissa = 10, pad = 0;
  static constexpr uint64_t sign = 0x8000, infinity = 0x7c00, largest = 0x7bff, nan = 0x7fff;
};
struct BF16 {
  using bits = uint16_t;
  static constexpr int exponent = 8, mantissa = 7, pad = 0;
  static constexpr uint64_t sign = 0x8000, infinity = 0x7f80, largest = 0x7f7f, nan = 0x7fff;
};
struct E4M3 {  // no infinity; the largest exponent holds numbers up to 448 and one NaN
  using bits = uint8_t;
  static constexpr int exponent = 4, mantissa = 3, pad = 0;
  static constexpr uint64_t sign = 0x80, infinity = 0, largest = 0x7e, nan = 0x7f;
};
struct E5M2 {
  using bits = uint8_t;
  static constexpr int exponent = 5, mantissa = 2, pad = 0;
  static constexpr uint64_t sign = 0x80, infinity = 0x7c, largest = 0x7b, nan = 0x7f;
};
struct TF32 {  // an f32 whose low 13 bits do not count
  using bits = uint32_t;
  static constexpr int exponent = 8, mantissa = 10, pad = 13;
  static constexpr uint64_t sign = 0x80000000, infinity = 0x7f800000, largest = 0x7f7fe000,
                            nan = 0x7fffffff;
};
struct F32 {
  using bits = uint32_t;
  static constexpr int exponent = 8, mantissa = 23, pad = 0;
  static constexpr uint64_t sign = 0x80000000, infinity = 0x7f800000, largest = 0x7f7fffff,
                            nan = 0x7fffffff;
};
struct F64 {
  using bits = uint64_t;
  static constexpr int exponent = 11, mantissa = 52, pad = 0;
  static constexpr uint64_t sign = uint64_t{1} << 63, infinity = uint64_t{0x7ff} << 52,
                            largest = infinity - 1, nan = uint64_t{0x7fffffffffffffff};
};

template<class F>
constexpr int bias = (1 << (F::exponent - 1)) - 1;

inline uint32_t to_bits(float x) { return std::bit_cast<uint32_t>(x); }
inline uint64_t to_bits(double x) { return std::bit_cast<uint64_t>(x); }
inline float f32_of(uint32_t bits) { return std::bit_cast<float>(bits); }
inline double f64_of(uint64_t bits) { return std::bit_cast<double>(bits); }

// ---- rounding into a format

// The finite number (-1)^negative * m * 2^(e - 62) in format F. Bit 62 of m is its highest one, unless the number is below
// half of F's smallest; a last bit of one may stand for any tail.
template<class F, Rounding R, bool Satfinite = false>
constexpr typename F::bits encode(bool negative, uint64_t m, int e) {
  constexpr int smallest = 1 - bias<F>;  // exponent of the normal numbers' lower end
  const int below = e < smallest ? smallest - e : 0;
  int shift = 62 - F::mantissa + below;
  m = shift > 63 ? (m != 0) : m;
  shift = shift > 63 ? 63 : shift;
  const uint64_t half = uint64_t{1} << (shift - 1);
  const uint64_t rest = m & (2 * half - 1);
  uint64_t q = m >> shift;
  if constexpr (R == Rounding::rn) q += rest > half || (rest == half && (q & 1));
  if constexpr (R == Rounding::rna) q += rest >= half;
  if constexpr (R == Rounding::rm) q += negative && rest != 0;
  if constexpr (R == Rounding::rp) q += !negative && rest != 0;
  // A carry out of q moves into the exponent by itself.
  const uint64_t exponent = below ? 0 : uint64_t(e - smallest) << F::mantissa;
  uint64_t bits = (exponent + q) << F::pad;
  if (bits > F::largest) {
    const bool stay = Satfinite || F::infinity == 0 || R == Rounding::rz ||
                      (R == Rounding::rm && !negative) || (R == Rounding::rp && negative);
    bits = stay ? F::largest : F::infinity;
  }
  return static_cast<typename F::bits>(bits | (negative ? F::sign : 0));
}

// A double (or a float, which is one) in format F. NaN becomes the format's canonical one; infinity stays, or becomes the
// largest number where the format has none or Satfinite asks for it.
template<class F, Rounding R = Rounding::rn, bool Satfinite = false>
constexpr typename F::bits narrow(double x) {
  static_assert(F::mantissa < 52, "f64 needs no rounding");
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const bool negative = bits >> 63;
  const int field = static_cast<int>(bits >> 52 & 0x7ff);
  const uint64_t fraction = bits & ((uint64_t{1} << 52) - 1);
  if (field == 0x7ff) {
    if (fraction) return static_cast<typename F::bits>(F::nan);
    const uint64_t huge = Satfinite || F::infinity == 0 ? F::largest : F::infinity;
    return static_cast<typename F::bits>(huge | (negative ? F::sign : 0));
  }
  const uint64_t m = (field ? fraction | uint64_t{1} << 52 : fraction) << 10;
  return encode<F, R, Satfinite>(negative, m, field - 1023);
}

// An integer in format F.
template<class F, Rounding R = Rounding::rn>
constexpr typename F::bits from_unsigned(uint64_t x, bool negative = false) {
  if (x == 0) return 0;
  const int zeros = std::countl_zero(x);
  const uint64_t top = x << zeros;
  return encode<F, R>(negative, top >> 1 | (top & 1), 63 - zeros);
}
template<class F, Rounding R = Rounding::rn>
constexpr typename F::bits from_signed(int64_t x) {
  return from_unsigned<F, R>(x < 0 ? -static_cast<uint64_t>(x) : static_cast<uint64_t>(x), x < 0);
}

// ---- out of a format, exactly. NaN becomes the canonical NaN of f32.

template<class F>
constexpr float widen(uint32_t bits) {
  static_assert(F::mantissa <= 23);
  if constexpr (F::exponent == 8) {  // f32 itself, or its upper part
    const uint32_t x = std::is_same_v<F, BF16> ? bits << 16 : bits >> F::pad << F::pad;
    return std::bit_cast<float>((x & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : x);
  } else {
    // The number's bits at the top of an f32's fraction, times the power of two between the two biases: a subnormal
    // becomes a normal f32 by the product.
    const uint32_t magnitude = bits & static_cast<uint32_t>(F::sign - 1);
    const uint32_t sign = static_cast<uint32_t>((bits & F::sign) ? 0x80000000 : 0);
    constexpr float scale = std::bit_cast<float>(uint32_t(127 + 127 - bias<F>) << 23);
    const float x = std::bit_cast<float>(magnitude << (23 - F::mantissa)) * scale;
    if (magnitude > F::largest)
      return std::bit_cast<float>(magnitude == F::infinity ? 0x7f800000 | sign : 0x7fffffff);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(x) | sign);
  }
}

// The everyday conversions by name.
inline float f16_to_f32(uint16_t x) { return widen<F16>(x); }
inline float bf16_to_f32(uint16_t x) { return widen<BF16>(x); }
inline float e4m3_to_f32(uint8_t x) { return widen<E4M3>(x); }
inline float e5m2_to_f32(uint8_t x) { return widen<E5M2>(x); }
template<Rounding R = Rounding::rn>
inline uint16_t f32_to_f16(float x) {
  return narrow<F16, R>(x);
}
template<Rounding R = Rounding::rn>
inline uint16_t f32_to_bf16(float x) {
  if constexpr (R ==
                Rounding::rn) {  // the inner loop of mixed precision: 32-bit integers vectorise
    const uint32_t b = to_bits(x);
    const uint32_t rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((b & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
  } else {
    return narrow<BF16, R>(x);
  }
}
// What a tensor core reads of an f32 given as tf32.
inline float truncate_tf32(uint32_t bits) { return f32_of(bits & 0xffffe000); }

// ---- modifiers

template<class F>
constexpr bool is_nan(uint64_t bits) {
  return (bits & (F::sign - 1)) > (F::infinity ? F::infinity : F::largest);
}
// .ftz: a subnormal becomes zero of its sign.
template<class F>
constexpr typename F::bits flush(typename F::bits bits) {
  constexpr uint64_t normal = uint64_t{1} << (F::mantissa + F::pad);
  return (bits & (F::sign - 1)) < normal ? static_cast<typename F::bits>(bits & F::sign) : bits;
}
inline float flush(float x) { return f32_of(flush<F32>(to_bits(x))); }
// .relu: negative numbers (and -0) become +0, NaN the canonical NaN.
template<class F>
constexpr typename F::bits relu(typename F::bits bits) {
  if (is_nan<F>(bits)) return static_cast<typename F::bits>(F::nan);
  return bits & F::sign ? 0 : bits;
}
// .sat: into [0, 1]; NaN becomes +0.
inline float saturate(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline double saturate(double x) { return x > 0 ? (x < 1 ? x : 1.0) : 0.0; }
template<class F>
constexpr typename F::bits saturate_bits(typename F::bits bits) {
  constexpr uint64_t one = uint64_t(bias<F>) << (F::mantissa + F::pad);
  if (is_nan<F>(bits) || (bits & F::sign)) return 0;
  return bits > one ? static_cast<typename F::bits>(one) : bits;
}

// min and max as PTX has them: -0 < +0; a NaN loses against a number, or wins with NanWins (.NaN); two NaNs, or a winning
// one, give the canonical NaN.
template<bool NanWins = false, class T>
inline T minimum(T a, T b) {
  constexpr T nan =
      sizeof(T) == 4 ? T(std::bit_cast<float>(0x7fffffff)) : T(std::bit_cast<double>(F64::nan));
  if (a != a) return NanWins || b != b ? nan : b;
  if (b != b) return NanWins ? nan : a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template<bool NanWins = false, class T>
inline T maximum(T a, T b) {
  constexpr T nan =
      sizeof(T) == 4 ? T(std::bit_cast<float>(0x7fffffff)) : T(std::bit_cast<double>(F64::nan));
  if (a != a) return NanWins || b != b ? nan : b;
  if (b != b) return NanWins ? nan : a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

// ---- arithmetic in double with rounding to odd, for operands of up to 24 significand bits

namespace odd {

// `near` is the exact result to nearest, `error` has the sign of exact - near.
inline double settle(double near, double error) {
  const uint64_t bits = to_bits(near);
  if (!(error > 0 || error < 0) || (bits & 1)) return near;
  return f64_of((error > 0) == (near > 0) ? bits + 1 : bits - 1);
}
template<Rounding R>
inline double add(double a, double b) {
  const double sum = a + b;
  const double part = sum - a;
  const double error = (a - (sum - part)) + (b - part);
  if (R == Rounding::rm && sum == 0) return std::signbit(a) || std::signbit(b) ? -0.0 : 0.0;
  return settle(sum, error);
}
inline double divide(double a, double b) {
  const double q = a / b;
  if (!(std::fabs(q) < INFINITY) || !(std::fabs(b) < INFINITY)) return q;
  const double error = std::fma(-q, b, a);
  return settle(q, b < 0 ? -error : error);
}
inline double root(double a) {
  const double r = std::sqrt(a);
  if (!(r < INFINITY) || r == 0) return r;
  return settle(r, std::fma(-r, r, a));
}

}  // namespace odd

// ---- arithmetic on numbers of F, given and returned as the float that holds each exactly. NaN is canonical.

template<class F, Rounding R, bool Ftz = false>
inline typename F::bits round_result(double x) {
  const typename F::bits bits = narrow<F, R>(x);
  return Ftz ? flush<F>(bits) : bits;
}

namespace detail {

// Whether the host's own float arithmetic is the answer.
template<class F, Rounding R>
constexpr bool native = std::is_same_v<F, F32> && R == Rounding::rn;

template<class F>
inline float load(typename F::bits bits, bool ftz) {
  return widen<F>(ftz ? flush<F>(bits) : bits);
}
template<bool Ftz>
inline uint32_t store(float x) {
  const uint32_t bits = x != x ? static_cast<uint32_t>(F32::nan) : to_bits(x);
  return Ftz ? flush<F32>(bits) : bits;
}

}  // namespace detail

template<class F, Rounding R = Rounding::rn, bool Ftz = false>
inline typename F::bits add(typename F::bits a, typename F::bits b) {
  const float x = detail::load<F>(a, Ftz), y = detail::load<F>(b, Ftz);
  if constexpr (detail::native<F, R>)
    return detail::store<Ftz>(x + y);
  else
    return round_result<F, R, Ftz>(odd::add<R>(x, y));
}
template<class F, Rounding R = Rounding::rn, bool Ftz = false>
inline typename F::bits mul(typename F::bits a, typename F::bits b) {
  const float x = detail::load<F>(a, Ftz), y = detail::load<F>(b, Ftz);
  if constexpr (detail::native<F, R>)
    return detail::store<Ftz>(x * y);
  else
    return round_result<F, R, Ftz>(double{x} * double{y});
}
template<class F, Rounding R = Rounding::rn, bool Ftz = false>
inline typename F::bits fma(typename F::bits a, typename F::bits b, typename F::bits c) {
  const double x = detail::load<F>(a, Ftz), y = detail::load<F>(b, Ftz),
               z = detail::load<F>(c, Ftz);
  return round_result<F, R, Ftz>(odd::add<R>(x * y, z));
}
template<class F, Rounding R = Rounding::rn, bool Ftz = false>
inline typename F::bits div(typename F::bits a, typename F::bits b) {
  const float x = detail::load<F>(a, Ftz), y = detail::load<F>(b, Ftz);
  if constexpr (detail::native<F, R>)
    return detail::store<Ftz>(x / y);
  else
    return round_result<F, R, Ftz>(odd::divide(x, y));
}
template<class F, Rounding R = Rounding::rn, bool Ftz = false>
inline typename F::bits sqrt(typename F::bits a) {
  const float x = detail::load<F>(a, Ftz);
  if constexpr (detail::native<F, R>)
    return detail::store<Ftz>(std::sqrt(x));
  else
    return round_result<F, R, Ftz>(odd::root(x));
}

// The same on floats.
template<Rounding R = Rounding::rn, bool Ftz = false>
inline float add_f32(float a, float b) {
  return f32_of(add<F32, R, Ftz>(to_bits(a), to_bits(b)));
}
template<Rounding R = Rounding::rn, bool Ftz = false>
inline float mul_f32(float a, float b) {
  return f32_of(mul<F32, R, Ftz>(to_bits(a), to_bits(b)));
}
template<Rounding R = Rounding::rn, bool Ftz = false>
inline float fma_f32(float a, float b, float c) {
  return f32_of(fma<F32, R, Ftz>(to_bits(a), to_bits(b), to_bits(c)));
}
template<Rounding R = Rounding::rn, bool Ftz = false>
inline float div_f32(float a, float b) {
  return f32_of(div<F32, R, Ftz>(to_bits(a), to_bits(b)));
}
template<Rounding R = Rounding::rn, bool Ftz = false>
inline float sqrt_f32(float a) {
  return f32_of(sqrt<F32, R, Ftz>(to_bits(a)));
}

// ---- f64: the host's arithmetic in the mode asked for

// Sets the host's rounding mode for a scope. `hide` keeps the compiler from moving or folding the operations inside.
class HostRounding {
 public:
  explicit HostRounding(Rounding r) : before_(std::fegetround()) {
    std::fesetround(r == Rounding::rz   ? FE_TOWARDZERO
                    : r == Rounding::rm ? FE_DOWNWARD
                    : r == Rounding::rp ? FE_UPWARD
                                        : FE_TONEAREST);
  }
  ~HostRounding() { std::fesetround(before_); }
  HostRounding(const HostRounding&) = delete;
  HostRounding& operator=(const HostRounding&) = delete;

 private:
  int before_;
};

namespace detail {

template<Rounding R, class Op>
inline double in_mode(Op op, double a, double b = 0, double c = 0) {
  double result;
  if constexpr (R == Rounding::rn) {
    result = op(a, b, c);
  } else {
    const HostRounding mode(R);
    volatile double x = a, y = b, z = c;
    volatile double r = op(x, y, z);
    result = r;
  }
  return result != result ? f64_of(F64::nan) : result;
}

}  // namespace detail

template<Rounding R = Rounding::rn>
inline double add_f64(double a, double b) {
  return detail::in_mode<R>([](double x, double y, double) { return x + y; }, a, b);
}
template<Rounding R = Rounding::rn>
inline double mul_f64(double a, double b) {
  return detail::in_mode<R>([](double x, double y, double) { return x * y; }, a, b);
}
template<Rounding R = Rounding::rn>
inline double fma_f64(double a, double b, double c) {
  return detail::in_mode<R>([](double x, double y, double z) { return std::fma(x, y, z); }, a, b,
                            c);
}
template<Rounding R = Rounding::rn>
inline double div_f64(double a, double b) {
  return detail::in_mode<R>([](double x, double y, double) { return x / y; }, a, b);
}
template<Rounding R = Rounding::rn>
inline double sqrt_f64(double a) {
  return detail::in_mode<R>([](double x, double, double) { return std::sqrt(x); }, a);
}

// ---- to integers

// x rounded to an integral value: .rni, .rzi, .rmi, .rpi.
template<Rounding R, class T>
inline T integral(T x) {
  if constexpr (R == Rounding::rz) return std::trunc(x);
  if constexpr (R == Rounding::rm) return std::floor(x);
  if constexpr (R == Rounding::rp) return std::ceil(x);
  if constexpr (R == Rounding::rna) return std::round(x);
  return std::nearbyint(x);
}
// x as an integer, clamped to its range. NaN becomes 0 if neither side has 64 bits, else the integer whose highest bit
// alone is set.
template<class Int, Rounding R, bool From64 = false>
inline Int to_integer(double x) {
  using Limits = std::numeric_limits<Int>;
  if (x != x)
    return From64 || sizeof(Int) == 8 ? static_cast<Int>(uint64_t{1} << (8 * sizeof(Int) - 1))
                                      : Int{0};
  const double y = integral<R>(x);
  const double end = std::ldexp(1.0, Limits::digits);  // one past the largest
  if (y >= end) return Limits::max();
  if (y <= static_cast<double>(Limits::min())) return Limits::min();
  return static_cast<Int>(y);
}

}  // namespace tw::vgpu
