// Counters: what a profiler would show of a launch, for each instruction.
//
// Global memory: the bytes that a warp-wide access asks for (a place that several lanes name counts once) and the
// 32-byte sectors they lie in. A copy by the async proxy is one request for each contiguous run.
// Shared memory: 32 banks of 4 bytes. Accesses of up to 4, of 8 and of 16 bytes per lane are served for 32, 16 and 8
// lanes at a time; such a group takes as many wavefronts as the busiest bank has different words. The ideal is one for
// each group. What wgmma and copies by the async proxy do in shared memory is not counted.
// Footprint: the sectors of global memory that the launch reads or writes at all, each once: traffic that no cache
// avoids.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "vgpu/memory.h"
#include "vgpu/observer.h"

namespace tw::vgpu {

constexpr uint32_t kSectorBytes = 32;

// Of one instruction, summed over warps.
struct Count {
  struct Traffic {
    uint64_t requests = 0, bytes = 0, sectors = 0;
  };
  uint64_t issues = 0;  // warp instructions; one that waits counts once
  uint64_t lanes = 0;   // thread instructions
  Traffic load, store;  // global memory; an atomic is a store
  uint64_t shared_requests = 0, wavefronts = 0, ideal_wavefronts = 0;
  uint64_t local_bytes = 0;

  void add(const Count& other);
};

// Which sectors of a launch's memory have been touched.
class Footprint {
 public:
  void cover(const GlobalMap& memory);
  void mark(uint64_t address, uint64_t bytes);
  uint64_t sectors() const;

 private:
  struct Range {
    uint64_t first, last;  // sectors
    std::unique_ptr<std::atomic<uint64_t>[]> bits;
  };
  std::vector<Range> ranges_;  // sorted
};

class Counters {
 public:
  explicit Counters(const Program& program) : program_(program), counts_(program.code.size()) {}

  void start(const GlobalMap& memory) {
    read_.cover(memory);
    written_.cover(memory);
  }
  // An observer of one cluster, which adds what it has seen to this when it goes.
  std::unique_ptr<Observer> watch();

  const Program& program() const { return program_; }
  const std::vector<Count>& counts() const { return counts_; }  // by pc
  uint64_t sectors_read() const { return read_.sectors(); }
  uint64_t sectors_written() const { return written_.sectors(); }

 private:
  class Watch;
  const Program& program_;
  std::mutex mutex_;
  std::vector<Count> counts_;
  Footprint read_, written_;
};

}  // namespace tw::vgpu
