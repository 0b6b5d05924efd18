// mov (with packing and unpacking), selp, cvta, isspacep and the clocks.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <tuple>

#include "vgpu/block.h"
#include "vgpu/lanes.h"

namespace tw::vgpu {

namespace {

using ptx::Operand;

struct Wide {  // 128 bits
  uint64_t low, high;
};

// f(T{}) with the register type of `bits` bits.
template<class F>
void with_bits(Decode& d, int bits, F f) {
  switch (bits) {
    case 8:
      f(uint8_t{});
      break;
    case 16:
      f(uint16_t{});
      break;
    case 32:
      f(uint32_t{});
      break;
    case 64:
      f(uint64_t{});
      break;
    case 128:
      f(Wide{});
      break;
    default:
      d.fail("no register has " + std::to_string(bits) + " bits");
  }
}

// ---- mov

Status run_mov_pred(Warp& w, const Instr& in) {
  blend(w.mask(in.op[0]), w.mask(in.op[1]) ^ in.op[2], w.exec);
  return Status::next;
}

// d = {a, b, ...}, the first in the low bits. The elements lie in the pool.
template<class D, class S>
Status run_pack(Warp& w, const Instr& in) {
  constexpr int n = sizeof(D) / sizeof(S);
  const S* source[n];
  for (int i = 0; i < n; ++i) source[i] = w.lanes<S>(w.pool(in)[i]);
  write_lanes<D>(w, in.op[0], [&](int l) {
    S parts[n];
    for (int i = 0; i < n; ++i) parts[i] = source[i][l];
    return std::bit_cast<D>(parts);
  });
  return Status::next;
}
template<class S, class D>
Status run_unpack(Warp& w, const Instr& in) {
  constexpr int n = sizeof(S) / sizeof(D);
  // The source may be overwritten by the first of the destinations.
  alignas(64) S source[kLanes];
  const S* s = w.lanes<S>(in.op[0]);
  std::copy(s, s + kLanes, source);
  for (int i = 0; i < n; ++i)
    write_lanes<D>(w, w.pool(in)[i], [&](int l) {
      D parts[n];
      const S whole = source[l];
      std::memcpy(parts, &whole, sizeof whole);
      return parts[i];
    });
  return Status::next;
}

template<class Clock>
uint64_t ticks() {
  return static_cast<uint64_t>(Clock::now().time_since_epoch().count());
}
// %clock counts executed instructions of the warp: it never goes back, and is no time.
template<class T>
Status run_clock(Warp& w, const Instr& in) {
  const auto now = static_cast<T>(in.imm ? w.executed >> 32 : w.executed);
  write_lanes<T>(w, in.op[0], [&](int) { return now; });
  return Status::next;
}
template<class T>
Status run_globaltimer(Warp& w, const Instr& in) {
  const uint64_t now = ticks<std::chrono::system_clock>();
  write_lanes<T>(w, in.op[0], [&](int) { return static_cast<T>(in.imm ? now >> 32 : now); });
  return Status::next;
}
bool decode_clock(Decode& d, const Operand& o, int bits) {
  if (o.kind != Operand::Kind::special) return false;
  const bool high = o.name == "%clock_hi" || o.name == "%globaltimer_hi";
  const bool timer = o.name.starts_with("%globaltimer");
  if (!timer && o.name != "%clock" && o.name != "%clock64" && o.name != "%clock_hi") return false;
  d.out.op[0] = d.destination(0, bits);
  d.out.imm = high;
  d.flag(Instr::kPolls);
  if (bits == 64)
    d.run(timer ? run_globaltimer<uint64_t> : run_clock<uint64_t>, Class::move);
  else
    d.run(timer ? run_globaltimer<uint32_t> : run_clock<uint32_t>, Class::move);
  return true;
}

template<class Whole, class Part>
void set_pack(Decode& d, bool packs) {
  if constexpr (sizeof(Part) < sizeof(Whole))
    d.run(packs ? run_pack<Whole, Part> : run_unpack<Whole, Part>, Class::move);
}
void decode_pack(Decode& d, int bits, bool packs) {
  const Operand& whole = d.operand(packs ? 0 : 1);
  const Operand& parts = d.operand(packs ? 1 : 0);
  const auto n = static_cast<int>(parts.items.size());
  if (n != 2 && n != 4 && n != 8) d.fail("a vector of " + std::to_string(n) + " elements");
  d.out.op[0] = packs ? d.destination(whole, bits) : d.source(whole, bits);
  for (const Operand& item : parts.items)
    d.push(packs ? d.source(item, bits / n) : d.destination(item, bits / n));
  with_bits(d, bits, [&]<class W>(W) {
    with_bits(d, bits / n, [&]<class P>(P) { set_pack<W, P>(d, packs); });
  });
}

template<class T>
constexpr Handler move = lanewise<[](T a) { return a; }>;

void decode_mov(Decode& d) {
  d.expect_operands(2, 2);
  const int bits = ptx::bits_of(d.take_type());
  if (bits == 1) {
    std::tie(d.out.op[1], d.out.op[2]) = d.predicate(d.operand(1));
    d.out.op[0] = d.destination(0, 1);
    d.run(run_mov_pred, Class::predicate);
    return;
  }
  if (decode_clock(d, d.operand(1), bits)) return;
  if (d.operand(0).kind == Operand::Kind::vector) return decode_pack(d, bits, false);
  if (d.operand(1).kind == Operand::Kind::vector) return decode_pack(d, bits, true);
  d.out.op[0] = d.destination(0, bits);
  d.out.op[1] = d.source(1, bits);
  with_bits(d, bits, [&]<class T>(T) { d.run(move<T>, Class::move); });
}
const Opcode mov("mov", decode_mov);

// ---- selp.type d, a, b, p

template<class T>
Status run_selp(Warp& w, const Instr& in) {
  const T* a = w.lanes<T>(in.op[1]);
  alignas(64) T value[kLanes];
  std::copy_n(w.lanes<T>(in.op[2]), kLanes, value);
  blend(value, a, w.mask(in.op[3]));
  if (w.exec == kAllLanes)
    std::copy_n(value, kLanes, w.lanes<T>(in.op[0]));
  else
    blend(w.lanes<T>(in.op[0]), value, w.exec);
  return Status::next;
}
void decode_selp(Decode& d) {
  d.expect_operands(4, 4);
  const int bits = ptx::bits_of(d.take_type());
  d.out.op[0] = d.destination(0, bits);
  d.out.op[1] = d.source(1, bits);
  d.out.op[2] = d.source(2, bits);
  const auto [predicate, flip] = d.predicate(d.operand(3));
  d.out.op[3] = predicate;
  if (flip) std::swap(d.out.op[1], d.out.op[2]);
  if (bits == 16)
    d.run(run_selp<uint16_t>, Class::move);
  else if (bits == 32)
    d.run(run_selp<uint32_t>, Class::move);
  else if (bits == 64)
    d.run(run_selp<uint64_t>, Class::move);
}
const Opcode selp("selp", decode_selp);

// ---- addresses

// cvta{.to}.space.size d, a: global and constant addresses are generic already, and those of parameters if they have
// 64 bits.
template<bool to, uint64_t window>
constexpr Handler convert_address = lanewise<[](uint64_t a) -> uint64_t {
  if constexpr (to) return a & 0xffffffff;
  return window | (a & 0xffffffff);
}>;
constexpr Handler convert_parameter_address =
    lanewise<[](uint64_t a, uint64_t parameters) -> uint64_t {
      return a < uint64_t{1} << 16 ? parameters + a : a;
    }>;

void decode_cvta(Decode& d) {
  d.expect_operands(2, 2);
  const bool to = d.take("to");
  const ptx::Space space = d.take_space();
  if (ptx::bits_of(d.take_type()) != 64) d.fail("only 64-bit generic addresses are supported");
  d.out.op[0] = d.destination(0, 64);
  d.out.op[1] = d.source(1, 64);
  if (space == ptx::Space::shared)
    d.run(to ? convert_address<true, kSharedWindow> : convert_address<false, kSharedWindow>,
          Class::integer);
  else if (space == ptx::Space::local)
    d.run(to ? convert_address<true, kLocalWindow> : convert_address<false, kLocalWindow>,
          Class::integer);
  else if (space == ptx::Space::param && !to) {
    d.out.op[2] = d.parameter_address(0);
    d.run(convert_parameter_address, Class::integer);
  } else
    d.run(move<uint64_t>, Class::integer);
}
const Opcode cvta("cvta", decode_cvta);

void decode_isspacep(Decode& d) {
  d.expect_operands(2, 2);
  const bool own = d.has("shared::cta") || d.has("shared");
  const ptx::Space space = d.take_space();
  d.out.op[0] = d.destination(0, 1);
  d.out.op[1] = d.source(1, 64);
  if (space == ptx::Space::shared && own)
    d.run(
        lanewise<[](uint64_t a) { return in_shared_window(a) && !(a >> kSharedRankShift & 0xff); }>,
        Class::predicate);
  else if (space == ptx::Space::shared)
    d.run(lanewise<[](uint64_t a) { return in_shared_window(a); }>, Class::predicate);
  else if (space == ptx::Space::local)
    d.run(lanewise<[](uint64_t a) { return in_local_window(a); }>, Class::predicate);
  else if (space == ptx::Space::global)
    d.run(lanewise<[](uint64_t a) { return a < kSharedWindow; }>, Class::predicate);
  else
    d.fail("this state space cannot be told from a generic address");
}
const Opcode isspacep("isspacep", decode_isspacep);

}  // namespace

}  // namespace tw::vgpu
