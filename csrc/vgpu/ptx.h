// PTX as data: what the parser hands to the decoder. Text only; nothing is executed or checked
// against an architecture here.
//
// The grammar is that of nvcc 13 and Triton 3.6 to 3.9: one module with variables and kernels; a
// kernel with parameters, scoped registers, variables and labels, and instructions.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tw::vgpu::ptx {

enum class Space : uint8_t { generic, reg, param, local, shared, global, constant };

// Types of registers, variables, parameters and of most instruction suffixes.
enum class Type : uint8_t {
  none,
  pred,
  b8,
  b16,
  b32,
  b64,
  b128,
  u8,
  u16,
  u32,
  u64,
  s8,
  s16,
  s32,
  s64,
  f16,
  f16x2,
  bf16,
  bf16x2,
  tf32,
  f32,
  f64,
};  // fmt: skip

int bits_of(Type type);  // pred: 1
bool is_float(Type type);
bool is_signed(Type type);
std::optional<Type> type_named(std::string_view name);  // "u32"
std::string_view name_of(Type type);

struct Operand {
  enum class Kind : uint8_t {
    reg,      // Kernel::registers[reg]
    special,  // %tid.x, %laneid, ...: `name`
    integer,  // bits
    real,     // bits of a float (single) or a double
    symbol,   // a variable, parameter or function: `name` (+ offset)
    label,    // instruction index `reg`, one past the last for a label at the end; or a target list
    address,  // [items[0] + offset, items[1], ...]
    vector,   // {items...}
    pair,     // items[0] | items[1]
    list,     // (items...) of a call
    sink,     // _
  };
  Kind kind = Kind::sink;
  bool negated = false;  // !%p
  bool single = false;
  uint32_t reg = 0;
  uint64_t bits = 0;
  int64_t offset = 0;
  std::string name;
  std::vector<Operand> items;
};

struct Location {
  int file = 0;  // Module::files; 0: unknown
  int line = 0;
};

constexpr uint32_t kNoRegister = 0xffffffff;

struct Instruction {
  std::string opcode;              // "ld.global.v4.f32"
  std::vector<std::string> parts;  // {"ld", "global", "v4", "f32"}; "::" does not split
  std::string text;                // as written, blanks collapsed
  uint32_t guard = kNoRegister;    // @%p
  bool guard_negated = false;
  std::vector<Operand> operands;
  int line = 0;       // of the PTX text
  Location location;  // of the source, by .loc
};

struct Register {
  std::string name;
  Type type;
};

// A pointer stored in a variable's initial value.
struct Relocation {
  uint64_t offset;
  std::string symbol;
  int64_t addend;
};

struct Variable {
  std::string name;
  Space space = Space::generic;
  Type type = Type::none;
  uint64_t align = 1;
  uint64_t bytes = 0;  // 0: `extern`, sized by the launch
  bool external = false;
  std::vector<uint8_t> initial;  // shorter than `bytes`: the rest is zero
  std::vector<Relocation> relocations;
  int line = 0;
};

struct Parameter {
  std::string name;
  Type type = Type::none;
  uint64_t align = 1;
  uint64_t bytes = 0;
  uint64_t offset = 0;     // in the parameter buffer
  bool aggregate = false;  // declared as an array: a struct passed by value
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  std::vector<Parameter> results;  // of a device function
  uint64_t parameter_bytes = 0;
  std::vector<Register> registers;  // those that are used
  std::vector<Variable> variables;  // .shared, .local, .param inside the body
  std::vector<Instruction> instructions;
  std::map<std::string, std::vector<uint32_t>> target_lists;  // .branchtargets
  uint32_t reqntid[3] = {0, 0, 0};                            // 0: not given
  uint32_t maxntid[3] = {0, 0, 0};
  uint32_t cluster[3] = {0, 0, 0};  // .reqnctapercluster
  int line = 0;
};

struct Module {
  std::string version;
  std::string target;  // "sm_90a"
  std::map<int, std::string> files;
  std::vector<Variable> variables;  // .global, .const, .shared at module level
  std::vector<Kernel> kernels;
  std::vector<Kernel> functions;  // device functions that have a body
};

// Throws SyntaxError; never crashes, whatever the text.
Module parse(std::string_view text);

}  // namespace tw::vgpu::ptx
