#include "vgpu/memory.h"

#include <algorithm>
#include <bit>

#include "vgpu/block.h"

namespace tw::vgpu {

void GlobalMap::finish() {
  std::sort(ranges_.begin(), ranges_.end(), [](const Allocation& a, const Allocation& b) {
    return a.address != b.address ? a.address < b.address : a.bytes < b.bytes;
  });
  std::vector<Allocation> merged;
  for (const Allocation& a : ranges_) {
    if (!a.bytes) continue;
    if (!merged.empty() && a.address < merged.back().address + merged.back().bytes) {
      Allocation& last = merged.back();
      last.bytes = std::max(last.bytes, a.address + a.bytes - last.address);
      last.read_only &= a.read_only;
    } else {
      merged.push_back(a);
    }
  }
  ranges_ = std::move(merged);
}

const Allocation* GlobalMap::below(uint64_t address) const {
  const auto next =
      std::upper_bound(ranges_.begin(), ranges_.end(), address,
                       [](uint64_t at, const Allocation& a) { return at < a.address; });
  return next == ranges_.begin() ? nullptr : &*std::prev(next);
}

const Allocation* GlobalMap::find(uint64_t address, uint64_t bytes) const {
  const Allocation* a = below(address);
  return a && a->holds(address, bytes) ? a : nullptr;
}

// ---- faults

static const char* verb(Intent intent) {
  return intent == Intent::load ? "read" : intent == Intent::store ? "write" : "atomic";
}

[[noreturn]] static void bad_global(Warp& w, const Instr& in, Intent intent, uint64_t bytes,
                                    uint64_t address, int lane) {
  const GlobalMap& map = w.block().launch().memory;
  std::string text = std::string("global memory: ") + verb(intent) + " of " +
                     std::to_string(bytes) + " bytes at " + hex(address);
  const Allocation* below = map.below(address);
  if (address < 4096) {
    text += ": a null pointer";
  } else if (below && below->holds(address, 1) && below->read_only &&
             below->holds(address, bytes)) {
    text += ": this memory is read-only";
  } else if (below && address < below->address + below->bytes) {
    text += " runs past the end of an allocation of " + std::to_string(below->bytes) + " bytes";
  } else {
    text += " is out of bounds";
    const Allocation* above = nullptr;
    for (const Allocation& a : map.ranges())
      if (a.address > address) {
        above = &a;
        break;
      }
    const uint64_t after = below ? address - (below->address + below->bytes) : ~uint64_t{0};
    const uint64_t before = above ? above->address - address : ~uint64_t{0};
    if (below && after <= before)
      text += ": " + std::to_string(after) + " bytes past the end of an allocation of " +
              std::to_string(below->bytes) + " bytes";
    else if (above)
      text += ": " + std::to_string(before) + " bytes before an allocation of " +
              std::to_string(above->bytes) + " bytes";
  }
  w.fault(Fault::Kind::memory, in, lane, text, address);
}

[[noreturn]] static void misaligned(Warp& w, const Instr& in, const char* space, Intent intent,
                                    uint64_t bytes, uint64_t align, uint64_t address, int lane) {
  w.fault(Fault::Kind::memory, in, lane,
          std::string(space) + " memory: misaligned " + verb(intent) + " of " +
              std::to_string(bytes) + " bytes at " + hex(address) +
              ", which is not a multiple of " + std::to_string(align),
          address);
}

// ---- one lane

static uint8_t* shared_pointer(Warp& w, const Instr& in, Intent intent, uint64_t bytes,
                               uint64_t address, int lane) {
  const auto offset = static_cast<uint32_t>(address & ((1u << kSharedRankShift) - 1));
  const auto rank = static_cast<uint32_t>(address >> kSharedRankShift);
  Block* owner = &w.block();
  if (rank) {
    if (rank - 1 >= owner->cluster().size())
      w.fault(Fault::Kind::memory, in, lane,
              std::string("shared memory: ") + verb(intent) + " at " + hex(address) +
                  ": the cluster has " + std::to_string(owner->cluster().size()) + " block(s)",
              address);
    owner = &owner->cluster().block(rank - 1);
  }
  if (offset < kSharedBase || offset > owner->shared_end() || bytes > owner->shared_end() - offset)
    w.fault(Fault::Kind::memory, in, lane,
            std::string("shared memory: ") + verb(intent) + " of " + std::to_string(bytes) +
                " bytes at " + hex(address) + " is out of bounds: the block has [" +
                hex(kSharedBase) + ", " + hex(owner->shared_end()) + ")",
            address);
  return owner->shared() + offset;
}

static uint8_t* local_pointer(Warp& w, const Instr& in, Intent intent, uint64_t bytes,
                              uint64_t address, int lane) {
  const uint64_t size = w.program().local_bytes;
  if (address > size || bytes > size - address)
    w.fault(Fault::Kind::memory, in, lane,
            std::string("local memory: ") + verb(intent) + " of " + std::to_string(bytes) +
                " bytes at offset " + hex(address) + " is out of bounds: a thread has " +
                std::to_string(size) + " bytes",
            address);
  return w.local_memory(lane) + address;
}

static uint8_t* global_pointer(Warp& w, const Instr& in, Intent intent, uint64_t bytes,
                               uint64_t address, int lane) {
  const Allocation* a = w.block().launch().memory.find(address, bytes);
  if (!a || (a->read_only && intent != Intent::load))
    bad_global(w, in, intent, bytes, address, lane);
  return reinterpret_cast<uint8_t*>(address);
}

void resolve(Warp& w, const Instr& in, ptx::Space space, Intent intent, uint32_t bytes,
             const uint64_t* address, uint8_t** host) {
  using ptx::Space;
  uint64_t low = ~uint64_t{0}, high = 0, bits = 0;
  for (int l = 0; l < kLanes; ++l) {
    const bool on = w.exec >> l & 1;
    low = std::min(low, on ? address[l] : ~uint64_t{0});
    high = std::max(high, on ? address[l] : 0);
    bits |= on ? address[l] : 0;
  }
  if (bits & (bytes - 1)) [[unlikely]] {
    const char* name = space == Space::shared  ? "shared"
                       : space == Space::local ? "local"
                                               : "global";
    for (int l = 0; l < kLanes; ++l)
      if (w.exec >> l & 1 && address[l] & (bytes - 1))
        misaligned(w, in, name, intent, bytes, bytes, address[l], l);
  }
  // The usual case: all lanes in one allocation.
  if (space == Space::shared) {
    const Block& b = w.block();
    if (low >= kSharedBase && high + bytes <= b.shared_end()) [[likely]] {
      for (int l = 0; l < kLanes; ++l)
        if (w.exec >> l & 1) host[l] = b.shared() + address[l];
      return;
    }
  } else if (space != Space::local) {
    const Allocation* a =
        high < kSharedWindow ? w.block().launch().memory.find(low, high - low + bytes) : nullptr;
    if (a && !(a->read_only && intent != Intent::load)) [[likely]] {
      for (int l = 0; l < kLanes; ++l) host[l] = reinterpret_cast<uint8_t*>(address[l]);
      return;
    }
  }
  for (int l = 0; l < kLanes; ++l) {
    if (!(w.exec >> l & 1)) continue;
    const uint64_t a = address[l];
    if (space == Space::shared)
      host[l] = shared_pointer(w, in, intent, bytes, a, l);
    else if (space == Space::local)
      host[l] = local_pointer(w, in, intent, bytes, a, l);
    else if (space == Space::generic && in_shared_window(a))
      host[l] = shared_pointer(w, in, intent, bytes, static_cast<uint32_t>(a), l);
    else if (space == Space::generic && in_local_window(a))
      host[l] = local_pointer(w, in, intent, bytes, static_cast<uint32_t>(a), l);
    else
      host[l] = global_pointer(w, in, intent, bytes, a, l);
  }
}

void observe(Warp& w, const Instr& in, ptx::Space space, Access access, const uint64_t* address,
             uint8_t* const* host) {
  using ptx::Space;
  Observer* const observer = w.block().observer();
  if (!observer) return;
  access.bytes = in.bytes;
  access.host = host;
  uint64_t generic[kLanes] = {};
  uint32_t in_space[8] = {};
  for (int l = 0; l < kLanes; ++l) {
    if (!(w.exec >> l & 1)) continue;
    generic[l] = address[l] | (space == Space::shared  ? kSharedWindow
                               : space == Space::local ? kLocalWindow
                                                       : 0);
    const Space real = in_shared_window(generic[l])  ? Space::shared
                       : in_local_window(generic[l]) ? Space::local
                                                     : Space::global;
    in_space[static_cast<size_t>(real)] |= uint32_t{1} << l;
  }
  access.address = generic;
  for (size_t s = 0; s < 8; ++s) {
    if (!in_space[s]) continue;
    access.space = static_cast<Space>(s);
    access.lanes = in_space[s];
    observer->access(w, in, access);
  }
}

uint8_t* resolve_range(Warp& w, const Instr& in, ptx::Space space, Intent intent, uint64_t bytes,
                       uint64_t align, uint64_t address) {
  using ptx::Space;
  const int lane = w.exec ? std::countr_zero(w.exec) : 0;
  if (address & (align - 1))
    misaligned(w, in, space == Space::shared ? "shared" : "global", intent, bytes, align, address,
               lane);
  if (space == Space::shared) return shared_pointer(w, in, intent, bytes, address, lane);
  if (space == Space::generic && in_shared_window(address))
    return shared_pointer(w, in, intent, bytes, static_cast<uint32_t>(address), lane);
  return global_pointer(w, in, intent, bytes, address, lane);
}

}  // namespace tw::vgpu
