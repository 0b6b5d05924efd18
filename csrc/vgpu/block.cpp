#include "vgpu/block.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace tw::vgpu {

// ---- block

size_t Block::next_slot() {
  static std::atomic<size_t> slots{0};
  return slots++;
}

Block::Block(const Program& program, const Launch& launch, Cluster& cluster, uint32_t rank)
    : program_(program), launch_(launch), cluster_(cluster), rank_(rank) {
  shared_end_ = launch.dynamic_shared ? program.dynamic_shared_base() + launch.dynamic_shared
                                      : program.static_shared_end;
  shared_storage_.resize(shared_end_ + 1024);
  const auto address = reinterpret_cast<uintptr_t>(shared_storage_.data());
  shared_ = shared_storage_.data() + ((address + 1023) / 1024 * 1024 - address);
  warps_.reserve(launch.warps_per_block());
  for (uint32_t w = 0; w < launch.warps_per_block(); ++w) warps_.emplace_back(*this, w);
}

void Block::start(uint64_t linear_index) {
  const uint32_t* grid = launch_.grid;
  index_[0] = static_cast<uint32_t>(linear_index % grid[0]);
  index_[1] = static_cast<uint32_t>(linear_index / grid[0] % grid[1]);
  index_[2] = static_cast<uint32_t>(linear_index / grid[0] / grid[1]);
  std::memset(shared_, 0xcd, shared_end_);
  for (Barrier& b : barriers_) b = Barrier{};
  for (auto& extension : extensions_) extension.reset();
  const uint32_t threads = launch_.threads_per_block();
  for (Warp& w : warps_) {
    const uint32_t lanes = std::min<uint32_t>(32, threads - w.index() * 32);
    w.start(kAllLanes >> (32 - lanes));
    fill_specials(w);
  }
  if (observer()) observer()->block_start(*this);
}

void Block::finish() {
  if (observer()) observer()->block_exit(*this);
  for (auto& extension : extensions_)
    if (extension) extension->finish(*this);
  if (observer()) observer()->block_end(*this);
}

bool Block::advance_extensions() {
  bool any = false;
  for (auto& extension : extensions_) any |= extension && extension->advance(*this);
  return any;
}

void Block::fill_specials(Warp& w) {
  const uint32_t* grid = launch_.grid;
  const uint32_t* block = launch_.block;
  const uint32_t* cluster = launch_.cluster;
  for (const SpecialRegister& r : program_.specials) {
    uint32_t* lanes = w.lanes<uint32_t>(r.offset);
    const auto all = [&](uint32_t value) { std::fill_n(lanes, kLanes, value); };
    const auto each = [&](auto f) {
      for (uint32_t l = 0; l < kLanes; ++l) lanes[l] = f(l);
    };
    const auto axis = [&](Special first) {
      return static_cast<int>(r.which) - static_cast<int>(first);
    };
    const uint32_t first_thread = w.index() * kLanes;
    switch (r.which) {
      case Special::tid_x:
        each([&](uint32_t l) { return (first_thread + l) % block[0]; });
        break;
      case Special::tid_y:
        each([&](uint32_t l) { return (first_thread + l) / block[0] % block[1]; });
        break;
      case Special::tid_z:
        each([&](uint32_t l) { return (first_thread + l) / block[0] / block[1]; });
        break;
      case Special::ntid_x:
      case Special::ntid_y:
      case Special::ntid_z:
        all(block[axis(Special::ntid_x)]);
        break;
      case Special::ctaid_x:
      case Special::ctaid_y:
      case Special::ctaid_z:
        all(index_[axis(Special::ctaid_x)]);
        break;
      case Special::nctaid_x:
      case Special::nctaid_y:
      case Special::nctaid_z:
        all(grid[axis(Special::nctaid_x)]);
        break;
      case Special::laneid:
        each([](uint32_t l) { return l; });
        break;
      case Special::warpid:
        all(w.index());
        break;
      case Special::nwarpid:
        all(launch_.warps_per_block());
        break;
      case Special::lanemask_eq:
        each([](uint32_t l) { return 1u << l; });
        break;
      case Special::lanemask_le:
        each([](uint32_t l) { return kAllLanes >> (31 - l); });
        break;
      case Special::lanemask_lt:
        each([](uint32_t l) { return (1u << l) - 1; });
        break;
      case Special::lanemask_ge:
        each([](uint32_t l) { return kAllLanes << l; });
        break;
      case Special::lanemask_gt:
        each([](uint32_t l) { return kAllLanes << l << 1; });
        break;
      case Special::clusterid_x:
      case Special::clusterid_y:
      case Special::clusterid_z: {
        const int i = axis(Special::clusterid_x);
        all(index_[i] / cluster[i]);
        break;
      }
      case Special::nclusterid_x:
      case Special::nclusterid_y:
      case Special::nclusterid_z: {
        const int i = axis(Special::nclusterid_x);
        all(grid[i] / cluster[i]);
        break;
      }
      case Special::cluster_ctaid_x:
      case Special::cluster_ctaid_y:
      case Special::cluster_ctaid_z: {
        const int i = axis(Special::cluster_ctaid_x);
        all(index_[i] % cluster[i]);
        break;
      }
      case Special::cluster_nctaid_x:
      case Special::cluster_nctaid_y:
      case Special::cluster_nctaid_z:
        all(cluster[axis(Special::cluster_nctaid_x)]);
        break;
      case Special::cluster_ctarank:
        all(rank_);
        break;
      case Special::cluster_nctarank:
        all(launch_.blocks_per_cluster());
        break;
      case Special::is_explicit_cluster:
        w.mask(r.offset) = launch_.blocks_per_cluster() > 1 ? kAllLanes : 0;
        break;
      case Special::smid:
      case Special::gridid:
      case Special::zero:
        all(0);
        break;
      case Special::nsmid:
        all(1);
        break;
      case Special::dynamic_smem_size:
        all(launch_.dynamic_shared);
        break;
      case Special::total_smem_size:
        all(shared_end_ - kSharedBase);
        break;
      case Special::parameters:
        std::fill_n(
            w.lanes<uint64_t>(r.offset), kLanes,
            reinterpret_cast<uint64_t>(launch_.parameters.data()) + static_cast<uint64_t>(r.value));
        break;
    }
  }
}

// ---- barriers

Block::Barrier& Block::barrier(Warp& w, const Instr& in, uint32_t index, uint32_t count) {
  if (index >= barriers_.size())
    w.fault(Fault::Kind::barrier, in, -1,
            "barrier " + std::to_string(index) + " does not exist (0 to 15)");
  if (count % kLanes)
    w.fault(Fault::Kind::barrier, in, -1,
            "barrier " + std::to_string(index) + ": thread count " + std::to_string(count) +
                " is not a multiple of the warp size");
  const auto all = static_cast<uint32_t>(warps_.size() * kLanes);
  if (count > all)
    w.fault(Fault::Kind::barrier, in, -1,
            "barrier " + std::to_string(index) + " waits for " + std::to_string(count) +
                " threads, the block has " + std::to_string(launch_.threads_per_block()));
  if (count == all) count = 0;
  Barrier& b = barriers_[index];
  if (b.arrived && b.count != count)
    w.fault(Fault::Kind::barrier, in, -1,
            "barrier " + std::to_string(index) + ": this warp expects " +
                std::to_string(count ? count : all) + " threads, others that have arrived expect " +
                std::to_string(b.count ? b.count : all));
  b.count = count;
  if (b.lanes.empty()) b.lanes.resize(warps_.size());
  return b;
}

void Block::arrive(Warp& w, uint32_t index) {
  Barrier& b = barriers_[index];
  // With .aligned the whole warp arrives, lanes that have exited included.
  const bool whole = w.exec == w.live;
  b.arrived += whole ? kLanes : static_cast<uint32_t>(std::popcount(w.exec));
  b.lanes[w.index()] |= w.exec;
  try_open(index);
}

void Block::try_open(uint32_t index) {
  Barrier& b = barriers_[index];
  if (!b.arrived) return;
  if (b.count) {
    if (b.arrived < b.count) return;
  } else {
    for (const Warp& w : warps_)
      if (~b.lanes[w.index()] & w.live) return;
  }
  if (observer()) observer()->barrier_open(*this, static_cast<int>(index), b.count == 0);
  ++b.phase;
  ++progress;
  b.arrived = 0;
  std::fill(b.lanes.begin(), b.lanes.end(), 0);
  b.result = b.pending;
  b.pending = Reduction{};
}

bool Block::barrier_sync(Warp& w, const Instr& in, uint32_t index, uint32_t count) {
  if (!w.ticket()) {
    Barrier& b = barrier(w, in, index, count);
    w.ticket() = b.phase + 1;
    if (observer()) observer()->barrier_arrive(w, in, static_cast<int>(index), true);
    arrive(w, index);
  }
  Barrier& b = barriers_[index];
  if (b.phase < w.ticket()) try_open(index);  // warps may have exited
  if (b.phase < w.ticket()) return false;
  if (observer()) observer()->barrier_leave(w, in, static_cast<int>(index));
  return true;
}

void Block::barrier_arrive(Warp& w, const Instr& in, uint32_t index, uint32_t count) {
  barrier(w, in, index, count);
  if (observer()) observer()->barrier_arrive(w, in, static_cast<int>(index), false);
  arrive(w, index);
}

void Block::barrier_reduce(Warp& w, uint32_t index, uint32_t predicate) {
  if (index >= barriers_.size()) return;  // barrier_sync reports it
  Reduction& r = barriers_[index].pending;
  r.population += static_cast<uint32_t>(std::popcount(predicate & w.exec));
  r.all &= (predicate & w.exec) == w.exec;
  r.any |= (predicate & w.exec) != 0;
}
const Block::Reduction& Block::reduction(Warp&, uint32_t index) const {
  return barriers_[index].result;
}

std::string Block::explain_barrier(uint32_t index) const {
  const Barrier& b = barriers_.at(index);
  return "barrier " + std::to_string(index) + ": " + std::to_string(b.arrived) + " of " +
         std::to_string(b.count ? b.count : static_cast<uint32_t>(warps_.size()) * kLanes) +
         " threads have arrived";
}

// ---- cluster

Cluster::Cluster(const Program& program, const Launch& launch)
    : program_(program), launch_(launch) {
  for (uint32_t r = 0; r < launch.blocks_per_cluster(); ++r)
    blocks_.push_back(std::make_unique<Block>(program, launch, *this, r));
  observer_ = launch.observer;
  if (launch.check != Check::off) {
    checker_ = make_checker(*this);
    observer_ = checker_.get();
  }
  if (launch.counters) {
    counters_ = launch.counters->watch();
    if (observer_) both_ = std::make_unique<TwoObservers>(*observer_, *counters_);
    observer_ = both_ ? both_.get() : counters_.get();
  }
}

void Cluster::start(uint64_t linear_index) {
  index_ = linear_index;
  uint64_t clusters[3];
  for (int i = 0; i < 3; ++i) clusters[i] = launch_.grid[i] / launch_.cluster[i];
  const uint64_t x = linear_index % clusters[0] * launch_.cluster[0];
  const uint64_t y = linear_index / clusters[0] % clusters[1] * launch_.cluster[1];
  const uint64_t z = linear_index / clusters[0] / clusters[1] * launch_.cluster[2];
  for (uint32_t r = 0; r < size(); ++r) {
    const uint64_t bx = x + r % launch_.cluster[0];
    const uint64_t by = y + r / launch_.cluster[0] % launch_.cluster[1];
    const uint64_t bz = z + r / launch_.cluster[0] / launch_.cluster[1];
    blocks_[r]->start((bz * launch_.grid[1] + by) * launch_.grid[0] + bx);
  }
}

uint64_t Cluster::progress() const {
  uint64_t sum = 0;
  for (const auto& block : blocks_) sum += block->progress;
  return sum;
}

uint64_t Cluster::instructions() const {
  uint64_t sum = 0;
  for (const auto& block : blocks_)
    for (const Warp& w : block->warps()) sum += w.executed;
  return sum;
}

bool Cluster::run(const std::atomic<bool>& stop) {
  while (!stop.load(std::memory_order_relaxed)) {
    const uint64_t before = progress();
    bool running = false, progressed = false, spinning = false;
    for (const auto& block : blocks_) {
      std::vector<Warp>& warps = block->warps();
      for (size_t i = 0; i < warps.size(); ++i) {
        Warp& w = warps[launch_.reverse_warps ? warps.size() - 1 - i : i];
        if (w.finished()) continue;
        const Turn turn = w.turn();
        running |= turn != Turn::finished;
        progressed |= turn == Turn::progress;
        spinning |= turn == Turn::spinning;
      }
    }
    if (!running) {
      for (const auto& block : blocks_) block->finish();
      return true;
    }
    if (progressed || progress() != before) continue;
    // A whole round without any change. First what is outstanding, then what is parked.
    bool again = false;
    for (const auto& block : blocks_) again |= block->advance_extensions();
    if (again) continue;
    if (!spinning)
      for (const auto& block : blocks_)
        for (const Warp& w : block->warps())
          if (!w.finished()) w.check_divergence();
    for (const auto& block : blocks_)
      for (Warp& w : block->warps()) again |= !w.finished() && w.break_joins();
    if (again) continue;
    if (!spinning) deadlock("no warp can go on");
    return false;
  }
  return false;
}

void Cluster::deadlock(const char* what) const {
  std::string text = program_.name + ": deadlock: " + what + "\n";
  const Block* first = nullptr;
  int listed = 0;
  for (const auto& block : blocks_) {
    const uint32_t* i = block->index();
    text += "  block (" + std::to_string(i[0]) + ", " + std::to_string(i[1]) + ", " +
            std::to_string(i[2]) + ")\n";
    for (const Warp& w : block->warps()) {
      if (w.finished() || listed++ > 16) continue;
      if (!first) first = block.get();
      text += w.position();
    }
  }
  Fault fault(Fault::Kind::deadlock, text);
  fault.kernel = program_.name;
  for (int i = 0; first && i < 3; ++i) fault.block[i] = first->index()[i];
  for (size_t i = 0; first && i < first->warps().size(); ++i) {
    const Warp& w = first->warps()[i];
    if (w.finished()) continue;
    const Program::Origin& o = program_.origins[w.position_pc()];
    fault.warp = static_cast<int>(i);
    fault.ptx_line = o.line;
    fault.instruction = o.text;
    if (o.location.line) fault.source_line = o.location.line;
    break;
  }
  throw fault;
}

}  // namespace tw::vgpu
