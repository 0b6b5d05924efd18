#include "vgpu/checker.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "vgpu/block.h"
#include "vgpu/global_races.h"
#include "vgpu/lanes.h"
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

namespace {

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
  void mbarrier_signal(Warp&, const Instr&, int lane, const uint8_t*, bool asynchronous,
                       bool completes) override;
  void mbarrier_leave(Warp&, const Instr&, int lane, const uint8_t*) override;
  void async(Warp&, const Instr&, int lane, const AsyncAccess&) override;
  void registers(Warp&, const Instr&, const uint32_t* offsets, uint32_t count, bool done) override;

 private:
  using Kind = Fault::Kind;
  uint32_t slot(const Warp& w) const { return w.block().rank() * per_block_ + w.index(); }
  WarpState& state(const Warp& w) { return warps_[slot(w)]; }
  BlockState& state(const Block& b) { return blocks_[b.rank()]; }
  const Text& text(const Warp& w, const Instr& in) const { return texts_[w.program().pc_of(in)]; }

  void start_cluster();
  void add_mbarrier_clock();
  void arrive(WarpState& me, uint32_t own, Clock& at) const;
  void tick(WarpState& me) const { me.now += me.now < kMaxClock; }
  MBarrierState& mbarrier(Warp& w, const Instr& in, int lane, const uint8_t* host, uint32_t* index);

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
  uint32_t per_block_, readers_, width_;
  uint32_t shift_;
  uint32_t base_ = 0, newest_ = 0;  // clocks of this cluster of blocks start at base_
  uint32_t started_ = 0;
  std::vector<Text> texts_;
  std::vector<WarpState> warps_;
  std::vector<BlockState> blocks_;
  std::vector<MBarrierState> mbarriers_;
  BarrierState cluster_barrier_;
  std::vector<uint32_t> cluster_waiting_;
  Clock cluster_opened_;
  std::map<std::pair<uint32_t, size_t>, Clock>
      flags_;                         // places that relaxed stores released through
  std::vector<uint32_t> kept_index_;  // register offset / 4 -> index + 1
  uint32_t kept_ = 0;
};

// ---- set-up

Checker::Checker(Cluster& cluster)
    : cluster_(cluster),
      program_(cluster.program()),
      next_(cluster.launch().observer),
      global_(cluster.launch().global_races),
      strict_(cluster.launch().check == Check::strict),
      per_block_(cluster.launch().warps_per_block()),
      readers_((per_block_ * cluster.size() + 7) / 8 * 8),
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

// ---- messages

std::string Checker::who(uint32_t owner) const {
  std::string s = "warp " + std::to_string(owner % per_block_);
  if (cluster_.size() > 1)
    s += " of block " + std::to_string(owner / per_block_) + " of the cluster";
  return s;
}
std::string Checker::place(uint32_t pc) const {
  if (pc >= program_.origins.size() || pc == 0xffff) return "";
  const Program::Origin& o = program_.origins[pc];
  std::string s = "PTX line " + std::to_string(o.line) + " '" + o.text + "'";
  if (o.location.line) s += ", source line " + std::to_string(o.location.line);
  return s;
}
std::string Checker::describe(Cell c) const {
  if (c.owner() >= readers_) {
    const MBarrierState& m = mbarriers_[c.owner() - readers_];
    return "the asynchronous copy at " + place(c.pc()) + ", which reports to the mbarrier at " +
           hex(m.address);
  }
  std::string s = who(c.owner());
  if (c.lane() < kManyLanes) s += ", lane " + std::to_string(c.lane());
  return s + ", at " + place(c.pc());
}
void Checker::report(const At& at, Kind kind, const std::string& what) const {
  at.w.fault(kind, at.in, at.lane, what, address_of(at));
}

// ---- the checks of a granule that was not found clean

void Checker::check_read(const At& at, bool relaxed) const {
  const Cell c = at.block.cells[at.granule];
  const uint32_t own = slot(at.w);
  const WarpState& me = warps_[own];
  const std::string where = std::string("shared memory: ") + at.verb + " at " + hex(address_of(at));
  if (c.clock() < base_)
    report(at, Kind::uninitialised, where + ", which nobody has written in this block");
  if (c.pending())
    report(at, Kind::asynchronous,
           where + " while an asynchronous write to it is under way, issued by " + describe(c) +
               "; nothing has waited for it");
  if (c.clock() <= me.clock.seen[c.owner()] || (c.owner() == own && c.lane() == at.lane_code))
    return;
  if (relaxed && c.relaxed()) return;
  if (c.owner() >= readers_)
    report(at, Kind::race,
           where + " races with " + describe(c) + ": this warp has not waited for that phase");
  if (c.owner() == own)
    report(at, Kind::race,
           where + " races with the write of another lane of this warp: " + describe(c) +
               "; no bar.warp.sync or barrier orders them");
  report(at, Kind::race,
         where + " races with the write of " + describe(c) + "; no barrier orders them");
}

void Checker::check_reads(const At& at) const {
  const uint32_t own = slot(at.w);
  const WarpState& me = warps_[own];
  const uint32_t* reads = &at.block.reads[at.granule * readers_];
  const std::string where = std::string("shared memory: ") + at.verb + " at " + hex(address_of(at));
  for (uint32_t u = 0; u < readers_; ++u) {
    if ((reads[u] >> kReadShift) <= me.clock.seen[u]) continue;
    if (reads[u] & kInFlight)
      report(at, Kind::asynchronous,
             where + " while an asynchronous operation of " + who(u) +
                 " still reads it; nothing has waited for it");
    const uint32_t lane = reads[u] & 63;
    if (u == own && (lane == at.lane_code || lane == kWholeWarp)) continue;
    if (u == own)
      report(at, Kind::race,
             where + " races with the read of another lane of this warp" +
                 (lane < kManyLanes ? " (" + std::to_string(lane) + ")" : "") +
                 "; no bar.warp.sync or barrier orders them");
    report(at, Kind::race,
           where + " races with a read by " + who(u) +
               (lane < kManyLanes ? ", lane " + std::to_string(lane) : "") +
               ", which nothing orders before it; that warp last synchronised at " +
               place(warps_[u].arrived_at));
  }
}

void Checker::check_write(const At& at, bool relaxed, const uint8_t* old_bytes,
                          const uint8_t* value) const {
  const Cell c = at.block.cells[at.granule];
  const uint32_t own = slot(at.w);
  const WarpState& me = warps_[own];
  const std::string where = std::string("shared memory: ") + at.verb + " at " + hex(address_of(at));
  if (c.clock() >= base_) {
    if (c.pending())
      report(at, Kind::asynchronous,
             where + " while an asynchronous write to it is under way, issued by " + describe(c) +
                 "; nothing has waited for it");
    const bool ordered =
        c.clock() <= me.clock.seen[c.owner()] || (c.owner() == own && c.lane() == at.lane_code);
    const bool same_instruction = c.owner() == own && c.pc() == program_.pc_of(at.in);
    const bool unchanged = value && std::memcmp(old_bytes, value, size_t{1} << shift_) == 0;
    if (!ordered && !same_instruction && !unchanged && !(relaxed && c.relaxed())) {
      if (c.owner() >= readers_)
        report(at, Kind::race,
               where + " races with " + describe(c) + ": this warp has not waited for that phase");
      report(at, Kind::race,
             where + " races with the write of " + describe(c) + "; no " +
                 (c.owner() == own ? "bar.warp.sync or " : "") + "barrier orders them");
    }
  }
  check_reads(at);
}

void Checker::check_fenced(const At& at, const char* what) const {
  const Cell c = at.block.cells[at.granule];
  const WarpState& me = warps_[slot(at.w)];
  if (!unfenced(me, c)) return;
  report(at, Kind::race,
         std::string("shared memory: ") + what + " at " + hex(address_of(at)) +
             " needs a fence.proxy.async after the generic write of " + describe(c));
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

void Checker::mbarrier_init(Warp& w, const Instr& in, int lane, const uint8_t* host) {
  if (next_) next_->mbarrier_init(w, in, lane, host);
  uint32_t index = 0;
  MBarrierState& m = mbarrier(w, in, lane, host, &index);
  m.arriving.clear();
  m.done.clear();
  m.init_owner = slot(w);
  m.init_clock = state(w).now;
  m.init_pc = program_.pc_of(in);
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
  const MBarrierState& m = mbarrier(w, in, lane, host, &index);
  WarpState& me = state(w);
  if (m.init_owner != slot(w) && m.init_clock > me.clock.seen[m.init_owner])
    w.fault(
        Kind::race, in, lane,
        "mbarrier: this warp waits for it, but nothing orders that after its initialisation by " +
            who(m.init_owner) + " at " + place(m.init_pc),
        m.address);
  if (!text(w, in).relaxed) me.clock.join(m.done);
}

// ---- asynchronous operations

void Checker::async(Warp& w, const Instr& in, int lane, const AsyncAccess& a) {
  if (next_) next_->async(w, in, lane, a);
  using Async = AsyncAccess::Kind;
  const uint32_t own = slot(w), pc = program_.pc_of(in);
  WarpState& me = warps_[own];
  BlockState& b = state(*a.block);
  const bool writes = a.kind == Async::copy || a.kind == Async::load;
  const bool generic = a.kind == Async::copy;
  const auto lane_code = a.kind == Async::wgmma ? kManyLanes : static_cast<uint32_t>(lane);
  const uint32_t tag = kInFlight | (static_cast<uint32_t>(a.id) & ~kInFlight);
  const uint32_t over =
      me.now << kReadShift | (a.kind == Async::wgmma ? kWholeWarp : static_cast<uint32_t>(lane));

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
        else if (reads[own] == tag)
          reads[own] = over;
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
          check_fenced(at, at.verb);
        }
        reads[own] = tag;
      }
    }
  }
  if (generic) return;
  auto& outstanding = state(w.block()).outstanding;
  if (!a.done) {
    outstanding.push_back({a.kind, a.id, &w, &in, lane});
  } else {
    std::erase_if(outstanding, [&](const Outstanding& o) {
      return o.id == a.id && o.warp == &w && o.kind == a.kind;
    });
  }
}

void Checker::registers(Warp& w, const Instr& in, const uint32_t* offsets, uint32_t count,
                        bool done) {
  if (next_) next_->registers(w, in, offsets, count, done);
  WarpState& me = state(w);
  for (uint32_t k = 0; k < count; ++k) {
    const uint32_t slot_of = offsets[k] / 4;
    if (slot_of >= kept_index_.size() || !kept_index_[slot_of]) continue;  // nobody else uses it
    const uint32_t i = kept_index_[slot_of] - 1;
    if (done) {
      me.in_flight[i] -= me.in_flight[i] > 0;
      continue;
    }
    if (me.unfenced[i])
      w.fault(Kind::asynchronous, in, -1,
              "wgmma: a register of this wgmma.mma_async was written, and no wgmma.fence has come "
              "since");
    ++me.in_flight[i];
  }
}

}  // namespace

std::unique_ptr<Observer> make_checker(Cluster& cluster) {
  return std::make_unique<Checker>(cluster);
}

}  // namespace tw::vgpu
