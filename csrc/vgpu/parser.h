// The recursive-descent parser of PTX. parser_module.cpp reads what stands outside of kernels, parser_kernel.cpp
// what stands inside.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "vgpu/fault.h"
#include "vgpu/lexer.h"
#include "vgpu/ptx.h"

namespace tw::vgpu::ptx {

constexpr uint64_t kMaxVariableBytes = uint64_t{1} << 32;
constexpr int kMaxNesting = 64;  // of { } scopes and of vectors in an operand

class Parser {
 public:
  explicit Parser(std::string_view text) : lexer_(text) { advance(); }
  Module module();

 private:
  // One { } level of a kernel. Registers, labels and variables are looked up innermost first.
  struct Scope {
    int parent = -1;
    std::map<std::string, uint32_t, std::less<>> registers;  // name -> Kernel::registers
    std::map<std::string, std::pair<uint64_t, Type>, std::less<>>
        families;                                               // "%r" -> (count, type)
    std::map<std::string, uint32_t, std::less<>> labels;        // name -> instruction
    std::map<std::string, std::string, std::less<>> variables;  // name -> unique name
  };

  // tokens
  void advance() { token_ = lexer_.next(); }
  [[noreturn]] void fail(const std::string& what) const { throw SyntaxError(token_.line, what); }
  [[noreturn]] void unexpected(const std::string& wanted) const;
  bool accept(char c) {
    if (!token_.is(c)) return false;
    advance();
    return true;
  }
  void expect(char c) {
    if (!accept(c)) unexpected(std::string("'") + c + "'");
  }
  bool accept(std::string_view word) {
    if (!token_.is(word)) return false;
    advance();
    return true;
  }
  std::string name(const char* what);
  uint64_t integer(const char* what);
  int64_t signed_integer();

  // module level
  void file();
  void skip_section();
  void function(bool entry, bool external);
  void parameters(std::vector<Parameter>* out, uint64_t* bytes);
  void launch_bounds();
  void three(uint32_t out[3]);
  Variable variable(Space space, bool external);
  void initial_value(Variable& v, Type type);
  bool linkage(bool* external);

  // inside a kernel
  void body();
  void scope();
  void registers();
  void location();
  void label(const std::string& text, int line);
  void target_list(const std::string& text);
  void instruction();
  Operand operand(int depth);
  Operand simple_operand(int depth);
  Operand address(int depth);
  Operand named(std::string_view text);
  std::optional<uint32_t> find_register(std::string_view text);
  void resolve_symbols();
  void resolve(Operand& operand, int scope, int line);

  Lexer lexer_;
  Token token_;
  Module module_;
  Kernel* kernel_ = nullptr;  // where instructions go
  std::vector<Scope> scopes_;
  int scope_ = -1;
  int nesting_ = 0;
  Location location_;
  std::vector<int> scope_of_;                              // of each instruction
  std::vector<std::pair<Instruction, int>> target_lists_;  // .branchtargets, with their scopes
};

}  // namespace tw::vgpu::ptx
