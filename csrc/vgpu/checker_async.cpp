// The checker: asynchronous operations and the registers of wgmma.
#include <algorithm>
#include <string>
#include <vector>

#include "vgpu/checker_state.h"

namespace tw::vgpu::checker {

// ---- asynchronous operations

void Checker::async(Warp& w, const Instr& in, int lane, const AsyncAccess& a) {
  if (next_) next_->async(w, in, lane, a);
  using Async = AsyncAccess::Kind;
  const uint32_t own = slot(w), pc = program_.pc_of(in);
  WarpState& me = warps_[own];
  BlockState& b = state(*a.block);
  const bool writes = a.kind == Async::copy || a.kind == Async::load;
  const bool generic = a.kind == Async::copy;
  const auto lane_code = lane < 0 ? kManyLanes : static_cast<uint32_t>(lane);
  const bool wgmma = a.kind == Async::wgmma;
  const uint32_t reader = wgmma ? warpgroup(w) : own;
  const uint32_t tag = kInFlight | (static_cast<uint32_t>(a.id) & ~kInFlight);
  const uint32_t over = wgmma ? wgmma_clock(a.id) << kReadShift | kWholeWarp
                              : me.now << kReadShift | static_cast<uint32_t>(lane);

  Cell written;
  if (writes && !a.done) {
    written =
        Cell::make(me.now, own, lane_code, pc, Cell::kPending | (generic ? Cell::kGeneric : 0));
  } else if (writes && a.mbarrier) {
    uint32_t index = 0;
    const MBarrierState& m = mbarrier(w, in, lane, a.mbarrier, &index);
    written = Cell::make(m.phase + 1, index, lane_code, pc, generic ? Cell::kGeneric : 0);
  } else if (writes) {
    written = Cell::make(me.now, own, lane_code, pc, Cell::kGeneric);
  }
  for (uint32_t i = 0; i < a.count; ++i) {
    const size_t first = (a.address[i] - kSharedBase) >> shift_;
    const size_t end = first + std::max(1u, a.bytes >> shift_);
    for (size_t g = first; g < end; ++g) {
      uint32_t* reads = &b.reads[g * readers_];
      Cell& c = b.cells[g];
      if (a.done) {
        if (writes)
          c = written;
        else if (reads[reader] == tag)
          reads[reader] = over;
        continue;
      }
      if (writes) {
        const bool ordered = c.clock() < base_ || clean(me, own, lane_code, c);
        if (!ordered || !unread(me, reads) || (!generic && unfenced(me, c))) [[unlikely]] {
          const At at{w, in, lane, lane_code, b, g, "an asynchronous write"};
          check_write(at, false, nullptr, nullptr);
          if (!generic) check_fenced(at, at.verb);
        }
        c = written;
      } else {
        // Lanes of the own warp are ordered by the fence, which is checked.
        if (unfenced(me, c) || !clean(me, own, c.lane(), c)) [[unlikely]] {
          const At at{w, in, lane, c.lane(), b, g, "an asynchronous read"};
          check_read(at, false);
          const bool copied =
              c.pc() < program_.code.size() && program_.code[c.pc()].kind == Class::async_copy;
          if (!(wgmma && copied && unfenced_copies_)) check_fenced(at, at.verb);
        }
        // Warps of a warpgroup issue their parts one after the other: the newest operation counts.
        if (!wgmma || !(reads[reader] & kInFlight) || reads[reader] < tag) reads[reader] = tag;
      }
    }
  }
  if (generic) return;
  auto& outstanding = state(w.block()).outstanding;
  if (!a.done) {
    outstanding.push_back({a.kind, a.id, &w, &in, lane});
  } else if (!wgmma) {  // which its warp has still to wait for
    std::erase_if(outstanding, [&](const Outstanding& o) {
      return o.id == a.id && o.warp == &w && o.kind == a.kind;
    });
  }
}

// A copy reads the map through a proxy of its own: a fence that acquires it must come between it and the write.
void Checker::tensor_map(Warp& w, const Instr& in, int lane, const uint8_t* at, MapUse use) {
  if (next_) next_->tensor_map(w, in, lane, at, use);
  const uint32_t own = slot(w);
  WarpState& me = warps_[own];
  if (use == MapUse::written) {
    tensor_maps_[at] = {own, me.now, program_.pc_of(in), std::vector<uint32_t>(readers_)};
    tick(me);
    return;
  }
  const auto found = tensor_maps_.find(at);
  if (found == tensor_maps_.end()) return;
  TensorMapState& m = found->second;
  const auto ordered = [&](uint32_t u, uint32_t clock) {
    return u == own || clock <= me.clock.seen[u];
  };
  if (use == MapUse::acquired) {
    if (ordered(m.owner, m.clock)) m.acquired[own] = me.now;
    return;
  }
  for (uint32_t u = 0; u < readers_; ++u)
    if (m.acquired[u] && ordered(u, m.acquired[u])) return;
  w.fault(Kind::race, in, lane,
          "tensor map: " + who(m.owner) + " wrote it at " + place(m.pc) +
              ", and no fence.proxy.tensormap::generic.acquire of it comes before this copy",
          reinterpret_cast<uint64_t>(at));
}

void Checker::wgmma_leave(Warp& w, const Instr& in, uint64_t id) {
  if (next_) next_->wgmma_leave(w, in, id);
  uint32_t& seen = state(w).clock.seen[warpgroup(w)];
  seen = std::max(seen, wgmma_clock(id));
  WarpState& group = warps_[warpgroup(w)];
  group.now = std::max(group.now, wgmma_clock(id));
  std::erase_if(state(w.block()).outstanding, [&](const Outstanding& o) {
    return o.warp == &w && o.kind == AsyncAccess::Kind::wgmma && o.id <= id;
  });
}

void Checker::registers(Warp& w, const Instr& in, const uint32_t* offsets, uint32_t accumulators,
                        uint32_t count, bool done) {
  if (next_) next_->registers(w, in, offsets, accumulators, count, done);
  WarpState& me = state(w);
  for (uint32_t k = 0; k < count; ++k) {
    const uint32_t slot_of = offsets[k] / 4;
    if (slot_of >= kept_index_.size() || !kept_index_[slot_of]) continue;  // nobody else uses it
    const uint32_t i = kept_index_[slot_of] - 1;
    if (done) {
      me.in_flight[i] -= me.in_flight[i] > 0;
      continue;
    }
    // Compilers sink what computes A behind the fence too: the assembler sees that the wgmma needs it.
    if (me.unfenced[i] && (k < accumulators || strict_))
      w.fault(Kind::asynchronous, in, -1,
              "wgmma: a register of this wgmma.mma_async was written, and no wgmma.fence has come "
              "since");
    ++me.in_flight[i];
  }
}

}  // namespace tw::vgpu::checker
