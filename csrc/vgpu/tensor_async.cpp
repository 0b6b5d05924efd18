// cp.async and its groups, mbarrier.*, and the completion of asynchronous work.
#include "vgpu/async.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "vgpu/lanes.h"
#include "vgpu/mbarrier.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

using ptx::Space;

// ---- cp.async

static void run_copy(const Copy& c, uint32_t lanes) {
  const auto copy = [&](int l) {
    const uint32_t size = c.size[static_cast<size_t>(l)];
    uint8_t* to = c.to[static_cast<size_t>(l)];
    if (size == 16) [[likely]] {
      std::memcpy(to, c.from[static_cast<size_t>(l)], 16);
    } else {
      if (size) std::memcpy(to, c.from[static_cast<size_t>(l)], size);
      std::memset(to + size, 0, c.bytes - size);
    }
  };
  for_lanes(lanes, copy);
}

// Tells the observer that cp.async of these lanes has been issued or is done; barriers: where each lane reports it, or null.
static void observe_copy(Warp& w, const Copy& c, uint32_t lanes, bool done,
                         uint8_t* const* barriers) {
  Observer* const observer = w.block().observer();
  if (!observer) return;
  AsyncAccess access;
  access.kind = AsyncAccess::Kind::copy;
  access.done = done;
  access.block = &w.block();
  access.bytes = c.bytes;
  for_lanes(lanes, [&](int l) {
    const auto address = static_cast<uint32_t>(c.to[static_cast<size_t>(l)] - w.block().shared());
    access.id = c.id + static_cast<uint64_t>(l);
    access.address = &address;
    access.mbarrier = barriers ? barriers[l] : nullptr;
    observer->async(w, *c.in, l, access);
  });
}

// Takes the lanes `due(copy)` off the copies and runs them.
template<class Due>
static void run_due(Warp& w, std::vector<Copy>& copies, uint8_t* const* barriers, Due due) {
  size_t kept = 0;
  for (Copy& c : copies) {
    const uint32_t lanes = due(c) & c.lanes;
    if (lanes) {
      run_copy(c, lanes);
      observe_copy(w, c, lanes, true, barriers);
    }
    c.lanes &= ~lanes;
    if (!c.lanes) continue;
    if (&copies[kept] != &c) copies[kept] = c;
    ++kept;
  }
  copies.resize(kept);
}

void Async::wait_copies(Warp& w, uint32_t lanes, uint32_t pending) {
  OfWarp& mine = of(w);
  if (mine.copies.empty()) return;
  const auto& groups = mine.copy_groups;
  run_due(w, mine.copies, nullptr, [&](const Copy& c) {
    uint32_t due = 0;
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t committed = groups[static_cast<size_t>(l)];
      due |= static_cast<uint32_t>(committed > c.group && committed - c.group > pending) << l;
    }
    return due & lanes;
  });
}
void Async::run_copies_before(Warp& w, uint32_t lanes, uint64_t id, uint8_t* const* barriers) {
  run_due(w, of(w).copies, barriers, [&](const Copy& c) { return c.id < id ? lanes : 0; });
}

namespace {

// op: 0 to, 1 from, 2 size of the source or kNone. detail: flags. `bytes`: cp-size. pool: two addresses.
constexpr uint8_t kSizeIsPredicate = 1;  // ignore-src

Status run_cp_async(Warp& w, const Instr& in) {
  const uint32_t exec = w.exec, bytes = in.bytes;
  const uint32_t* pool = w.pool(in);
  uint64_t to[kLanes], from[kLanes];
  pool_addresses(w, pool, Space::shared, to);
  pool_addresses(w, pool + kAddressWords, Space::global, from);
  Copy c;
  c.in = &in;
  c.bytes = bytes;
  uint32_t full = exec, partial = 0;
  c.size.fill(static_cast<uint8_t>(bytes));
  if (in.op[2] != kNone) {
    const uint32_t* sizes = in.detail & kSizeIsPredicate ? nullptr : w.lanes<uint32_t>(in.op[2]);
    const uint32_t ignored = sizes ? 0 : w.mask(in.op[2]) ^ in.op[3];
    for_lanes(exec, [&](int l) {
      const uint32_t size = sizes ? sizes[l] : ignored >> l & 1 ? 0 : bytes;
      if (size > bytes)
        w.fault(Fault::Kind::memory, in, l,
                "cp.async: source size " + std::to_string(size) + " above the size of the copy");
      c.size[static_cast<size_t>(l)] = static_cast<uint8_t>(size);
      if (size == bytes) return;
      full &= ~(1u << l);
      if (size) partial |= 1u << l;
    });
  }
  resolve(w, in, Space::shared, Intent::store, bytes, to, c.to.data());
  uint8_t* source[kLanes] = {};
  if (full) {
    w.exec = full;
    resolve(w, in, Space::global, Intent::load, bytes, from, source);
  }
  for_lanes(partial, [&](int l) {
    w.exec = 1u << l;
    source[l] = resolve_range(w, in, Space::global, Intent::load, c.size[static_cast<size_t>(l)],
                              bytes, from[l]);
  });
  w.exec = exec;
  std::copy_n(source, kLanes, c.from.begin());
  w.exec = full | partial;
  if (w.exec) observe(w, in, Space::global, {.load = true}, from, source);
  w.exec = exec;
  Async::OfWarp& mine = async_of(w).of(w);
  c.id = mine.operations;
  mine.operations += kLanes;
  // One record for all lanes that have committed the same number of groups.
  for (uint32_t left = exec; left;) {
    c.group = mine.copy_groups[static_cast<size_t>(std::countr_zero(left))];
    c.lanes = 0;
    for_lanes(left, [&](int l) {
      if (mine.copy_groups[static_cast<size_t>(l)] == c.group) c.lanes |= 1u << l;
    });
    left &= ~c.lanes;
    observe_copy(w, c, c.lanes, false, nullptr);
    mine.copies.push_back(c);
  }
  return Status::next;
}

void decode_cp_async(Decode& d) {
  const bool global_cache = d.take("cg");
  if (!global_cache && !d.take("ca")) d.fail("cp.async: expected .ca or .cg");
  if (!(d.take("shared") || d.take("shared::cta")) || !d.take("global"))
    d.fail("cp.async copies from .global to .shared");
  const bool hint = d.take("L2::cache_hint");
  for (const char* word : {"L2::64B", "L2::128B", "L2::256B"}) d.take(word);
  d.expect_operands(3, 5);
  push_address(d, 0, Space::shared);
  push_address(d, 1, Space::global);
  const uint64_t bytes = d.immediate(d.operand(2));
  if (bytes != 16 && (global_cache || (bytes != 4 && bytes != 8)))
    d.fail("cp.async: size of " + std::to_string(bytes) + " bytes");
  d.out.bytes = static_cast<uint8_t>(bytes);
  if (d.operands() - (hint ? 1 : 0) > 3) {
    const ptx::Operand& size = d.operand(3);
    if (d.is_predicate(size)) {
      d.out.detail |= kSizeIsPredicate;
      std::tie(d.out.op[2], d.out.op[3]) = d.predicate(size);
    } else {
      d.out.op[2] = d.source(size, 32);
    }
  }
  d.run(run_cp_async, Class::async_copy);
}
const Opcode cp_async("cp.async", decode_cp_async);

Status run_commit_group(Warp& w, const Instr&) {
  auto& groups = async_of(w).of(w).copy_groups;
  for_lanes(w.exec, [&](int l) { ++groups[static_cast<size_t>(l)]; });
  return Status::next;
}
void decode_commit_group(Decode& d) {
  d.expect_operands(0, 0);
  d.run(run_commit_group, Class::async_copy);
}
const Opcode cp_async_commit_group("cp.async.commit_group", decode_commit_group);

Status run_wait_group(Warp& w, const Instr& in) {
  async_of(w).wait_copies(w, w.exec, static_cast<uint32_t>(in.imm));
  return Status::next;
}
Status run_wait_all(Warp& w, const Instr& in) {
  run_commit_group(w, in);
  async_of(w).wait_copies(w, w.exec, 0);
  return Status::next;
}
void decode_wait_group(Decode& d) {
  d.expect_operands(1, 1);
  d.out.imm = static_cast<int64_t>(d.immediate(d.operand(0)));
  d.run(run_wait_group, Class::async_copy);
}
void decode_wait_all(Decode& d) {
  d.expect_operands(0, 0);
  d.run(run_wait_all, Class::async_copy);
}
const Opcode cp_async_wait_group("cp.async.wait_group", decode_wait_group);
const Opcode cp_async_wait_all("cp.async.wait_all", decode_wait_all);

// ---- mbarrier

std::string describe(const MBarrier& b) {
  return std::to_string(b.expected() - b.pending()) + " of " + std::to_string(b.expected()) +
         " arrivals and " + std::to_string(b.bytes()) + " bytes outstanding in a phase of parity " +
         std::to_string(b.phase());
}

// In Instr::detail, beside kWideAddress.
constexpr uint8_t kExpectsBytes = 2, kNoComplete = 4, kDrops = 8, kParity = 16, kBlocking = 32;

void barrier_addresses(Warp& w, const Instr& in, int at, uint64_t* address, uint8_t** host) {
  const Space space = static_cast<Space>(in.op[6]);
  load_addresses(w, in, at, space, address);
  resolve(w, in, space, Intent::atomic, 8, address, host);
}

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
    MBarrier::invalidated().store(host[l]);
  });
  return Status::next;
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

// ---- cp.async.mbarrier.arrive{.noinc}: an arrival of each lane once its copies so far are done

constexpr uint8_t kNoIncrement = 2;

Status run_copies_arrive(Warp& w, const Instr& in) {
  uint64_t address[kLanes];
  uint8_t* host[kLanes];
  barrier_addresses(w, in, 0, address, host);
  auto op = std::make_unique<BulkOperation>();
  op->kind = BulkOperation::Kind::arrive_copies;
  op->warp = &w;
  op->in = &in;
  op->lane = std::countr_zero(w.exec);
  op->lanes = w.exec;
  for_lanes(w.exec, [&](int l) {
    op->barriers[static_cast<size_t>(l)] = host[l];
    MBarrier b = MBarrier::load(host[l]);
    if (!b.valid())
      w.fault(Fault::Kind::barrier, in, l, "no mbarrier has been initialised here", address[l]);
    if (in.detail & kNoIncrement) return;
    if (const char* error = b.add_pending(1))
      w.fault(Fault::Kind::barrier, in, l, std::string("mbarrier: ") + error, address[l]);
    b.store(host[l]);
  });
  async_of(w).add(std::move(op));
  ++w.block().progress;
  return Status::next;
}
void decode_copies_arrive(Decode& d) {
  d.expect_operands(1, 1);
  if (d.take("noinc")) d.out.detail |= kNoIncrement;
  take_barrier(d, 0, 0);
  d.run(run_copies_arrive, Class::async_copy);
}
const Opcode cp_async_mbarrier_arrive("cp.async.mbarrier.arrive", decode_copies_arrive);

}  // namespace

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

// ---- completion

bool Async::is_awaited(Block& block, const BulkOperation& op) const {
  Cluster& cluster = block.cluster();
  for (uint32_t r = 0; r < cluster.size(); ++r) {
    const Async* other = cluster.block(r).find_extension<Async>();
    if (!other) continue;
    for (const OfWarp& warp : other->warps_) {
      if (!warp.waits_for) continue;
      for (const BulkOperation::Target& t : op.targets)
        if (t.barrier == warp.waits_for) return true;
      if (op.kind == BulkOperation::Kind::arrive_copies)
        for (uint32_t left = op.lanes; left; left &= left - 1)
          if (op.barriers[static_cast<size_t>(std::countr_zero(left))] == warp.waits_for)
            return true;
    }
  }
  return false;
}
const BulkOperation* Async::first_awaited(Block& block) const {
  for (const auto& op : bulk_)
    if (is_awaited(block, *op)) return op.get();
  return nullptr;
}

bool Async::advance(Block& block) {
  if (bulk_.empty()) return false;
  std::vector<std::unique_ptr<BulkOperation>> due;
  const auto take = [&](auto wanted) {
    for (auto& op : bulk_)
      if (wanted(*op)) due.push_back(std::move(op));
    std::erase_if(bulk_, [](const auto& op) { return !op; });
  };
  if (first_awaited(block)) {
    take([&](const BulkOperation& op) { return is_awaited(block, op); });
  } else {
    // Whoever is awaited goes first, in the whole cluster; then the oldest.
    Cluster& cluster = block.cluster();
    for (uint32_t r = 0; r < cluster.size(); ++r) {
      const Async* other = cluster.block(r).find_extension<Async>();
      if (other && other != this && other->first_awaited(cluster.block(r))) return false;
    }
    const BulkOperation* oldest = bulk_.front().get();
    take([&](const BulkOperation& op) { return &op == oldest; });
  }
  for (auto& op : due) complete(*op);
  ++block.progress;
  return true;
}

void Async::finish(Block&) {
  for (auto& op : bulk_) complete(*op);
  bulk_.clear();
}

}  // namespace tw::vgpu
