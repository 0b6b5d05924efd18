// 32-lane loops, which the compiler vectorises.
//
// lanewise<[](int32_t a, int32_t b) { return a + b; }> is a handler: the lambda's types say how wide
// the registers are (bool: a predicate), op[0] is the destination and op[1], op[2], ... are the sources. The
// lambda runs for all 32 lanes, active or not, and only active ones are written: it must be
// defined for any bits.
#pragma once
#include <bit>
#include <cstdint>
#include <utility>

#include "vgpu/warp.h"

namespace tw::vgpu {

// d[l] = value[l] for the lanes in exec.
template<class T>
inline void blend(T* d, const T* value, uint32_t exec) {
  if constexpr (sizeof(T) == 2) {  // there is no vector shift of 16 bits: test one bit per lane
    for (int half = 0; half < kLanes; half += 16, exec >>= 16, d += 16, value += 16)
#pragma GCC ivdep
      for (int l = 0; l < 16; ++l)
        d[l] = static_cast<uint16_t>(exec) & static_cast<uint16_t>(1u << l) ? value[l] : d[l];
  } else {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = exec >> l & 1 ? value[l] : d[l];
  }
}
inline void blend(uint32_t& predicate, uint32_t value, uint32_t exec) {
  predicate = (predicate & ~exec) | (value & exec);
}
// f(lane) for each lane in exec, in order.
template<class F>
inline void for_lanes(uint32_t exec, F f) {
  for (; exec; exec &= exec - 1) f(std::countr_zero(exec));
}
// Computes every lane with f(l) and writes the active ones to the register at `offset`.
template<class T, class F>
inline void write_lanes(Warp& w, uint32_t offset, F f) {
  T* d = w.lanes<T>(offset);
  if (w.exec == kAllLanes) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = f(l);
  } else {
    alignas(64) T value[kLanes];
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) value[l] = f(l);
    blend(d, value, w.exec);
  }
}

// One source operand as an array; a predicate is its mask.
template<class T>
struct Lanes {
  const T* p;
  Lanes(const Warp& w, uint32_t offset) : p(w.lanes<T>(offset)) {}
  T operator[](int l) const { return p[l]; }
};
template<>
struct Lanes<bool> {
  uint32_t mask;
  Lanes(const Warp& w, uint32_t offset) : mask(w.mask(offset)) {}
  bool operator[](int l) const { return mask >> l & 1; }
};

template<auto F, class Member = decltype(&decltype(F)::operator())>
struct Lanewise;
template<auto F, class L, class D, class... S>
struct Lanewise<F, D (L::*)(S...) const> {
  template<size_t... I>
  static void run(Warp& w, const Instr& in, std::index_sequence<I...>) {
    const auto loop = [&](auto write, const Lanes<S>... s) {
#pragma GCC ivdep
      for (int l = 0; l < kLanes; ++l) write(l, F(s[l]...));
    };
    if constexpr (std::is_same_v<D, bool>) {
      uint32_t mask = 0;
      loop([&](int l, bool value) { mask |= static_cast<uint32_t>(value) << l; },
           Lanes<S>(w, in.op[I + 1])...);
      blend(w.mask(in.op[0]), mask, w.exec);
    } else if (w.exec == kAllLanes) {
      D* d = w.lanes<D>(in.op[0]);
      loop([d](int l, D value) { d[l] = value; }, Lanes<S>(w, in.op[I + 1])...);
    } else {
      alignas(64) D value[kLanes];
      loop([&value](int l, D v) { value[l] = v; }, Lanes<S>(w, in.op[I + 1])...);
      blend(w.lanes<D>(in.op[0]), value, w.exec);
    }
  }
};

template<auto F>
Status lanewise(Warp& w, const Instr& in) {
  Lanewise<F>::run(w, in,
                   std::make_index_sequence<[]<class L, class D, class... S>(D (L::*)(S...) const) {
                     return sizeof...(S);
                   }(&decltype(F)::operator())>{});
  return Status::next;
}

// ---- addresses
//
// Decode::address() is kept as: op[at] = base register or kNone; imm = offset; kWideAddress in
// `detail` if the base has 64 bits.
constexpr uint8_t kWideAddress = 1;

inline void set_address(Instr& out, int at, const Decode::Address& a) {
  out.op[at] = a.base;
  out.imm = a.offset;
  out.detail |= a.wide ? kWideAddress : 0;
}
// Shared and local addresses have 32 bits, also if they come in a 64-bit register.
inline void load_addresses(const Warp& w, const Instr& in, int at, ptx::Space space,
                           uint64_t* address) {
  const auto offset = static_cast<uint64_t>(in.imm);
  if (in.op[at] == kNone) {
    for (int l = 0; l < kLanes; ++l) address[l] = offset;
  } else if (in.detail & kWideAddress) {
    const uint64_t* base = w.lanes<uint64_t>(in.op[at]);
    for (int l = 0; l < kLanes; ++l) address[l] = base[l] + offset;
  } else {
    const uint32_t* base = w.lanes<uint32_t>(in.op[at]);
    for (int l = 0; l < kLanes; ++l) address[l] = base[l] + offset;
  }
  if (space == ptx::Space::shared || space == ptx::Space::local)
    for (int l = 0; l < kLanes; ++l) address[l] = static_cast<uint32_t>(address[l]);
}

}  // namespace tw::vgpu
