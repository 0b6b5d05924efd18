// What loads, stores and atomics share: their modifiers, and how `detail` keeps them.
#pragma once
#include <string>

#include "vgpu/program.h"

namespace tw::vgpu {

// Instr::detail: bit 0 wide address (lanes.h), bit 1 relaxed, bits 2.. space.
constexpr uint8_t kRelaxed = 2;
constexpr int kSpaceShift = 2;

inline void set_space(Instr& out, ptx::Space space, bool relaxed) {
  out.detail |=
      static_cast<uint8_t>((relaxed ? kRelaxed : 0) | static_cast<int>(space) << kSpaceShift);
}
inline ptx::Space space_of(const Instr& in) {
  return static_cast<ptx::Space>(in.detail >> kSpaceShift);
}

inline Class class_of(ptx::Space space) {
  switch (space) {
    case ptx::Space::shared:
      return Class::shared_memory;
    case ptx::Space::local:
      return Class::local_memory;
    case ptx::Space::param:
    case ptx::Space::constant:
      return Class::constant_memory;
    default:
      return Class::global_memory;
  }
}

// Operands that only hint at caching are read for their syntax and dropped. Returns whether the last operand is a cache
// policy.
inline bool take_cache_hints(Decode& d) {
  for (const char* word :
       {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::evict_normal", "L1::evict_unchanged",
        "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::evict_normal",
        "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B"})
    d.take(word);
  return d.take("L2::cache_hint");
}
// .volatile, .relaxed.gpu and so on: other threads may see or change the place at any time.
inline bool take_ordering(Decode& d) {
  bool ordered = false;
  for (const char* word : {"volatile", "relaxed", "acquire", "release", "mmio"})
    ordered |= d.take(word);
  d.take("weak");
  for (const char* word : {"cta", "cluster", "gpu", "sys"}) d.take(word);
  return ordered;
}

}  // namespace tw::vgpu
