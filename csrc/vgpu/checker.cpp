// The checker: set-up, blocks and accesses. The rest: checker_state.h.
#include "vgpu/checker.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/checker_state.h"
#include "vgpu/scalar_memory.h"

namespace tw::vgpu {

uint32_t granule_shift(const Program& program, Memory memory) {
  uint32_t shift = 4;
  for (const Instr& in : program.code) {
    if (!in.bytes) continue;
    bool counts = in.kind == Class::async_copy || in.kind == Class::barrier;
    if (in.kind == Class::shared_memory) counts = memory == Memory::shared;
    if (in.kind == Class::global_memory || in.kind == Class::atomic) {
      const ptx::Space space = space_of(in);
      counts = space == ptx::Space::generic ||
               (space == ptx::Space::shared) == (memory == Memory::shared);
    }
    if (counts) shift = std::min(shift, static_cast<uint32_t>(std::countr_zero(in.bytes)));
  }
  return shift;
}

namespace checker {

// ---- set-up

// The warps, and their warpgroups if there is wgmma.
static uint32_t number_of_readers(const Cluster& cluster) {
  const uint32_t warps = cluster.launch().warps_per_block();
  const uint32_t groups = cluster.program().kept_uses.empty() ? 0 : (warps + 3) / 4;
  return ((warps + groups) * cluster.size() + 7) / 8 * 8;
}

Checker::Checker(Cluster& cluster)
    : cluster_(cluster),
      program_(cluster.program()),
      next_(cluster.launch().observer),
      global_(cluster.launch().global_races),
      strict_(cluster.launch().check == Check::strict),
      unfenced_copies_(!strict_ && cluster.launch().unfenced_copies),
      per_block_(cluster.launch().warps_per_block()),
      readers_(number_of_readers(cluster)),
      width_(readers_),
      shift_(granule_shift(program_, Memory::shared)) {
  texts_.resize(program_.code.size());
  for (size_t i = 0; i < texts_.size(); ++i) {
    const std::string& s = program_.origins[i].text;
    const Class kind = program_.code[i].kind;
    texts_[i].collective = program_.origins[i].text.find("matrix.sync") != std::string::npos;
    const auto has = [&](const char* word) { return s.find(word) != std::string::npos; };
    Text& t = texts_[i];
    if (kind == Class::fence) {
      t.proxy_fence = has("fence.proxy.async");
      t.init_fence = has("mbarrier_init");
      t.wgmma_fence = has("wgmma.fence");
    } else if (kind == Class::barrier) {
      t.relaxed = has(".relaxed");
    } else if (kind == Class::atomic || kind == Class::shared_memory ||
               kind == Class::global_memory) {
      t.acquire = has(".acquire") || has(".acq_rel");
      t.release = has(".release") || has(".acq_rel");
    }
  }
  for (const auto& uses : program_.kept_uses)
    for (const Program::RegisterUse& use : uses) {
      if (kept_index_.size() <= use.offset / 4) kept_index_.resize(use.offset / 4 + 1);
      if (!kept_index_[use.offset / 4]) kept_index_[use.offset / 4] = ++kept_;
    }
  warps_.resize(readers_);
  for (WarpState& w : warps_) {
    w.clock.resize(width_);
    w.released.resize(width_);
    w.acquired.resize(width_);
    w.in_flight.resize(kept_);
    w.unfenced.resize(kept_);
  }
  cluster_opened_.resize(width_);
  cluster_barrier_.arriving.resize(width_);
  blocks_.resize(cluster.size());
  for (uint32_t r = 0; r < cluster.size(); ++r) {
    const uint32_t bytes = cluster.block(r).shared_end() - kSharedBase;
    BlockState& b = blocks_[r];
    b.cells.resize((bytes >> shift_) + 1);
    b.reads.resize(b.cells.size() * readers_);
    b.mbarriers.resize(bytes / 8 + 1);
    b.remote.resize(readers_);
    b.remote_pc.resize(readers_);
    for (BarrierState& barrier : b.barriers) barrier.arriving.resize(width_);
  }
}

void Checker::start_cluster() {
  newest_ = base_;
  for (const WarpState& w : warps_) newest_ = std::max(newest_, w.now);
  for (const MBarrierState& m : mbarriers_) newest_ = std::max(newest_, m.phase);
  base_ = newest_ + 1;
  if (base_ > kMaxClock / 2) {
    base_ = 1;
    for (BlockState& b : blocks_) {
      std::fill(b.cells.begin(), b.cells.end(), Cell{});
      std::fill(b.reads.begin(), b.reads.end(), 0);
    }
  }
  for (WarpState& w : warps_) {
    std::fill(w.clock.seen.begin(), w.clock.seen.end(), base_ - 1);
    std::fill(w.clock.fenced.begin(), w.clock.fenced.end(), base_ - 1);
    w.now = base_;
    w.has_released = w.has_acquired = false;
    w.uses_in_flight = 0;
    std::fill(w.in_flight.begin(), w.in_flight.end(), 0);
    std::fill(w.unfenced.begin(), w.unfenced.end(), 1);
  }
  for (BlockState& b : blocks_) {
    std::fill(b.mbarriers.begin(), b.mbarriers.end(), 0);
    for (BarrierState& barrier : b.barriers)
      if (barrier.used) {
        barrier.arriving.clear();
        barrier.waiting = 0;
        barrier.used = false;
      }
    b.outstanding.clear();
    std::fill(b.remote.begin(), b.remote.end(), 0);
  }
  mbarriers_.clear();
  tensor_maps_.clear();
  cluster_barrier_.arriving.clear();
  cluster_opened_.clear();
  flags_.clear();
}

void Checker::block_start(Block& b) {
  if (next_) next_->block_start(b);
  if (b.rank() == 0) start_cluster();
}
void Checker::block_exit(Block& b) {
  if (next_) next_->block_exit(b);
  for (const Outstanding& o : state(b).outstanding) {
    const char* what =
        o.kind == AsyncAccess::Kind::store  ? "asynchronous store still reads its shared memory"
        : o.kind == AsyncAccess::Kind::load ? "asynchronous load still writes its shared memory"
                                            : "wgmma is still in flight";
    o.warp->fault(
        Kind::asynchronous, *o.in, o.lane,
        std::string("the block has ended while this ") + what + ": nobody has waited for it");
  }
}
void Checker::block_end(Block& b) {
  if (next_) next_->block_end(b);
  if (cluster_.size() == 1) return;
  // A block must not end before the others have used its memory: one of its warps knows that they have.
  for (uint32_t u = 0; u < per_block_ * cluster_.size(); ++u) {
    const uint32_t last = state(b).remote[u];
    bool known = last == 0;
    for (const Warp& w : b.warps()) known |= state(w).clock.seen[u] >= last;
    if (known) continue;
    const Warp& w = cluster_.block(u / per_block_).warps()[u % per_block_];
    w.fault(Kind::race, program_.code[state(b).remote_pc[u]], -1,
            "this uses the shared memory of block " + std::to_string(b.rank()) +
                " of the cluster, which may have ended before: nothing orders its end after this");
  }
}

// Clocks grow by one place for each mbarrier.
void Checker::add_mbarrier_clock() {
  ++width_;
  for (WarpState& w : warps_) {
    w.clock.resize(width_);
    w.released.resize(width_);
    w.acquired.resize(width_);
  }
  for (BlockState& b : blocks_)
    for (BarrierState& barrier : b.barriers) barrier.arriving.resize(width_);
  for (MBarrierState& m : mbarriers_) {
    m.arriving.resize(width_);
    m.done.resize(width_);
  }
  cluster_barrier_.arriving.resize(width_);
  cluster_opened_.resize(width_);
  for (auto& [where, clock] : flags_) clock.resize(width_);
}

// ---- accesses

void Checker::instruction(Warp& w, const Instr& in, uint32_t lanes) {
  if (next_) next_->instruction(w, in, lanes);
  if (!kept_ || !lanes) return;
  const auto& uses = program_.kept_uses[program_.pc_of(in)];
  if (uses.empty()) return;
  WarpState& me = state(w);
  for (const Program::RegisterUse& use : uses) {
    const uint32_t i = kept_index_[use.offset / 4] - 1;
    if (me.in_flight[i])
      w.fault(Kind::asynchronous, in, std::countr_zero(lanes),
              "wgmma: a register is " + std::string(use.written ? "written" : "read") +
                  " while a wgmma.mma_async uses it; wgmma.wait_group must come first");
    if (!use.written) continue;
    // Compilers sink copies between the fence and the wgmma, and the assembler removes them: a copy is as old as
    // its source.
    const bool copies = !strict_ && use.copied != kNone;
    const bool written = !copies || me.unfenced[kept_index_[use.copied / 4] - 1];
    me.unfenced[i] = written || (me.unfenced[i] && lanes != kAllLanes);
  }
}

void Checker::access(Warp& w, const Instr& in, const Access& a) {
  if (next_) next_->access(w, in, a);
  if (a.space == ptx::Space::shared)
    shared(w, in, a);
  else if (global_ && a.space == ptx::Space::global)
    global_->access(w, in, a);
}

void Checker::shared(Warp& w, const Instr& in, const Access& a) {
  const uint32_t own = slot(w), pc = program_.pc_of(in);
  WarpState& me = warps_[own];
  if (a.relaxed) synchronise(w, in, a);
  const uint32_t granules = std::max(1u, a.bytes >> shift_);
  const bool collective = texts_[pc].collective;
  const uint32_t first_own = me.clock.seen[own] << kReadShift | 63;  // reads above it are unordered
  constexpr uint64_t kOffset = (1u << kSharedRankShift) - 1;
  for (uint32_t left = a.lanes; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    const uint32_t lane = collective ? kManyLanes : static_cast<uint32_t>(l);
    const auto rank = static_cast<uint32_t>(a.address[l] >> kSharedRankShift & 0xff);
    BlockState& b = rank ? blocks_[rank - 1] : blocks_[w.block().rank()];
    if (rank && rank - 1 != w.block().rank()) use_remote(b, me, own, pc);
    const size_t first = ((a.address[l] & kOffset) - kSharedBase) >> shift_;
    for (size_t g = first; g < first + granules; ++g) {
      uint32_t* reads = &b.reads[g * readers_];
      if (a.load && !clean(me, own, lane, b.cells[g])) [[unlikely]]
        check_read({w, in, l, lane, b, g, a.store ? "an atomic" : "a read"}, a.relaxed);
      if (a.store) {
        const Cell c = b.cells[g];
        const bool ordered = c.clock() < base_ || clean(me, own, lane, c);
        if (!ordered || !unread(me, reads)) [[unlikely]] {
          const size_t at = (g - first) << shift_;
          check_write({w, in, l, lane, b, g, a.load ? "an atomic" : "a write"}, a.relaxed,
                      a.host[l] + at, a.value ? a.value + l * a.value_stride + at : nullptr);
        }
        b.cells[g] =
            Cell::make(me.now, own, lane, pc, Cell::kGeneric | (a.relaxed ? Cell::kRelaxed : 0));
      } else if (!a.relaxed) {
        const uint32_t before = reads[own];
        // A collective read is over for all lanes when one goes on.
        const uint32_t reader = collective ? kWholeWarp : lane;
        uint32_t entry = me.now << kReadShift | reader;
        if (before > first_own && (before & 63) != reader)
          entry = me.now << kReadShift | kManyLanes;
        reads[own] = before & kInFlight ? before : entry;
      }
    }
  }
}

// Relaxed accesses order nothing by themselves; with fences, or as .release and .acquire, they do.
void Checker::synchronise(Warp& w, const Instr& in, const Access& a) {
  WarpState& me = state(w);
  const Text& t = text(w, in);
  const uint32_t own = slot(w);
  if (!me.has_released && !t.release && flags_.empty()) return;
  for_lanes(a.lanes, [&](int l) {
    const auto rank = static_cast<uint32_t>(a.address[l] >> kSharedRankShift & 0xff);
    const std::pair<uint32_t, size_t> key{rank ? rank - 1 : w.block().rank(),
                                          a.address[l] & ((1u << kSharedRankShift) - 1)};
    if (a.load) {
      const auto found = flags_.find(key);
      if (found != flags_.end()) {
        if (t.acquire)
          me.clock.join(found->second);
        else
          me.acquired.join(found->second), me.has_acquired = true;
      }
    }
    if (a.store && (t.release || me.has_released)) {
      Clock& flag = flags_[key];
      flag.resize(width_);
      if (t.release)
        arrive(me, own, flag);
      else
        flag.join(me.released);
    }
  });
}

}  // namespace checker

std::unique_ptr<Observer> make_checker(Cluster& cluster) {
  return std::make_unique<checker::Checker>(cluster);
}

}  // namespace tw::vgpu
