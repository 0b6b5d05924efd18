// Address spaces. A generic address below 2^48 is a host pointer (global, constant and parameter
// memory); above lie the windows of shared and local memory. A shared address is 32 bits: the byte
// offset, and in the top byte 0 for the block's own memory or r + 1 for that of the cluster's block r.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vgpu/program.h"

namespace tw::vgpu {

constexpr uint64_t kSharedWindow = uint64_t{1} << 56;
constexpr uint64_t kLocalWindow = uint64_t{1} << 57;
constexpr uint32_t kSharedRankShift = 24;
constexpr bool in_shared_window(uint64_t a) { return a >> 32 == kSharedWindow >> 32; }
constexpr bool in_local_window(uint64_t a) { return a >> 32 == kLocalWindow >> 32; }

// A range of host memory that a kernel may touch.
struct Allocation {
  uint64_t address = 0, bytes = 0;
  bool read_only = false;
  bool holds(uint64_t a, uint64_t n) const {
    return a - address <= bytes && n <= bytes - (a - address);
  }
};

// The ranges of one launch, sorted. Overlapping ones are merged.
class GlobalMap {
 public:
  void add(Allocation a) { ranges_.push_back(a); }
  void finish();
  // The range that holds [address, address + bytes), or null.
  const Allocation* find(uint64_t address, uint64_t bytes) const;
  // For messages: the last range that starts at or below the address.
  const Allocation* below(uint64_t address) const;
  const std::vector<Allocation>& ranges() const { return ranges_; }

 private:
  std::vector<Allocation> ranges_;
};

// One memory instruction of a warp, as the observers see it.
struct Access {
  bool load = false, store = false;  // both: an atomic
  bool relaxed = false;  // volatile, relaxed, acquire, release or atomic: no data race by itself
  const uint8_t* value = nullptr;  // store: what is written, by lane; null: unknown
  uint32_t value_stride = 32;      // from one lane's value to the next
  bool async_proxy = false;
  bool counted = true;  // by the counters
  uint32_t bytes = 0;   // per lane
  uint32_t lanes = 0;
  const uint64_t* address = nullptr;      // [32]; generic
  uint8_t* const* host = nullptr;         // [32]; where the bytes lie
  ptx::Space space = ptx::Space::global;  // never generic
};

enum class Intent : uint8_t { load, store, atomic };

// Turns the addresses of one warp-wide access into host pointers. Faults if a lane is out of bounds,
// misaligned or in the wrong space. Entries of inactive lanes are not touched.
//   space     generic: each lane decides
//   address   as the program computed it (32-bit shared and local addresses zero-extended)
void resolve(Warp& w, const Instr& in, ptx::Space space, Intent intent, uint32_t bytes,
             const uint64_t* address, uint8_t** host);
// Shows an access of w.exec to the block's observer, once for each space that the lanes' addresses are in.
void observe(Warp& w, const Instr& in, ptx::Space space, Access access, const uint64_t* address,
             uint8_t* const* host);
// One address of the current thread block, for bulk operations: [address, address + bytes).
uint8_t* resolve_range(Warp& w, const Instr& in, ptx::Space space, Intent intent, uint64_t bytes,
                       uint64_t align, uint64_t address);

}  // namespace tw::vgpu
