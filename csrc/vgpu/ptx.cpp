#include "vgpu/ptx.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "vgpu/fault.h"
#include "vgpu/lexer.h"

namespace tw::vgpu::ptx {

// ---- types

struct TypeRow {
  Type type;
  std::string_view name;
  int bits;
};
static constexpr TypeRow kTypes[] = {
    {Type::pred, "pred", 1},    {Type::b8, "b8", 8},      {Type::b16, "b16", 16},
    {Type::b32, "b32", 32},     {Type::b64, "b64", 64},   {Type::b128, "b128", 128},
    {Type::u8, "u8", 8},        {Type::u16, "u16", 16},   {Type::u32, "u32", 32},
    {Type::u64, "u64", 64},     {Type::s8, "s8", 8},      {Type::s16, "s16", 16},
    {Type::s32, "s32", 32},     {Type::s64, "s64", 64},   {Type::f16, "f16", 16},
    {Type::f16x2, "f16x2", 32}, {Type::bf16, "bf16", 16}, {Type::bf16x2, "bf16x2", 32},
    {Type::tf32, "tf32", 32},   {Type::f32, "f32", 32},   {Type::f64, "f64", 64},
};

std::optional<Type> type_named(std::string_view name) {
  for (const TypeRow& row : kTypes)
    if (row.name == name) return row.type;
  return std::nullopt;
}
std::string_view name_of(Type type) {
  for (const TypeRow& row : kTypes)
    if (row.type == type) return row.name;
  return "none";
}
int bits_of(Type type) {
  for (const TypeRow& row : kTypes)
    if (row.type == type) return row.bits;
  return 0;
}
bool is_float(Type type) { return type >= Type::f16; }
bool is_signed(Type type) { return type >= Type::s8 && type <= Type::s64; }

// ---- parser

namespace {

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

void Parser::unexpected(const std::string& wanted) const {
  const std::string got = token_.kind == Token::Kind::end ? "the end of the text"
                                                          : "'" + std::string(token_.text) + "'";
  fail("expected " + wanted + ", got " + got);
}

std::string Parser::name(const char* what) {
  if (token_.kind != Token::Kind::word || token_.text[0] == '.') unexpected(what);
  std::string text(token_.text);
  advance();
  return text;
}

uint64_t Parser::integer(const char* what) {
  if (token_.kind != Token::Kind::integer) unexpected(what);
  const uint64_t value = token_.bits;
  advance();
  return value;
}

int64_t Parser::signed_integer() {
  bool negative = false;
  while (token_.is('-') || token_.is('+')) {
    negative ^= token_.is('-');
    advance();
  }
  const uint64_t value = integer("an integer");
  return static_cast<int64_t>(negative ? 0 - value : value);
}

Module Parser::module() {
  while (token_.kind != Token::Kind::end) {
    if (accept(".version")) {
      if (token_.kind != Token::Kind::real && token_.kind != Token::Kind::integer)
        unexpected("a version number");
      module_.version = token_.text;
      advance();
    } else if (accept(".target")) {
      module_.target = name("a target");
      while (accept(',')) name("a target option");
    } else if (accept(".address_size")) {
      if (integer("64") != 64) fail("only 64-bit addresses are supported");
    } else if (accept(".file")) {
      file();
    } else if (accept(".section")) {
      skip_section();
    } else if (token_.is(".loc")) {
      location();
    } else if (accept(".pragma")) {
      while (!token_.is(';') && token_.kind != Token::Kind::end) advance();
      expect(';');
    } else if (accept(".alias")) {
      name("a function");
      expect(',');
      name("a function");
      expect(';');
    } else if (!accept(';')) {
      bool external = false;
      while (linkage(&external)) {
      }
      if (accept(".entry"))
        function(true, external);
      else if (accept(".func"))
        function(false, external);
      else if (accept(".global"))
        module_.variables.push_back(variable(Space::global, external));
      else if (accept(".const"))
        module_.variables.push_back(variable(Space::constant, external));
      else if (accept(".shared"))
        module_.variables.push_back(variable(Space::shared, external));
      else
        unexpected("a module-level directive");
    }
  }
  if (module_.version.empty()) fail("no .version: this is not a PTX module");
  if (module_.target.empty()) fail("no .target");
  return std::move(module_);
}

bool Parser::linkage(bool* external) {
  if (accept(".extern")) return *external = true;
  return accept(".visible") || accept(".weak") || accept(".common");
}

void Parser::file() {
  const uint64_t number = integer("a file number");
  if (number > 1000000) fail("file number out of range");
  if (token_.kind != Token::Kind::string) unexpected("a file name");
  module_.files[static_cast<int>(number)] = token_.text;
  advance();
  while (accept(',')) integer("a number");
}

void Parser::skip_section() {
  if (token_.kind != Token::Kind::word) unexpected("a section name");
  advance();
  expect('{');
  for (int depth = 1; depth > 0; advance()) {
    if (token_.kind == Token::Kind::end) unexpected("'}'");
    depth += token_.is('{') - token_.is('}');
  }
}

void Parser::three(uint32_t out[3]) {
  for (int i = 0; i < 3; ++i) {
    if (i > 0 && !accept(',')) {
      out[i] = 1;
      continue;
    }
    const uint64_t value = integer("a count");
    if (value > 0x7fffffff) fail("count out of range");
    out[i] = static_cast<uint32_t>(value);
  }
}

void Parser::launch_bounds() {
  for (;;) {
    if (accept(".reqntid")) {
      three(kernel_->reqntid);
    } else if (accept(".maxntid")) {
      three(kernel_->maxntid);
    } else if (accept(".reqnctapercluster")) {
      three(kernel_->cluster);
    } else if (accept(".maxnreg") || accept(".minnctapersm") || accept(".maxnctapersm") ||
               accept(".maxclusterrank")) {
      integer("a count");
    } else if (accept(".explicitcluster") || accept(".blocksareclusters") || accept(".noreturn")) {
    } else if (accept(".pragma")) {
      while (!token_.is(';') && token_.kind != Token::Kind::end) advance();
      expect(';');
    } else if (accept(".abi_preserve") || accept(".abi_preserve_control")) {
      integer("a count");
    } else {
      return;
    }
  }
}

static uint64_t round_up(uint64_t value, uint64_t align) {
  return (value + align - 1) / align * align;
}

// (.param .u64 .ptr .global .align 1 name, .param .align 8 .b8 name[128])
void Parser::parameters(std::vector<Parameter>* out, uint64_t* bytes) {
  expect('(');
  if (accept(')')) return;
  do {
    if (accept(".reg")) {  // of a .func only
      advance();
      name("a register");
      continue;
    }
    if (!accept(".param")) unexpected(".param");
    Variable v = variable(Space::param, false);
    Parameter p{v.name, v.type, v.align, v.bytes, 0, v.external};
    *bytes = round_up(*bytes, p.align);
    p.offset = *bytes;
    *bytes += p.bytes;
    out->push_back(std::move(p));
  } while (accept(','));
  expect(')');
}

void Parser::function(bool entry, bool external) {
  Kernel kernel;
  kernel.line = token_.line;
  kernel_ = &kernel;
  uint64_t ignored = 0;
  std::vector<Parameter> results;
  if (!entry && token_.is('(')) parameters(&results, &ignored);
  kernel.name = name("a function name");
  if (token_.is('(')) parameters(&kernel.parameters, &kernel.parameter_bytes);
  launch_bounds();
  if (!entry || external) module_.functions.push_back(kernel.name);
  if (!accept(';')) {
    if (external) unexpected("';' after an external function");
    body();
    for (const Kernel& other : module_.kernels)
      if (entry && other.name == kernel.name) fail("kernel " + kernel.name + " is defined twice");
    if (entry) module_.kernels.push_back(std::move(kernel));
  }
  kernel_ = nullptr;
}

// [.align N] [.ptr ...] .type name[N][M] [= value], without the space in front. A parameter has no
// ';', other variables do.
Variable Parser::variable(Space space, bool external) {
  Variable v;
  v.space = space;
  v.external = external;
  v.line = token_.line;
  Type type = Type::none;
  uint64_t align = 0, vector = 1;
  while (token_.kind == Token::Kind::word && token_.text[0] == '.') {
    const std::string_view word = token_.text.substr(1);
    if (const auto named = type_named(word)) {
      if (type != Type::none) fail("two types in one declaration");
      type = *named;
      advance();
    } else if (word == "align") {
      advance();
      const uint64_t value = integer("an alignment");
      if (!std::has_single_bit(value) || value > 1 << 20) fail("alignment is not a power of two");
      // After .ptr it is what the pointer points to that is aligned.
      if (align == 0) align = value;
    } else if (word == "ptr") {
      advance();
      align = std::max<uint64_t>(bits_of(type) / 8, 1);
    } else if (word == "v2" || word == "v4" || word == "v8") {
      vector = static_cast<uint64_t>(word[1] - '0');
      advance();
    } else if (word == "global" || word == "const" || word == "shared" || word == "local" ||
               word == "attribute" || word == "managed" || word == "unified") {
      advance();
      if (accept('('))
        while (!accept(')')) {
          if (token_.kind == Token::Kind::end) unexpected("')'");
          advance();
        }
    } else if (word == "texref" || word == "samplerref" || word == "surfref") {
      fail("textures are not supported");
    } else {
      unexpected("a type");
    }
  }
  if (type == Type::none) unexpected("a type");
  if (type == Type::pred) fail("a variable cannot be a predicate");
  v.type = type;
  v.name = name("a variable name");
  const uint64_t unit = static_cast<uint64_t>(bits_of(type)) / 8 * vector;
  v.align = align == 0 ? unit : align;
  uint64_t count = 1;
  bool array = false, open = false;
  while (accept('[')) {
    array = true;
    if (accept(']')) {
      open = true;
      continue;
    }
    const uint64_t size = integer("an array size");
    expect(']');
    if (size > kMaxVariableBytes || count * size > kMaxVariableBytes)
      fail("variable " + v.name + " is too large");
    count *= size;
  }
  v.bytes = open ? 0 : unit * count;
  if (v.bytes > kMaxVariableBytes) fail("variable " + v.name + " is too large");
  if (space == Space::param) {
    if (!kernel_ || scope_ < 0) {
      v.external = array;
      return v;
    }
  }
  if (accept('=')) {
    initial_value(v, type);
    if (open) v.bytes = v.initial.size();
    if (v.initial.size() > v.bytes)
      fail("variable " + v.name + ": more initial values than elements");
  }
  while (accept(',')) fail("one variable per declaration, please");
  expect(';');
  return v;
}

// 1, -2, 0f3f800000, name, generic(name)+4, {..., ...}
void Parser::initial_value(Variable& v, Type type) {
  const size_t unit = static_cast<size_t>(bits_of(type)) / 8;
  if (accept('{')) {
    if (++nesting_ > kMaxNesting) fail("initial value nested too deeply");
    do {
      if (token_.is('}')) break;
      initial_value(v, type);
    } while (accept(','));
    expect('}');
    --nesting_;
    return;
  }
  uint64_t bits = 0;
  const Operand value = simple_operand(0);
  if (value.kind == Operand::Kind::symbol) {
    std::string symbol = value.name;
    int64_t addend = value.offset;
    if (symbol == "generic" && accept('(')) {
      symbol = name("a variable");
      expect(')');
      if (token_.is('+') || token_.is('-')) addend = signed_integer();
    }
    if (unit != 8) fail("an address needs 64 bits");
    v.relocations.push_back({v.initial.size(), symbol, addend});
  } else if (value.kind == Operand::Kind::integer) {
    bits = value.bits;
    if (type == Type::f32)
      bits = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int64_t>(bits)));
    if (type == Type::f64)
      bits = std::bit_cast<uint64_t>(static_cast<double>(static_cast<int64_t>(bits)));
  } else if (value.kind == Operand::Kind::real) {
    bits = value.bits;
    if (unit == 4 && !value.single)
      bits = std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(bits)));
    if (unit == 8 && value.single)
      bits = std::bit_cast<uint64_t>(
          static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits))));
  } else {
    fail("initial value is not a constant");
  }
  for (size_t i = 0; i < unit; ++i)
    v.initial.push_back(static_cast<uint8_t>(i < 8 ? bits >> (8 * i) : 0));
  if (v.initial.size() > (size_t{1} << 28)) fail("initial value is too large");
}

// ---- kernels

void Parser::body() {
  scopes_.clear();
  scope_of_.clear();
  target_lists_.clear();
  scope_ = -1;
  location_ = {};
  nesting_ = 0;
  expect('{');
  scope();
  resolve_symbols();
  scope_ = -1;
}

void Parser::scope() {
  if (++nesting_ > kMaxNesting) fail("scopes nested too deeply");
  scopes_.push_back(Scope{});
  scopes_.back().parent = scope_;
  const int outer = scope_;
  scope_ = static_cast<int>(scopes_.size()) - 1;
  while (!accept('}')) {
    if (accept('{')) {
      scope();
    } else if (accept(".reg")) {
      registers();
    } else if (token_.is(".loc")) {
      location();
    } else if (accept(".pragma")) {
      while (!token_.is(';') && token_.kind != Token::Kind::end) advance();
      expect(';');
    } else if (token_.is(".shared") || token_.is(".local") || token_.is(".param") ||
               token_.is(".global") || token_.is(".const") || token_.is(".extern")) {
      bool external = accept(".extern");
      const Space space = token_.is(".shared")  ? Space::shared
                          : token_.is(".local") ? Space::local
                          : token_.is(".param") ? Space::param
                          : token_.is(".const") ? Space::constant
                                                : Space::global;
      advance();
      Variable v = variable(space, external);
      // The same name may be declared in two scopes: make it unique.
      const std::string declared = v.name;
      for (const Variable& other : kernel_->variables)
        if (other.name == v.name) {
          v.name += "@" + std::to_string(kernel_->variables.size());
          break;
        }
      scopes_[static_cast<size_t>(scope_)].variables[declared] = v.name;
      (space == Space::global || space == Space::constant ? module_.variables : kernel_->variables)
          .push_back(std::move(v));
    } else if (!accept(';')) {
      instruction();
    }
  }
  scope_ = outer;
  --nesting_;
}

// .reg .b32 %r<8>, %x;
void Parser::registers() {
  Type type = Type::none;
  if (token_.kind == Token::Kind::word && token_.text[0] == '.')
    type = type_named(token_.text.substr(1)).value_or(Type::none);
  if (type == Type::none) unexpected("a register type");
  advance();
  if (token_.is(".v2") || token_.is(".v4")) fail("vector registers are not supported");
  Scope& here = scopes_[static_cast<size_t>(scope_)];
  do {
    std::string declared = name("a register name");
    if (accept('<')) {
      const uint64_t count = integer("a register count");
      expect('>');
      here.families[declared] = {count, type};
    } else {
      here.registers[declared] = static_cast<uint32_t>(kernel_->registers.size());
      kernel_->registers.push_back({declared, type});
    }
  } while (accept(','));
  expect(';');
}

// A register by name, innermost scope first. A member of a family (%r<8> declares %r0 to %r7) gets
// its number at its first use.
std::optional<uint32_t> Parser::find_register(std::string_view text) {
  size_t digits = text.size();
  while (digits > 0 && text[digits - 1] >= '0' && text[digits - 1] <= '9') --digits;
  const std::string_view family = text.substr(0, digits), number = text.substr(digits);
  const bool canonical =
      !number.empty() && number.size() <= 9 && (number[0] != '0' || number == "0");
  for (int s = scope_; s >= 0; s = scopes_[static_cast<size_t>(s)].parent) {
    Scope& here = scopes_[static_cast<size_t>(s)];
    if (const auto found = here.registers.find(text); found != here.registers.end())
      return found->second;
    if (!canonical) continue;
    const auto declared = here.families.find(family);
    if (declared == here.families.end()) continue;
    if (std::stoull(std::string(number)) >= declared->second.first) continue;
    const auto index = static_cast<uint32_t>(kernel_->registers.size());
    kernel_->registers.push_back({std::string(text), declared->second.second});
    here.registers[std::string(text)] = index;
    return index;
  }
  return std::nullopt;
}

// .loc file line column [, function_name symbol[+n]] [, inlined_at file line column]
void Parser::location() {
  advance();
  const uint64_t file = integer("a file number"), line = integer("a line");
  integer("a column");
  if (file > 1000000 || line > 0x7fffffff) fail(".loc out of range");
  location_ = {static_cast<int>(file), static_cast<int>(line)};
  while (accept(',')) {
    if (accept("function_name")) {
      name("a symbol");
      if (accept('+')) integer("an offset");
    } else if (accept("inlined_at")) {
      for (int i = 0; i < 3; ++i) integer("a number");
    } else {
      unexpected("function_name or inlined_at");
    }
  }
}

void Parser::label(const std::string& text, int line) {
  auto& labels = scopes_[static_cast<size_t>(scope_)].labels;
  if (!labels.emplace(text, static_cast<uint32_t>(kernel_->instructions.size())).second)
    throw SyntaxError(line, "label " + text + " is defined twice");
}

// name: .branchtargets L1, L2;   name: .callprototype ...;
void Parser::target_list(const std::string& text) {
  if (!token_.is(".branchtargets")) {
    while (!token_.is(';') && token_.kind != Token::Kind::end) advance();
    expect(';');
    return;
  }
  advance();
  Instruction list;  // resolved like an instruction, then taken out (see resolve_symbols)
  list.opcode = ".branchtargets";
  list.text = text;
  list.line = token_.line;
  do {
    Operand target;
    target.kind = Operand::Kind::symbol;
    target.name = name("a label");
    list.operands.push_back(std::move(target));
  } while (accept(','));
  expect(';');
  target_lists_.push_back({std::move(list), scope_});
}

void Parser::instruction() {
  const char* first = token_.text.data();
  Instruction in;
  in.line = token_.line;
  in.location = location_;
  if (accept('@')) {
    in.guard_negated = accept('!');
    if (token_.kind != Token::Kind::word) unexpected("a predicate");
    const auto guard = find_register(token_.text);
    if (!guard || kernel_->registers[*guard].type != Type::pred)
      fail("guard '" + std::string(token_.text) + "' is not a predicate register");
    in.guard = *guard;
    advance();
  }
  if (token_.kind != Token::Kind::word || token_.text[0] == '.' || token_.text[0] == '%')
    unexpected("an instruction");
  in.opcode = token_.text;
  const int line = token_.line;
  advance();
  if (in.guard == kNoRegister && accept(':')) {
    if (token_.is(".branchtargets") || token_.is(".callprototype") || token_.is(".calltargets"))
      target_list(in.opcode);
    else
      label(in.opcode, line);
    return;
  }
  for (size_t at = 0; at <= in.opcode.size();) {
    const size_t dot = std::min(in.opcode.find('.', at), in.opcode.size());
    in.parts.push_back(in.opcode.substr(at, dot - at));
    at = dot + 1;
  }
  if (!token_.is(';')) {
    do in.operands.push_back(operand(0));
    while (accept(','));
  }
  if (!token_.is(';')) unexpected("',' or ';'");
  const char* last = token_.text.data();
  for (const char* c = first; c < last; ++c) {
    const bool blank = *c == ' ' || *c == '\t' || *c == '\n' || *c == '\r';
    if (!blank)
      in.text += *c;
    else if (!in.text.empty() && in.text.back() != ' ')
      in.text += ' ';
  }
  while (!in.text.empty() && in.text.back() == ' ') in.text.pop_back();
  advance();
  kernel_->instructions.push_back(std::move(in));
  scope_of_.push_back(scope_);
}

Operand Parser::operand(int depth) {
  Operand first = simple_operand(depth);
  if (!token_.is('|')) return first;
  advance();
  Operand both;
  both.kind = Operand::Kind::pair;
  both.items.push_back(std::move(first));
  both.items.push_back(simple_operand(depth));
  return both;
}

Operand Parser::simple_operand(int depth) {
  if (depth > kMaxNesting) fail("operand nested too deeply");
  Operand o;
  if (accept('!')) {
    o = simple_operand(depth + 1);
    if (o.kind != Operand::Kind::reg) fail("'!' needs a predicate");
    o.negated = !o.negated;
    return o;
  }
  if (token_.is('[')) return address(depth);
  if (token_.is('{') || token_.is('(')) {
    const char close = token_.is('{') ? '}' : ')';
    o.kind = token_.is('{') ? Operand::Kind::vector : Operand::Kind::list;
    advance();
    if (accept(close)) return o;
    do o.items.push_back(operand(depth + 1));
    while (accept(','));
    expect(close);
    return o;
  }
  bool negative = false, complement = false;
  while (token_.is('-') || token_.is('+') || token_.is('~')) {
    if (complement || (token_.is('~') && negative)) fail("malformed constant");
    complement = token_.is('~');
    negative ^= token_.is('-');
    advance();
  }
  if (token_.kind == Token::Kind::integer) {
    o.kind = Operand::Kind::integer;
    o.bits = negative ? 0 - token_.bits : complement ? ~token_.bits : token_.bits;
    advance();
    return o;
  }
  if (token_.kind == Token::Kind::real) {
    if (complement) fail("malformed constant");
    o.kind = Operand::Kind::real;
    o.single = token_.single;
    o.bits = token_.bits ^ (negative ? uint64_t{1} << (o.single ? 31 : 63) : 0);
    advance();
    return o;
  }
  if (negative || complement) unexpected("a number");
  if (token_.kind != Token::Kind::word || token_.text[0] == '.') unexpected("an operand");
  o = named(token_.text);
  advance();
  if (o.kind == Operand::Kind::symbol && (token_.is('+') || token_.is('-')))
    o.offset = signed_integer();
  return o;
}

// [base], [base + offset], [base, {c0, c1}]
Operand Parser::address(int depth) {
  expect('[');
  Operand o;
  o.kind = Operand::Kind::address;
  do {
    if (depth + 1 > kMaxNesting) fail("operand nested too deeply");
    o.items.push_back(operand(depth + 1));
    Operand& item = o.items.back();
    if (o.items.size() == 1) {
      o.offset = item.offset;
      item.offset = 0;
      while (token_.is('+') || token_.is('-'))
        o.offset = static_cast<int64_t>(static_cast<uint64_t>(o.offset) +
                                        static_cast<uint64_t>(signed_integer()));
    }
  } while (accept(','));
  expect(']');
  return o;
}

// A register, a special register, the sink, WARP_SZ, or a symbol that resolve() looks at later.
Operand Parser::named(std::string_view text) {
  Operand o;
  if (text == "_") return o;
  if (text == "WARP_SZ") {
    o.kind = Operand::Kind::integer;
    o.bits = 32;
    return o;
  }
  if (kernel_ && scope_ >= 0)
    if (const auto found = find_register(text)) {
      o.kind = Operand::Kind::reg;
      o.reg = *found;
      return o;
    }
  o.kind = text[0] == '%' ? Operand::Kind::special : Operand::Kind::symbol;
  o.name = text;
  return o;
}

void Parser::resolve_symbols() {
  for (size_t i = 0; i < kernel_->instructions.size(); ++i)
    for (Operand& o : kernel_->instructions[i].operands)
      resolve(o, scope_of_[i], kernel_->instructions[i].line);
  for (auto& [list, scope] : target_lists_) {
    std::vector<uint32_t>& targets = kernel_->target_lists[list.text];
    for (Operand& o : list.operands) {
      resolve(o, scope, list.line);
      if (o.kind != Operand::Kind::label)
        throw SyntaxError(list.line, "label " + o.name + " is not defined");
      targets.push_back(o.reg);
    }
  }
  target_lists_.clear();
}

// Labels may be used before their definition, so this runs when the kernel is complete.
void Parser::resolve(Operand& operand, int scope, int line) {
  for (Operand& item : operand.items) resolve(item, scope, line);
  if (operand.kind != Operand::Kind::symbol) return;
  for (int s = scope; s >= 0; s = scopes_[static_cast<size_t>(s)].parent) {
    const Scope& here = scopes_[static_cast<size_t>(s)];
    if (const auto found = here.labels.find(operand.name); found != here.labels.end()) {
      operand.kind = Operand::Kind::label;
      operand.reg = found->second;
      return;
    }
    if (const auto found = here.variables.find(operand.name); found != here.variables.end()) {
      operand.name = found->second;
      return;
    }
  }
}

}  // namespace

Module parse(std::string_view text) { return Parser(text).module(); }

}  // namespace tw::vgpu::ptx
