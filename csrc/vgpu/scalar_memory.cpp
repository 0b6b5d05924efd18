// ld, st, prefetch and their relatives. Values of 8 bits and more; a narrow value in a wide register is extended.
#include <algorithm>
#include <cstring>
#include <string>

#include "vgpu/block.h"
#include "vgpu/lanes.h"
#include "vgpu/scalar_memory.h"

namespace tw::vgpu {

namespace {

using ptx::Operand;
using ptx::Space;
using ptx::Type;

struct Wide {
  uint64_t low, high;
};
// The low part of a register, for a memory type.
template<class M, class R>
M narrow_to(R value) {
  if constexpr (std::is_same_v<M, R>)
    return value;
  else
    return static_cast<M>(value);
}

// op: 0 base, 1 count of elements; the pool has their registers.

// ---- ld

template<class M, class R>
Status run_load(Warp& w, const Instr& in) {
  alignas(64) uint64_t address[kLanes];
  uint8_t* host[kLanes];
  load_addresses(w, in, 0, space_of(in), address);
  resolve(w, in, space_of(in), Intent::load, in.bytes, address, host);
  observe(w, in, space_of(in), {.load = true, .relaxed = (in.detail & kRelaxed) != 0}, address,
          host);
  const uint32_t* to = w.pool(in);
  for (uint32_t v = 0; v < in.op[1]; ++v) {
    R* d = w.lanes<R>(to[v]);
    const auto read = [&](int l) {
      M value;
      std::memcpy(&value, host[l] + v * sizeof(M), sizeof(M));
      if constexpr (std::is_same_v<M, R>)
        d[l] = value;
      else
        d[l] = static_cast<R>(value);
    };
    if (w.exec == kAllLanes)
      for (int l = 0; l < kLanes; ++l) read(l);
    else
      for_lanes(w.exec, read);
  }
  return Status::next;
}

// From the parameter buffer: the same for all lanes, checked when decoded.
template<class M, class R>
Status run_load_parameter(Warp& w, const Instr& in) {
  const uint8_t* from = w.block().launch().parameters.data() + in.imm;
  for (uint32_t v = 0; v < in.op[1]; ++v) {
    M value;
    std::memcpy(&value, from + v * sizeof(M), sizeof(M));
    write_lanes<R>(w, w.pool(in)[v], [&](int) {
      if constexpr (std::is_same_v<M, R>)
        return value;
      else
        return static_cast<R>(value);
    });
  }
  return Status::next;
}

// ---- st

template<class M, class R>
Status run_store(Warp& w, const Instr& in) {
  alignas(64) uint64_t address[kLanes];
  uint8_t* host[kLanes];
  load_addresses(w, in, 0, space_of(in), address);
  resolve(w, in, space_of(in), Intent::store, in.bytes, address, host);
  const uint32_t* from = w.pool(in);
  const uint32_t count = in.op[1];
  if (w.block().observer()) {
    alignas(16) uint8_t value[kLanes][32] = {};
    for_lanes(w.exec, [&](int l) {
      for (uint32_t v = 0; v < count; ++v) {
        const M part = narrow_to<M>(w.lanes<R>(from[v])[l]);
        std::memcpy(value[l] + v * sizeof(M), &part, sizeof(M));
      }
    });
    observe(w, in, space_of(in),
            {.store = true, .relaxed = (in.detail & kRelaxed) != 0, .value = value[0]}, address,
            host);
  }
  // Lane by lane: of several that write one place, the last one wins whole.
  bool changed = !(in.detail & kRelaxed);
  const auto write = [&](int l) {
    for (uint32_t v = 0; v < count; ++v) {
      const M value = narrow_to<M>(w.lanes<R>(from[v])[l]);
      if (!changed) changed = std::memcmp(host[l] + v * sizeof(M), &value, sizeof(M)) != 0;
      std::memcpy(host[l] + v * sizeof(M), &value, sizeof(M));
    }
  };
  if (w.exec == kAllLanes)
    for (int l = 0; l < kLanes; ++l) write(l);
  else
    for_lanes(w.exec, write);
  w.block().progress += changed;
  return Status::next;
}

// ---- choosing the handler

template<bool load, class M, class R>
Handler handler(bool parameter) {
  if constexpr (load) return parameter ? run_load_parameter<M, R> : run_load<M, R>;
  return run_store<M, R>;
}
// M of the memory into (or out of) a register of `bits`.
template<bool load, class M>
Handler choose_register(int bits, bool parameter) {
  if (bits == 128) return nullptr;
  if constexpr (sizeof(M) <= 1)
    if (bits == 8) return handler<load, M, uint8_t>(parameter);
  if constexpr (sizeof(M) <= 2)
    if (bits == 16) return handler<load, M, uint16_t>(parameter);
  if constexpr (sizeof(M) <= 4)
    if (bits == 32) return handler<load, M, uint32_t>(parameter);
  if (bits == 64) return handler<load, M, uint64_t>(parameter);
  return nullptr;
}
template<bool load>
Handler choose(Type type, int bits, bool parameter) {
  switch (type) {
    case Type::s8:
      return choose_register<load, int8_t>(bits, parameter);
    case Type::s16:
      return choose_register<load, int16_t>(bits, parameter);
    case Type::s32:
      return choose_register<load, int32_t>(bits, parameter);
    default:
      break;
  }
  switch (ptx::bits_of(type)) {
    case 8:
      return choose_register<load, uint8_t>(bits, parameter);
    case 16:
      return choose_register<load, uint16_t>(bits, parameter);
    case 32:
      return choose_register<load, uint32_t>(bits, parameter);
    case 64:
      return choose_register<load, uint64_t>(bits, parameter);
    case 128:
      return bits == 128 ? handler<load, Wide, Wide>(parameter) : nullptr;
    default:
      return nullptr;
  }
}

template<bool load>
void decode_access(Decode& d) {
  const bool ordered = take_ordering(d);
  if (ordered && load) d.flag(Instr::kPolls);
  const Space named_space = d.take_space();
  const bool policy = take_cache_hints(d);
  if (policy)
    d.expect_operands(3, 3);
  else
    d.expect_operands(2, 2);
  uint32_t vector = 1;
  for (const uint32_t n : {2u, 4u, 8u})
    if (d.take("v" + std::to_string(n))) vector = n;
  const Type type = d.take_type();
  if (!load && named_space == Space::constant) d.fail("constant memory is read-only");

  const Decode::Address address = d.address(d.operand(load ? 1 : 0), named_space);
  const Space space = address.space;
  const Operand& data = d.operand(load ? 0 : 1);
  set_address(d.out, 0, address);
  if (!load && address.parameter) d.fail("kernel parameters are read-only");
  // Parameters by address, and constants, are reached through host pointers.
  const bool pointer = space == Space::param || space == Space::constant || space == Space::global;
  set_space(d.out, pointer ? Space::global : space, ordered);
  d.out.op[1] = vector;
  const int bytes = ptx::bits_of(type) / 8;
  if (bytes == 0) d.fail("a predicate cannot be in memory");
  d.out.bytes = static_cast<uint8_t>(bytes * static_cast<int>(vector));
  if (d.out.bytes > 32) d.fail("more than 32 bytes");
  if (address.parameter) {
    const auto end = static_cast<uint64_t>(address.offset) + d.out.bytes;
    if (end > d.parameter_bytes()) d.fail("outside of the kernel's parameters");
  }

  int bits = 0;  // of the registers
  const auto element = [&](const Operand& o) {
    const int own = d.register_bits(o) ? d.register_bits(o) : bits ? bits : std::max(8 * bytes, 16);
    if (own < 8 * bytes) d.fail("the register is narrower than the type");
    if (bits && own != bits) d.fail("registers of different widths in one vector");
    bits = own;
    d.push(load ? d.destination(o, own) : d.source(o, own));
  };
  if (vector == 1) {
    element(data.kind == Operand::Kind::vector && data.items.size() == 1 ? data.items[0] : data);
  } else {
    if (data.kind != Operand::Kind::vector || data.items.size() != vector)
      d.fail("expected a vector of " + std::to_string(vector) + " registers");
    for (const Operand& o : data.items)  // `_` takes its width from the others
      if (d.register_bits(o)) bits = d.register_bits(o);
    for (const Operand& o : data.items) element(o);
  }
  d.run(choose<load>(type, bits, address.parameter), class_of(space));
}

const Opcode ld("ld", decode_access<true>);
const Opcode ldu("ldu", decode_access<true>);
const Opcode st("st", decode_access<false>);

// ---- hints

Status run_nothing(Warp&, const Instr&) { return Status::next; }
void decode_prefetch(Decode& d) {
  for (const char* word :
       {"global", "local", "L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap", "param",
        "const", "generic", "level::eviction_priority", "L2::128B"})
    d.take(word);
  d.run(run_nothing, Class::other);
}
const Opcode prefetch("prefetch", decode_prefetch);
const Opcode prefetchu("prefetchu", decode_prefetch);
const Opcode applypriority("applypriority", decode_prefetch);
const Opcode discard("discard", decode_prefetch);

// createpolicy makes the 64-bit operand of .L2::cache_hint, which nobody looks at.
Status run_createpolicy(Warp& w, const Instr& in) {
  write_lanes<uint64_t>(w, in.op[0], [](int) { return uint64_t{0}; });
  return Status::next;
}
void decode_createpolicy(Decode& d) {
  for (const char* word : {"fractional", "range", "cvt", "global", "L2", "b64", "L2::evict_last",
                           "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged"})
    d.take(word);
  d.out.op[0] = d.destination(0, 64);
  d.run(run_createpolicy, Class::other);
}
const Opcode createpolicy("createpolicy", decode_createpolicy);

}  // namespace

}  // namespace tw::vgpu
