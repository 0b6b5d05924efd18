// trainwright._host: the scalar functions of csrc/include, for the tests to check bit by bit. Not
// an op library: tensors go through the torch dispatcher.
#include <pybind11/pybind11.h>

#include <cmath>

#include "trainwright/philox.h"
#include "trainwright/types.h"

namespace py = pybind11;

PYBIND11_MODULE(_host, m) {
  m.doc() = "Scalar functions of Trainwright's headers, for tests.";
  m.def("philox", [](uint64_t seed, uint64_t block, uint64_t stream) {
    const tw::Philox4 r = tw::philox_block(seed, block, stream);
    return py::make_tuple(r.v[0], r.v[1], r.v[2], r.v[3]);
  });
  m.def("uniform01", &tw::uniform01);
  m.def("float_to_bf16_bits", [](float x) { return tw::to_bf16(x).bits; });
  m.def("bf16_bits_to_float", [](uint16_t bits) { return tw::to_float(tw::bf16{bits}); });
  m.def("float_to_f16_bits", [](float x) { return tw::to_f16(x).bits; });
  m.def("f16_bits_to_float", [](uint16_t bits) { return tw::to_float(tw::f16{bits}); });
}
