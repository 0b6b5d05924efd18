#include "vgpu/warp.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "vgpu/block.h"

namespace tw::vgpu {

constexpr int kTripsPerTurn = 1024;  // backward branches, then the next warp
constexpr int kPollsPerTurn = 16;    // of them, such that read memory others may change

Warp::Warp(Block& block, uint32_t index)
    : block_(&block), program_(&block.program()), index_(index) {
  storage_.resize(program_->register_bytes + 64);
  auto address = reinterpret_cast<uintptr_t>(storage_.data());
  registers_ = storage_.data() + ((address + 63) / 64 * 64 - address);
  local_storage_.resize(static_cast<size_t>(program_->local_bytes) * kLanes + 64);
  address = reinterpret_cast<uintptr_t>(local_storage_.data());
  local_ = local_storage_.data() + ((address + 63) / 64 * 64 - address);
  const auto fill = [this]<class T>(uint32_t offset, T value) {
    std::fill_n(lanes<T>(offset), kLanes, value);
  };
  for (const Constant& c : program_->constants) {
    switch (c.bits) {
      case 1:
        mask(c.offset) = c.value ? kAllLanes : 0;
        break;
      case 8:
        fill(c.offset, static_cast<uint8_t>(c.value));
        break;
      case 16:
        fill(c.offset, static_cast<uint16_t>(c.value));
        break;
      case 32:
        fill(c.offset, static_cast<uint32_t>(c.value));
        break;
      default:
        fill(c.offset, c.value);
    }
  }
}

void Warp::start(uint32_t live_lanes) {
  live = live_lanes;
  executed = 0;
  fragments_.clear();
  joins_.clear();
  fragments_.push_back({0, live_lanes, kNoJoin, false, false, 0});
  load(0);
  // What nobody has written reads as poison, so that a use shows up in the results.
  std::memset(registers_, 0xcd, program_->plain_bytes);
  if (program_->local_bytes)
    std::memset(local_, 0xcd, static_cast<size_t>(program_->local_bytes) * kLanes);
}

// ---- fragments and joins

void Warp::load(size_t fragment) {
  current_ = fragment;
  Fragment& f = fragments_[fragment];
  f.waiting = false;
  pc = f.pc;
  join_pc_ = f.join == kNoJoin ? kNone : joins_[static_cast<size_t>(f.join)].pc;
}

int Warp::open_join(uint32_t at, uint32_t lanes, int outer) {
  size_t slot = 0;
  while (slot < joins_.size() && joins_[slot].used) ++slot;
  if (slot == joins_.size()) joins_.emplace_back();
  joins_[slot] = {at, lanes, 0, outer, true};
  return static_cast<int>(slot);
}

void Warp::branch(uint32_t taken, uint32_t target, uint32_t join) {
  const uint32_t here = fragments_[current_].mask;
  if (taken && target <= pc) {
    --trips_;
    if (polled_) --polls_;
    polled_ = false;
  }
  if (taken == here) {
    pc = target;
    return;
  }
  ++pc;
  if (!taken) return;
  int heading = fragments_[current_].join;
  const bool same = heading != kNoJoin && joins_[static_cast<size_t>(heading)].pc == join;
  if (join != kNone && !same) heading = open_join(join, here, heading);
  fragments_[current_].mask = here & ~taken;
  fragments_[current_].join = heading;
  fragments_.push_back({target, taken, heading, false, false, 0});
  if (join != kNone) join_pc_ = join;
}

void Warp::branch_table(const uint32_t* targets, uint32_t join) {
  const uint32_t here = fragments_[current_].mask, run = exec;
  --trips_;
  const uint32_t first = targets[std::countr_zero(run)];
  uint32_t same = 0;
  for (int l = 0; l < kLanes; ++l)
    if (run >> l & 1 && targets[l] == first) same |= uint32_t{1} << l;
  if (same == here) {
    pc = first;
    return;
  }
  int heading = fragments_[current_].join;
  if (join != kNone && !(heading != kNoJoin && joins_[static_cast<size_t>(heading)].pc == join))
    heading = open_join(join, here, heading);
  // Lanes whose guard is false fall through; the others go to their targets, a fragment each.
  uint32_t left = run;
  const uint32_t next = pc + 1;
  bool kept = here != run;
  if (kept) {
    fragments_[current_].mask = here & ~run;
    pc = next;
  }
  while (left) {
    const uint32_t target = targets[std::countr_zero(left)];
    uint32_t group = 0;
    for (int l = 0; l < kLanes; ++l)
      if (left >> l & 1 && targets[l] == target) group |= uint32_t{1} << l;
    left &= ~group;
    if (kept) {
      fragments_.push_back({target, group, heading, false, false, 0});
    } else {
      fragments_[current_].mask = group;
      pc = target;
      kept = true;
    }
  }
  fragments_[current_].join = heading;
  join_pc_ = heading == kNoJoin ? kNone : joins_[static_cast<size_t>(heading)].pc;
}

// The current fragment has reached its join.
void Warp::park() {
  const Fragment f = fragments_[current_];
  remove(current_);
  Join& join = joins_[static_cast<size_t>(f.join)];
  join.arrived |= f.mask;
  if (join.arrived == join.expected) release(static_cast<size_t>(f.join));
}

// What has arrived goes on, heading for the outer join.
void Warp::release(size_t index) {
  Join& join = joins_[index];
  const uint32_t lanes = join.arrived;
  join.expected &= ~lanes;
  join.arrived = 0;
  if (!join.expected) join.used = false;
  fragments_.push_back({join.pc, lanes, join.outer, false, false, 0});
}

void Warp::remove(size_t fragment) {
  fragments_[fragment] = fragments_.back();
  fragments_.pop_back();
}

void Warp::exit(uint32_t lanes) {
  live &= ~lanes;
  ++block_->progress;
  fragments_[current_].mask &= ~lanes;
  ++pc;
  for (size_t i = 0; i < joins_.size(); ++i) {
    Join& join = joins_[i];
    if (!join.used) continue;
    join.expected &= ~lanes;
    if (!join.expected)
      join.used = false;
    else if (join.arrived == join.expected)
      release(i);
  }
}

bool Warp::break_joins() {
  bool any = false;
  for (size_t i = 0; i < joins_.size(); ++i)
    if (joins_[i].used && joins_[i].arrived) {
      release(i);
      any = true;
    }
  return any;
}

// ---- execution

Turn Warp::turn() {
  trips_ = kTripsPerTurn;
  polls_ = kPollsPerTurn;
  polled_ = false;
  bool progress = false, spun = false;
  for (Fragment& f : fragments_) f.had_turn = false;
  for (;;) {
    size_t next = fragments_.size();
    while (next > 0 && fragments_[next - 1].had_turn) --next;
    if (next == 0) break;
    load(next - 1);
    trips_ = std::max(trips_, kTripsPerTurn / 8);  // each fragment gets a share
    polls_ = std::max(polls_, kPollsPerTurn / 8);
    switch (run_fragment()) {
      case Turn::progress:
        progress = true;
        break;
      case Turn::spinning:
        spun = true;
        break;
      case Turn::waiting:
      case Turn::finished:
        break;
    }
  }
  if (fragments_.empty()) {
    if (live) throw std::logic_error("vgpu: all fragments of a warp are parked");
    return Turn::finished;
  }
  return progress ? Turn::progress : spun ? Turn::spinning : Turn::waiting;
}

// Runs the current fragment until it has exited or is parked (finished), waits, or has used up its
// turn. fragments_[current_].pc is up to date only outside of this function.
Turn Warp::run_fragment() {
  const Instr* const code = program_->code.data();
  Observer* const observer = block_->observer();
  for (;;) {
    if (pc == join_pc_) [[unlikely]] {
      park();
      return Turn::finished;
    }
    const Instr& in = code[pc];
    exec = fragments_[current_].mask;
    if (in.flags) [[unlikely]] {
      polled_ |= (in.flags & Instr::kPolls) != 0;
      if (in.flags & (Instr::kConverge | Instr::kMembers) && exec != live && !gather(in)) {
        fragments_[current_].pc = pc;
        fragments_[current_].had_turn = fragments_[current_].waiting = true;
        return Turn::waiting;
      }
    }
    if (in.guard != kNone) {
      exec &= mask(in.guard) ^ in.guard_flip;
      if (in.flags & Instr::kConverge && exec && exec != live) [[unlikely]]
        fault(Fault::Kind::barrier, in, std::countr_zero(exec),
              "divergent: only lanes " + hex(exec) + " of the warp's " + hex(live) +
                  " execute an instruction that is for the whole warp");
      if (!exec) {
        ++executed;
        if (observer) observer->instruction(*this, in, 0);
        ++pc;
        if (gathered_) [[unlikely]]
          scatter(Status::next);
        continue;
      }
    }
    ++executed;
    if (observer) observer->instruction(*this, in, exec);
    const Status status = in.run(*this, in);
    if (ticketed_) [[unlikely]] {
      ticketed_ = false;
      if (status != Status::wait) fragments_[current_].ticket = 0;
    }
    if (gathered_) [[unlikely]]
      scatter(status);
    if (status == Status::next) [[likely]] {
      ++pc;
      continue;
    }
    Fragment& f = fragments_[current_];
    if (status == Status::jump) {
      if (!f.mask) {
        remove(current_);
        return Turn::finished;
      }
      if (trips_ > 0 && polls_ > 0) [[likely]]
        continue;
      f.pc = pc;
      f.had_turn = true;
      return polls_ > 0 ? Turn::progress : Turn::spinning;
    }
    f.had_turn = true;
    if (status == Status::wait) {
      f.pc = pc;
      f.waiting = true;
      return Turn::waiting;
    }
    f.pc = pc + 1;
    return Turn::spinning;
  }
}

// ---- .sync and .aligned in divergent code

// The current fragment is not the whole warp and stands at an instruction for several lanes. True if all that it needs stand
// there: then exec covers them.
bool Warp::gather(const Instr& in) {
  uint32_t needed = live;
  const uint32_t own = exec;
  if (in.flags & Instr::kMembers) {
    const uint32_t* members = lanes<uint32_t>(in.op[kMembersOperand]);
    needed = 0;
    const uint32_t guarded = in.guard == kNone ? own : own & (mask(in.guard) ^ in.guard_flip);
    for (int l = 0; l < kLanes; ++l)
      if (guarded >> l & 1) needed |= members[l];
    needed = (needed | own) & live;
  }
  uint32_t here = own;
  for (size_t i = 0; i < fragments_.size(); ++i)
    if (i != current_ && fragments_[i].pc == pc) here |= fragments_[i].mask;
  if (needed & ~here) return false;
  gathered_ = 0;
  for (size_t i = 0; i < fragments_.size(); ++i)
    if (i != current_ && fragments_[i].pc == pc && fragments_[i].mask & needed)
      gathered_ |= fragments_[i].mask;
  for (Fragment& f : fragments_)
    if (f.mask & gathered_ && f.ticket) fragments_[current_].ticket = f.ticket;
  exec = own | gathered_;
  return true;
}

// After an instruction that was executed for several fragments: they move on with the current one,
// and become one with it if they head for the same join.
void Warp::scatter(Status status) {
  const uint32_t others = gathered_;
  gathered_ = 0;
  for (size_t i = fragments_.size(); i-- > 0;) {
    if (i == current_ || !(fragments_[i].mask & others)) continue;
    Fragment& f = fragments_[i];
    if (status == Status::wait) {
      f.ticket = fragments_[current_].ticket;
      f.had_turn = f.waiting = true;
      continue;
    }
    f.ticket = 0;
    f.waiting = f.had_turn = false;
    f.pc = fragments_[current_].pc = pc + 1;
    if (f.join == fragments_[current_].join) {
      fragments_[current_].mask |= f.mask;
      const bool moved = current_ == fragments_.size() - 1;
      remove(i);
      if (moved) current_ = i;
    }
  }
}

void Warp::check_divergence() const {
  if (fragments_.size() == 1 && fragments_[0].mask == live) return;
  for (const Fragment& f : fragments_) {
    const Instr& in = program_->code[f.pc];
    if (!f.waiting || !(in.flags & (Instr::kConverge | Instr::kMembers)) || f.mask == live)
      continue;
    fault(Fault::Kind::barrier, in, std::countr_zero(f.mask),
          std::string("divergent: lanes ") + hex(f.mask) + " wait here for lanes " +
              hex(live & ~f.mask) + " of the warp, which are elsewhere:\n" + position());
  }
}

// ---- messages

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string Warp::position() const {
  std::string text;
  const auto line = [&](uint32_t at, uint32_t lanes, const char* what) {
    const Program::Origin& o = program_->origins[at];
    text += "  warp " + std::to_string(index_) + ", lanes " + hex(lanes) + ": " + what +
            " PTX line " + std::to_string(o.line) + " '" + o.text + "'";
    if (o.location.line) text += " (source line " + std::to_string(o.location.line) + ")";
  };
  for (const Fragment& f : fragments_) {
    line(f.pc, f.mask, "at");
    const Program::Origin& o = program_->origins[f.pc];
    if (f.waiting && o.explain) {
      // The explanation may look at the lanes that wait.
      Warp& self = const_cast<Warp&>(*this);
      const uint32_t saved = exec;
      self.exec = f.mask;
      text += ", waits for " + o.explain(self, program_->code[f.pc]);
      self.exec = saved;
    }
    text += "\n";
  }
  for (const Join& j : joins_)
    if (j.used && j.arrived) {
      line(j.pc, j.arrived, "parked before");
      text += ", until lanes " + hex(j.expected & ~j.arrived) + " join\n";
    }
  return text;
}

static Fault describe(const Warp& w, Fault::Kind kind, const Instr& in, int lane,
                      const std::string& what) {
  const Program& program = w.program();
  const Program::Origin& o = program.origins[program.pc_of(in)];
  const uint32_t* block = w.block().index();
  std::string source;
  if (o.location.line) {
    const auto file = program.module->files.find(o.location.file);
    source = file == program.module->files.end() ? "line" : file->second;
    source += ":" + std::to_string(o.location.line);
  }
  std::string text =
      program.name + ": " + what + "\n  at PTX line " + std::to_string(o.line) + ": " + o.text;
  if (!source.empty()) text += "\n  source " + source;
  text += "\n  block (" + std::to_string(block[0]) + ", " + std::to_string(block[1]) + ", " +
          std::to_string(block[2]) + "), warp " + std::to_string(w.index());
  if (lane >= 0) {
    const uint32_t* size = w.block().launch().block;
    const uint32_t thread = w.index() * kLanes + static_cast<uint32_t>(lane);
    text += ", lane " + std::to_string(lane) + ", thread (" + std::to_string(thread % size[0]) +
            ", " + std::to_string(thread / size[0] % size[1]) + ", " +
            std::to_string(thread / size[0] / size[1]) + ")";
  }
  Fault fault(kind, text);
  fault.kernel = program.name;
  fault.ptx_line = o.line;
  fault.instruction = o.text;
  if (o.location.line) {
    fault.source_line = o.location.line;
    fault.source_file = source.substr(0, source.rfind(':'));
  }
  for (int i = 0; i < 3; ++i) fault.block[i] = block[i];
  fault.warp = static_cast<int>(w.index());
  fault.lane = lane;
  return fault;
}

void Warp::fault(Fault::Kind kind, const Instr& in, int lane, const std::string& what) const {
  throw describe(*this, kind, in, lane, what);
}
void Warp::fault(Fault::Kind kind, const Instr& in, int lane, const std::string& what,
                 uint64_t address) const {
  Fault fault = describe(*this, kind, in, lane, what);
  fault.address = address;
  fault.has_address = true;
  throw fault;
}

}  // namespace tw::vgpu
