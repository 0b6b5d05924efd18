// Opcodes that mean something for integers and for floating point alike: scalar_dispatch.cpp looks at the
// type and calls one of these.
#pragma once
#include "vgpu/program.h"

namespace tw::vgpu {

void integer_add(Decode& d, ptx::Type type);
void integer_sub(Decode& d, ptx::Type type);
void integer_mul(Decode& d, ptx::Type type);
void integer_mad(Decode& d, ptx::Type type);
void integer_div(Decode& d, ptx::Type type);
void integer_min(Decode& d, ptx::Type type);
void integer_max(Decode& d, ptx::Type type);
void integer_neg(Decode& d, ptx::Type type);
void integer_abs(Decode& d, ptx::Type type);

void float_add(Decode& d, ptx::Type type);
void float_sub(Decode& d, ptx::Type type);
void float_mul(Decode& d, ptx::Type type);
void float_fma(Decode& d, ptx::Type type);
void float_div(Decode& d, ptx::Type type);
void float_min(Decode& d, ptx::Type type);
void float_max(Decode& d, ptx::Type type);
void float_neg(Decode& d, ptx::Type type);
void float_abs(Decode& d, ptx::Type type);

}  // namespace tw::vgpu
