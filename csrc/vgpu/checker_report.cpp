// The checker: the checks of a granule that was not found clean, and their messages.
#include <algorithm>
#include <cstring>
#include <string>

#include "vgpu/checker_state.h"

namespace tw::vgpu::checker {

// ---- messages

std::string Checker::who(uint32_t owner) const {
  const uint32_t warps = per_block_ * cluster_.size(), groups = (per_block_ + 3) / 4;
  std::string s = "warp ";
  uint32_t block = owner / per_block_;
  if (owner < warps) {
    s += std::to_string(owner % per_block_);
  } else {
    const uint32_t first = (owner - warps) % groups * 4;
    s = "warps " + std::to_string(first) + "-" + std::to_string(first + 3);
    block = (owner - warps) / groups;
  }
  if (cluster_.size() > 1) s += " of block " + std::to_string(block) + " of the cluster";
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
    if (u >= per_block_ * cluster_.size())
      report(at, Kind::race,
             where + " races with a read by a wgmma of " + who(u) +
                 ": this warp has not waited for it, and nothing orders it after a wait");
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

}  // namespace tw::vgpu::checker
