#include "vgpu/scalar_dispatch.h"

namespace tw::vgpu {

namespace {

using Typed = void (*)(Decode&, ptx::Type);

template<Typed integer, Typed floating>
void decode_by_type(Decode& d) {
  const ptx::Type type = d.take_type();
  (ptx::is_float(type) ? floating : integer)(d, type);
}

const Opcode add("add", decode_by_type<integer_add, float_add>);
const Opcode sub("sub", decode_by_type<integer_sub, float_sub>);
const Opcode mul("mul", decode_by_type<integer_mul, float_mul>);
const Opcode mad("mad", decode_by_type<integer_mad, float_fma>);
const Opcode div_("div", decode_by_type<integer_div, float_div>);
const Opcode min_("min", decode_by_type<integer_min, float_min>);
const Opcode max_("max", decode_by_type<integer_max, float_max>);
const Opcode neg("neg", decode_by_type<integer_neg, float_neg>);
const Opcode abs_("abs", decode_by_type<integer_abs, float_abs>);

}  // namespace

}  // namespace tw::vgpu
