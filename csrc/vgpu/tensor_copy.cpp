// cp.async, its groups, and its arrivals at mbarriers.
#include <algorithm>
#include <bit>
#include <tuple>

#include "vgpu/async.h"
#include "vgpu/lanes.h"
#include "vgpu/mbarrier.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

using ptx::Space;

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
    async_of(w).add(w, c);
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

}  // namespace tw::vgpu
