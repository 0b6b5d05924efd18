#include <algorithm>

#include "vgpu/parser.h"

namespace tw::vgpu::ptx {

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

}  // namespace tw::vgpu::ptx
