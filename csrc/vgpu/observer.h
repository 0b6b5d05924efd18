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
    wgmma,  // operands are read; done when a warp of the warpgroup has waited
  };
  Kind kind = Kind::copy;
  bool done = false;
  uint64_t id = 0;  // of the operation, unique in the warp for its kind; the same when it is done
  Block* block = nullptr;  // whose shared memory
  // `count` ranges of `bytes` each, by shared address in that block.
  const uint32_t* address = nullptr;
  uint32_t count = 1, bytes = 0;
  // `done` of copy and load: where the operation reports its completion (host address), or null.
  const uint8_t* mbarrier = nullptr;
};

// What happens to a tensor map in global memory: a kernel writes it and releases that, acquires it with a fence, copies
// with it.
enum class MapUse : uint8_t { written, acquired, copied };

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
  virtual void mbarrier_inval(Warp&, const Instr&, int /*lane*/, const uint8_t*) {}
  virtual void mbarrier_signal(Warp&, const Instr&, int /*lane*/, const uint8_t*,
                               bool /*asynchronous*/, bool /*completes*/) {}
  // A wait for it, or a test, has succeeded.
  virtual void mbarrier_leave(Warp&, const Instr&, int /*lane*/, const uint8_t*) {}
  virtual void async(Warp&, const Instr&, int /*lane*/, const AsyncAccess&) {}
  virtual void tensor_map(Warp&, const Instr&, int /*lane*/, const uint8_t*, MapUse) {}
  // A warp has waited for its part of wgmma operation `id` and those before.
  virtual void wgmma_leave(Warp&, const Instr&, uint64_t /*id*/) {}
  // wgmma: the registers are in use (offsets in the warp's file), or free again; first the accumulators, then those
  // of A.
  virtual void registers(Warp&, const Instr&, const uint32_t* /*offsets*/,
                         uint32_t /*accumulators*/, uint32_t /*count*/, bool /*done*/) {}
};

// One after the other.
class TwoObservers : public Observer {
 public:
  TwoObservers(Observer& first, Observer& second) : first_(first), second_(second) {}
  void block_start(Block& b) override { each(&Observer::block_start, b); }
  void block_exit(Block& b) override { each(&Observer::block_exit, b); }
  void block_end(Block& b) override { each(&Observer::block_end, b); }
  void instruction(Warp& w, const Instr& in, uint32_t lanes) override {
    each(&Observer::instruction, w, in, lanes);
  }
  void access(Warp& w, const Instr& in, const Access& a) override {
    each(&Observer::access, w, in, a);
  }
  void barrier_arrive(Warp& w, const Instr& in, int barrier, bool waits) override {
    each(&Observer::barrier_arrive, w, in, barrier, waits);
  }
  void barrier_open(Block& b, int barrier, bool whole_block) override {
    each(&Observer::barrier_open, b, barrier, whole_block);
  }
  void barrier_leave(Warp& w, const Instr& in, int barrier) override {
    each(&Observer::barrier_leave, w, in, barrier);
  }
  void cluster_arrive(Warp& w, const Instr& in) override { each(&Observer::cluster_arrive, w, in); }
  void cluster_open(Cluster& c) override { each(&Observer::cluster_open, c); }
  void cluster_leave(Warp& w, const Instr& in) override { each(&Observer::cluster_leave, w, in); }
  void warp_sync(Warp& w, const Instr& in, uint32_t lanes) override {
    each(&Observer::warp_sync, w, in, lanes);
  }
  void fence(Warp& w, const Instr& in) override { each(&Observer::fence, w, in); }
  void mbarrier_init(Warp& w, const Instr& in, int lane, const uint8_t* at) override {
    each(&Observer::mbarrier_init, w, in, lane, at);
  }
  void mbarrier_inval(Warp& w, const Instr& in, int lane, const uint8_t* at) override {
    each(&Observer::mbarrier_inval, w, in, lane, at);
  }
  void mbarrier_signal(Warp& w, const Instr& in, int lane, const uint8_t* at, bool asynchronous,
                       bool completes) override {
    each(&Observer::mbarrier_signal, w, in, lane, at, asynchronous, completes);
  }
  void mbarrier_leave(Warp& w, const Instr& in, int lane, const uint8_t* at) override {
    each(&Observer::mbarrier_leave, w, in, lane, at);
  }
  void async(Warp& w, const Instr& in, int lane, const AsyncAccess& a) override {
    each(&Observer::async, w, in, lane, a);
  }
  void tensor_map(Warp& w, const Instr& in, int lane, const uint8_t* at, MapUse use) override {
    each(&Observer::tensor_map, w, in, lane, at, use);
  }
  void wgmma_leave(Warp& w, const Instr& in, uint64_t id) override {
    each(&Observer::wgmma_leave, w, in, id);
  }
  void registers(Warp& w, const Instr& in, const uint32_t* offsets, uint32_t accumulators,
                 uint32_t count, bool done) override {
    each(&Observer::registers, w, in, offsets, accumulators, count, done);
  }

 private:
  template<class Method, class... Args>
  void each(Method method, Args&... args) {
    (first_.*method)(args...);
    (second_.*method)(args...);
  }
  Observer& first_;
  Observer& second_;
};

}  // namespace tw::vgpu
