// A warp: 32 lanes of registers, and where each lane is.
//
// Lanes that are at the same instruction form a fragment. A branch that splits one makes two, both heading for a
// join: the instruction where the sides meet again (the branch's immediate post-dominator). A fragment that
// reaches its join is parked there until all lanes that the join expects are in; then they go on as
// one. Every fragment that is not parked can run, so a lane may wait for another of its own warp (a
// spin lock): when the others make no progress, joins are broken open and what was parked goes on alone.
//
// Instructions with a member mask (.sync) or for the whole warp (.aligned) wait until the lanes they
// name stand at that instruction, and then execute once for all of them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "vgpu/fault.h"
#include "vgpu/program.h"

namespace tw::vgpu {

class Block;

std::string hex(uint64_t value);  // "0x1f"

constexpr uint32_t kAllLanes = 0xffffffff;
constexpr int kLanes = 32;

// What one turn of a warp came to.
enum class Turn : uint8_t {
  finished,  // all lanes have exited
  progress,  // ended by its budget of loop trips, or yielded
  spinning,  // the same, but each trip polled memory: it may wait for somebody
  waiting,   // nobody in it can go on
};

class Warp {
 public:
  Warp(Block& block, uint32_t index);

  // ---- for handlers
  uint32_t exec = 0;   // lanes that execute the current instruction
  uint32_t live = 0;   // lanes that have not exited
  uint32_t carry = 0;  // the carry flag of each lane (add.cc and its like)
  uint32_t pc = 0;     // of the current instruction; `Status::jump` handlers set the next one

  Block& block() const { return *block_; }
  const Program& program() const { return *program_; }
  uint32_t index() const { return index_; }  // in the block
  template<class T>
  T* lanes(uint32_t offset) const {
    return reinterpret_cast<T*>(registers_ + offset);
  }
  uint32_t& mask(uint32_t offset) const { return *lanes<uint32_t>(offset); }  // a predicate
  const uint32_t* pool(const Instr& in) const { return program_->pool.data() + in.pool; }
  uint32_t fragment_mask() const { return fragments_[current_].mask; }
  // Private to the instruction being retried (Status::wait); 0 at its first call.
  uint64_t& ticket() {
    ticketed_ = true;
    return fragments_[current_].ticket;
  }

  void branch(uint32_t taken, uint32_t target, uint32_t join);
  // brx.idx: each lane has its own target.
  void branch_table(const uint32_t* targets, uint32_t join);
  void exit(uint32_t lanes);

  uint8_t* local_memory(int lane) const {
    return local_ + static_cast<size_t>(lane) * program_->local_bytes;
  }
  uint64_t executed = 0;  // instructions, since the launch

  // Builds the full message. lane -1: the warp as a whole.
  [[noreturn]] void fault(Fault::Kind kind, const Instr& in, int lane,
                          const std::string& what) const;
  [[noreturn]] void fault(Fault::Kind kind, const Instr& in, int lane, const std::string& what,
                          uint64_t address) const;

  // ---- for the block
  void start(uint32_t live_lanes);  // at the first instruction
  Turn turn();
  bool finished() const { return live == 0; }
  // Lets parked lanes go on without the rest. False if none are parked.
  bool break_joins();
  // Faults if a fragment waits at an .aligned or .sync instruction for lanes that stand elsewhere.
  void check_divergence() const;
  // Where the warp stands, a line per fragment.
  std::string position() const;
  uint32_t position_pc() const { return fragments_.empty() ? 0 : fragments_[0].pc; }

 private:
  friend class Block;
  static constexpr int kNoJoin = -1;
  struct Fragment {
    uint32_t pc, mask;
    int join;       // index into joins_
    bool had_turn;  // in the current turn
    bool waiting;   // its instruction returned Status::wait
    uint64_t ticket;
  };
  struct Join {
    uint32_t pc;
    uint32_t expected;  // lanes that head for it
    uint32_t arrived;
    int outer;  // the join that the released lanes head for
    bool used;
  };

  Turn run_fragment();
  bool gather(const Instr& in);
  void scatter(Status status);
  void load(size_t fragment);
  void remove(size_t fragment);
  int open_join(uint32_t pc, uint32_t lanes, int outer);
  void park();
  void release(size_t join);

  Block* block_;
  const Program* program_;
  uint32_t index_;
  uint8_t* registers_ = nullptr;
  uint8_t* local_ = nullptr;
  std::vector<uint8_t> storage_, local_storage_;
  std::vector<Fragment> fragments_;
  std::vector<Join> joins_;
  size_t current_ = 0;
  uint32_t join_pc_ = kNone;  // of the current fragment
  uint32_t gathered_ = 0;     // lanes of other fragments that execute with the current one
  int trips_ = 0;             // backward branches left in this turn
  int polls_ = 0;
  bool polled_ = false;
  bool ticketed_ = false;  // the current instruction has looked at its ticket
};

}  // namespace tw::vgpu
