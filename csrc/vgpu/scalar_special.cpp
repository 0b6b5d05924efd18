// Functions that hardware approximates: ex2, lg2, sin, cos, tanh, rsqrt. Here they are as good as the host's
// float functions, which is better than the ISA asks for.
#include <cmath>

#include "vgpu/lanes.h"
#include "vgpu/scalar_float.h"

namespace tw::vgpu {

namespace {

using ptx::Type;

template<class Op, class F, bool Ftz>
inline typename F::bits evaluate(typename F::bits a) {
  const float y = Op::apply(detail::load<F>(a, Ftz));
  if constexpr (std::is_same_v<F, F32>)
    return detail::store<Ftz>(y);
  else
    return Ftz ? flush<F>(narrow<F>(y)) : narrow<F>(y);
}
template<class Op>
void decode_function(Decode& d) {
  const Type type = d.take_type();
  take_float_operands(d, 1, ptx::bits_of(type));
  d.take("approx") || d.fail("only the .approx form exists");
  with_flag(d.take("ftz"), [&]<bool Ftz>() {
    if (type == Type::f32) {
      d.run(lanewise<[](uint32_t a) { return evaluate<Op, F32, Ftz>(a); }>,
            Class::special_function);
      return;
    }
    with_half(d, type, [&]<class F, bool pair>() {
      if constexpr (pair)
        d.run(lanewise<[](uint32_t a) { return map_halves(evaluate<Op, F, Ftz>, a); }>,
              Class::special_function);
      else
        d.run(lanewise<[](uint16_t a) { return evaluate<Op, F, Ftz>(a); }>,
              Class::special_function);
    });
  });
}

struct Exp2 {
  static float apply(float x) { return std::exp2(x); }
};
struct Log2 {
  static float apply(float x) { return std::log2(x); }
};
struct Sin {
  static float apply(float x) { return std::sin(x); }
};
struct Cos {
  static float apply(float x) { return std::cos(x); }
};
struct Tanh {
  static float apply(float x) { return std::tanh(x); }
};
struct Rsqrt {
  static float apply(float x) {
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
  }
};
const Opcode ex2("ex2", decode_function<Exp2>);
const Opcode lg2("lg2", decode_function<Log2>);
const Opcode sin_("sin", decode_function<Sin>);
const Opcode cos_("cos", decode_function<Cos>);
const Opcode tanh_("tanh", decode_function<Tanh>);

// The approximate f64 form with .ftz looks at the upper half only and gives an upper half.
constexpr uint64_t kUpperHalf = 0xffffffff00000000;

void decode_rsqrt(Decode& d) {
  if (!d.has("f64")) return decode_function<Rsqrt>(d);
  d.take_type();
  take_float_operands(d, 1, 64);
  d.take("approx");
  if (d.take("ftz"))
    d.run(lanewise<[](uint64_t a) {
            return to_bits(1.0 / std::sqrt(f64_of(flush<F64>(a & kUpperHalf)))) & kUpperHalf;
          }>,
          Class::special_function);
  else
    d.run(lanewise<[](double a) { return 1.0 / std::sqrt(a); }>, Class::special_function);
}
const Opcode rsqrt("rsqrt", decode_rsqrt);

}  // namespace

}  // namespace tw::vgpu
