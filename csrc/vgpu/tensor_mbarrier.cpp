// mbarrier.*: the instructions; the object is in mbarrier.h.
#include "vgpu/mbarrier.h"

#include <bit>

#include "vgpu/async.h"
#include "vgpu/lanes.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

using ptx::Space;

namespace {

std::string describe(const MBarrier& b) {
  return std::to_string(b.expected() - b.pending()) + " of " + std::to_string(b.expected()) +
         " arrivals and " + std::to_string(b.bytes()) + " bytes outstanding in a phase of parity " +
         std::to_string(b.phase());
}

// In Instr::detail, beside kWideAddress.
constexpr uint8_t kExpectsBytes = 2, kNoComplete = 4, kDrops = 8, kParity = 16, kBlocking = 32;

Status run_init(Warp& w, const Instr& in) {
  uint64_t address[kLanes];
  uint8_t* host[kLanes];
  barrier_addresses(w, in, 0, address, host);
  const uint32_t* count = w.lanes<uint32_t>(in.op[1]);
  for_lanes(w.exec, [&](int l) {
    if (count[l] == 0 || count[l] > MBarrier::kMaxCount)
      w.fault(Fault::Kind::barrier, in, l, "mbarrier.init: count " + std::to_string(count[l]));
    MBarrier::initialised(count[l]).store(host[l]);
    if (Observer* observer = w.block().observer()) observer->mbarrier_init(w, in, l, host[l]);
  });
  ++w.block().progress;
  return Status::next;
}
Status run_inval(Warp& w, const Instr& in) {
  uint64_t address[kLanes];
  uint8_t* host[kLanes];
  barrier_addresses(w, in, 0, address, host);
  for_lanes(w.exec, [&](int l) {
    if (!MBarrier::load(host[l]).valid())
      w.fault(Fault::Kind::barrier, in, l, "no mbarrier has been initialised here", address[l]);
    if (Observer* observer = w.block().observer()) observer->mbarrier_inval(w, in, l, host[l]);
    MBarrier::invalidated().store(host[l]);
  });
  return Status::next;
}
void take_order(Decode& d) {
  for (const char* word : {"release", "acquire", "relaxed", "cta", "cluster"}) d.take(word);
}

void decode_init(Decode& d) {
  d.expect_operands(2, 2);
  take_barrier(d, 0, 0);
  d.out.op[1] = d.source(1, 32);
  d.run(run_init, Class::barrier);
}
void decode_inval(Decode& d) {
  d.expect_operands(1, 1);
  take_barrier(d, 0, 0);
  d.run(run_inval, Class::barrier);
}
const Opcode mbarrier_init("mbarrier.init", decode_init);
const Opcode mbarrier_inval("mbarrier.inval", decode_inval);

// op: 0 address, 1 count or bytes (or kNone: one arrival), 2 state or kNone
Status run_arrive(Warp& w, const Instr& in) {
  uint64_t address[kLanes];
  uint8_t* host[kLanes];
  barrier_addresses(w, in, 0, address, host);
  const uint32_t* operand = in.op[1] == kNone ? nullptr : w.lanes<uint32_t>(in.op[1]);
  const Signal what = in.detail & kDrops        ? Signal::arrive_drop
                      : in.detail & kNoComplete ? Signal::arrive_no_complete
                                                : Signal::arrive;
  for_lanes(w.exec, [&](int l) {
    const bool bytes = in.detail & kExpectsBytes;
    const uint64_t before =
        signal(w, in, l, host[l], what, operand && !bytes ? operand[l] : 1, bytes ? operand[l] : 0);
    if (in.op[2] != kNone) w.lanes<uint64_t>(in.op[2])[l] = before;
  });
  return Status::next;
}
template<bool Drop>
void decode_arrive(Decode& d) {
  take_order(d);
  if (d.take("expect_tx")) d.out.detail |= kExpectsBytes;
  if (d.take("noComplete")) d.out.detail |= kNoComplete;
  if (Drop) d.out.detail |= kDrops;
  const bool bytes = d.out.detail & kExpectsBytes;
  d.expect_operands(bytes ? 3 : 2, 3);
  take_barrier(d, 1, 0);
  if (d.operand(0).kind != ptx::Operand::Kind::sink) d.out.op[2] = d.destination(0, 64);
  if (d.operands() == 3) d.out.op[1] = d.source(2, 32);
  d.run(run_arrive, Class::barrier);
}
const Opcode mbarrier_arrive("mbarrier.arrive", decode_arrive<false>);
const Opcode mbarrier_arrive_drop("mbarrier.arrive_drop", decode_arrive<true>);

template<Signal What>
Status run_bytes(Warp& w, const Instr& in) {
  uint64_t address[kLanes];
  uint8_t* host[kLanes];
  barrier_addresses(w, in, 0, address, host);
  const uint32_t* bytes = w.lanes<uint32_t>(in.op[1]);
  for_lanes(w.exec, [&](int l) { signal(w, in, l, host[l], What, 0, bytes[l]); });
  return Status::next;
}
template<Signal What>
void decode_bytes(Decode& d) {
  take_order(d);
  d.expect_operands(2, 2);
  take_barrier(d, 0, 0);
  d.out.op[1] = d.source(1, 32);
  d.run(run_bytes<What>, Class::barrier);
}
const Opcode mbarrier_expect_tx("mbarrier.expect_tx", decode_bytes<Signal::expect>);
const Opcode mbarrier_complete_tx("mbarrier.complete_tx", decode_bytes<Signal::complete>);

// op: 0 predicate, 1 address, 2 state or parity
Status run_wait(Warp& w, const Instr& in) {
  uint64_t address[kLanes];
  uint8_t* host[kLanes];
  barrier_addresses(w, in, 1, address, host);
  uint32_t done = 0;
  for_lanes(w.exec, [&](int l) {
    const MBarrier b = MBarrier::load(host[l]);
    if (!b.valid())
      w.fault(Fault::Kind::barrier, in, l, "no mbarrier has been initialised here", address[l]);
    const bool over = in.detail & kParity ? b.done(w.lanes<uint32_t>(in.op[2])[l] & 1)
                                          : b.done_token(w.lanes<uint64_t>(in.op[2])[l]);
    done |= static_cast<uint32_t>(over) << l;
    if (Observer* observer = over ? w.block().observer() : nullptr)
      observer->mbarrier_leave(w, in, l, host[l]);
  });
  Async::OfWarp& mine = async_of(w).of(w);
  if (!done) mine.waits_for = host[std::countr_zero(w.exec)];
  if (!done && in.detail & kBlocking) return Status::wait;
  if (done) mine.waits_for = nullptr;
  blend(w.mask(in.op[0]), done, w.exec);
  return Status::next;
}
std::string explain_wait(Warp& w, const Instr& in) {
  uint64_t address[kLanes];
  uint8_t* host[kLanes];
  barrier_addresses(w, in, 1, address, host);
  const int lane = std::countr_zero(w.exec);
  std::string text = "the mbarrier at shared address " + hex(address[lane]);
  if (in.detail & kParity)
    text += ", phase of parity " + std::to_string(w.lanes<uint32_t>(in.op[2])[lane] & 1);
  return text + ": " + describe(MBarrier::load(host[lane]));
}
template<bool Blocking>
void decode_wait(Decode& d) {
  take_order(d);
  if (d.take("parity")) d.out.detail |= kParity;
  d.expect_operands(3, Blocking ? 4 : 3);
  take_barrier(d, 1, 1);
  d.out.op[0] = d.destination(0, 1);
  d.out.op[2] = d.source(2, d.out.detail & kParity ? 32 : 64);
  if (Blocking) {
    if (d.operands() == 4) d.source(3, 32);  // a time limit
    d.out.detail |= kBlocking;
    d.explain(explain_wait);
  }
  d.flag(Instr::kPolls);
  d.run(run_wait, Class::barrier);
}
const Opcode mbarrier_test_wait("mbarrier.test_wait", decode_wait<false>);
const Opcode mbarrier_try_wait("mbarrier.try_wait", decode_wait<true>);

Status run_pending_count(Warp& w, const Instr& in) {
  const uint64_t* state = w.lanes<uint64_t>(in.op[1]);
  write_lanes<uint32_t>(w, in.op[0], [&](int l) { return MBarrier::pending_of(state[l]); });
  return Status::next;
}
void decode_pending_count(Decode& d) {
  d.expect_operands(2, 2);
  if (!d.take("b64")) d.fail("expected .b64");
  d.out.op[0] = d.destination(0, 32);
  d.out.op[1] = d.source(1, 64);
  d.run(run_pending_count, Class::barrier);
}
const Opcode mbarrier_pending_count("mbarrier.pending_count", decode_pending_count);

}  // namespace

// ---- shared with the other files

void barrier_addresses(Warp& w, const Instr& in, int at, uint64_t* address, uint8_t** host) {
  const Space space = static_cast<Space>(in.op[6]);
  load_addresses(w, in, at, space, address);
  resolve(w, in, space, Intent::atomic, 8, address, host);
}
void take_barrier(Decode& d, size_t operand, int at) {
  const Space space = d.take_space();
  if (space != Space::shared && space != Space::generic)
    d.fail("an mbarrier lies in shared memory");
  if (!d.take("b64")) d.fail("expected .b64");
  set_address(d.out, at, d.address(d.operand(operand), space));
  d.out.op[6] = static_cast<uint32_t>(space);
  d.out.bytes = 8;
}

uint64_t signal(Warp& w, const Instr& in, int lane, uint8_t* barrier, Signal what, int64_t count,
                int64_t bytes) {
  MBarrier b = MBarrier::load(barrier);
  if (!b.valid())
    w.fault(Fault::Kind::barrier, in, lane, "no mbarrier has been initialised at this address");
  const uint64_t before = b.token();
  const bool phase = b.phase();
  MBarrier::Error error = nullptr;
  if (what == Signal::complete) {
    error = b.complete(bytes);
  } else {
    if (bytes) error = b.expect(bytes);
    if (!error && what != Signal::expect)
      error = b.arrive(static_cast<uint32_t>(count), what == Signal::arrive_drop);
  }
  if (!error && what == Signal::arrive_no_complete && b.phase() != phase)
    error = "an arrival with .noComplete ended the phase";
  if (error)
    w.fault(Fault::Kind::barrier, in, lane,
            std::string("mbarrier: ") + error + " (" + describe(MBarrier::load(barrier)) + ")");
  b.store(barrier);
  ++w.block().progress;
  // Bytes that are only announced, or counted by the program itself, order nothing.
  if (Observer* observer = what == Signal::expect ? nullptr : w.block().observer())
    observer->mbarrier_signal(w, in, lane, barrier,
                              what == Signal::complete || what == Signal::arrive_copies,
                              b.phase() != phase);
  return before;
}

}  // namespace tw::vgpu
