// A kernel decoded once into a flat program: one function pointer and a few register offsets per
// instruction. Whatever cannot be executed is refused here, before anything runs.
//
// ---- How to add an instruction (in any .cpp file of this folder; nothing else is edited)
//
//   static Status run_neg(Warp& w, const Instr& in) {        // executes it for the lanes in w.exec
//     return map<int32_t>(w, in, [](int32_t a) { return -a; });       // lanes.h: 32-lane loops
//   }
//   static void decode_neg(Decode& d) {                      // runs once, when the kernel is loaded
//     d.take("s32") || d.fail("neg: only .s32");             // modifiers: every one must be taken,
//     d.out.op[0] = d.destination(0, 32);                    //   or the core refuses the instruction
//     d.out.op[1] = d.source(1, 32);
//     d.run(run_neg, Class::integer);
//   }
//   static const Opcode neg("neg", decode_neg);              // registers it under its first word, or
//                                                            // under more: "cp.async.bulk.tensor";
//                                                            // the longest registered prefix wins
// ---- Operands
//
// A warp keeps each register as 32 lanes side by side: 32, 64, 128, 256 or 512 bytes for 8 to 128
// bits; a predicate is one 32-bit mask (bit l = lane l). Instr::op holds byte offsets into that
// file. An immediate, an address of a variable, %tid.x and the like are registers too, filled when
// a warp is made or a block starts: a handler never asks what kind of operand it has. Longer operand lists
// (vectors, fragments) lie in Program::pool at Instr::pool; `imm` is free for a constant.
//
// ---- Execution (warp.h)
//
// The core evaluates the guard, calls `run` with the lanes to execute in Warp::exec (never 0), and
// looks at the Status. Write only lanes in exec (lanes.h blends). Status::wait means "not done, and
// nothing changed except Warp::ticket(): call me again"; it is called again each time the scheduler
// comes round, so test the condition first and keep what the first call did in the ticket. The
// ticket is 0 at the first call. If every warp of a block waits, the core asks the block's
// asynchronous engines for work (block.h: Extension::advance), and failing that reports a deadlock
// with the text of the instruction's `explain` function.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "vgpu/ptx.h"

namespace tw::vgpu {

class Warp;
struct Decoder;
struct Instr;

enum class Status : uint8_t {
  next,   // done; go on with the following instruction
  jump,   // done; the handler has set the program counter (branches, exit)
  wait,   // not done: run the same instruction again later
  yield,  // done; go on with the following instruction after everybody else had a turn
};
using Handler = Status (*)(Warp&, const Instr&);
using Explain = std::string (*)(Warp&, const Instr&);  // what a waiting instruction waits for

// For the counters; the groups a profiler shows.
enum class Class : uint8_t {
  integer,
  fp16,
  fp32,
  fp64,
  conversion,
  move,
  predicate,
  special_function,
  control,
  shuffle,
  vote,
  barrier,
  global_memory,
  shared_memory,
  local_memory,
  constant_memory,
  atomic,
  tensor,
  async_copy,
  fence,
  other,
};  // fmt: skip
std::string_view name_of(Class c);

constexpr uint32_t kNone = 0xffffffff;
constexpr uint32_t kAllOnes = 0xffffffff;  // flips a predicate

struct Instr {
  enum Flag : uint8_t {
    kConverge = 1,  // all live lanes execute it together (.aligned): others are waited for
    kMembers =
        2,        // the lanes named by the 32-bit register op[kMembersOperand] do (.sync with mask)
    kPolls = 4,   // may be the body of a spin loop: atomics, volatile and acquire loads, test_wait
    kBranch = 8,  // runs even if no lane takes it
  };
  Handler run = nullptr;
  int64_t imm = 0;
  uint32_t op[7] = {kNone, kNone, kNone, kNone, kNone, kNone, kNone};
  uint32_t pool = 0;        // index into Program::pool
  uint32_t guard = kNone;   // offset of a predicate
  uint32_t guard_flip = 0;  // ~0u for @!p
  uint8_t flags = 0;
  Class kind = Class::other;
  uint8_t bytes = 0;      // of memory per lane, where it applies
  uint8_t detail = 0;     // free for the handler
  uint32_t join = kNone;  // branches: where the two sides meet again (pc)
};
constexpr int kMembersOperand = 6;

// ---- what surrounds the instructions

// Registers that a block fills when it starts.
enum class Special : uint8_t {
  tid_x,
  tid_y,
  tid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  laneid,
  warpid,
  nwarpid,
  lanemask_eq,
  lanemask_le,
  lanemask_lt,
  lanemask_ge,
  lanemask_gt,
  clusterid_x,
  clusterid_y,
  clusterid_z,
  nclusterid_x,
  nclusterid_y,
  nclusterid_z,
  cluster_ctaid_x,
  cluster_ctaid_y,
  cluster_ctaid_z,
  cluster_nctaid_x,
  cluster_nctaid_y,
  cluster_nctaid_z,
  cluster_ctarank,
  cluster_nctarank,
  is_explicit_cluster,
  smid,
  nsmid,
  gridid,
  dynamic_smem_size,
  total_smem_size,
  zero,
  parameters,  // 64 bits: address of the parameter buffer, plus `value`
};  // fmt: skip
struct SpecialRegister {
  Special which;
  uint32_t offset;
  int64_t value;
};
struct Constant {
  uint32_t offset;
  int bits;  // 1 (a mask of 32 equal predicates), 8, 16, 32, 64
  uint64_t value;
};

// Memory of .global and .const variables; shared by the kernels of a module.
struct GlobalVariable {
  std::string name;
  std::unique_ptr<uint8_t[]> storage;  // 256-byte aligned inside
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
  bool constant = false;
};
struct ModuleMemory {
  explicit ModuleMemory(const ptx::Module& module);  // allocates and initialises
  const GlobalVariable* find(std::string_view name) const;
  std::vector<GlobalVariable> variables;
};

struct SharedVariable {
  std::string name;
  uint32_t offset;  // shared address
  uint64_t bytes;   // 0: the dynamic array
};

// Shared addresses start here: hardware keeps the first KiB of each block's shared memory.
constexpr uint32_t kSharedBase = 1024;

struct Program {
  std::string name;
  std::string target;       // "sm_90a"
  std::vector<Instr> code;  // ends with an exit
  std::vector<uint32_t> pool;
  uint32_t register_bytes = 0;  // of a warp
  uint32_t plain_bytes = 0;     // the part that holds ordinary registers (poisoned at block start)
  std::vector<Constant> constants;
  std::vector<SpecialRegister> specials;
  std::vector<SharedVariable> shared;
  uint32_t static_shared_end = kSharedBase;  // where dynamic shared memory may start
  uint32_t dynamic_shared_align = 16;
  uint32_t local_bytes = 0;  // of a thread

  // For messages, by pc.
  struct Origin {
    int line;  // of the PTX text
    ptx::Location location;
    std::string text;
    Explain explain;
  };
  std::vector<Origin> origins;

  // Registers named by Decode::keep, and those that are copied into them, where other instructions use them; by
  // pc, empty if there are none.
  struct RegisterUse {
    uint32_t offset;
    bool written;
    uint32_t copied;  // of a mov between registers: the offset of its source; else kNone
  };
  std::vector<std::vector<RegisterUse>> kept_uses;

  ptx::Kernel kernel;  // parameters, launch bounds (instructions moved out)
  std::shared_ptr<const ptx::Module> module;
  std::shared_ptr<ModuleMemory> memory;

  uint32_t pc_of(const Instr& in) const { return static_cast<uint32_t>(&in - code.data()); }
  // First byte of dynamic shared memory; 1024-aligned, which TMA swizzles rely on.
  uint32_t dynamic_shared_base() const { return (static_shared_end + 1023) / 1024 * 1024; }
};

// Throws UnsupportedError.
std::unique_ptr<Program> decode(std::shared_ptr<const ptx::Module> module,
                                const ptx::Kernel& kernel, std::shared_ptr<ModuleMemory> memory);

// ---- decoding one instruction

class Decode {
 public:
  Decode(Decoder& decoder, const ptx::Instruction& in, Instr& out)
      : in(in), out(out), decoder_(decoder), taken_(in.parts.size()) {}

  const ptx::Instruction& in;
  Instr& out;

  // Modifiers. `take` marks one as understood. A leading part of the opcode that was registered
  // counts as taken.
  bool take(std::string_view modifier);
  // The first modifier not yet taken that names a type (in order, so cvt calls it twice).
  ptx::Type take_type();
  // .global, .shared, .shared::cta, .shared::cluster, .local, .param, .const; generic if none.
  ptx::Space take_space(bool* cluster = nullptr);
  bool has(std::string_view modifier) const;

  // Operands by position. `bits` 1 means a predicate. Immediates, symbols and special registers are fine as
  // sources; `_` as a destination is a register nobody reads.
  size_t operands() const { return in.operands.size(); }
  void expect_operands(size_t least, size_t most);
  const ptx::Operand& operand(size_t i) const { return in.operands.at(i); }
  uint32_t source(size_t i, int bits) { return source(operand(i), bits); }
  uint32_t source(const ptx::Operand& o, int bits);
  uint32_t destination(size_t i, int bits) { return destination(operand(i), bits); }
  uint32_t destination(const ptx::Operand& o, int bits);
  // !%p gives the flip, ~0u; else 0.
  std::pair<uint32_t, uint32_t> predicate(const ptx::Operand& o);
  uint32_t constant(uint64_t value, int bits);
  uint32_t scratch(int bits);                      // a register of its own for this instruction
  int register_bits(const ptx::Operand& o) const;  // 0 if it is none
  bool is_predicate(const ptx::Operand& o) const;
  uint64_t immediate(const ptx::Operand& o) const;  // or fails

  uint64_t immediate_bits(const ptx::Operand& o, int bits) const;  // of a constant, in that width

  // [base + offset]; load_addresses() in lanes.h evaluates it.
  struct Address {
    uint32_t base = kNone;  // kNone: only the offset
    bool wide = false;      // base has 64 bits
    int64_t offset = 0;
    bool parameter = false;  // names a kernel parameter: `offset` is in the parameter buffer
    ptx::Space space =
        ptx::Space::generic;  // as asked for; local for the .param variables of a call
  };
  Address address(const ptx::Operand& o, ptx::Space space);

  uint64_t parameter_bytes() const;
  uint32_t parameter_address(int64_t offset);          // a register
  uint32_t local_offset(const ptx::Operand& o) const;  // of a local variable, or kNone

  // brx.idx: how many targets. The core puts their pcs into the pool; those of `bra` into imm.
  uint32_t branch_targets() const;

  // Appends to Program::pool and sets out.pool if it is the first.
  void push(uint32_t value);

  // Registers used by an instruction that reads or writes them after it has returned (wgmma) must
  // not share storage with others: name them here.
  void keep(const ptx::Operand& o);

  void run(Handler handler, Class kind) {
    out.run = handler;
    out.kind = kind;
  }
  void flag(Instr::Flag flag) { out.flags |= flag; }
  void explain(Explain f);  // for instructions that may wait

  Decoder& decoder() { return decoder_; }
  [[noreturn]] bool fail(const std::string& what) const;  // bool: for `cond || d.fail("...")`
  void finish();                                          // every modifier taken?

 private:
  friend struct Decoder;
  Decoder& decoder_;
  std::vector<bool> taken_;
  bool pushed_ = false;
};

using DecodeFn = void (*)(Decode&);
struct Opcode {
  Opcode(const char* prefix, DecodeFn decode);
};

}  // namespace tw::vgpu
