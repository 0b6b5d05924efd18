// The checker: what barriers, fences and mbarriers order.
#include <algorithm>
#include <bit>
#include <string>

#include "vgpu/checker_state.h"

namespace tw::vgpu::checker {

// ---- synchronisation

// Everything up to now is known to whoever leaves.
void Checker::arrive(WarpState& me, uint32_t own, Clock& at) const {
  at.join(me.clock);
  at.seen[own] = std::max(at.seen[own], me.now);
  tick(me);
}

void Checker::barrier_arrive(Warp& w, const Instr& in, int barrier, bool waits) {
  if (next_) next_->barrier_arrive(w, in, barrier, waits);
  WarpState& me = state(w);
  BarrierState& b = state(w.block()).barriers[static_cast<size_t>(barrier)];
  b.used = true;
  if (waits) b.waiting |= uint64_t{1} << w.index();
  me.arrived_at = program_.pc_of(in);
  arrive(me, slot(w), b.arriving);
}
void Checker::barrier_open(Block& block, int barrier, bool whole_block) {
  if (next_) next_->barrier_open(block, barrier, whole_block);
  BarrierState& b = state(block).barriers[static_cast<size_t>(barrier)];
  // Threads that have exited count as arrived.
  for (const Warp& w : block.warps())
    if (whole_block && w.finished()) arrive(state(w), slot(w), b.arriving);
  for (uint64_t left = b.waiting; left; left &= left - 1)
    warps_[block.rank() * per_block_ + static_cast<uint32_t>(std::countr_zero(left))].clock.join(
        b.arriving);
  b.arriving.clear();
  b.waiting = 0;
}
void Checker::barrier_leave(Warp& w, const Instr& in, int barrier) {
  if (next_) next_->barrier_leave(w, in, barrier);
}

void Checker::cluster_arrive(Warp& w, const Instr& in) {
  if (next_) next_->cluster_arrive(w, in);
  state(w).arrived_at = program_.pc_of(in);
  arrive(state(w), slot(w), cluster_barrier_.arriving);
}
void Checker::cluster_open(Cluster& cluster) {
  if (next_) next_->cluster_open(cluster);
  for (const auto& block : cluster.blocks())
    for (const Warp& w : block->warps())
      if (w.finished()) arrive(state(w), slot(w), cluster_barrier_.arriving);
  cluster_opened_.join(cluster_barrier_.arriving);
  cluster_barrier_.arriving.clear();
}
void Checker::cluster_leave(Warp& w, const Instr& in) {
  if (next_) next_->cluster_leave(w, in);
  state(w).clock.join(cluster_opened_);
}

void Checker::warp_sync(Warp& w, const Instr& in, uint32_t lanes) {
  if (next_) next_->warp_sync(w, in, lanes);
  WarpState& me = state(w);
  me.clock.seen[slot(w)] = me.now;
  tick(me);
}

void Checker::fence(Warp& w, const Instr& in) {
  if (next_) next_->fence(w, in);
  WarpState& me = state(w);
  const Text& t = text(w, in);
  const uint32_t own = slot(w);
  if (t.wgmma_fence) {
    std::fill(me.unfenced.begin(), me.unfenced.end(), 0);
    return;
  }
  if (t.proxy_fence) {
    for (size_t i = 0; i < width_; ++i)
      me.clock.fenced[i] = std::max(me.clock.fenced[i], me.clock.seen[i]);
    me.clock.fenced[own] = me.now;
  } else if (!t.init_fence) {
    if (me.has_acquired) me.clock.join(me.acquired);
    me.released.join(me.clock);
    me.released.seen[own] = me.now;
    me.has_released = true;
  }
  tick(me);
  if (global_) global_->fence(w);
}

// ---- mbarriers

MBarrierState& Checker::mbarrier(Warp& w, const Instr& in, int lane, const uint8_t* host,
                                 uint32_t* index) {
  for (uint32_t r = 0; r < cluster_.size(); ++r) {
    const Block& b = cluster_.block(r);
    const auto offset = static_cast<uint64_t>(host - b.shared());
    if (host < b.shared() || offset >= b.shared_end()) continue;
    uint16_t& known = blocks_[r].mbarriers[(offset - kSharedBase) / 8];
    if (!known) {
      if (readers_ + mbarriers_.size() >= kMaxOwners)
        w.fault(Kind::barrier, in, lane, "more mbarriers than the checker can follow");
      mbarriers_.emplace_back();
      known = static_cast<uint16_t>(mbarriers_.size());
      if (readers_ + mbarriers_.size() > width_) add_mbarrier_clock();
      MBarrierState& m = mbarriers_.back();
      m.arriving.resize(width_);
      m.done.resize(width_);
      m.used.resize(readers_);
      m.phase = base_;
      m.block = r;
      m.address =
          static_cast<uint32_t>(offset) | (r == w.block().rank() ? 0 : (r + 1) << kSharedRankShift);
    }
    *index = readers_ + known - 1;
    return mbarriers_[known - 1u];
  }
  w.fault(Kind::memory, in, lane, "mbarrier outside of shared memory");
}

void Checker::check_unused(const Warp& w, const Instr& in, int lane, const MBarrierState& m) const {
  const uint32_t own = slot(w);
  for (uint32_t u = 0; u < readers_; ++u)
    if (u != own && m.used[u] > warps_[own].clock.seen[u])
      w.fault(Kind::race, in, lane,
              "mbarrier: nothing orders this after its last use by " + who(u) +
                  "; that warp last synchronised at " + place(warps_[u].arrived_at),
              m.address);
}

void Checker::mbarrier_init(Warp& w, const Instr& in, int lane, const uint8_t* host) {
  if (next_) next_->mbarrier_init(w, in, lane, host);
  uint32_t index = 0;
  MBarrierState& m = mbarrier(w, in, lane, host, &index);
  check_unused(w, in, lane, m);
  m.arriving.clear();
  m.done.clear();
  std::fill(m.used.begin(), m.used.end(), 0);
  m.init_owner = slot(w);
  m.init_clock = state(w).now;
  m.init_pc = program_.pc_of(in);
}

void Checker::mbarrier_inval(Warp& w, const Instr& in, int lane, const uint8_t* host) {
  if (next_) next_->mbarrier_inval(w, in, lane, host);
  uint32_t index = 0;
  check_unused(w, in, lane, mbarrier(w, in, lane, host, &index));
}

void Checker::mbarrier_signal(Warp& w, const Instr& in, int lane, const uint8_t* host,
                              bool asynchronous, bool completes) {
  if (next_) next_->mbarrier_signal(w, in, lane, host, asynchronous, completes);
  uint32_t index = 0;
  MBarrierState& m = mbarrier(w, in, lane, host, &index);
  WarpState& me = state(w);
  const uint32_t own = slot(w);
  if (!asynchronous) {
    if (m.init_owner != own && m.init_clock > me.clock.seen[m.init_owner])
      w.fault(Kind::race, in, lane,
              "mbarrier: this warp uses it, but nothing orders that after its initialisation by " +
                  who(m.init_owner) + " at " + place(m.init_pc),
              m.address);
    me.arrived_at = program_.pc_of(in);
    m.used[own] = me.now;
    if (m.block != w.block().rank()) use_remote(blocks_[m.block], me, own, program_.pc_of(in));
    if (!text(w, in).relaxed) arrive(me, own, m.arriving);
  }
  if (completes) {
    ++m.phase;
    m.done.join(m.arriving);
    m.done.seen[index] = m.done.fenced[index] = m.phase;
    m.arriving.clear();
  }
}

void Checker::mbarrier_leave(Warp& w, const Instr& in, int lane, const uint8_t* host) {
  if (next_) next_->mbarrier_leave(w, in, lane, host);
  uint32_t index = 0;
  MBarrierState& m = mbarrier(w, in, lane, host, &index);
  WarpState& me = state(w);
  m.used[slot(w)] = me.now;
  if (m.init_owner != slot(w) && m.init_clock > me.clock.seen[m.init_owner])
    w.fault(
        Kind::race, in, lane,
        "mbarrier: this warp waits for it, but nothing orders that after its initialisation by " +
            who(m.init_owner) + " at " + place(m.init_pc),
        m.address);
  if (!text(w, in).relaxed) me.clock.join(m.done);
}

}  // namespace tw::vgpu::checker
