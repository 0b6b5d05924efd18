// Python module trainwright._vgpu: PTX in, a launch on host memory, counts and faults out. The face that users
// see is trainwright.vgpu.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "vgpu/fault.h"
#include "vgpu/grid.h"
#include "vgpu/number_binding.h"
#include "vgpu/program.h"
#include "vgpu/tensor_binding.h"

namespace py = pybind11;

namespace tw::vgpu {

namespace {

// A module with its kernels, decoded at their first use.
class LoadedModule {
 public:
  explicit LoadedModule(const std::string& text)
      : module_(std::make_shared<ptx::Module>(ptx::parse(text))),
        memory_(std::make_shared<ModuleMemory>(*module_)) {}

  const ptx::Module& module() const { return *module_; }
  const ptx::Kernel& kernel(const std::string& name) const {
    for (const ptx::Kernel& k : module_->kernels)
      if (k.name == name) return k;
    std::string names;
    for (const ptx::Kernel& k : module_->kernels) names += (names.empty() ? "" : ", ") + k.name;
    throw LaunchError("no kernel " + name +
                      " in this module; it has: " + (names.empty() ? "none" : names));
  }
  const Program& program(const std::string& name) {
    for (const auto& p : programs_)
      if (p->name == name) return *p;
    programs_.push_back(decode(module_, kernel(name), memory_));
    return *programs_.back();
  }
  const GlobalVariable& variable(const std::string& name) const {
    const GlobalVariable* v = memory_->find(name);
    if (!v) throw LaunchError("no variable " + name + " in this module");
    return *v;
  }

 private:
  std::shared_ptr<ptx::Module> module_;
  std::shared_ptr<ModuleMemory> memory_;
  std::vector<std::unique_ptr<Program>> programs_;
};

using Shape = std::array<uint32_t, 3>;
using Range = std::tuple<uint64_t, uint64_t, bool>;  // address, bytes, read-only

py::tuple launch(LoadedModule& module, const std::string& name, Shape grid, Shape block,
                 Shape cluster, uint32_t dynamic_shared, const py::bytes& parameters,
                 const std::vector<Range>& memory, unsigned threads, bool reverse_warps,
                 Check check, bool unfenced_copies, Counters* counters) {
  const Program& program = module.program(name);
  Launch l;
  std::copy(grid.begin(), grid.end(), l.grid);
  std::copy(block.begin(), block.end(), l.block);
  std::copy(cluster.begin(), cluster.end(), l.cluster);
  l.dynamic_shared = dynamic_shared;
  l.reverse_warps = reverse_warps;
  l.check = check;
  l.unfenced_copies = unfenced_copies;
  l.counters = counters;
  const std::string bytes = parameters;
  l.parameters.assign(bytes.begin(), bytes.end());
  for (const auto& [address, size, read_only] : memory) l.memory.add({address, size, read_only});
  LaunchResult result;
  bool signalled = false;
  {
    const py::gil_scoped_release release;
    result = run_grid(program, l, threads, [&signalled] {
      const py::gil_scoped_acquire acquire;
      signalled = signalled || PyErr_CheckSignals() != 0;
      return signalled;
    });
  }
  if (signalled) throw py::error_already_set();
  return py::make_tuple(result.warp_instructions, result.seconds);
}

// One tuple for each instruction that was issued; trainwright.vgpu.counters names the entries.
py::list rows_of(const Counters& counters) {
  const Program& program = counters.program();
  py::list out;
  for (size_t pc = 0; pc < program.code.size(); ++pc) {
    const Count& c = counters.counts()[pc];
    if (!c.issues) continue;
    const Program::Origin& o = program.origins[pc];
    const auto file = program.module->files.find(o.location.file);
    const auto traffic = [](const Count::Traffic& t) {
      return py::make_tuple(t.requests, t.bytes, t.sectors);
    };
    out.append(py::make_tuple(pc, o.line, o.text, std::string(name_of(program.code[pc].kind)),
                              file == program.module->files.end() ? std::string() : file->second,
                              o.location.line, c.issues, c.lanes, traffic(c.load), traffic(c.store),
                              c.shared_requests, c.wavefronts, c.ideal_wavefronts, c.local_bytes));
  }
  return out;
}

py::list parameters_of(const ptx::Kernel& k) {
  py::list out;
  for (const ptx::Parameter& p : k.parameters)
    out.append(
        py::make_tuple(p.name, std::string(ptx::name_of(p.type)), p.offset, p.bytes, p.aggregate));
  return out;
}

// ---- exceptions: the classes of trainwright.vgpu.errors

const char* class_of(Fault::Kind kind) {
  switch (kind) {
    case Fault::Kind::memory:
      return "MemoryFault";
    case Fault::Kind::race:
      return "RaceError";
    case Fault::Kind::uninitialised:
      return "UninitialisedError";
    case Fault::Kind::asynchronous:
      return "AsyncError";
    case Fault::Kind::barrier:
      return "BarrierError";
    case Fault::Kind::deadlock:
      return "DeadlockError";
    case Fault::Kind::trap:
      return "TrapError";
  }
  return "Fault";
}
void raise(const char* name, const char* message, const Fault* fault) {
  const py::object cls = py::module_::import("trainwright.vgpu.errors").attr(name);
  const py::object error = cls(py::str(message));
  if (fault) {
    error.attr("kernel") = fault->kernel;
    error.attr("ptx_line") = fault->ptx_line;
    error.attr("instruction") = fault->instruction;
    error.attr("source_file") = fault->source_file;
    error.attr("source_line") = fault->source_line;
    error.attr("block") = py::make_tuple(fault->block[0], fault->block[1], fault->block[2]);
    error.attr("warp") = fault->warp;
    error.attr("lane") = fault->lane;
    if (fault->has_address)
      error.attr("address") = fault->address;
    else
      error.attr("address") = py::none();
  }
  PyErr_SetObject(cls.ptr(), error.ptr());
}
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Fault& f) {
    raise(class_of(f.kind), f.what(), &f);
  } catch (const SyntaxError& e) {
    raise("PtxSyntaxError", e.what(), nullptr);
  } catch (const UnsupportedError& e) {
    raise("UnsupportedError", e.what(), nullptr);
  } catch (const LaunchError& e) {
    raise("LaunchError", e.what(), nullptr);
  }
}

}  // namespace

PYBIND11_MODULE(_vgpu, m) {
#ifdef __AVX2__
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    throw py::import_error(
        "trainwright._vgpu was built for a CPU with AVX2 and FMA; build it on this machine");
#endif
  py::register_exception_translator(translate);
  bind_numbers(m);
  bind_tensor_maps(m);

  py::enum_<Check>(m, "Check")
      .value("off", Check::off)
      .value("on", Check::on)
      .value("strict", Check::strict)
      .value("global_", Check::global);
  py::class_<LoadedModule>(m, "Module")
      .def(py::init<const std::string&>(), py::arg("ptx"))
      .def_property_readonly("target", [](const LoadedModule& m) { return m.module().target; })
      .def_property_readonly("kernels",
                             [](const LoadedModule& m) {
                               std::vector<std::string> names;
                               for (const ptx::Kernel& k : m.module().kernels)
                                 names.push_back(k.name);
                               return names;
                             })
      .def("parameters", [](const LoadedModule& m,
                            const std::string& name) { return parameters_of(m.kernel(name)); })
      .def("parameter_bytes",
           [](const LoadedModule& m, const std::string& name) {
             return m.kernel(name).parameter_bytes;
           })
      .def("required_block",
           [](const LoadedModule& m, const std::string& name) {
             const uint32_t* n = m.kernel(name).reqntid;
             return py::make_tuple(n[0], n[1], n[2]);
           })
      .def("required_cluster",
           [](const LoadedModule& m, const std::string& name) {
             const uint32_t* n = m.kernel(name).cluster;
             return py::make_tuple(n[0], n[1], n[2]);
           })
      .def(
          "decode", [](LoadedModule& m, const std::string& name) { m.program(name); },
          "Decodes a kernel; raises if one of its instructions is not supported.")
      .def("variable",
           [](const LoadedModule& m, const std::string& name) {
             const GlobalVariable& v = m.variable(name);
             return py::make_tuple(reinterpret_cast<uint64_t>(v.data), v.bytes);
           })
      .def("launch", launch, py::arg("name"), py::arg("grid"), py::arg("block"), py::arg("cluster"),
           py::arg("dynamic_shared"), py::arg("parameters"), py::arg("memory"), py::arg("threads"),
           py::arg("reverse_warps"), py::arg("check"), py::arg("unfenced_copies"),
           py::arg("counters"))
      .def(
          "counters",
          [](LoadedModule& m, const std::string& name) {
            return std::make_unique<Counters>(m.program(name));
          },
          py::keep_alive<0, 1>());

  py::class_<Counters>(m, "Counters")
      .def("rows", rows_of)
      .def_property_readonly("sectors", [](const Counters& c) {
        return py::make_tuple(c.sectors_read(), c.sectors_written());
      });
}

}  // namespace tw::vgpu
