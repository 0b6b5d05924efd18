#pragma once

#include <pybind11/pybind11.h>

namespace tw::vgpu {

// Adds encode_tiled, which makes tensor maps, to a Python module.
void bind_tensor_maps(pybind11::module_& m);

}  // namespace tw::vgpu
