// The checker's state. checker.h says what it finds and how.
//   checker.cpp          set-up, blocks, accesses
//   checker_sync.cpp     barriers, fences, mbarriers: who knows what of whom
//   checker_async.cpp    asynchronous operations and the registers of wgmma
//   checker_report.cpp   the checks of a granule that was not found clean, and their messages
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "vgpu/block.h"
#include "vgpu/checker.h"
#include "vgpu/global_races.h"
#include "vgpu/lanes.h"

namespace tw::vgpu::checker {

// ---- records of a granule

// The last write.
//   bits 0-15 pc, 16-21 lane, 22-31 owner, 32-34 flags, 35-63 clock
struct Cell {
  static constexpr uint64_t kPending = uint64_t{1} << 32;  // an asynchronous write is under way
  static constexpr uint64_t kRelaxed = uint64_t{1} << 33;
  static constexpr uint64_t kGeneric = uint64_t{1} << 34;  // by the generic proxy
  uint64_t bits = 0;

  static Cell make(uint32_t clock, uint32_t owner, uint32_t lane, uint32_t pc, uint64_t flags) {
    return {uint64_t{clock} << 35 | flags | uint64_t{owner} << 22 | uint64_t{lane} << 16 |
            std::min<uint32_t>(pc, 0xffff)};
  }
  uint32_t clock() const { return static_cast<uint32_t>(bits >> 35); }
  uint32_t owner() const { return bits >> 22 & 0x3ff; }
  uint32_t lane() const { return bits >> 16 & 63; }
  uint32_t pc() const { return bits & 0xffff; }
  bool pending() const { return bits & kPending; }
  bool relaxed() const { return bits & kRelaxed; }
  bool generic() const { return bits & kGeneric; }
};

// A read: the clock and the lane; or, while an asynchronous operation reads, kInFlight and its number.
constexpr uint32_t kInFlight = 0x80000000;
constexpr uint32_t kReadShift = 6;
constexpr uint32_t kManyLanes = 32;  // of a warp; or all of them together
constexpr uint32_t kWholeWarp = 33;  // read by all, and all know that it is over
constexpr uint32_t kMaxClock = (1u << (31 - kReadShift)) - 1;
constexpr uint32_t kMaxOwners = 1024;

// What somebody knows of every warp and every mbarrier: the newest clock that is ordered before. `fenced`: and made
// visible to the asynchronous proxy.
struct Clock {
  std::vector<uint32_t> seen, fenced;

  void resize(size_t n) {
    seen.resize(n);
    fenced.resize(n);
  }
  void clear() {
    std::fill(seen.begin(), seen.end(), 0);
    std::fill(fenced.begin(), fenced.end(), 0);
  }
  void join(const Clock& other) {
    for (size_t i = 0; i < seen.size(); ++i) seen[i] = std::max(seen[i], other.seen[i]);
    for (size_t i = 0; i < fenced.size(); ++i) fenced[i] = std::max(fenced[i], other.fenced[i]);
  }
};

struct WarpState {
  Clock clock;       // of itself: what all lanes have seen of each other
  uint32_t now = 0;  // its present interval
  Clock released;    // at its last fence; sent by relaxed stores
  Clock acquired;    // by relaxed loads; taken at the next fence
  bool has_released = false, has_acquired = false;
  uint32_t arrived_at = 0;  // pc of the last synchronisation, for messages
  // wgmma: by kept register, how many operations use it, and whether it was written since the last wgmma.fence.
  std::vector<uint8_t> in_flight, unfenced;
  uint32_t uses_in_flight = 0;
};

struct BarrierState {
  Clock arriving;
  uint64_t waiting = 0;  // warps of the block
  bool used = false;
};

struct MBarrierState {
  Clock arriving, done;
  uint32_t phase = 0;  // completed ones, counted on from block to block
  uint32_t address = 0;
  uint32_t block = 0;  // rank
  uint32_t init_owner = 0, init_clock = 0, init_pc = 0;
  std::vector<uint32_t> used;  // by warp: when it last arrived or had waited
};

// A tensor map that the kernel has written to global memory.
struct TensorMapState {
  uint32_t owner = 0, clock = 0, pc = 0;  // of the write
  std::vector<uint32_t> acquired;         // by warp: when its fence came after the write, or 0
};

struct Outstanding {
  AsyncAccess::Kind kind;
  uint64_t id;
  Warp* warp;
  const Instr* in;
  int lane;
};

struct BlockState {
  std::vector<Cell> cells;
  std::vector<uint32_t> reads;      // [granule][reader]
  std::vector<uint16_t> mbarriers;  // by shared address / 8: index + 1
  std::array<BarrierState, 16> barriers;
  std::vector<Outstanding> outstanding;
  // By warp of other blocks of the cluster: when it last used this block's memory, and where.
  std::vector<uint32_t> remote, remote_pc;
};

// What the text of an instruction says and the checker needs.
struct Text {
  bool acquire = false, release = false;
  bool proxy_fence = false;  // fence.proxy.async
  bool init_fence = false;   // fence.mbarrier_init
  bool wgmma_fence = false;
  bool collective = false;  // ldmatrix, stmatrix: the data of a row is of several lanes
  bool relaxed = false;     // an mbarrier operation without order
};

class Checker final : public Observer {
 public:
  explicit Checker(Cluster& cluster);

  void block_start(Block&) override;
  void block_exit(Block&) override;
  void block_end(Block&) override;
  void instruction(Warp&, const Instr&, uint32_t lanes) override;
  void access(Warp&, const Instr&, const Access&) override;
  void barrier_arrive(Warp&, const Instr&, int barrier, bool waits) override;
  void barrier_open(Block&, int barrier, bool whole_block) override;
  void barrier_leave(Warp&, const Instr&, int barrier) override;
  void cluster_arrive(Warp&, const Instr&) override;
  void cluster_open(Cluster&) override;
  void cluster_leave(Warp&, const Instr&) override;
  void warp_sync(Warp&, const Instr&, uint32_t lanes) override;
  void fence(Warp&, const Instr&) override;
  void mbarrier_init(Warp&, const Instr&, int lane, const uint8_t*) override;
  void mbarrier_inval(Warp&, const Instr&, int lane, const uint8_t*) override;
  void mbarrier_signal(Warp&, const Instr&, int lane, const uint8_t*, bool asynchronous,
                       bool completes) override;
  void mbarrier_leave(Warp&, const Instr&, int lane, const uint8_t*) override;
  void async(Warp&, const Instr&, int lane, const AsyncAccess&) override;
  void tensor_map(Warp&, const Instr&, int lane, const uint8_t*, MapUse) override;
  void wgmma_leave(Warp&, const Instr&, uint64_t id) override;
  void registers(Warp&, const Instr&, const uint32_t* offsets, uint32_t accumulators,
                 uint32_t count, bool done) override;

 private:
  using Kind = Fault::Kind;
  uint32_t slot(const Warp& w) const { return w.block().rank() * per_block_ + w.index(); }
  WarpState& state(const Warp& w) { return warps_[slot(w)]; }
  // wgmma is an operation of four warps: a reader with a clock of its own, which counts its operations.
  uint32_t warpgroup(const Warp& w) const {
    return per_block_ * cluster_.size() + w.block().rank() * ((per_block_ + 3) / 4) + w.index() / 4;
  }
  uint32_t wgmma_clock(uint64_t id) const {
    return static_cast<uint32_t>(std::min<uint64_t>(base_ + id, kMaxClock));
  }
  BlockState& state(const Block& b) { return blocks_[b.rank()]; }
  const Text& text(const Warp& w, const Instr& in) const { return texts_[w.program().pc_of(in)]; }

  void start_cluster();
  void add_mbarrier_clock();
  void arrive(WarpState& me, uint32_t own, Clock& at) const;
  void tick(WarpState& me) const { me.now += me.now < kMaxClock; }
  MBarrierState& mbarrier(Warp& w, const Instr& in, int lane, const uint8_t* host, uint32_t* index);
  // Nobody uses it any more: it may become another or plain memory.
  void check_unused(const Warp& w, const Instr& in, int lane, const MBarrierState& m) const;

  void use_remote(BlockState& b, const WarpState& me, uint32_t own, uint32_t pc) const {
    b.remote[own] = me.now;
    b.remote_pc[own] = pc;
  }
  void shared(Warp& w, const Instr& in, const Access& a);
  void synchronise(Warp& w, const Instr& in, const Access& a);

  // The checks of one granule. Fast: true if nothing can be wrong.
  bool clean(const WarpState& me, uint32_t own, uint32_t lane, Cell c) const {
    return c.clock() >= base_ && !c.pending() &&
           (c.clock() <= me.clock.seen[c.owner()] || (c.owner() == own && c.lane() == lane));
  }
  bool unfenced(const WarpState& me, Cell c) const {
    return c.generic() && c.clock() >= base_ && c.clock() > me.clock.fenced[c.owner()];
  }
  bool unread(const WarpState& me, const uint32_t* reads) const {
    uint32_t any = 0;
    const uint32_t* seen = me.clock.seen.data();
    for (uint32_t u = 0; u < readers_; ++u) any |= (reads[u] >> kReadShift) > seen[u];
    return !any;
  }
  struct At {
    Warp& w;
    const Instr& in;
    int lane;
    uint32_t lane_code;
    const BlockState& block;
    size_t granule;
    const char* verb;  // "a read"
  };
  uint32_t address_of(const At& at) const {
    return kSharedBase + static_cast<uint32_t>(at.granule << shift_);
  }
  void check_read(const At& at, bool relaxed) const;
  void check_write(const At& at, bool relaxed, const uint8_t* old_bytes,
                   const uint8_t* value) const;
  void check_reads(const At& at) const;
  void check_fenced(const At& at, const char* what) const;
  std::string who(uint32_t owner) const;
  std::string place(uint32_t pc) const;
  std::string describe(Cell c) const;
  [[noreturn]] void report(const At& at, Kind kind, const std::string& what) const;

  Cluster& cluster_;
  const Program& program_;
  Observer* next_;
  GlobalRaces* global_;
  const bool strict_;
  const bool unfenced_copies_;  // wgmma may read data of cp.async without a proxy fence
  uint32_t per_block_, readers_, width_;
  uint32_t shift_;
  uint32_t base_ = 0, newest_ = 0;  // clocks of this cluster of blocks start at base_
  uint32_t started_ = 0;
  std::vector<Text> texts_;
  std::vector<WarpState> warps_;
  std::vector<BlockState> blocks_;
  std::vector<MBarrierState> mbarriers_;
  std::map<const uint8_t*, TensorMapState> tensor_maps_;
  BarrierState cluster_barrier_;
  std::vector<uint32_t> cluster_waiting_;
  Clock cluster_opened_;
  std::map<std::pair<uint32_t, size_t>, Clock>
      flags_;                         // places that relaxed stores released through
  std::vector<uint32_t> kept_index_;  // register offset / 4 -> index + 1
  uint32_t kept_ = 0;
};

}  // namespace tw::vgpu::checker
