#include "vgpu/inline_calls.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "vgpu/fault.h"

namespace tw::vgpu::ptx {

namespace {

constexpr int kMaxDepth = 32;
constexpr size_t kMaxInstructions = size_t{1} << 22;

const Kernel* callee_of(const Module& module, const Instruction& in) {
  if (in.parts[0] != "call") return nullptr;
  for (const Operand& o : in.operands)
    if (o.kind == Operand::Kind::symbol)
      for (const Kernel& f : module.functions)
        if (f.name == o.name) return &f;
  return nullptr;
}

// The names that the call passes, by the names that the function knows them under. Parameters are variables in
// local memory, so passing one is letting the function use the caller's.
std::map<std::string, std::string> bind_parameters(const Kernel& caller, const Kernel& function,
                                                   const Instruction& call) {
  std::map<std::string, std::string> names;
  bool after_name = false;
  const auto bind = [&](const Operand& list, const std::vector<Parameter>& formal) {
    if (list.items.size() != formal.size())
      throw UnsupportedError(caller.name, call.line, "wrong number of parameters: " + call.text);
    for (size_t i = 0; i < formal.size(); ++i) {
      if (list.items[i].kind != Operand::Kind::symbol)
        throw UnsupportedError(caller.name, call.line,
                               "parameters of a call must be .param variables: " + call.text);
      names[formal[i].name] = list.items[i].name;
    }
  };
  for (const Operand& o : call.operands) {
    after_name |= o.kind == Operand::Kind::symbol;
    if (o.kind == Operand::Kind::list) bind(o, after_name ? function.parameters : function.results);
  }
  return names;
}

class Inliner {
 public:
  Inliner(const Module& module, const Kernel& kernel) : module_(module), out_(kernel) {
    out_.instructions.clear();
    out_.target_lists.clear();
  }

  // Appends the body of `function`, its registers numbered from `first`, its names replaced by `names`.
  // A `ret` inside a called function goes to the instruction after the body.
  void append(const Kernel& function, uint32_t first,
              const std::map<std::string, std::string>& names, int depth) {
    if (depth > kMaxDepth || out_.instructions.size() > kMaxInstructions)
      throw UnsupportedError(out_.name, function.line, "recursive function " + function.name);
    const std::string suffix = depth ? "@" + std::to_string(copies_++) : "";
    std::map<std::string, std::string> own = names;
    for (const Variable& v : function.variables) own[v.name] = v.name + (depth ? suffix : "");
    if (depth)
      for (Variable v : function.variables) {
        v.name += suffix;
        out_.variables.push_back(std::move(v));
      }
    for (const auto& [name, targets] : function.target_lists) own[name] = name + suffix;

    std::vector<uint32_t> position;  // of each of the function's instructions in out_
    std::vector<size_t> to_fix;      // instructions of out_ whose labels count in the function
    std::vector<size_t> returns;
    for (const Instruction& in : function.instructions) {
      position.push_back(static_cast<uint32_t>(out_.instructions.size()));
      Instruction copy = in;
      if (copy.guard != kNoRegister) copy.guard += first;
      for (Operand& o : copy.operands) rename(o, first, own);
      if (const Kernel* callee = callee_of(module_, copy)) {
        expand(*callee, copy, depth);
        continue;
      }
      if (depth && copy.parts[0] == "ret") {
        returns.push_back(out_.instructions.size());
        copy.opcode = "bra";
        copy.parts = {"bra"};
      } else {
        to_fix.push_back(out_.instructions.size());
      }
      out_.instructions.push_back(std::move(copy));
    }
    const auto end = static_cast<uint32_t>(out_.instructions.size());
    position.push_back(end);
    for (const size_t i : to_fix)
      for (Operand& o : out_.instructions[i].operands) relabel(o, position);
    for (const size_t i : returns) out_.instructions[i].operands = {label(end)};
    for (const auto& [name, targets] : function.target_lists)
      for (const uint32_t t : targets) out_.target_lists[own[name]].push_back(position[t]);
  }

  Kernel take() { return std::move(out_); }

 private:
  static Operand label(uint32_t target) {
    Operand o;
    o.kind = Operand::Kind::label;
    o.reg = target;
    return o;
  }

  void expand(const Kernel& callee, const Instruction& call, int depth) {
    size_t skip = 0;
    if (call.guard != kNoRegister) {  // around the body, where the guard is false
      Instruction branch = call;
      branch.opcode = "bra";
      branch.parts = {"bra"};
      branch.guard_negated = !branch.guard_negated;
      skip = out_.instructions.size();
      out_.instructions.push_back(std::move(branch));
    }
    const auto first = static_cast<uint32_t>(out_.registers.size());
    out_.registers.insert(out_.registers.end(), callee.registers.begin(), callee.registers.end());
    append(callee, first, bind_parameters(out_, callee, call), depth + 1);
    if (call.guard != kNoRegister)
      out_.instructions[skip].operands = {label(static_cast<uint32_t>(out_.instructions.size()))};
  }

  static void rename(Operand& o, uint32_t first, const std::map<std::string, std::string>& names) {
    if (o.kind == Operand::Kind::reg) o.reg += first;
    if (o.kind == Operand::Kind::symbol)
      if (const auto found = names.find(o.name); found != names.end()) o.name = found->second;
    for (Operand& item : o.items) rename(item, first, names);
  }
  static void relabel(Operand& o, const std::vector<uint32_t>& position) {
    if (o.kind == Operand::Kind::label) o.reg = position[o.reg];
    for (Operand& item : o.items) relabel(item, position);
  }

  const Module& module_;
  Kernel out_;
  int copies_ = 0;
};

}  // namespace

Kernel inline_calls(const Module& module, const Kernel& kernel) {
  const auto calls = [&](const Instruction& in) { return callee_of(module, in) != nullptr; };
  if (std::none_of(kernel.instructions.begin(), kernel.instructions.end(), calls)) return kernel;
  Inliner inliner(module, kernel);
  inliner.append(kernel, 0, {}, 0);
  return inliner.take();
}

}  // namespace tw::vgpu::ptx
