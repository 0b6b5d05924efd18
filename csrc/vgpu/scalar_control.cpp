// Branches, exits, barriers of the block, fences, traps and calls.
#include <atomic>
#include <bit>
#include <cstring>
#include <string>
#include <tuple>

#include "vgpu/block.h"
#include "vgpu/lanes.h"

namespace tw::vgpu {

namespace {

// ---- branches

Status run_bra(Warp& w, const Instr& in) {
  w.branch(w.exec, static_cast<uint32_t>(in.imm), in.join);
  return Status::jump;
}
void decode_bra(Decode& d) {
  d.take("uni");
  d.run(run_bra, Class::control);
}
const Opcode bra("bra", decode_bra);

Status run_brx(Warp& w, const Instr& in) {
  const uint32_t* index = w.lanes<uint32_t>(in.op[0]);
  uint32_t targets[kLanes] = {};
  const auto count = in.op[1];
  for_lanes(w.exec, [&](int l) {
    if (index[l] >= count)
      w.fault(Fault::Kind::trap, in, l,
              "brx.idx: index " + std::to_string(index[l]) + " of " + std::to_string(count) +
                  " targets");
    targets[l] = w.pool(in)[index[l]];
  });
  w.branch_table(targets, in.join);
  return Status::jump;
}
void decode_brx(Decode& d) {
  d.take("idx") || d.fail("only brx.idx is supported");
  d.take("uni");
  d.out.op[0] = d.source(0, 32);
  d.out.op[1] = d.branch_targets();
  d.run(run_brx, Class::control);
}
const Opcode brx("brx", decode_brx);

Status run_exit(Warp& w, const Instr&) {
  w.exit(w.exec);
  return Status::jump;
}
void decode_exit(Decode& d) {
  d.take("uni");
  d.run(run_exit, Class::control);
}
const Opcode ret("ret", decode_exit);
const Opcode exit_("exit", decode_exit);

Status run_trap(Warp& w, const Instr& in) {
  w.fault(Fault::Kind::trap, in, std::countr_zero(w.exec), "trap: the program stopped itself");
}
void decode_trap(Decode& d) { d.run(run_trap, Class::control); }
const Opcode trap("trap", decode_trap);
const Opcode brkpt("brkpt", decode_trap);

// Device functions are inlined by the compilers, except for assert and printf. An assert that is reached is
// a fault: __assertfail(message, file, line, function, character size). op: local offsets of the arguments.
std::string text_at(Warp& w, uint64_t address) {
  std::string text;
  for (; text.size() < 500 && w.block().launch().memory.find(address, 1); ++address) {
    const char c = *reinterpret_cast<const char*>(address);
    if (!c) return text;
    text += c;
  }
  return "?";
}
Status run_assertfail(Warp& w, const Instr& in) {
  const int lane = std::countr_zero(w.exec);
  const auto argument = [&]<class T>(uint32_t i, T value) {
    std::memcpy(&value, w.local_memory(lane) + in.op[i], sizeof value);
    return value;
  };
  w.fault(Fault::Kind::trap, in, lane,
          "assertion failed: " + text_at(w, argument(0, uint64_t{})) + " (" +
              text_at(w, argument(1, uint64_t{})) + ":" + std::to_string(argument(2, uint32_t{})) +
              ", " + text_at(w, argument(3, uint64_t{})) + ")");
}
Status run_printf(Warp& w, const Instr& in) {
  w.fault(Fault::Kind::trap, in, std::countr_zero(w.exec), "device-side printf is not supported");
}
void decode_call(Decode& d) {
  d.take("uni");
  std::string callee;
  const ptx::Operand* arguments = nullptr;
  for (const ptx::Operand& o : d.in.operands) {
    if (o.kind == ptx::Operand::Kind::symbol && callee.empty()) callee = o.name;
    if (o.kind == ptx::Operand::Kind::list && !callee.empty()) arguments = &o;
  }
  if (callee == "__assertfail") {
    if (!arguments || arguments->items.size() != 5) d.fail("__assertfail has five arguments");
    for (size_t i = 0; i < 4; ++i) {
      d.out.op[i] = d.local_offset(arguments->items[i]);
      if (d.out.op[i] == kNone) d.fail("the arguments are not .param variables");
    }
    d.run(run_assertfail, Class::control);
  } else if (callee == "vprintf") {
    d.run(run_printf, Class::control);
  } else {
    d.fail("call of '" + callee + "': functions that are not inlined are not supported");
  }
}
const Opcode call("call", decode_call);

// ---- barriers

// op: 0 barrier (register or constant, 32 bits), 1 thread count or kNone, 2 predicate, 3 result
uint32_t uniform(Warp& w, const Instr& in, uint32_t offset, const char* what) {
  const uint32_t* lanes = w.lanes<uint32_t>(offset);
  const uint32_t first = lanes[std::countr_zero(w.exec)];
  for_lanes(w.exec, [&](int l) {
    if (lanes[l] != first)
      w.fault(Fault::Kind::barrier, in, l,
              std::string("the lanes of the warp give different ") + what);
  });
  return first;
}
uint32_t thread_count(Warp& w, const Instr& in) {
  if (in.op[1] == kNone) return 0;
  const uint32_t count = uniform(w, in, in.op[1], "thread counts");
  if (count == 0) w.fault(Fault::Kind::barrier, in, -1, "barrier with a thread count of 0");
  return count;
}

Status run_bar_sync(Warp& w, const Instr& in) {
  const uint32_t barrier = uniform(w, in, in.op[0], "barriers");
  return w.block().barrier_sync(w, in, barrier, thread_count(w, in)) ? Status::next : Status::wait;
}
Status run_bar_arrive(Warp& w, const Instr& in) {
  w.block().barrier_arrive(w, in, uniform(w, in, in.op[0], "barriers"), thread_count(w, in));
  return Status::next;
}
enum class Reduce : uint8_t { popc, all, any };
template<Reduce kind>
Status run_bar_red(Warp& w, const Instr& in) {
  const uint32_t barrier = uniform(w, in, in.op[0], "barriers");
  if (!w.ticket()) w.block().barrier_reduce(w, barrier, w.mask(in.op[2]) ^ in.op[4]);
  if (!w.block().barrier_sync(w, in, barrier, thread_count(w, in))) return Status::wait;
  const Block::Reduction& r = w.block().reduction(w, barrier);
  if constexpr (kind == Reduce::popc)
    write_lanes<uint32_t>(w, in.op[3], [&](int) { return r.population; });
  else
    blend(w.mask(in.op[3]), (kind == Reduce::all ? r.all : r.any) ? kAllLanes : 0, w.exec);
  return Status::next;
}
std::string explain_bar(Warp& w, const Instr& in) {
  return w.block().explain_barrier(w.lanes<uint32_t>(in.op[0])[std::countr_zero(w.exec)]);
}

// bar{.cta}.sync a{, b}; bar.arrive a, b; bar.red.op d, a{, b}, {!}c; bar.warp.sync mask. `bar` is barrier.aligned.
void decode_bar(Decode& d) {
  const bool aligned = d.take("aligned") || d.in.parts[0] == "bar";
  d.take("cta");
  if (aligned) d.flag(Instr::kConverge);
  d.explain(explain_bar);
  if (d.take("sync")) {
    d.expect_operands(1, 2);
    d.out.op[0] = d.source(0, 32);
    if (d.operands() > 1) d.out.op[1] = d.source(1, 32);
    d.run(run_bar_sync, Class::barrier);
  } else if (d.take("arrive")) {
    d.expect_operands(2, 2);
    d.out.op[0] = d.source(0, 32);
    d.out.op[1] = d.source(1, 32);
    d.run(run_bar_arrive, Class::barrier);
  } else if (d.take("red")) {
    d.expect_operands(3, 4);
    const bool popc = d.take("popc");
    d.take(popc ? "u32" : "pred");
    d.out.op[3] = d.destination(0, popc ? 32 : 1);
    d.out.op[0] = d.source(1, 32);
    if (d.operands() > 3) d.out.op[1] = d.source(2, 32);
    std::tie(d.out.op[2], d.out.op[4]) = d.predicate(d.operand(d.operands() - 1));
    if (popc)
      d.run(run_bar_red<Reduce::popc>, Class::barrier);
    else if (d.take("and"))
      d.run(run_bar_red<Reduce::all>, Class::barrier);
    else if (d.take("or"))
      d.run(run_bar_red<Reduce::any>, Class::barrier);
  }
}
const Opcode bar("bar", decode_bar);
const Opcode barrier("barrier", decode_bar);

Status run_bar_warp_sync(Warp& w, const Instr& in) {
  if (Observer* o = w.block().observer()) o->warp_sync(w, in, w.exec);
  return Status::next;
}
void decode_bar_warp_sync(Decode& d) {
  d.expect_operands(1, 1);
  d.out.op[kMembersOperand] = d.source(0, 32);
  d.flag(Instr::kMembers);
  d.run(run_bar_warp_sync, Class::barrier);
}
const Opcode bar_warp_sync("bar.warp.sync", decode_bar_warp_sync);

// ---- fences and sleep

// Host memory is coherent, and a thread's accesses are not reordered against this.
Status run_fence(Warp& w, const Instr& in) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (Observer* o = w.block().observer()) o->fence(w, in);
  return Status::next;
}
void decode_fence(Decode& d) {
  for (const char* word :
       {"sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "gl", "sys"})
    d.take(word);
  d.run(run_fence, Class::fence);
}
const Opcode fence("fence", decode_fence);
const Opcode membar("membar", decode_fence);

Status run_nanosleep(Warp&, const Instr&) { return Status::yield; }
void decode_nanosleep(Decode& d) {
  d.take("u32");
  d.flag(Instr::kPolls);
  d.run(run_nanosleep, Class::other);
}
const Opcode nanosleep("nanosleep", decode_nanosleep);

}  // namespace

}  // namespace tw::vgpu
