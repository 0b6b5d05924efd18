// Tensor maps from Python, as cuTensorMapEncodeTiled makes them.
#include "vgpu/tensor_binding.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "vgpu/tma.h"

namespace tw::vgpu {

namespace py = pybind11;

static py::bytes tensor_map_bytes(int type, uint64_t address, const std::vector<uint64_t>& dims,
                                  const std::vector<uint64_t>& strides,
                                  const std::vector<uint32_t>& box,
                                  const std::vector<uint32_t>& element_strides, int interleave,
                                  int swizzle, int fill) {
  if (strides.size() + 1 != dims.size() || box.size() != dims.size() ||
      element_strides.size() != dims.size())
    throw py::value_error("tensor map: sizes, strides and box of different ranks");
  TensorMap map;
  const std::string problem =
      encode_tiled(map, type, static_cast<uint32_t>(dims.size()), address, dims.data(),
                   strides.data(), box.data(), element_strides.data(), interleave, swizzle, fill);
  if (!problem.empty()) throw py::value_error(problem);
  return {reinterpret_cast<const char*>(&map), sizeof(map)};
}

void bind_tensor_maps(py::module_& m) {
  m.def("encode_tiled", &tensor_map_bytes, py::arg("type"), py::arg("address"), py::arg("dims"),
        py::arg("strides"), py::arg("box"), py::arg("element_strides"), py::arg("interleave"),
        py::arg("swizzle"), py::arg("fill"),
        "The 128 bytes of a tensor map. Arguments as cuTensorMapEncodeTiled has them: type is a "
        "CUtensorMapDataType, strides are bytes and leave out dimension 0.");
}

}  // namespace tw::vgpu
