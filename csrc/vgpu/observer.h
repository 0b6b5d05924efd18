// Who watches a run: the checker and the counters. All hooks run on the thread that executes the block;
// with several threads they are called concurrently for different blocks.
#pragma once
#include <cstdint>

#include "vgpu/memory.h"

namespace tw::vgpu {

class Block;
class Cluster;
class Warp;

// Shared memory that an asynchronous operation reads or writes, once when the operation is issued and
// once when it is done with it.
struct AsyncAccess {
  enum class Kind : uint8_t {
    copy,   // cp.async writes; done at its wait or when its mbarrier arrival is made
    load,   // a bulk or tensor copy, st.async: writes; done when its mbarrier is told
    store,  // a bulk or tensor copy reads; done at wait_group.read
    wgmma,  // operands are read; done at wgmma.wait_group
  };
  Kind kind = Kind::copy;
  bool done = false;
  uint64_t id = 0;         // of the operation, unique in the block's warp; the same when it is done
  Block* block = nullptr;  // whose shared memory
  // `count` ranges of `bytes` each, by shared address in that block.
  const uint32_t* address = nullptr;
  uint32_t count = 1, bytes = 0;
  // `done` of copy and load: where the operation reports its completion (host address), or null.
  const uint8_t* mbarrier = nullptr;
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void block_start(Block&) {}
  // All threads have exited; asynchronous work may still be outstanding. Then that is completed.
  virtual void block_exit(Block&) {}
  virtual void block_end(Block&) {}
  // Before an instruction executes for `lanes`: 0 if its guard is false everywhere; again each time a
  // waiting one is tried.
  virtual void instruction(Warp&, const Instr&, uint32_t /*lanes*/) {}
  // Before the bytes are read or written.
  virtual void access(Warp&, const Instr&, const Access&) {}

  // Lanes of `w` arrive at a barrier of the block; a barrier opens, for all that have arrived; a warp leaves it.
  virtual void barrier_arrive(Warp&, const Instr&, int /*barrier*/, bool /*waits*/) {}
  virtual void barrier_open(Block&, int /*barrier*/, bool /*whole_block*/) {}
  virtual void barrier_leave(Warp&, const Instr&, int /*barrier*/) {}
  // barrier.cluster: the same. A warp that has left it has seen what came before the arrivals.
  virtual void cluster_arrive(Warp&, const Instr&) {}
  virtual void cluster_open(Cluster&) {}
  virtual void cluster_leave(Warp&, const Instr&) {}
  virtual void warp_sync(Warp&, const Instr&, uint32_t /*lanes*/) {}
  virtual void fence(Warp&, const Instr&) {}

  // mbarriers, by host address. A signal is an arrival of the lane (and perhaps announces bytes), or
  // `asynchronous`: made by a copy. `completes`: it has ended the phase.
  virtual void mbarrier_init(Warp&, const Instr&, int /*lane*/, const uint8_t*) {}
  virtual void mbarrier_signal(Warp&, const Instr&, int /*lane*/, const uint8_t*,
                               bool /*asynchronous*/, bool /*completes*/) {}
  // A wait for it, or a test, has succeeded.
  virtual void mbarrier_leave(Warp&, const Instr&, int /*lane*/, const uint8_t*) {}
  virtual void async(Warp&, const Instr&, int /*lane*/, const AsyncAccess&) {}
  // wgmma: the registers are in use (offsets in the warp's file), or free again.
  virtual void registers(Warp&, const Instr&, const uint32_t* /*offsets*/, uint32_t /*count*/,
                         bool /*done*/) {}
};

}  // namespace tw::vgpu
