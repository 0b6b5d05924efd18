// A thread block while it runs: warps, shared memory, named barriers; and the cluster it belongs to.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/checker.h"
#include "vgpu/counters.h"
#include "vgpu/memory.h"
#include "vgpu/observer.h"
#include "vgpu/warp.h"

namespace tw::vgpu {

class Block;
class Cluster;

// What one launch shares between all its blocks.
struct Launch {
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
  uint32_t dynamic_shared = 0;  // bytes
  bool reverse_warps = false;   // run the warps of a block in reverse order
  std::vector<uint8_t> parameters;
  GlobalMap memory;
  Observer* observer = nullptr;
  Check check = Check::off;             // who is asked before the observer
  bool unfenced_copies = false;         // of a compiler that hands data of cp.async to wgmma so
  GlobalRaces* global_races = nullptr;  // set by run_grid
  Counters* counters = nullptr;

  uint32_t threads_per_block() const { return block[0] * block[1] * block[2]; }
  uint32_t warps_per_block() const { return (threads_per_block() + 31) / 32; }
  uint32_t blocks_per_cluster() const { return cluster[0] * cluster[1] * cluster[2]; }
  uint64_t blocks() const { return uint64_t{grid[0]} * grid[1] * grid[2]; }
};

// State that a group of instructions adds to every block: mbarriers, queues of asynchronous work. Made at
// its first use by Block::extension<T>(), kept until the block ends.
class Extension {
 public:
  virtual ~Extension() = default;
  // Nobody in the cluster can go on: complete some outstanding work, if there is any. True if something was done.
  // Work that a program waits for explicitly is done by the waiting instruction itself.
  virtual bool advance(Block&) { return false; }
  // All threads have exited. Finish what is still outstanding or fault.
  virtual void finish(Block&) {}
};

class Block {
 public:
  Block(const Program& program, const Launch& launch, Cluster& cluster, uint32_t rank);

  void start(uint64_t linear_index);  // forgets everything of the block before
  void finish();

  const Program& program() const { return program_; }
  const Launch& launch() const { return launch_; }
  Observer* observer() const;
  Cluster& cluster() const { return cluster_; }
  uint32_t rank() const { return rank_; }  // in the cluster
  const uint32_t* index() const { return index_; }
  std::vector<Warp>& warps() { return warps_; }
  const std::vector<Warp>& warps() const { return warps_; }

  // Shared memory by shared address: [kSharedBase, shared_end()).
  uint8_t* shared() const { return shared_; }
  uint32_t shared_end() const { return shared_end_; }

  // Counts whatever other warps may be waiting for: changed memory, opened barriers, finished copies.
  // Spinning while it stands still, in all blocks, is a deadlock.
  uint64_t progress = 0;

  // Named barriers. `count` 0 means all threads of the block. Returns true when the barrier is
  // open for this warp (its arrival having been counted at the first call; see Warp::ticket).
  bool barrier_sync(Warp& w, const Instr& in, uint32_t barrier, uint32_t count);
  void barrier_arrive(Warp& w, const Instr& in, uint32_t barrier, uint32_t count);
  // bar.red: each arrival adds its lanes' predicate; valid once the barrier has opened.
  struct Reduction {
    uint32_t population = 0;
    bool all = true, any = false;
  };
  void barrier_reduce(Warp& w, uint32_t barrier, uint32_t predicate);
  const Reduction& reduction(Warp& w, uint32_t barrier) const;
  std::string explain_barrier(uint32_t barrier) const;

  template<class T>
  T& extension() {
    std::unique_ptr<Extension>& slot = extensions_.at(slot_of<T>());
    if (!slot) slot = std::make_unique<T>();
    return static_cast<T&>(*slot);
  }
  template<class T>
  T* find_extension() const {  // null if not used yet
    return static_cast<T*>(extensions_.at(slot_of<T>()).get());
  }
  bool advance_extensions();

 private:
  struct Barrier {
    uint32_t count = 0;           // threads it waits for; 0: all of the block
    uint32_t arrived = 0;         // threads, so far
    uint64_t phase = 0;           // times opened
    std::vector<uint32_t> lanes;  // that have arrived, by warp
    Reduction pending, result;
  };
  Barrier& barrier(Warp& w, const Instr& in, uint32_t barrier, uint32_t count);
  void arrive(Warp& w, uint32_t barrier);
  void try_open(uint32_t barrier);
  void fill_specials(Warp& w);

  static size_t next_slot();
  template<class T>
  static size_t slot_of() {
    static const size_t slot = next_slot();
    return slot;
  }

  const Program& program_;
  const Launch& launch_;
  Cluster& cluster_;
  uint32_t rank_;
  uint32_t index_[3] = {0, 0, 0};
  std::vector<Warp> warps_;
  std::vector<uint8_t> shared_storage_;
  uint8_t* shared_ = nullptr;
  uint32_t shared_end_ = 0;
  std::array<Barrier, 16> barriers_;
  std::array<std::unique_ptr<Extension>, 8> extensions_;
};

// Blocks that run together and see each other's shared memory; usually one.
class Cluster {
 public:
  Cluster(const Program& program, const Launch& launch);
  void start(uint64_t linear_index);
  // Gives turns to the warps until all have finished (true), or all of them wait or spin (false).
  // Throws the deadlock if all wait. `stop` ends it early (false).
  bool run(const std::atomic<bool>& stop);
  uint64_t progress() const;
  uint64_t instructions() const;  // executed by its warps since start()
  [[noreturn]] void deadlock(const char* what) const;

  std::vector<std::unique_ptr<Block>>& blocks() { return blocks_; }
  Block& block(uint32_t rank) { return *blocks_.at(rank); }
  uint32_t size() const { return static_cast<uint32_t>(blocks_.size()); }
  uint64_t index() const { return index_; }
  const Program& program() const { return program_; }
  const Launch& launch() const { return launch_; }
  // The checker or the launch's observer, the counters, both, or null.
  Observer* observer() const { return observer_; }

 private:
  const Program& program_;
  const Launch& launch_;
  uint64_t index_ = 0;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unique_ptr<Observer> checker_, counters_, both_;
  Observer* observer_ = nullptr;
};

inline Observer* Block::observer() const { return cluster_.observer(); }

}  // namespace tw::vgpu
