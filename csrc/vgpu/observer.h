// Who watches a run: the checker and the counters. All hooks run on the thread that executes the block;
// with several threads they are called concurrently for different blocks.
#pragma once
#include <cstdint>

#include "vgpu/memory.h"

namespace tw::vgpu {

class Block;
class Warp;

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void block_start(Block&) {}
  virtual void block_end(Block&) {}
  // Before an instruction executes for `lanes`: 0 if its guard is false everywhere; again each time a
  // waiting one is tried.
  virtual void instruction(Warp&, const Instr&, uint32_t /*lanes*/) {}
  // Before the bytes are read or written.
  virtual void access(Warp&, const Instr&, const Access&) {}
  // Lanes of `w` arrive at a barrier of the block; a barrier opens; a warp leaves it.
  virtual void barrier_arrive(Warp&, const Instr&, int /*barrier*/) {}
  virtual void barrier_leave(Warp&, const Instr&, int /*barrier*/) {}
  virtual void warp_sync(Warp&, const Instr&, uint32_t /*lanes*/) {}
  virtual void fence(Warp&, const Instr&) {}
};

}  // namespace tw::vgpu
