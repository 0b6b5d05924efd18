// From ptx::Kernel to Program: operands become offsets, each opcode finds its handler, branches
// learn their joins.
#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <tuple>

#include "vgpu/control_flow.h"
#include "vgpu/decoder.h"
#include "vgpu/fault.h"
#include "vgpu/inline_calls.h"
#include "vgpu/memory.h"
#include "vgpu/program.h"

namespace tw::vgpu {

using ptx::Operand;
using ptx::Space;
using ptx::Type;

std::string_view name_of(Class c) {
  static constexpr std::string_view kNames[] = {
      "integer",       "fp16",          "fp32",         "fp64",
      "conversion",    "move",          "predicate",    "special_function",
      "control",       "shuffle",       "vote",         "barrier",
      "global_memory", "shared_memory", "local_memory", "constant_memory",
      "atomic",        "tensor",        "async_copy",   "fence",
      "other"};
  return kNames[static_cast<size_t>(c)];
}

// ---- opcodes

static std::map<std::string, DecodeFn, std::less<>>& opcodes() {
  static std::map<std::string, DecodeFn, std::less<>> table;
  return table;
}
Opcode::Opcode(const char* prefix, DecodeFn decode) { opcodes()[prefix] = decode; }

// The longest registered prefix of a dotted opcode, and how many parts it has.
static std::pair<DecodeFn, size_t> find_opcode(const ptx::Instruction& in) {
  for (size_t parts = in.parts.size(); parts > 0; --parts) {
    std::string prefix = in.parts[0];
    for (size_t i = 1; i < parts; ++i) prefix += "." + in.parts[i];
    if (const auto found = opcodes().find(prefix); found != opcodes().end())
      return {found->second, parts};
  }
  return {nullptr, 0};
}

// ---- module memory

ModuleMemory::ModuleMemory(const ptx::Module& module) {
  for (const ptx::Variable& v : module.variables) {
    if (v.space == Space::shared) continue;
    if (v.external || v.bytes == 0)
      throw UnsupportedError("", v.line, "external variable " + v.name + " has no definition here");
    GlobalVariable g;
    g.name = v.name;
    g.bytes = v.bytes;
    g.constant = v.space == Space::constant;
    const uint64_t align = std::max<uint64_t>(256, v.align);
    g.storage = std::make_unique<uint8_t[]>(v.bytes + align);
    const auto address = reinterpret_cast<uintptr_t>(g.storage.get());
    g.data = g.storage.get() + ((address + align - 1) / align * align - address);
    std::copy(v.initial.begin(), v.initial.end(), g.data);
    variables.push_back(std::move(g));
  }
  for (const ptx::Variable& v : module.variables) {
    for (const ptx::Relocation& r : v.relocations) {
      const GlobalVariable* to = find(r.symbol);
      if (!to) throw UnsupportedError("", v.line, "address of unknown variable " + r.symbol);
      const uint64_t value = reinterpret_cast<uint64_t>(to->data) + static_cast<uint64_t>(r.addend);
      std::memcpy(find(v.name)->data + r.offset, &value, sizeof value);
    }
  }
}

const GlobalVariable* ModuleMemory::find(std::string_view name) const {
  for (const GlobalVariable& v : variables)
    if (v.name == name) return &v;
  return nullptr;
}

// ---- a kernel's decoding

Decoder::Decoder(std::shared_ptr<const ptx::Module> module, const ptx::Kernel& kernel,
                 std::shared_ptr<ModuleMemory> memory)
    : kernel(kernel),
      program(std::make_unique<Program>()),
      offsets(kernel.registers.size(), kNone) {
  program->name = kernel.name;
  program->target = module->target;
  program->module = std::move(module);
  program->memory = std::move(memory);
}

void Decoder::lay_out_variables() {
  uint32_t top_shared = kSharedBase, top_local = 0;
  std::vector<const ptx::Variable*> dynamic;
  const auto place = [](uint32_t& top, const ptx::Variable& v) {
    const uint64_t at = (top + v.align - 1) / v.align * v.align;
    if (at + v.bytes > uint64_t{1} << kSharedRankShift)
      throw UnsupportedError(v.name, v.line, "variable is too large for its memory");
    top = static_cast<uint32_t>(at + v.bytes);
    return static_cast<uint32_t>(at);
  };
  const auto add = [&](const ptx::Variable& v) {
    if (v.space == Space::shared) {
      if (v.bytes == 0)
        dynamic.push_back(&v);
      else
        program->shared.push_back({v.name, place(top_shared, v), v.bytes});
    } else if (v.space == Space::local || v.space == Space::param) {  // param: of a call
      locals[v.name] = place(top_local, v);
    }
  };
  // Shared variables of the module exist in every kernel that names them.
  for (const ptx::Variable& v : program->module->variables) {
    if (v.space != Space::shared) continue;
    bool used = false;
    const auto look = [&](auto&& self, const Operand& o) -> void {
      used |= o.kind == Operand::Kind::symbol && o.name == v.name;
      for (const Operand& item : o.items) self(self, item);
    };
    for (const ptx::Instruction& in : kernel.instructions)
      for (const Operand& o : in.operands) look(look, o);
    if (used) add(v);
  }
  for (const ptx::Variable& v : kernel.variables) add(v);
  program->static_shared_end = top_shared;
  for (const ptx::Variable* v : dynamic) {
    program->dynamic_shared_align =
        std::max(program->dynamic_shared_align, static_cast<uint32_t>(v->align));
    program->shared.push_back({v->name, program->dynamic_shared_base(), 0});
  }
  program->local_bytes = (top_local + 15) / 16 * 16;
}

const SharedVariable* Decoder::shared(std::string_view name) const {
  for (const SharedVariable& v : program->shared)
    if (v.name == name) return &v;
  return nullptr;
}
const ptx::Parameter* Decoder::parameter(std::string_view name) const {
  for (const ptx::Parameter& p : kernel.parameters)
    if (p.name == name) return &p;
  return nullptr;
}

uint32_t Decoder::constant(uint64_t value, int bits) {
  if (bits == 1) value = value ? 1 : 0;
  if (bits > 1 && bits < 64) value &= (uint64_t{1} << bits) - 1;
  const auto [found, added] = constants.try_emplace({value, bits}, program->constants.size());
  if (added) program->constants.push_back({allocate(bits), bits, value});
  return program->constants[found->second].offset;
}

static Special special_named(const std::string& name, bool* known) {
  static const std::map<std::string, Special> kNames = {
      {"%tid.x", Special::tid_x},
      {"%tid.y", Special::tid_y},
      {"%tid.z", Special::tid_z},
      {"%ntid.x", Special::ntid_x},
      {"%ntid.y", Special::ntid_y},
      {"%ntid.z", Special::ntid_z},
      {"%ctaid.x", Special::ctaid_x},
      {"%ctaid.y", Special::ctaid_y},
      {"%ctaid.z", Special::ctaid_z},
      {"%nctaid.x", Special::nctaid_x},
      {"%nctaid.y", Special::nctaid_y},
      {"%nctaid.z", Special::nctaid_z},
      {"%laneid", Special::laneid},
      {"%warpid", Special::warpid},
      {"%nwarpid", Special::nwarpid},
      {"%lanemask_eq", Special::lanemask_eq},
      {"%lanemask_le", Special::lanemask_le},
      {"%lanemask_lt", Special::lanemask_lt},
      {"%lanemask_ge", Special::lanemask_ge},
      {"%lanemask_gt", Special::lanemask_gt},
      {"%clusterid.x", Special::clusterid_x},
      {"%clusterid.y", Special::clusterid_y},
      {"%clusterid.z", Special::clusterid_z},
      {"%nclusterid.x", Special::nclusterid_x},
      {"%nclusterid.y", Special::nclusterid_y},
      {"%nclusterid.z", Special::nclusterid_z},
      {"%cluster_ctaid.x", Special::cluster_ctaid_x},
      {"%cluster_ctaid.y", Special::cluster_ctaid_y},
      {"%cluster_ctaid.z", Special::cluster_ctaid_z},
      {"%cluster_nctaid.x", Special::cluster_nctaid_x},
      {"%cluster_nctaid.y", Special::cluster_nctaid_y},
      {"%cluster_nctaid.z", Special::cluster_nctaid_z},
      {"%cluster_ctarank", Special::cluster_ctarank},
      {"%cluster_nctarank", Special::cluster_nctarank},
      {"%is_explicit_cluster", Special::is_explicit_cluster},
      {"%smid", Special::smid},
      {"%nsmid", Special::nsmid},
      {"%gridid", Special::gridid},
      {"%dynamic_smem_size", Special::dynamic_smem_size},
      {"%total_smem_size", Special::total_smem_size},
      {"%aggr_smem_size", Special::total_smem_size},
  };  // fmt: skip
  const auto found = kNames.find(name);
  *known = found != kNames.end();
  return *known ? found->second : Special::zero;
}

uint32_t Decoder::special(const ptx::Instruction& in, const std::string& name, int bits) {
  bool known = false;
  const Special which = special_named(name, &known);
  const int own = which == Special::is_explicit_cluster ? 1 : 32;
  if (!known)
    throw UnsupportedError(kernel.name, in.line,
                           "special register " + name + " is not supported: " + in.text);
  if (bits != own)
    throw UnsupportedError(kernel.name, in.line,
                           name + " has " + std::to_string(own) + " bits: " + in.text);
  const auto [found, added] = specials.try_emplace({which, 0}, program->specials.size());
  if (added) program->specials.push_back({which, allocate(own), 0});
  return program->specials[found->second].offset;
}

uint32_t Decoder::symbol(const ptx::Instruction& in, const Operand& o, int bits) {
  if (const SharedVariable* v = shared(o.name))
    return constant(static_cast<uint64_t>(v->offset + o.offset), bits);
  if (const auto found = locals.find(o.name); found != locals.end())
    return constant(static_cast<uint64_t>(found->second + o.offset), bits);
  if (const GlobalVariable* v = program->memory->find(o.name)) {
    if (bits != 64)
      throw UnsupportedError(kernel.name, in.line,
                             "the address of " + o.name + " has 64 bits: " + in.text);
    return constant(reinterpret_cast<uint64_t>(v->data) + static_cast<uint64_t>(o.offset), 64);
  }
  if (const ptx::Parameter* p = parameter(o.name)) {
    // Those of 64 bits are generic already; those of 32 are offsets, which cvta makes generic: no host address is as
    // small.
    const int64_t at = static_cast<int64_t>(p->offset) + o.offset;
    return bits == 64 ? parameter_address(at) : constant(static_cast<uint64_t>(at), bits);
  }
  throw UnsupportedError(kernel.name, in.line, "'" + o.name + "' is not declared: " + in.text);
}

uint32_t Decoder::parameter_address(int64_t offset) {
  const auto [found, added] =
      specials.try_emplace({Special::parameters, offset}, program->specials.size());
  if (added) program->specials.push_back({Special::parameters, allocate(64), offset});
  return program->specials[found->second].offset;
}

static Flow flow_of(const ptx::Kernel& kernel, const ptx::Instruction& in) {
  Flow f;
  f.conditional = in.guard != ptx::kNoRegister;
  const std::string& op = in.parts[0];
  const auto fail = [&](const std::string& what) {
    throw UnsupportedError(kernel.name, in.line, what + ": " + in.text);
  };
  if (op == "ret" || op == "exit" || op == "trap") {
    f.kind = Flow::Kind::exit;
  } else if (op == "bra") {
    f.kind = Flow::Kind::branch;
    if (in.operands.size() != 1 || in.operands[0].kind != Operand::Kind::label)
      fail("label is not defined");
    f.targets.push_back(in.operands[0].reg);
  } else if (op == "brx") {
    f.kind = Flow::Kind::branch;
    if (in.operands.size() != 2 || in.operands[1].kind != Operand::Kind::symbol)
      fail("brx.idx needs a target list");
    const auto list = kernel.target_lists.find(in.operands[1].name);
    if (list == kernel.target_lists.end()) fail("target list is not defined");
    f.targets = list->second;
  }
  return f;
}

void Decoder::decode_instruction(size_t index) {
  const ptx::Instruction& in = kernel.instructions[index];
  Instr& out = program->code[index];
  const auto [decode, parts] = find_opcode(in);
  if (!decode) throw UnsupportedError(kernel.name, in.line, "unsupported instruction: " + in.text);
  if (in.guard != ptx::kNoRegister) {
    out.guard = register_offset(in.guard);
    out.guard_flip = in.guard_negated ? kAllOnes : 0;
  }
  program->origins[index] = {in.line, in.location, in.text, nullptr};
  Decode d(*this, in, out);
  std::fill_n(d.taken_.begin(), parts, true);
  decode(d);
  d.finish();
  if (flow[index].kind == Flow::Kind::branch) {
    for (const uint32_t t : flow[index].targets) d.push(t);
    out.imm = flow[index].targets.front();
  }
}

// The registers of wgmma, those that are copied into them, and where each is used. Uses by wgmma itself are not listed.
void Decoder::find_kept_uses() {
  if (kept.empty()) return;
  const auto is_copy = [](const ptx::Instruction& in) {
    return in.parts[0] == "mov" && in.operands[0].kind == Operand::Kind::reg &&
           in.operands[1].kind == Operand::Kind::reg;
  };
  std::set<uint32_t> followed = kept;
  for (size_t before = 0; before != followed.size();) {
    before = followed.size();
    for (const ptx::Instruction& in : kernel.instructions)
      if (is_copy(in) && followed.contains(in.operands[0].reg)) followed.insert(in.operands[1].reg);
  }
  program->kept_uses.resize(program->code.size());
  for (size_t i = 0; i < kernel.instructions.size(); ++i) {
    const ptx::Instruction& in = kernel.instructions[i];
    if (in.parts[0] == "wgmma") continue;
    const bool stores = in.parts[0] == "st" || in.parts[0] == "red" || in.parts[0] == "stmatrix";
    const uint32_t copied = is_copy(in) ? register_offset(in.operands[1].reg) : kNone;
    const auto look = [&](auto&& self, const Operand& o, bool written) -> void {
      if (o.kind == Operand::Kind::reg && followed.contains(o.reg))
        program->kept_uses[i].push_back({register_offset(o.reg), written, copied});
      const bool address = o.kind == Operand::Kind::address;
      for (const Operand& item : o.items) self(self, item, written && !address);
    };
    for (size_t k = 0; k < in.operands.size(); ++k) look(look, in.operands[k], k == 0 && !stores);
  }
}

std::unique_ptr<Program> Decoder::run() {
  lay_out_variables();
  const size_t n = kernel.instructions.size();
  program->code.resize(n + 1);
  program->origins.resize(n + 1);
  for (const ptx::Instruction& in : kernel.instructions) flow.push_back(flow_of(kernel, in));
  flow.push_back({Flow::Kind::exit, false, {}});
  const std::vector<uint32_t> joins = join_points(flow);
  for (size_t i = 0; i < kernel.registers.size(); ++i) register_offset(static_cast<uint32_t>(i));
  top = (top + 63) / 64 * 64;
  program->plain_bytes = top;
  for (size_t i = 0; i < n; ++i) {
    program->code[i].join = joins[i];
    decode_instruction(i);
  }
  // The end of the text is an exit; labels may stand there.
  ptx::Instruction end;
  end.opcode = "ret";
  end.parts = {"ret"};
  end.text = "end of kernel";
  end.line = n ? kernel.instructions.back().line : kernel.line;
  program->origins[n] = {end.line, {}, end.text, nullptr};
  Decode d(*this, end, program->code[n]);
  d.taken_[0] = true;
  opcodes().at("ret")(d);
  find_kept_uses();
  program->register_bytes = (top + 63) / 64 * 64;
  program->kernel = kernel;
  program->kernel.instructions.clear();
  return std::move(program);
}

std::unique_ptr<Program> decode(std::shared_ptr<const ptx::Module> module,
                                const ptx::Kernel& kernel, std::shared_ptr<ModuleMemory> memory) {
  const ptx::Kernel flat = ptx::inline_calls(*module, kernel);
  return Decoder(std::move(module), flat, std::move(memory)).run();
}

}  // namespace tw::vgpu
