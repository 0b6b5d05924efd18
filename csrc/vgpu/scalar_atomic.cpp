// atom and red: read-modify-write on global, shared and distributed shared memory. The lanes of a warp go one
// after the other, in order.
#include <atomic>
#include <string>

#include "vgpu/block.h"
#include "vgpu/lanes.h"
#include "vgpu/scalar_float.h"
#include "vgpu/scalar_memory.h"

namespace tw::vgpu {

namespace {

using ptx::Operand;
using ptx::Space;
using ptx::Type;

// op: 0 base, 1 elements of a vector, 2 bit 0: there are destinations. Pool: destinations, sources,
// and for cas the new value.

// F(old, b, c, flush) gives the new value; c is the new value of cas.
template<class T, auto F>
Status run_atomic(Warp& w, const Instr& in) {
  alignas(64) uint64_t address[kLanes];
  uint8_t* host[kLanes];
  const Space space = space_of(in);
  load_addresses(w, in, 0, space, address);
  resolve(w, in, space, Intent::atomic, in.bytes, address, host);
  observe(w, in, space, {.load = true, .store = true, .relaxed = true}, address, host);
  const uint32_t count = in.op[1];
  const uint32_t* to = w.pool(in);
  const uint32_t* from = to + count;
  const T* third = in.op[2] & 2 ? w.lanes<T>(from[count]) : nullptr;
  bool changed = false;
  for_lanes(w.exec, [&](int l) {
    // f32 additions in global memory flush subnormals, those in shared memory do not.
    const bool flush = space == Space::global || !in_shared_window(address[l]);
    for (uint32_t v = 0; v < count; ++v) {
      const T b = w.lanes<T>(from[v])[l], c = third ? third[l] : T{};
      std::atomic_ref<T> place(*reinterpret_cast<T*>(host[l] + v * sizeof(T)));
      T old = place.load(std::memory_order_relaxed), wanted;
      do wanted = F(old, b, c, flush && space != Space::shared);
      while (!place.compare_exchange_weak(old, wanted));
      changed |= wanted != old;
      if (in.op[2] & 1) w.lanes<T>(to[v])[l] = old;
    }
  });
  w.block().progress += changed;
  return Status::next;
}

template<class T>
Handler choose_integer(Decode& d) {
  if (d.take("add"))
    return run_atomic<T, [](T a, T b, T, bool) {
      return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    }>;
  if (d.take("min")) return run_atomic<T, [](T a, T b, T, bool) { return a < b ? a : b; }>;
  if (d.take("max")) return run_atomic<T, [](T a, T b, T, bool) { return a < b ? b : a; }>;
  return nullptr;
}
template<class T>
Handler choose_bits(Decode& d) {
  if (d.take("cas")) return run_atomic<T, [](T a, T b, T c, bool) { return a == b ? c : a; }>;
  if (d.take("exch")) return run_atomic<T, [](T, T b, T, bool) { return b; }>;
  if (d.take("and")) return run_atomic<T, [](T a, T b, T, bool) { return static_cast<T>(a & b); }>;
  if (d.take("or")) return run_atomic<T, [](T a, T b, T, bool) { return static_cast<T>(a | b); }>;
  if (d.take("xor")) return run_atomic<T, [](T a, T b, T, bool) { return static_cast<T>(a ^ b); }>;
  return nullptr;
}
Handler choose_u32(Decode& d) {
  using T = uint32_t;
  if (d.take("inc")) return run_atomic<T, [](T a, T b, T, bool) { return a < b ? a + 1 : 0; }>;
  if (d.take("dec"))
    return run_atomic<T, [](T a, T b, T, bool) { return a == 0 || b < a ? b : a - 1; }>;
  return choose_integer<T>(d);
}
template<class F>
Handler choose_half(Decode& d) {
  using T = uint16_t;
  if (d.take("add")) return run_atomic<T, [](T a, T b, T, bool) { return add<F>(a, b); }>;
  if (d.take("min"))
    return run_atomic<T, [](T a, T b, T, bool) {
      return narrow<F>(minimum(widen<F>(a), widen<F>(b)));
    }>;
  if (d.take("max"))
    return run_atomic<T, [](T a, T b, T, bool) {
      return narrow<F>(maximum(widen<F>(a), widen<F>(b)));
    }>;
  return nullptr;
}
template<class F>
Handler choose_pair(Decode& d) {
  using T = uint32_t;
  if (d.take("add"))
    return run_atomic<T, [](T a, T b, T, bool) { return map_halves(add<F>, a, b); }>;
  if (d.take("min"))
    return run_atomic<T, [](T a, T b, T, bool) {
      return map_halves(
          [](uint16_t x, uint16_t y) { return narrow<F>(minimum(widen<F>(x), widen<F>(y))); }, a,
          b);
    }>;
  if (d.take("max"))
    return run_atomic<T, [](T a, T b, T, bool) {
      return map_halves(
          [](uint16_t x, uint16_t y) { return narrow<F>(maximum(widen<F>(x), widen<F>(y))); }, a,
          b);
    }>;
  return nullptr;
}
Handler choose_f32(Decode& d) {
  using T = uint32_t;
  if (!d.take("add")) return nullptr;
  return run_atomic<T, [](T a, T b, T, bool flush) {
    return flush ? add<F32, Rounding::rn, true>(a, b) : add<F32>(a, b);
  }>;
}
Handler choose_f64(Decode& d) {
  using T = uint64_t;
  if (!d.take("add")) return nullptr;
  return run_atomic<T, [](T a, T b, T, bool) { return to_bits(add_f64(f64_of(a), f64_of(b))); }>;
}
Handler choose(Decode& d, Type type) {
  switch (type) {
    case Type::u32:
      return choose_u32(d);
    case Type::s32:
      return choose_integer<int32_t>(d);
    case Type::u64:
      return choose_integer<uint64_t>(d);
    case Type::s64:
      return choose_integer<int64_t>(d);
    case Type::b16:
      return choose_bits<uint16_t>(d);
    case Type::b32:
      return choose_bits<uint32_t>(d);
    case Type::b64:
      return choose_bits<uint64_t>(d);
    case Type::f16:
      return choose_half<F16>(d);
    case Type::bf16:
      return choose_half<BF16>(d);
    case Type::f16x2:
      return choose_pair<F16>(d);
    case Type::bf16x2:
      return choose_pair<BF16>(d);
    case Type::f32:
      return choose_f32(d);
    case Type::f64:
      return choose_f64(d);
    default:
      return nullptr;
  }
}

// atom{.sem}{.scope}{.space}.op{.vec}.type d, [a], b{, c}{, policy}; red: without d
template<bool returns>
void decode_atomic(Decode& d) {
  take_ordering(d);
  d.take("acq_rel");
  bool cluster = false;
  const Space space = d.take_space(&cluster);
  const bool policy = d.take("L2::cache_hint");
  d.take("noftz");
  uint32_t vector = 1;
  for (const uint32_t n : {2u, 4u, 8u})
    if (d.take("v" + std::to_string(n))) vector = n;
  const Type type = d.take_type();
  const int bits = ptx::bits_of(type);
  const bool cas = d.has("cas");
  const size_t first = returns ? 1 : 0, wanted = first + 2 + (cas ? 1 : 0) + (policy ? 1 : 0);
  d.expect_operands(wanted, wanted);
  if (space != Space::generic && space != Space::global && space != Space::shared)
    d.fail("atomics work on global and shared memory");
  set_address(d.out, 0, d.address(d.operand(first), space));
  set_space(d.out, space, true);
  d.out.op[1] = vector;
  d.out.op[2] = (returns ? 1 : 0) | (cas ? 2 : 0);
  d.out.bytes = static_cast<uint8_t>(bits / 8 * static_cast<int>(vector));
  const auto element = [&](const Operand& o, uint32_t i) -> const Operand& {
    if (vector == 1) return o;
    if (o.kind != Operand::Kind::vector || o.items.size() != vector)
      d.fail("expected a vector of " + std::to_string(vector));
    return o.items[i];
  };
  for (uint32_t i = 0; i < vector; ++i)
    d.push(returns ? d.destination(element(d.operand(0), i), bits) : 0);
  for (uint32_t i = 0; i < vector; ++i) d.push(d.source(element(d.operand(first + 1), i), bits));
  if (cas) d.push(d.source(first + 2, bits));
  d.flag(Instr::kPolls);
  const Handler handler = choose(d, type);
  if (!handler) d.fail("this operation on this type is not supported");
  d.run(handler, Class::atomic);
}
const Opcode atom("atom", decode_atomic<true>);
const Opcode red("red", decode_atomic<false>);

}  // namespace

}  // namespace tw::vgpu
