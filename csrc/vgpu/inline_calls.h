// Calls of device functions, replaced by the functions' bodies. The compilers inline nearly everything; what is
// left are a few large functions of the maths library (pow in f64).
#pragma once
#include "vgpu/ptx.h"

namespace tw::vgpu::ptx {

// The kernel with each direct call of a function that has a body in this module expanded in place; other
// calls stay. Throws UnsupportedError for recursion.
Kernel inline_calls(const Module& module, const Kernel& kernel);

}  // namespace tw::vgpu::ptx
