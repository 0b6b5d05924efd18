#include <algorithm>
#include <bit>

#include "vgpu/parser.h"

namespace tw::vgpu::ptx {

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
  if (!entry && token_.is('(')) parameters(&kernel.results, &ignored);
  kernel.name = name("a function name");
  if (token_.is('(')) parameters(&kernel.parameters, &kernel.parameter_bytes);
  launch_bounds();
  if (!accept(';')) {
    if (external) unexpected("';' after an external function");
    body();
    std::vector<Kernel>& list = entry ? module_.kernels : module_.functions;
    for (const Kernel& other : list)
      if (other.name == kernel.name)
        fail((entry ? "kernel " : "function ") + kernel.name + " is defined twice");
    list.push_back(std::move(kernel));
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

}  // namespace tw::vgpu::ptx
