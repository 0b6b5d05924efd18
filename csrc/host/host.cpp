// trainwright._host: the scalar functions of csrc/include, for the tests to check bit by bit. Not
// an op library: tensors go through the torch dispatcher.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <string>

#include "trainwright/philox.h"
#include "trainwright/types.h"
#include "trainwright/vec_math.h"

namespace py = pybind11;

// One function of vec_math.h on an array of floats, in vectors of the baseline instruction set.
static py::array_t<float> vec_math(const std::string& function, const py::array_t<float>& in) {
  py::array_t<float> out(in.size());
  const float* x = in.data();
  float* y = out.mutable_data();
  const auto map = [&](auto f) {
    tw::for_lanes<float>(in.size(), [&](int64_t i, auto k) {
      tw::vstore<float>(y + i, f(tw::vload<float>(x + i, k)), k);
    });
  };
  if (function == "exp")
    map([](tw::vf v) { return tw::vexp(v); });
  else if (function == "log")
    map([](tw::vf v) { return tw::vlog(v); });
  else if (function == "tanh")
    map([](tw::vf v) { return tw::vtanh(v); });
  else if (function == "sigmoid")
    map([](tw::vf v) { return tw::vsigmoid(v); });
  else if (function == "cdf")
    map([](tw::vf v) { return tw::vnormal(v).cdf; });
  else if (function == "pdf")
    map([](tw::vf v) { return tw::vnormal(v).pdf; });
  else
    throw py::value_error("vec_math: unknown function " + function);
  return out;
}

PYBIND11_MODULE(_host, m) {
  m.doc() = "Scalar functions of Trainwright's headers, for tests.";
  m.def("philox", [](uint64_t seed, uint64_t block, uint64_t stream) {
    const tw::Philox4 r = tw::philox_block(seed, block, stream);
    return py::make_tuple(r.v[0], r.v[1], r.v[2], r.v[3]);
  });
  m.def("uniform01", &tw::uniform01);
  m.def("vec_math", &vec_math);
  m.def("float_to_bf16_bits", [](float x) { return tw::to_bf16(x).bits; });
  m.def("bf16_bits_to_float", [](uint16_t bits) { return tw::to_float(tw::bf16{bits}); });
  m.def("float_to_f16_bits", [](float x) { return tw::to_f16(x).bits; });
  m.def("f16_bits_to_float", [](uint16_t bits) { return tw::to_float(tw::f16{bits}); });
}
