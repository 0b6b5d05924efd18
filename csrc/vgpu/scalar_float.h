// What the floating-point files share: modifiers to template arguments, pairs of 16 bits.
#pragma once
#include "vgpu/number.h"
#include "vgpu/program.h"

namespace tw::vgpu {

inline Rounding take_rounding(Decode& d) {
  if (d.take("rz")) return Rounding::rz;
  if (d.take("rm")) return Rounding::rm;
  if (d.take("rp")) return Rounding::rp;
  d.take("rn");
  return Rounding::rn;
}
// f<R>() with the rounding mode as a template argument.
template<class F>
void with_rounding(Rounding r, F f) {
  switch (r) {
    case Rounding::rz:
      f.template operator()<Rounding::rz>();
      break;
    case Rounding::rm:
      f.template operator()<Rounding::rm>();
      break;
    case Rounding::rp:
      f.template operator()<Rounding::rp>();
      break;
    default:
      f.template operator()<Rounding::rn>();
  }
}
template<class F>
void with_flag(bool flag, F f) {
  flag ? f.template operator()<true>() : f.template operator()<false>();
}
// f<Format, pair>() for f16, bf16, f16x2, bf16x2.
template<class F>
void with_half(Decode& d, ptx::Type type, F f) {
  switch (type) {
    case ptx::Type::f16:
      f.template operator()<F16, false>();
      break;
    case ptx::Type::bf16:
      f.template operator()<BF16, false>();
      break;
    case ptx::Type::f16x2:
      f.template operator()<F16, true>();
      break;
    case ptx::Type::bf16x2:
      f.template operator()<BF16, true>();
      break;
    default:
      d.fail("this type is not supported here");
  }
}
// Destination and sources of one width; a real constant of 16 bits cannot be written in PTX.
inline void take_float_operands(Decode& d, size_t sources, int bits) {
  d.expect_operands(sources + 1, sources + 1);
  d.out.op[0] = d.destination(0, bits);
  for (size_t i = 1; i <= sources; ++i) d.out.op[i] = d.source(i, bits);
}
// f on the low and on the high halves.
template<class F, class... X>
constexpr uint32_t map_halves(F f, X... x) {
  const uint32_t low = f(static_cast<uint16_t>(x)...), high = f(static_cast<uint16_t>(x >> 16)...);
  return high << 16 | low;
}
// A float that is a number of F, as its bits.
template<class F>
inline typename F::bits narrow_exact(float x) {
  if constexpr (std::is_same_v<F, F32>)
    return to_bits(x);
  else
    return narrow<F>(x);
}

}  // namespace tw::vgpu
