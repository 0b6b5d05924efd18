#pragma once

#include <pybind11/pybind11.h>

namespace tw::vgpu {

// Adds the functions of number.h, on arrays, to a Python module.
void bind_numbers(pybind11::module_& m);

}  // namespace tw::vgpu
