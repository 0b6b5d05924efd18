// Floating-point arithmetic: add, sub, mul, fma, div, rcp, sqrt with every rounding mode, min, max, neg, abs,
// copysign, testp; f32, f64, f16, bf16 and pairs of the latter two. number.h does the rounding.
#include <cmath>
#include <string>

#include "vgpu/lanes.h"
#include "vgpu/number.h"
#include "vgpu/scalar_dispatch.h"
#include "vgpu/scalar_float.h"

namespace tw::vgpu {

namespace {

using ptx::Type;

// f32 to nearest is the hot path: one hardware instruction for eight lanes.
template<class F, Rounding R, bool Ftz>
inline typename F::bits multiply_add(typename F::bits a, typename F::bits b, typename F::bits c) {
  if constexpr (std::is_same_v<F, F32> && R == Rounding::rn)
    return detail::store<Ftz>(
        std::fma(detail::load<F>(a, Ftz), detail::load<F>(b, Ftz), detail::load<F>(c, Ftz)));
  else
    return fma<F, R, Ftz>(a, b, c);
}

struct Add {
  static constexpr size_t kSources = 2;
  template<class F, Rounding R, bool Ftz>
  static typename F::bits apply(typename F::bits a, typename F::bits b) {
    return add<F, R, Ftz>(a, b);
  }
  template<Rounding R>
  static double apply_f64(double a, double b) {
    return add_f64<R>(a, b);
  }
};
struct Sub {
  static constexpr size_t kSources = 2;
  template<class F, Rounding R, bool Ftz>
  static typename F::bits apply(typename F::bits a, typename F::bits b) {
    return add<F, R, Ftz>(a, static_cast<typename F::bits>(b ^ F::sign));
  }
  template<Rounding R>
  static double apply_f64(double a, double b) {
    return add_f64<R>(a, -b);
  }
};
struct Mul {
  static constexpr size_t kSources = 2;
  template<class F, Rounding R, bool Ftz>
  static typename F::bits apply(typename F::bits a, typename F::bits b) {
    return mul<F, R, Ftz>(a, b);
  }
  template<Rounding R>
  static double apply_f64(double a, double b) {
    return mul_f64<R>(a, b);
  }
};
struct Fma {
  static constexpr size_t kSources = 3;
  template<class F, Rounding R, bool Ftz>
  static typename F::bits apply(typename F::bits a, typename F::bits b, typename F::bits c) {
    return multiply_add<F, R, Ftz>(a, b, c);
  }
  template<Rounding R>
  static double apply_f64(double a, double b, double c) {
    return fma_f64<R>(a, b, c);
  }
};

// What happens to a result: nothing, .sat, .relu.
enum class After : uint8_t { nothing, saturate, relu };
template<class F, After after>
inline typename F::bits finish(typename F::bits x) {
  if constexpr (after == After::saturate) return saturate_bits<F>(x);
  if constexpr (after == After::relu) return relu<F>(x);
  return x;
}

template<class Op, class F, Rounding R, bool Ftz, After after>
Handler scalar() {
  using B = typename F::bits;
  if constexpr (Op::kSources == 2)
    return lanewise<[](B a, B b) { return finish<F, after>(Op::template apply<F, R, Ftz>(a, b)); }>;
  else
    return lanewise<[](B a, B b, B c) {
      return finish<F, after>(Op::template apply<F, R, Ftz>(a, b, c));
    }>;
}
template<class Op, class F, bool Ftz, After after>
Handler packed() {
  constexpr auto R = Rounding::rn;
  if constexpr (Op::kSources == 2)
    return lanewise<[](uint32_t a, uint32_t b) {
      return map_halves(
          [](uint16_t x, uint16_t y) {
            return finish<F, after>(Op::template apply<F, R, Ftz>(x, y));
          },
          a, b);
    }>;
  else
    return lanewise<[](uint32_t a, uint32_t b, uint32_t c) {
      return map_halves(
          [](uint16_t x, uint16_t y, uint16_t z) {
            return finish<F, after>(Op::template apply<F, R, Ftz>(x, y, z));
          },
          a, b, c);
    }>;
}

template<class Op>
void decode_arithmetic(Decode& d, Type type) {
  take_float_operands(d, Op::kSources, ptx::bits_of(type));
  const Rounding rounding = take_rounding(d);
  if (type == Type::f64) {
    with_rounding(rounding, [&]<Rounding R>() {
      if constexpr (Op::kSources == 2)
        d.run(lanewise<[](double a, double b) { return Op::template apply_f64<R>(a, b); }>,
              Class::fp64);
      else
        d.run(lanewise<[](double a, double b, double c) {
                return Op::template apply_f64<R>(a, b, c);
              }>,
              Class::fp64);
    });
    return;
  }
  const bool ftz = d.take("ftz"), saturate = d.take("sat"), relu = d.take("relu");
  d.take("noftz");
  const After after = saturate ? After::saturate : relu ? After::relu : After::nothing;
  if (type == Type::f32) {
    if (relu) d.fail(".relu is for 16 bits only");
    with_rounding(rounding, [&]<Rounding R>() {
      with_flag(ftz, [&]<bool Ftz>() {
        d.run(saturate ? scalar<Op, F32, R, Ftz, After::saturate>()
                       : scalar<Op, F32, R, Ftz, After::nothing>(),
              Class::fp32);
      });
    });
    return;
  }
  if (rounding != Rounding::rn) d.fail("16-bit arithmetic rounds to nearest");
  with_half(d, type, [&]<class F, bool pair>() {
    with_flag(ftz, [&]<bool Ftz>() {
      const auto choose = [&]<After a>() {
        return pair ? packed<Op, F, Ftz, a>() : scalar<Op, F, Rounding::rn, Ftz, a>();
      };
      d.run(after == After::saturate ? choose.template operator()<After::saturate>()
            : after == After::relu   ? choose.template operator()<After::relu>()
                                     : choose.template operator()<After::nothing>(),
            Class::fp16);
    });
  });
}

// ---- min and max

struct Minimum {
  template<class T>
  static bool takes_first(T a, T b) {
    return a < b;
  }
  static double apply_f64(double a, double b) { return minimum(a, b); }
};
struct Maximum {
  template<class T>
  static bool takes_first(T a, T b) {
    return b < a;
  }
  static double apply_f64(double a, double b) { return maximum(a, b); }
};
// On bits, so that it vectorises. As signed integers, numbers are in order, and -0 below +0, once the
// magnitudes of those with a sign are inverted. .xorsign.abs: of magnitudes, with the product's sign.
template<class Op, class F, bool NanWins, bool Ftz, bool XorSign>
inline typename F::bits extreme(typename F::bits a, typename F::bits b) {
  using B = typename F::bits;
  using S = std::make_signed_t<B>;
  constexpr B magnitude = F::sign - 1;
  const B sign = XorSign ? static_cast<B>((a ^ b) & F::sign) : B{0};
  if (XorSign) a &= magnitude, b &= magnitude;
  if (Ftz) a = flush<F>(a), b = flush<F>(b);
  const auto key = [](B x) {
    const B negative = static_cast<B>(static_cast<S>(x) >> (8 * sizeof(B) - 1));
    return static_cast<S>(x ^ (negative & magnitude));
  };
  const B number = Op::takes_first(key(a), key(b)) ? a : b;
  const bool nan_a = is_nan<F>(a), nan_b = is_nan<F>(b);
  const B with_nan = NanWins || (nan_a && nan_b) ? static_cast<B>(F::nan) : nan_a ? b : a;
  return static_cast<B>((nan_a || nan_b ? with_nan : number) | sign);
}

template<class Op>
void decode_extreme(Decode& d, Type type) {
  take_float_operands(d, 2, ptx::bits_of(type));
  if (type == Type::f64) {
    d.run(lanewise<[](double a, double b) { return Op::apply_f64(a, b); }>, Class::fp64);
    return;
  }
  const bool ftz = d.take("ftz"), nan = d.take("NaN"), xorsign = d.take("xorsign");
  if (xorsign && !d.take("abs")) d.fail(".xorsign needs .abs");
  with_flag(ftz, [&]<bool Ftz>() {
    with_flag(nan, [&]<bool NanWins>() {
      with_flag(xorsign, [&]<bool XorSign>() {
        if (type == Type::f32) {
          d.run(lanewise<[](uint32_t a, uint32_t b) {
                  return extreme<Op, F32, NanWins, Ftz, XorSign>(a, b);
                }>,
                Class::fp32);
          return;
        }
        with_half(d, type, [&]<class F, bool pair>() {
          if constexpr (pair)
            d.run(lanewise<[](uint32_t a, uint32_t b) {
                    return map_halves(extreme<Op, F, NanWins, Ftz, XorSign>, a, b);
                  }>,
                  Class::fp16);
          else
            d.run(lanewise<[](uint16_t a, uint16_t b) {
                    return extreme<Op, F, NanWins, Ftz, XorSign>(a, b);
                  }>,
                  Class::fp16);
        });
      });
    });
  });
}

// ---- neg and abs: bits, and .ftz

struct Negate {
  template<class F>
  static typename F::bits apply(typename F::bits a) {
    return static_cast<typename F::bits>(a ^ F::sign);
  }
};
struct Absolute {
  template<class F>
  static typename F::bits apply(typename F::bits a) {
    return static_cast<typename F::bits>(a & (F::sign - 1));
  }
};
template<class Op>
void decode_sign(Decode& d, Type type) {
  take_float_operands(d, 1, ptx::bits_of(type));
  if (type == Type::f64) {
    d.run(lanewise<[](uint64_t a) { return Op::template apply<F64>(a); }>, Class::fp64);
    return;
  }
  with_flag(d.take("ftz"), [&]<bool Ftz>() {
    if (type == Type::f32) {
      d.run(lanewise<[](uint32_t a) { return Op::template apply<F32>(Ftz ? flush<F32>(a) : a); }>,
            Class::fp32);
      return;
    }
    with_half(d, type, [&]<class F, bool pair>() {
      if constexpr (pair)
        d.run(lanewise<[](uint32_t a) {
                return map_halves(
                    [](uint16_t x) { return Op::template apply<F>(Ftz ? flush<F>(x) : x); }, a);
              }>,
              Class::fp16);
      else
        d.run(lanewise<[](uint16_t a) { return Op::template apply<F>(Ftz ? flush<F>(a) : a); }>,
              Class::fp16);
    });
  });
}

}  // namespace

void float_add(Decode& d, Type type) { decode_arithmetic<Add>(d, type); }
void float_sub(Decode& d, Type type) { decode_arithmetic<Sub>(d, type); }
void float_mul(Decode& d, Type type) { decode_arithmetic<Mul>(d, type); }
void float_fma(Decode& d, Type type) { decode_arithmetic<Fma>(d, type); }
void float_min(Decode& d, Type type) { decode_extreme<Minimum>(d, type); }
void float_max(Decode& d, Type type) { decode_extreme<Maximum>(d, type); }
void float_neg(Decode& d, Type type) { decode_sign<Negate>(d, type); }
void float_abs(Decode& d, Type type) { decode_sign<Absolute>(d, type); }

// div.approx and div.full may be off by 2 ulp on hardware; here they are correctly rounded.
void float_div(Decode& d, Type type) {
  take_float_operands(d, 2, ptx::bits_of(type));
  if (type == Type::f64) {
    with_rounding(take_rounding(d), [&]<Rounding R>() {
      d.run(lanewise<[](double a, double b) { return div_f64<R>(a, b); }>, Class::fp64);
    });
    return;
  }
  if (type != Type::f32) d.fail("only f32 and f64");
  const bool approximate = d.take("approx") || d.take("full");
  const Rounding rounding = approximate ? Rounding::rn : take_rounding(d);
  with_flag(d.take("ftz"), [&]<bool Ftz>() {
    with_rounding(rounding, [&]<Rounding R>() {
      d.run(lanewise<[](uint32_t a, uint32_t b) { return div<F32, R, Ftz>(a, b); }>,
            Class::special_function);
    });
  });
}

namespace {

void decode_fma(Decode& d) { float_fma(d, d.take_type()); }
const Opcode fma_("fma", decode_fma);

// ---- rcp and sqrt, exact and approximate

// The approximate f64 forms look at the upper half only and give an upper half.
constexpr uint64_t kUpperHalf = 0xffffffff00000000;

void decode_rcp(Decode& d) {
  const Type type = d.take_type();
  take_float_operands(d, 1, ptx::bits_of(type));
  const bool approximate = d.take("approx");
  const Rounding rounding = approximate ? Rounding::rn : take_rounding(d);
  const bool ftz = d.take("ftz");
  if (type == Type::f64) {
    if (approximate) {
      d.run(lanewise<[](uint64_t a) {
              return to_bits(1.0 / f64_of(flush<F64>(a & kUpperHalf))) & kUpperHalf;
            }>,
            Class::special_function);
      return;
    }
    with_rounding(rounding, [&]<Rounding R>() {
      d.run(lanewise<[](double a) { return div_f64<R>(1.0, a); }>, Class::fp64);
    });
    return;
  }
  if (type != Type::f32) d.fail("only f32 and f64");
  with_flag(ftz, [&]<bool Ftz>() {
    with_rounding(rounding, [&]<Rounding R>() {
      d.run(lanewise<[](uint32_t a) { return div<F32, R, Ftz>(0x3f800000, a); }>,
            Class::special_function);
    });
  });
}
const Opcode rcp("rcp", decode_rcp);

void decode_sqrt(Decode& d) {
  const Type type = d.take_type();
  take_float_operands(d, 1, ptx::bits_of(type));
  const Rounding rounding = d.take("approx") ? Rounding::rn : take_rounding(d);
  if (type == Type::f64) {
    with_rounding(rounding, [&]<Rounding R>() {
      d.run(lanewise<[](double a) { return sqrt_f64<R>(a); }>, Class::fp64);
    });
    return;
  }
  if (type != Type::f32) d.fail("only f32 and f64");
  with_flag(d.take("ftz"), [&]<bool Ftz>() {
    with_rounding(rounding, [&]<Rounding R>() {
      d.run(lanewise<[](uint32_t a) { return sqrt<F32, R, Ftz>(a); }>, Class::special_function);
    });
  });
}
const Opcode sqrt_("sqrt", decode_sqrt);

// ---- copysign, testp

// The sign of a, the magnitude of b.
void decode_copysign(Decode& d) {
  const Type type = d.take_type();
  take_float_operands(d, 2, ptx::bits_of(type));
  if (type == Type::f32)
    d.run(lanewise<[](uint32_t a, uint32_t b) { return (a & 0x80000000) | (b & 0x7fffffff); }>,
          Class::fp32);
  else if (type == Type::f64)
    d.run(lanewise<[](uint64_t a, uint64_t b) { return (a & F64::sign) | (b & ~F64::sign); }>,
          Class::fp64);
}
const Opcode copysign_("copysign", decode_copysign);

template<class F>
void choose_testp(Decode& d) {
  using B = typename F::bits;
  constexpr B kSmallest = B{1} << F::mantissa;
  const Class kind = sizeof(B) == 8 ? Class::fp64 : Class::fp32;
  if (d.take("finite"))
    d.run(lanewise<[](B a) { return (a & (F::sign - 1)) < F::infinity; }>, kind);
  else if (d.take("infinite"))
    d.run(lanewise<[](B a) { return (a & (F::sign - 1)) == F::infinity; }>, kind);
  else if (d.take("number"))
    d.run(lanewise<[](B a) { return (a & (F::sign - 1)) <= F::infinity; }>, kind);
  else if (d.take("notanumber"))
    d.run(lanewise<[](B a) { return !((a & (F::sign - 1)) <= F::infinity); }>, kind);
  else if (d.take("normal"))
    d.run(lanewise<[](B a) {
            return (a & (F::sign - 1)) < F::infinity && !((a & (F::sign - 1)) < kSmallest);
          }>,
          kind);
  else if (d.take("subnormal"))
    d.run(lanewise<[](B a) { return (a & (F::sign - 1)) != 0 && (a & (F::sign - 1)) < kSmallest; }>,
          kind);
}
void decode_testp(Decode& d) {
  const Type type = d.take_type();
  d.expect_operands(2, 2);
  d.out.op[0] = d.destination(0, 1);
  d.out.op[1] = d.source(1, ptx::bits_of(type));
  if (type == Type::f32)
    choose_testp<F32>(d);
  else if (type == Type::f64)
    choose_testp<F64>(d);
}
const Opcode testp("testp", decode_testp);

}  // namespace

}  // namespace tw::vgpu
