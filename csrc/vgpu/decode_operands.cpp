// Decode: modifiers and operands of one instruction.
#include <algorithm>
#include <bit>

#include "vgpu/decoder.h"
#include "vgpu/fault.h"
#include "vgpu/memory.h"

namespace tw::vgpu {

using ptx::Operand;
using ptx::Space;
using ptx::Type;

bool Decode::fail(const std::string& what) const {
  throw UnsupportedError(decoder_.kernel.name, in.line, what + ": " + in.text);
}

bool Decode::has(std::string_view modifier) const {
  return std::find(in.parts.begin() + 1, in.parts.end(), modifier) != in.parts.end();
}

bool Decode::take(std::string_view modifier) {
  for (size_t i = 1; i < in.parts.size(); ++i)
    if (!taken_[i] && in.parts[i] == modifier) {
      taken_[i] = true;
      return true;
    }
  return false;
}

Type Decode::take_type() {
  for (size_t i = 1; i < in.parts.size(); ++i) {
    if (taken_[i]) continue;
    if (const auto type = ptx::type_named(in.parts[i])) {
      taken_[i] = true;
      return *type;
    }
  }
  fail("no type");
  return Type::none;
}

Space Decode::take_space(bool* cluster) {
  if (cluster) *cluster = false;
  if (take("global")) return Space::global;
  if (take("shared") || take("shared::cta")) return Space::shared;
  if (take("shared::cluster")) {
    if (cluster) *cluster = true;
    return Space::shared;
  }
  if (take("local")) return Space::local;
  if (take("const")) return Space::constant;
  if (take("param") || take("param::entry")) return Space::param;
  return Space::generic;
}

void Decode::finish() {
  for (size_t i = 0; i < taken_.size(); ++i)
    if (!taken_[i]) fail("." + in.parts[i] + " is not supported here");
  if (!out.run) fail("unsupported instruction");
}

void Decode::expect_operands(size_t least, size_t most) {
  if (operands() < least || operands() > most)
    fail("expected " + std::to_string(least) + (most > least ? " to " + std::to_string(most) : "") +
         " operands, got " + std::to_string(operands()));
}

int Decode::register_bits(const Operand& o) const {
  return o.kind == Operand::Kind::reg ? ptx::bits_of(decoder_.kernel.registers[o.reg].type) : 0;
}
bool Decode::is_predicate(const Operand& o) const { return register_bits(o) == 1; }

uint32_t Decode::source(const Operand& o, int bits) {
  switch (o.kind) {
    case Operand::Kind::reg: {
      if (o.negated) fail("'!' is not allowed here");
      if (register_bits(o) != bits)
        fail(decoder_.kernel.registers[o.reg].name + " has " + std::to_string(register_bits(o)) +
             " bits, expected " + std::to_string(bits));
      return decoder_.register_offset(o.reg);
    }
    case Operand::Kind::integer:
    case Operand::Kind::real:
      return constant(immediate_bits(o, bits), bits);
    case Operand::Kind::special:
      return decoder_.special(in, o.name, bits);
    case Operand::Kind::symbol:
      return decoder_.symbol(in, o, bits);
    default:
      fail("malformed operand");
      return kNone;
  }
}

// An integer is taken as bits. A real is converted to the width it is used in; 16 bits hold a half.
uint64_t Decode::immediate_bits(const Operand& o, int bits) const {
  if (o.kind == Operand::Kind::integer) return o.bits;
  if (bits == 64)
    return o.single ? std::bit_cast<uint64_t>(
                          static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(o.bits))))
                    : o.bits;
  if (bits == 32)
    return o.single ? o.bits
                    : std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(o.bits)));
  fail("a floating-point constant of " + std::to_string(bits) + " bits");
  return 0;
}

uint32_t Decode::destination(const Operand& o, int bits) {
  if (o.kind == Operand::Kind::sink) {
    const auto [found, added] = decoder_.sinks.try_emplace(bits, 0);
    if (added) found->second = decoder_.allocate(bits);
    return found->second;
  }
  if (o.kind != Operand::Kind::reg || o.negated) fail("the destination is not a register");
  return source(o, bits);
}

std::pair<uint32_t, uint32_t> Decode::predicate(const Operand& o) {
  if (o.kind != Operand::Kind::reg) return {source(o, 1), 0};
  if (!is_predicate(o)) fail(decoder_.kernel.registers[o.reg].name + " is not a predicate");
  return {decoder_.register_offset(o.reg), o.negated ? kAllOnes : 0};
}

uint32_t Decode::constant(uint64_t value, int bits) { return decoder_.constant(value, bits); }
uint32_t Decode::scratch(int bits) { return decoder_.allocate(bits); }

uint64_t Decode::immediate(const Operand& o) const {
  if (o.kind != Operand::Kind::integer) fail("expected an integer constant");
  return o.bits;
}

void Decode::push(uint32_t value) {
  std::vector<uint32_t>& pool = decoder_.program->pool;
  if (!pushed_) out.pool = static_cast<uint32_t>(pool.size());
  pushed_ = true;
  pool.push_back(value);
}

uint32_t Decode::branch_targets() const {
  const size_t index = static_cast<size_t>(&out - decoder_.program->code.data());
  return static_cast<uint32_t>(decoder_.flow[index].targets.size());
}

uint32_t Decode::local_offset(const ptx::Operand& o) const {
  const auto found = decoder_.locals.find(o.name);
  return o.kind == Operand::Kind::symbol && found != decoder_.locals.end() ? found->second : kNone;
}

uint32_t Decode::parameter_address(int64_t offset) { return decoder_.parameter_address(offset); }
uint64_t Decode::parameter_bytes() const { return decoder_.kernel.parameter_bytes; }

// Every register has storage of its own; the checker wants to know where they are used.
void Decode::keep(const Operand& o) {
  if (o.kind == Operand::Kind::reg) decoder_.kept.insert(o.reg);
  for (const Operand& item : o.items) keep(item);
}

void Decode::explain(Explain f) {
  decoder_.program->origins[static_cast<size_t>(&out - decoder_.program->code.data())].explain = f;
}

Decode::Address Decode::address(const Operand& o, Space space) {
  if (o.kind != Operand::Kind::address || o.items.empty()) fail("expected an address in brackets");
  const Operand& base = o.items[0];
  Address a;
  a.offset = o.offset;
  a.space = space;
  if (base.kind == Operand::Kind::reg) {
    const int bits = register_bits(base);
    const bool narrow = space == Space::shared || space == Space::local;
    if (bits != 64 && !(bits == 32 && narrow)) fail("an address in this memory has 64 bits");
    a.base = decoder_.register_offset(base.reg);
    a.wide = bits == 64;
  } else if (base.kind == Operand::Kind::integer) {
    a.offset += static_cast<int64_t>(base.bits);
  } else if (base.kind == Operand::Kind::symbol) {
    const ptx::Parameter* p = decoder_.parameter(base.name);
    if (space == Space::param && p) {
      a.parameter = true;
      a.offset += static_cast<int64_t>(p->offset);
      if (a.offset < 0 || a.offset > static_cast<int64_t>(decoder_.kernel.parameter_bytes))
        fail("outside of the parameters");
    } else {
      const bool local = decoder_.locals.contains(base.name);
      const bool narrow = local || decoder_.shared(base.name);
      if (local && space == Space::param) a.space = Space::local;
      a.base = decoder_.symbol(in, base, narrow ? 32 : 64);
      a.wide = !narrow;
    }
  } else {
    fail("malformed address");
  }
  return a;
}

}  // namespace tw::vgpu
