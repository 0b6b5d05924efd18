#include "vgpu/global_races.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "vgpu/block.h"
#include "vgpu/checker.h"
#include "vgpu/lanes.h"

namespace tw::vgpu {

GlobalRaces::GlobalRaces(const Program& program, const Launch& launch)
    : program_(program),
      shift_(granule_shift(program, Memory::global)),
      grid_{launch.grid[0], launch.grid[1], launch.grid[2]} {}

static uint32_t linear_index(const Warp& w, const uint32_t* grid) {
  const uint32_t* i = w.block().index();
  return (i[2] * grid[1] + i[1]) * grid[0] + i[0];
}

GlobalRaces::Granule& GlobalRaces::granule(uint64_t index) {
  std::unique_ptr<Page>& page = pages_[index / kPage];
  if (!page) page = std::make_unique<Page>(kPage);
  return (*page)[index % kPage];
}

bool GlobalRaces::ordered(const Block& me, uint32_t own, uint32_t other, uint32_t at) const {
  if (other == kNobody || other == own) return true;
  const auto found = me.known.find(other);
  return found != me.known.end() && at <= found->second;
}

void GlobalRaces::report(Warp& w, const Instr& in, int lane, uint64_t address, const char* verb,
                         const char* other, uint32_t block, uint32_t pc) const {
  std::string text = std::string("global memory: ") + verb + " at " + hex(address) +
                     " races with " + other + " block (" + std::to_string(block % grid_[0]) + ", " +
                     std::to_string(block / grid_[0] % grid_[1]) + ", " +
                     std::to_string(block / grid_[0] / grid_[1]) + "), at PTX line " +
                     std::to_string(program_.origins[pc].line) + " '" + program_.origins[pc].text +
                     "'; nothing orders the two blocks";
  w.fault(Fault::Kind::race, in, lane, text, address);
}

void GlobalRaces::access(Warp& w, const Instr& in, const Access& a) {
  const std::lock_guard lock(mutex_);
  const uint32_t own = linear_index(w, grid_), pc = program_.pc_of(in);
  Block& me = blocks_[own];
  const std::string& text = program_.origins[pc].text;
  const auto says = [&](const char* word) { return text.find(word) != std::string::npos; };
  const bool acquires = a.relaxed && (says(".acquire") || says(".acq_rel"));
  const bool releases = a.relaxed && (says(".release") || says(".acq_rel"));
  const auto join = [](Known& to, const Known& from) {
    for (const auto& [block, clock] : from) to[block] = std::max(to[block], clock);
  };
  const uint64_t granules = std::max(1u, a.bytes >> shift_);
  for_lanes(a.lanes, [&](int l) {
    if (a.relaxed) {
      if (a.load)
        if (const auto found = flags_.find(a.address[l]); found != flags_.end()) {
          join(acquires ? me.known : me.acquired, found->second);
          me.has_acquired |= !acquires;
        }
      if (a.store && (releases || me.has_released)) {
        Known& flag = flags_[a.address[l]];
        join(flag, releases ? me.known : me.released);
        if (releases) flag[own] = me.now++;
      }
    }
    for (uint64_t k = 0; k < granules; ++k) {
      const uint64_t address = a.address[l] + (k << shift_);
      Granule& g = granule(address >> shift_);
      const bool both_relaxed = a.relaxed && g.relaxed_write;
      if (!ordered(me, own, g.writer, g.written_at) && !both_relaxed) {
        const bool unchanged =
            a.store && !a.load && a.value &&
            std::memcmp(a.host[l] + (k << shift_), a.value + l * a.value_stride + (k << shift_),
                        size_t{1} << shift_) == 0;
        if (!unchanged)
          report(w, in, l, address, a.load ? "a read" : "a write", "the write of", g.writer,
                 g.write_pc);
      }
      if (a.store) {
        if (g.reader == kSeveral) {
          Known& readers = readers_[address >> shift_];
          for (const auto& [block, clock] : readers)
            if (!ordered(me, own, block, clock))
              report(w, in, l, address, "a write", "a read by", block, g.read_pc);
          readers.clear();
        } else if (!ordered(me, own, g.reader, g.read_at)) {
          report(w, in, l, address, "a write", "a read by", g.reader, g.read_pc);
        }
        g = {own, kNobody, me.now, 0, pc, 0, a.relaxed};
      } else if (!a.relaxed) {
        if (g.reader != kNobody && g.reader != own) {
          Known& readers = readers_[address >> shift_];
          if (g.reader != kSeveral) readers[g.reader] = g.read_at;
          readers[own] = me.now;
          g.reader = kSeveral;
        } else {
          g.reader = own;
        }
        g.read_at = me.now;
        g.read_pc = pc;
      }
    }
  });
}

void GlobalRaces::fence(Warp& w) {
  const std::lock_guard lock(mutex_);
  const uint32_t own = linear_index(w, grid_);
  Block& me = blocks_[own];
  if (me.has_acquired)
    for (const auto& [block, clock] : me.acquired)
      me.known[block] = std::max(me.known[block], clock);
  me.released = me.known;
  me.released[own] = me.now++;
  me.has_released = true;
}

}  // namespace tw::vgpu
