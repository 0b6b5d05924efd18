// The number formats on arrays, for the tests.
#include "vgpu/number_binding.h"

#include <pybind11/numpy.h>

#include <string>

#include "vgpu/number.h"

namespace tw::vgpu {
namespace {

namespace py = pybind11;

using Bits = py::array_t<uint64_t, py::array::c_style | py::array::forcecast>;
using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;

template<class F>
void for_format(const std::string& name, const char* own, bool& found, auto f) {
  if (name != own) return;
  found = true;
  f(F{});
}
// f(format) for the format of that name, of those that PTX calculates in; of all.
bool with_arithmetic_format(const std::string& name, auto f) {
  bool found = false;
  for_format<F16>(name, "f16", found, f);
  for_format<BF16>(name, "bf16", found, f);
  for_format<F32>(name, "f32", found, f);
  return found;
}
void with_format(const std::string& name, auto f) {
  bool found = with_arithmetic_format(name, f);
  for_format<E4M3>(name, "e4m3", found, f);
  for_format<E5M2>(name, "e5m2", found, f);
  for_format<TF32>(name, "tf32", found, f);
  if (!found) throw py::value_error("unknown number format " + name);
}

template<Rounding R>
struct Mode {
  static constexpr Rounding value = R;
};
// f(mode) for the rounding mode of that name.
void with_mode(const std::string& name, auto f) {
  if (name == "rn") return f(Mode<Rounding::rn>{});
  if (name == "rz") return f(Mode<Rounding::rz>{});
  if (name == "rm") return f(Mode<Rounding::rm>{});
  if (name == "rp") return f(Mode<Rounding::rp>{});
  if (name == "rna") return f(Mode<Rounding::rna>{});
  throw py::value_error("unknown rounding mode " + name);
}

template<class Out, class In>
auto map(const In& in, auto f) {
  py::array_t<Out> out(in.size());
  const auto* x = in.data();
  Out* y = out.mutable_data();
  for (py::ssize_t i = 0; i < in.size(); ++i) y[i] = f(x[i]);
  return out;
}

auto narrow_array(const std::string& format, const std::string& mode, bool satfinite,
                  const Doubles& x) {
  py::array_t<uint64_t> out;
  with_format(format, [&](auto f) {
    with_mode(mode, [&](auto m) {
      using F = decltype(f);
      constexpr Rounding R = decltype(m)::value;
      out = map<uint64_t>(x, [&](double v) -> uint64_t {
        return satfinite ? narrow<F, R, true>(v) : narrow<F, R>(v);
      });
    });
  });
  return out;
}

auto widen_array(const std::string& format, const Bits& x) {
  py::array_t<double> out;
  with_format(format, [&](auto f) {
    out = map<double>(
        x, [&](uint64_t v) -> double { return widen<decltype(f)>(static_cast<uint32_t>(v)); });
  });
  return out;
}

// f(i) for all i; the caller's arrays have one length.
auto tabulate(py::ssize_t n, auto f) {
  py::array_t<uint64_t> out(n);
  uint64_t* y = out.mutable_data();
  for (py::ssize_t i = 0; i < n; ++i) y[i] = f(i);
  return out;
}

auto arithmetic(const std::string& op, const std::string& format, const std::string& mode, bool ftz,
                const Bits& a, const Bits& b, const Bits& c) {
  if (a.size() != b.size() || a.size() != c.size())
    throw py::value_error("operands of different lengths");
  const uint64_t *x = a.data(), *y = b.data(), *z = c.data();
  py::array_t<uint64_t> out;
  const auto apply = [&](auto f) { out = tabulate(a.size(), f); };
  with_mode(mode, [&](auto m) {
    constexpr Rounding R = decltype(m)::value;
    if (format == "f64") {
      const auto on_doubles = [&](auto f) {
        apply([&](auto i) { return to_bits(f(f64_of(x[i]), f64_of(y[i]), f64_of(z[i]))); });
      };
      using D = double;
      if (op == "add") return on_doubles([](D p, D q, D) { return add_f64<R>(p, q); });
      if (op == "mul") return on_doubles([](D p, D q, D) { return mul_f64<R>(p, q); });
      if (op == "fma") return on_doubles([](D p, D q, D r) { return fma_f64<R>(p, q, r); });
      if (op == "div") return on_doubles([](D p, D q, D) { return div_f64<R>(p, q); });
      if (op == "sqrt") return on_doubles([](D p, D, D) { return sqrt_f64<R>(p); });
      throw py::value_error("unknown operation " + op);
    }
    const bool found = with_arithmetic_format(format, [&](auto g) {
      using F = decltype(g);
      using B = typename F::bits;
      const auto with_ftz = [&](auto flushing) {
        constexpr bool Z = decltype(flushing)::value;
        if (op == "add")
          return apply([&](auto i) { return uint64_t{add<F, R, Z>(B(x[i]), B(y[i]))}; });
        if (op == "mul")
          return apply([&](auto i) { return uint64_t{mul<F, R, Z>(B(x[i]), B(y[i]))}; });
        if (op == "fma")
          return apply([&](auto i) { return uint64_t{fma<F, R, Z>(B(x[i]), B(y[i]), B(z[i]))}; });
        if (op == "div")
          return apply([&](auto i) { return uint64_t{div<F, R, Z>(B(x[i]), B(y[i]))}; });
        if (op == "sqrt")
          return apply([&](auto i) { return uint64_t{tw::vgpu::sqrt<F, R, Z>(B(x[i]))}; });
        throw py::value_error("unknown operation " + op);
      };
      if (ftz)
        with_ftz(std::true_type{});
      else
        with_ftz(std::false_type{});
    });
    if (!found) throw py::value_error("no arithmetic in " + format);
  });
  return out;
}

// On bits: relu, sat, ftz.
auto modifier(const std::string& name, const std::string& format, const Bits& in) {
  py::array_t<uint64_t> out;
  with_format(format, [&](auto g) {
    using F = decltype(g);
    using B = typename F::bits;
    out = map<uint64_t>(in, [&](uint64_t v) -> uint64_t {
      if (name == "relu") return relu<F>(B(v));
      if (name == "sat") return saturate_bits<F>(B(v));
      if (name == "ftz") return flush<F>(B(v));
      throw py::value_error("unknown modifier " + name);
    });
  });
  return out;
}

auto from_integer(const std::string& format, const std::string& mode, bool is_signed,
                  const Bits& in) {
  py::array_t<uint64_t> out;
  with_mode(mode, [&](auto m) {
    constexpr Rounding R = decltype(m)::value;
    const auto convert = [&](auto f) {
      using F = decltype(f);
      out = map<uint64_t>(in, [&](uint64_t v) -> uint64_t {
        return is_signed ? from_signed<F, R>(static_cast<int64_t>(v)) : from_unsigned<F, R>(v);
      });
    };
    if (format == "f64")
      convert(F64{});
    else
      with_format(format, convert);
  });
  return out;
}

auto to_integer_array(const std::string& type, const std::string& mode, bool from64,
                      const Doubles& in) {
  py::array_t<int64_t> out;
  with_mode(mode, [&](auto m) {
    constexpr Rounding R = decltype(m)::value;
    const auto convert = [&](auto zero) {
      using Int = decltype(zero);
      out = map<int64_t>(in, [&](double v) {
        return static_cast<int64_t>(from64 ? to_integer<Int, R, true>(v) : to_integer<Int, R>(v));
      });
    };
    if (type == "s8") return convert(int8_t{});
    if (type == "u8") return convert(uint8_t{});
    if (type == "s16") return convert(int16_t{});
    if (type == "u16") return convert(uint16_t{});
    if (type == "s32") return convert(int32_t{});
    if (type == "u32") return convert(uint32_t{});
    if (type == "s64") return convert(int64_t{});
    if (type == "u64") return convert(uint64_t{});
    throw py::value_error("unknown integer type " + type);
  });
  return out;
}

double extreme(bool largest, bool nan_wins, double a, double b) {
  if (largest) return nan_wins ? maximum<true>(a, b) : maximum(a, b);
  return nan_wins ? minimum<true>(a, b) : minimum(a, b);
}

}  // namespace

void bind_numbers(py::module_& m) {
  m.def("narrow", &narrow_array, "float64 to the bits of a format");
  m.def("widen", &widen_array, "bits of a format to float64");
  m.def("arithmetic", &arithmetic, "one operation on arrays of bits");
  m.def("modifier", &modifier, "relu, sat or ftz on bits");
  m.def("from_integer", &from_integer, "64-bit integers to the bits of a format");
  m.def("to_integer", &to_integer_array, "float64 to an integer type");
  m.def("extreme", &extreme, "min or max of two numbers");
}

}  // namespace tw::vgpu
