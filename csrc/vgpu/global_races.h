// Data races between blocks in global memory. One object for a launch, shared by the threads that run it.
//
// For each granule: the block that last wrote it, and those that have read it since. Blocks are ordered by what
// they release and acquire: a fence and then an atomic or volatile store publishes what the block knows at that
// address; such a load of the place and then a fence takes it over. Everything within a block counts as ordered.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "vgpu/memory.h"

namespace tw::vgpu {

struct Launch;

class GlobalRaces {
 public:
  GlobalRaces(const Program& program, const Launch& launch);
  void access(Warp& w, const Instr& in, const Access& a);
  void fence(Warp& w);

 private:
  static constexpr uint32_t kNobody = 0xffffffff, kSeveral = 0xfffffffe;
  struct Granule {
    uint32_t writer = kNobody, reader = kNobody;
    uint32_t written_at = 0, read_at = 0;  // clocks of these blocks; pcs are in the next two
    uint32_t write_pc = 0, read_pc = 0;
    bool relaxed_write = false;
  };
  using Known = std::map<uint32_t, uint32_t>;  // block -> clock that is ordered before
  struct Block {
    uint32_t now = 1;
    Known known, released, acquired;
    bool has_released = false, has_acquired = false;
  };
  static constexpr uint32_t kPage = 1024;
  using Page = std::vector<Granule>;

  Granule& granule(uint64_t index);
  bool ordered(const Block& me, uint32_t own, uint32_t other, uint32_t at) const;
  [[noreturn]] void report(Warp& w, const Instr& in, int lane, uint64_t address, const char* verb,
                           const char* other, uint32_t block, uint32_t pc) const;

  const Program& program_;
  const uint32_t shift_;
  const uint32_t grid_[3];
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  std::unordered_map<uint32_t, Block> blocks_;
  std::unordered_map<uint64_t, Known> readers_;  // of granules that several blocks have read
  std::unordered_map<uint64_t, Known> flags_;
};

}  // namespace tw::vgpu
