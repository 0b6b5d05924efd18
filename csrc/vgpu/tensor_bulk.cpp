// Bulk copies: cp.async.bulk, cp.reduce.async.bulk, their tensor forms (TMA), st.async, and tensor maps.
#include <algorithm>
#include <bit>
#include <cstring>

#include "vgpu/async.h"
#include "vgpu/lanes.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

using ptx::Space;

namespace {

// Gives a deferred operation the lane that issued it: faults name it.
class AsLane {
 public:
  AsLane(Warp& w, int lane) : w_(w), exec_(w.exec) { w.exec = 1u << lane; }
  ~AsLane() { w_.exec = exec_; }
  AsLane(const AsLane&) = delete;
  AsLane& operator=(const AsLane&) = delete;

 private:
  Warp& w_;
  uint32_t exec_;
};

uint8_t* global_range(const BulkOperation& op, Intent intent, uint64_t address, uint64_t bytes) {
  return resolve_range(*op.warp, *op.in, Space::global, intent, bytes, 1, address);
}

// Shows the observer a range of global memory that the operation reads or writes now.
void observe_global(const BulkOperation& op, const uint8_t* host, uint64_t bytes, bool store) {
  Observer* const observer = op.warp->block().observer();
  if (!observer || !bytes) return;
  uint64_t address[kLanes] = {};
  uint8_t* hosts[kLanes] = {};
  address[op.lane] = reinterpret_cast<uint64_t>(host);
  hosts[op.lane] = const_cast<uint8_t*>(host);
  Access access;
  access.load = !store || op.reduces;
  access.store = store;
  access.relaxed = op.reduces;
  access.async_proxy = true;
  access.bytes = static_cast<uint32_t>(bytes);
  access.lanes = uint32_t{1} << op.lane;
  access.address = address;
  access.host = hosts;
  access.space = Space::global;
  observer->access(*op.warp, *op.in, access);
}

// Joins the runs of a stored box to lines for observe_global.
class GlobalLine {
 public:
  explicit GlobalLine(const BulkOperation& op) : op_(op) {}
  void extend(const uint8_t* at, uint64_t bytes) {
    if (at != begin_ + bytes_) {
      finish();
      begin_ = at;
    }
    bytes_ += bytes;
  }
  void finish() {
    observe_global(op_, begin_, bytes_, true);
    bytes_ = 0;
  }

 private:
  const BulkOperation& op_;
  const uint8_t* begin_ = nullptr;
  uint64_t bytes_ = 0;
};

// Tells the observer which shared memory the operation will read or write, or has.
void observe_shared(const BulkOperation& op, AsyncAccess::Kind kind, bool done, Block& block,
                    uint32_t address, const uint8_t* barrier) {
  Observer* const observer = op.warp->block().observer();
  if (!observer) return;
  AsyncAccess access;
  access.kind = kind;
  access.done = done;
  access.id = op.id;
  access.block = &block;
  access.address = &address;
  access.bytes = static_cast<uint32_t>(op.bytes);
  access.mbarrier = barrier;
  observer->async(*op.warp, *op.in, op.lane, access);
}

// The 16-byte chunk at a shared address of a block.
uint8_t* shared_chunk(const BulkOperation& op, const Block& block, uint32_t address) {
  if (address + 16 > block.shared_end())
    op.warp->fault(Fault::Kind::memory, *op.in, op.lane,
                   "shared memory: a box reaches out of bounds at " + hex(address), address);
  return block.shared() + address;
}

}  // namespace

// ---- completion

void Async::add(std::unique_ptr<BulkOperation> operation) {
  BulkOperation& op = *operation;
  op.id = of(*op.warp).operations++;
  for (const BulkOperation::Target& t : op.targets)
    observe_shared(op, AsyncAccess::Kind::load, false, *t.block, t.shared, nullptr);
  if (op.grouped)
    observe_shared(op, AsyncAccess::Kind::store, false, op.warp->block(), op.shared, nullptr);
  bulk_.push_back(std::move(operation));
}

void Async::complete(BulkOperation& op) {
  const AsLane as(*op.warp, op.lane);
  Warp& w = *op.warp;
  switch (op.kind) {
    case BulkOperation::Kind::load:
    case BulkOperation::Kind::load_tensor:
    case BulkOperation::Kind::store_values:
      for (const BulkOperation::Target& t : op.targets) {
        if (op.kind == BulkOperation::Kind::load_tensor)
          load_box(
              op.map, op.coordinates.data(), t.shared,
              [&](uint64_t address, uint64_t bytes) {
                const uint8_t* from = global_range(op, Intent::load, address, bytes);
                if (&t == op.targets.data()) observe_global(op, from, bytes, false);
                return from;
              },
              [&](uint32_t address) { return shared_chunk(op, *t.block, address); });
        else if (op.reduces)
          reduce(op.type, op.reduction, t.data, op.source ? op.source : op.values.data(), op.bytes);
        else
          std::memcpy(t.data, op.source ? op.source : op.values.data(), op.bytes);
        ++t.block->progress;
      }
      if (op.kind == BulkOperation::Kind::load && op.global_source)
        observe_global(op, op.source, op.bytes, false);
      for (const BulkOperation::Target& t : op.targets)
        observe_shared(op, AsyncAccess::Kind::load, true, *t.block, t.shared, t.barrier);
      for (const BulkOperation::Target& t : op.targets)
        signal(w, *op.in, op.lane, t.barrier, Signal::complete, 0, static_cast<int64_t>(op.bytes));
      return;
    case BulkOperation::Kind::store:
    case BulkOperation::Kind::store_tensor:
      read(op);
      return write(op);
    case BulkOperation::Kind::arrive_copies:
      run_copies_before(w, op.lanes, op.id, op.barriers.data());
      for_lanes(op.lanes, [&](int l) {
        signal(w, *op.in, l, op.barriers[static_cast<size_t>(l)], Signal::arrive_copies, 1);
      });
      return;
  }
}

// A store has two halves: its source may be reused after the first.
void Async::read(BulkOperation& op) {
  if (op.was_read) return;
  op.was_read = true;
  Block& block = op.warp->block();
  observe_shared(op, AsyncAccess::Kind::store, true, block, op.shared, nullptr);
  if (op.kind == BulkOperation::Kind::store) {
    op.values.assign(block.shared() + op.shared, block.shared() + op.shared + op.bytes);
    return;
  }
  op.values.clear();
  store_box(
      op.map, op.coordinates.data(), op.shared,
      [&](uint32_t address) { return shared_chunk(op, block, address); },
      [&](uint64_t, const uint8_t* from, uint32_t bytes) {
        op.values.insert(op.values.end(), from, from + bytes);
      });
}
void Async::write(BulkOperation& op) {
  const AsLane as(*op.warp, op.lane);
  const auto put = [&](uint8_t* to, const uint8_t* from, uint64_t bytes) {
    if (op.reduces)
      reduce(op.type, op.reduction, to, from, bytes);
    else
      std::memcpy(to, from, bytes);
  };
  const Intent intent = op.reduces ? Intent::atomic : Intent::store;
  if (op.kind == BulkOperation::Kind::store) {
    observe_global(op, op.destination, op.bytes, true);
    put(op.destination, op.values.data(), op.bytes);
  } else {
    const uint8_t* from = op.values.data();
    GlobalLine line(op);
    store_box(
        op.map, op.coordinates.data(), op.shared, [&](uint32_t) { return from; },
        [&](uint64_t address, const uint8_t*, uint32_t bytes) {
          uint8_t* to = global_range(op, intent, address, bytes);
          line.extend(to, bytes);
          put(to, from, bytes);
          from += bytes;
        });
    line.finish();
  }
  ++op.warp->block().progress;
}

void Async::wait_bulk(Warp& w, uint32_t lanes, uint32_t pending, bool read_only) {
  const auto& groups = of(w).bulk_groups;
  for (auto& op : bulk_) {
    if (!op->grouped || op->warp != &w || !(lanes >> op->lane & 1)) continue;
    const uint32_t committed = groups[static_cast<size_t>(op->lane)];
    if (committed <= op->group || committed - op->group <= pending) continue;
    const AsLane as(w, op->lane);
    read(*op);
    if (read_only) continue;
    write(*op);
    op.reset();
  }
  std::erase_if(bulk_, [](const auto& op) { return !op; });
}

namespace {

// ---- decoded form: imm holds a Form, the pool the operands

struct Form {
  BulkOperation::Kind kind;
  uint8_t rank;  // of a tensor
  bool multicast;
  bool reduces;
  Reduction reduction;
  TensorType type;
  bool from_shared;      // loads: the source is shared memory of this block
  uint8_t shared_space;  // ptx::Space of the shared side
};
static_assert(sizeof(Form) == 8);

void take_hints(Decode& d, bool* hint) { *hint = d.take("L2::cache_hint"); }

std::optional<Reduction> take_reduction(Decode& d) {
  static constexpr std::pair<const char*, Reduction> kNames[] = {
      {"add", Reduction::add},   {"min", Reduction::min},    {"max", Reduction::max},
      {"inc", Reduction::inc},   {"dec", Reduction::dec},    {"and", Reduction::bit_and},
      {"or", Reduction::bit_or}, {"xor", Reduction::bit_xor}};
  for (const auto& [name, op] : kNames)
    if (d.take(name)) return op;
  return std::nullopt;
}
TensorType take_reduced_type(Decode& d, Reduction op) {
  static constexpr std::pair<const char*, TensorType> kNames[] = {
      {"u32", TensorType::u32}, {"s32", TensorType::s32}, {"u64", TensorType::u64},
      {"s64", TensorType::s64}, {"f16", TensorType::f16}, {"bf16", TensorType::bf16},
      {"f32", TensorType::f32}, {"f64", TensorType::f64}};
  const bool bits = op >= Reduction::bit_and;
  if (bits && d.take("b32")) return TensorType::u32;
  if (bits && d.take("b64")) return TensorType::u64;
  for (const auto& [name, type] : kNames)
    if (d.take(name)) {
      if (!has_reduction(type, op)) d.fail("no such reduction of this type");
      return type;
    }
  d.fail("a type is missing");
  return TensorType::u32;
}

// ---- issue

// The shared range of an operation: its host memory, checked.
uint8_t* shared_range(Warp& w, const Instr& in, Space space, Intent intent, uint64_t bytes,
                      uint64_t align, uint64_t address) {
  if (space == Space::generic && !in_shared_window(address))
    w.fault(Fault::Kind::memory, in, std::countr_zero(w.exec),
            "the address " + hex(address) + " is not in shared memory", address);
  return resolve_range(w, in, space, intent, bytes, align, address);
}
constexpr uint32_t kOffsetMask = (1u << kSharedRankShift) - 1;
Block& owner(Warp& w, uint64_t address) {
  const uint32_t rank = static_cast<uint32_t>(address) >> kSharedRankShift;
  return rank ? w.block().cluster().block(rank - 1) : w.block();
}

// Destinations of a load: the block that the address names, or those of the multicast mask, at the same offsets.
void add_targets(Warp& w, const Instr& in, const Form& form, BulkOperation& op, uint64_t shared,
                 uint64_t barrier, uint64_t align, uint32_t mask) {
  const Space space = static_cast<Space>(form.shared_space);
  const auto add = [&](uint64_t to, uint64_t signals) {
    BulkOperation::Target t;
    t.data = shared_range(w, in, space, Intent::store, op.bytes, align, to);
    t.barrier = shared_range(w, in, space, Intent::atomic, 8, 8, signals);
    t.block = &owner(w, to);
    t.shared = static_cast<uint32_t>(to) & kOffsetMask;
    op.targets.push_back(t);
  };
  if (!form.multicast) return add(shared, barrier);
  const uint32_t size = w.block().cluster().size();
  if (mask == 0 || mask >> size)
    w.fault(Fault::Kind::memory, in, op.lane,
            "multicast to blocks " + hex(mask) + " of a cluster of " + std::to_string(size));
  for (; mask; mask &= mask - 1) {
    const uint64_t rank = uint64_t(std::countr_zero(mask) + 1) << kSharedRankShift;
    const auto in_block = [&](uint64_t a) { return (a & ~uint64_t{0xff000000}) | rank; };
    add(in_block(shared), in_block(barrier));
  }
}

TensorMap load_map(Warp& w, const Instr& in, int lane, uint64_t address) {
  const uint64_t parameters = reinterpret_cast<uint64_t>(w.block().launch().parameters.data());
  const uint64_t size = w.block().launch().parameters.size();
  TensorMap map;
  const bool parameter = address >= parameters && address + sizeof(map) <= parameters + size;
  if ((parameter ? address - parameters : address) % 64)
    w.fault(Fault::Kind::memory, in, lane,
            "the tensor map at " + hex(address) + " is not aligned to 64 bytes", address);
  const uint8_t* from =
      parameter ? reinterpret_cast<const uint8_t*>(address)
                : resolve_range(w, in, Space::global, Intent::load, sizeof(map), 64, address);
  std::memcpy(&map, from, sizeof(map));
  if (const std::string problem = map.problem(); !problem.empty())
    w.fault(Fault::Kind::memory, in, lane, problem, address);
  return map;
}

// pool: shared address, tensor map address, [mbarrier address], rank coordinates, [multicast mask]
Status run_tensor(Warp& w, const Instr& in) {
  Form form;
  std::memcpy(&form, &in.imm, sizeof(form));
  const bool loads = form.kind == BulkOperation::Kind::load_tensor;
  const Space space = static_cast<Space>(form.shared_space);
  for_lanes(w.exec, [&](int lane) {
    const AsLane as(w, lane);
    const uint32_t* pool = w.pool(in);
    const auto next_address = [&](Space s) {
      const uint64_t a = pool_address(w, pool, s, lane);
      pool += kAddressWords;
      return a;
    };
    auto op = std::make_unique<BulkOperation>();
    op->kind = form.kind;
    op->warp = &w;
    op->in = &in;
    op->lane = lane;
    const uint64_t shared = next_address(space);
    const uint64_t map_address = next_address(Space::generic);
    const uint64_t barrier = loads ? next_address(space) : 0;
    op->map = load_map(w, in, lane, map_address);
    if (op->map.rank() != form.rank)
      w.fault(Fault::Kind::memory, in, lane,
              "a copy of " + std::to_string(form.rank) + " dimensions with a tensor map of rank " +
                  std::to_string(op->map.rank()),
              map_address);
    for (int i = 0; i < form.rank; ++i)
      op->coordinates[static_cast<size_t>(i)] = w.lanes<int32_t>(*pool++)[lane];
    op->bytes = op->map.box_bytes();
    if (loads) {
      const uint32_t mask = form.multicast ? w.lanes<uint16_t>(*pool++)[lane] : 0;
      add_targets(w, in, form, *op, shared, barrier, 128, mask);
    } else {
      op->type = op->map.element();
      op->reduces = form.reduces;
      op->reduction = form.reduction;
      if (form.reduces && !has_reduction(op->type, form.reduction))
        w.fault(Fault::Kind::memory, in, lane,
                "the element type of the tensor map has no such reduction", map_address);
      shared_range(w, in, space, Intent::load, op->bytes, 128, shared);
      op->shared = static_cast<uint32_t>(shared) & kOffsetMask;
      op->grouped = true;
      op->group = async_of(w).of(w).bulk_groups[static_cast<size_t>(lane)];
    }
    async_of(w).add(std::move(op));
  });
  ++w.block().progress;
  return Status::next;
}

// [tensor map, {coordinates}]
void push_map(Decode& d, size_t operand) { push_address(d, operand, Space::generic); }
void push_coordinates(Decode& d, size_t operand, int rank) {
  const ptx::Operand& o = d.operand(operand);
  if (o.items.size() != 2 || o.items[1].kind != ptx::Operand::Kind::vector ||
      o.items[1].items.size() != static_cast<size_t>(rank))
    d.fail("expected a tensor map and " + std::to_string(rank) + " coordinates");
  for (const ptx::Operand& c : o.items[1].items) d.push(d.source(c, 32));
}
int take_rank(Decode& d) {
  for (int rank = 1; rank <= TensorMap::kMaxRank; ++rank)
    if (d.take(std::to_string(rank) + "d")) return rank;
  d.fail("expected .1d to .5d");
  return 0;
}
// 64-bit addresses may be shared-memory windows or plain offsets; the .shared of the text decides.
void take_shared(Decode& d, Form& form, const char* other) {
  if (!d.take("shared::cluster") && !d.take("shared::cta"))
    d.fail("expected .shared::cluster or .shared::cta");
  if (!d.take(other)) d.fail(std::string("expected .") + other);
  form.shared_space = static_cast<uint8_t>(Space::shared);
}

template<bool Reduce>
void decode_tensor(Decode& d) {
  Form form{};
  const int rank = take_rank(d);
  form.rank = static_cast<uint8_t>(rank);
  bool hint = false;
  take_hints(d, &hint);
  d.take("tile");
  const bool loads = !Reduce && d.take("mbarrier::complete_tx::bytes");
  if (!loads && !d.take("bulk_group")) d.fail("expected a completion mechanism");
  take_shared(d, form, "global");
  if (Reduce) {
    const auto op = take_reduction(d);
    if (!op) d.fail("expected a reduction");
    form.reduces = true;
    form.reduction = *op;
  }
  form.kind = loads ? BulkOperation::Kind::load_tensor : BulkOperation::Kind::store_tensor;
  form.multicast = loads && d.take("multicast::cluster");
  d.expect_operands((loads ? 3 : 2) + form.multicast + hint,
                    (loads ? 3 : 2) + form.multicast + hint);
  push_address(d, loads ? 0 : 1, Space::shared);
  push_map(d, loads ? 1 : 0);
  if (loads) push_address(d, 2, Space::shared);
  push_coordinates(d, loads ? 1 : 0, rank);
  if (form.multicast) d.push(d.source(3, 16));
  std::memcpy(&d.out.imm, &form, sizeof(form));
  d.run(run_tensor, Class::async_copy);
}
const Opcode bulk_tensor("cp.async.bulk.tensor", decode_tensor<false>);
const Opcode reduce_tensor("cp.reduce.async.bulk.tensor", decode_tensor<true>);

// pool: destination, source, [mbarrier]; op: 0 bytes, 1 multicast mask
Status run_bulk(Warp& w, const Instr& in) {
  Form form;
  std::memcpy(&form, &in.imm, sizeof(form));
  const bool loads = form.kind == BulkOperation::Kind::load;
  for_lanes(w.exec, [&](int lane) {
    const AsLane as(w, lane);
    const uint32_t* pool = w.pool(in);
    auto op = std::make_unique<BulkOperation>();
    op->kind = form.kind;
    op->warp = &w;
    op->in = &in;
    op->lane = lane;
    op->reduces = form.reduces;
    op->reduction = form.reduction;
    op->type = form.type;
    op->bytes = w.lanes<uint32_t>(in.op[0])[lane];
    if (op->bytes % 16)
      w.fault(Fault::Kind::memory, in, lane,
              "a bulk copy of " + std::to_string(op->bytes) + " bytes, not a multiple of 16");
    const Space to = loads ? Space::shared : Space::global;
    const Space from = loads && !form.from_shared ? Space::global : Space::shared;
    const uint64_t destination = pool_address(w, pool, to, lane);
    const uint64_t source = pool_address(w, pool + kAddressWords, from, lane);
    op->source = resolve_range(w, in, from, Intent::load, op->bytes, 16, source);
    op->global_source = from == Space::global;
    if (loads) {
      const uint64_t barrier = pool_address(w, pool + 2 * kAddressWords, Space::shared, lane);
      const uint32_t mask = form.multicast ? w.lanes<uint16_t>(in.op[1])[lane] : 0;
      add_targets(w, in, form, *op, destination, barrier, 16, mask);
    } else {
      op->shared = static_cast<uint32_t>(source) & kOffsetMask;
      op->destination = resolve_range(w, in, to, form.reduces ? Intent::atomic : Intent::store,
                                      op->bytes, 16, destination);
      op->grouped = true;
      op->group = async_of(w).of(w).bulk_groups[static_cast<size_t>(lane)];
    }
    async_of(w).add(std::move(op));
  });
  ++w.block().progress;
  return Status::next;
}

template<bool Reduce>
void decode_bulk(Decode& d) {
  Form form{};
  form.shared_space = static_cast<uint8_t>(Space::shared);
  bool hint = false;
  take_hints(d, &hint);
  const bool loads = d.take("mbarrier::complete_tx::bytes");
  if (!loads && !d.take("bulk_group")) d.fail("expected a completion mechanism");
  form.kind = loads ? BulkOperation::Kind::load : BulkOperation::Kind::store;
  if (loads) {
    // [shared::cluster <- shared::cta], or a shared space <- global
    const bool cluster = d.take("shared::cluster");
    form.from_shared = d.take("shared::cta") && cluster;
    if (!form.from_shared && !d.take("global")) d.fail("expected .global");
    form.multicast = d.take("multicast::cluster");
  } else {
    if (!d.take("global") || !d.take("shared::cta")) d.fail("expected .global.shared::cta");
  }
  if (Reduce) {
    const auto op = take_reduction(d);
    if (!op) d.fail("expected a reduction");
    d.take("noftz");
    form.reduces = true;
    form.reduction = *op;
    form.type = take_reduced_type(d, *op);
  }
  const size_t count = (loads ? 4 : 3) + form.multicast + hint;
  d.expect_operands(count, count);
  push_address(d, 0, loads ? Space::shared : Space::global);
  push_address(d, 1, loads && !form.from_shared ? Space::global : Space::shared);
  d.out.op[0] = d.source(2, 32);
  if (loads) push_address(d, 3, Space::shared);
  if (form.multicast) d.out.op[1] = d.source(4, 16);
  std::memcpy(&d.out.imm, &form, sizeof(form));
  d.run(run_bulk, Class::async_copy);
}
const Opcode bulk("cp.async.bulk", decode_bulk<false>);
const Opcode reduce_bulk("cp.reduce.async.bulk", decode_bulk<true>);

// Prefetches change nothing that a program can see.
Status run_nothing(Warp&, const Instr&) { return Status::next; }
void decode_prefetch(Decode& d) {
  for (const std::string& word : d.in.parts) d.take(word);
  d.run(run_nothing, Class::other);
}
const Opcode bulk_prefetch("cp.async.bulk.prefetch", decode_prefetch);
const Opcode map_prefetch("prefetch.tensormap", decode_prefetch);
const Opcode map_prefetch_param("prefetch.param.tensormap", decode_prefetch);
const Opcode map_prefetch_const("prefetch.const.tensormap", decode_prefetch);

// ---- groups

Status run_bulk_commit(Warp& w, const Instr&) {
  auto& groups = async_of(w).of(w).bulk_groups;
  for_lanes(w.exec, [&](int l) { ++groups[static_cast<size_t>(l)]; });
  return Status::next;
}
void decode_bulk_commit(Decode& d) {
  d.expect_operands(0, 0);
  d.run(run_bulk_commit, Class::async_copy);
}
template<bool Read>
Status run_bulk_wait(Warp& w, const Instr& in) {
  async_of(w).wait_bulk(w, w.exec, static_cast<uint32_t>(in.imm), Read);
  return Status::next;
}
void decode_bulk_wait(Decode& d) {
  d.expect_operands(1, 1);
  const bool read = d.take("read");
  d.out.imm = static_cast<int64_t>(d.immediate(d.operand(0)));
  d.run(read ? run_bulk_wait<true> : run_bulk_wait<false>, Class::async_copy);
}
const Opcode bulk_commit("cp.async.bulk.commit_group", decode_bulk_commit);
const Opcode bulk_wait("cp.async.bulk.wait_group", decode_bulk_wait);

// ---- st.async, red.async: to shared memory of the cluster, reporting to an mbarrier there

// pool: address, mbarrier, values...; op: 0 count; bytes: of each
Status run_store_async(Warp& w, const Instr& in) {
  Form form;
  std::memcpy(&form, &in.imm, sizeof(form));
  const uint32_t count = in.op[0], each = in.bytes;
  for_lanes(w.exec, [&](int lane) {
    const AsLane as(w, lane);
    const uint32_t* pool = w.pool(in);
    auto op = std::make_unique<BulkOperation>();
    op->kind = BulkOperation::Kind::store_values;
    op->warp = &w;
    op->in = &in;
    op->lane = lane;
    op->reduces = form.reduces;
    op->reduction = form.reduction;
    op->type = form.type;
    op->bytes = count * each;
    op->values.resize(op->bytes);
    for (uint32_t i = 0; i < count; ++i)
      std::memcpy(op->values.data() + i * each,
                  w.lanes<uint8_t>(pool[2 * kAddressWords + i]) + static_cast<size_t>(lane) * each,
                  each);
    add_targets(w, in, form, *op, pool_address(w, pool, Space::shared, lane),
                pool_address(w, pool + kAddressWords, Space::shared, lane), op->bytes, 0);
    async_of(w).add(std::move(op));
  });
  ++w.block().progress;
  return Status::next;
}
template<bool Reduce>
void decode_store_async(Decode& d) {
  Form form{};
  form.shared_space = static_cast<uint8_t>(Space::shared);
  for (const char* word : {"weak", "relaxed", "cluster"}) d.take(word);
  if (!d.take("shared::cluster")) d.fail("only .shared::cluster");
  if (!d.take("mbarrier::complete_tx::bytes")) d.fail("expected .mbarrier::complete_tx::bytes");
  const size_t count = d.take("v2") ? 2 : d.take("v4") ? 4 : 1;
  int bits;
  if (Reduce) {
    const auto op = take_reduction(d);
    if (!op) d.fail("expected a reduction");
    form.reduces = true;
    form.reduction = *op;
    form.type = take_reduced_type(d, *op);
    bits = 8 * bytes_of(form.type);
  } else {
    bits = ptx::bits_of(d.take_type());
  }
  if (bits != 32 && bits != 64) d.fail("values of 32 or 64 bits only");
  d.expect_operands(3, 3);
  push_address(d, 0, Space::shared);
  push_address(d, 2, Space::shared);
  const ptx::Operand& value = d.operand(1);
  const bool vector = value.kind == ptx::Operand::Kind::vector;
  if ((vector ? value.items.size() : 1) != count) d.fail("wrong number of values");
  for (size_t i = 0; i < count; ++i) d.push(d.source(vector ? value.items[i] : value, bits));
  d.out.op[0] = static_cast<uint32_t>(count);
  d.out.bytes = static_cast<uint8_t>(bits / 8);
  std::memcpy(&d.out.imm, &form, sizeof(form));
  d.run(run_store_async, Class::async_copy);
}
const Opcode st_async("st.async", decode_store_async<false>);
const Opcode red_async("red.async", decode_store_async<true>);

// ---- tensor maps

// op: 0 address, 1 value; 2 ordinal; detail: kWideAddress and field << 1; op[6]: space
Status run_replace(Warp& w, const Instr& in) {
  const Space space = static_cast<Space>(in.op[6]);
  uint64_t address[kLanes];
  load_addresses(w, in, 0, space, address);
  for_lanes(w.exec, [&](int lane) {
    const AsLane as(w, lane);
    uint8_t* at = resolve_range(w, in, space, Intent::store, sizeof(TensorMap), 64, address[lane]);
    const uint64_t value =
        in.bytes == 8 ? w.lanes<uint64_t>(in.op[1])[lane] : w.lanes<uint32_t>(in.op[1])[lane];
    TensorMap map;
    std::memcpy(&map, at, sizeof(map));
    replace(map, static_cast<TensorMapField>(in.detail >> 1), static_cast<int>(in.op[2]), value);
    std::memcpy(at, &map, sizeof(map));
  });
  return Status::next;
}
void decode_replace(Decode& d) {
  struct Field {
    const char* name;
    TensorMapField field;
    bool ordinal;
  };
  static constexpr Field kFields[] = {
      {"global_address", TensorMapField::global_address, false},
      {"rank", TensorMapField::rank, false},
      {"box_dim", TensorMapField::box_dim, true},
      {"global_dim", TensorMapField::global_dim, true},
      {"global_stride", TensorMapField::global_stride, true},
      {"element_stride", TensorMapField::element_stride, true},
      {"elemtype", TensorMapField::elemtype, false},
      {"interleave_layout", TensorMapField::interleave_layout, false},
      {"swizzle_mode", TensorMapField::swizzle_mode, false},
      {"fill_mode", TensorMapField::fill_mode, false},
  };
  if (!d.take("tile")) d.fail("expected .tile");
  const Field* field = nullptr;
  for (const Field& f : kFields)
    if (!field && d.take(f.name)) field = &f;
  if (!field) d.fail("no such field of a tensor map");
  const Space space = d.take_space();
  if (!d.take("b1024")) d.fail("expected .b1024");
  const int bits = d.take("b64") ? 64 : d.take("b32") ? 32 : 0;
  const bool wide = field->field == TensorMapField::global_address ||
                    field->field == TensorMapField::global_stride;
  if (bits != (wide ? 64 : 32)) d.fail("wrong width of the value");
  d.expect_operands(field->ordinal ? 3 : 2, field->ordinal ? 3 : 2);
  set_address(d.out, 0, d.address(d.operand(0), space));
  d.out.op[2] = field->ordinal ? static_cast<uint32_t>(d.immediate(d.operand(1))) : 0;
  TensorMap scratch{};
  if (d.out.op[2] > 8 || !replace(scratch, field->field, static_cast<int>(d.out.op[2]), 0))
    d.fail("no such dimension");
  d.out.op[1] = d.source(field->ordinal ? 2 : 1, bits);
  d.out.bytes = static_cast<uint8_t>(bits / 8);
  d.out.detail |= static_cast<uint8_t>(static_cast<int>(field->field) << 1);
  d.out.op[6] = static_cast<uint32_t>(space);
  d.run(run_replace, Class::shared_memory);
}
const Opcode tensormap_replace("tensormap.replace", decode_replace);

// pool: destination, source. The lanes of the warp copy together.
Status run_cp_fenceproxy(Warp& w, const Instr& in) {
  const int lane = std::countr_zero(w.exec);
  const AsLane as(w, lane);
  const uint32_t* pool = w.pool(in);
  const uint64_t to = pool_address(w, pool, Space::global, lane);
  const uint64_t from = pool_address(w, pool + kAddressWords, Space::shared, lane);
  uint8_t* destination = resolve_range(w, in, Space::global, Intent::store, 128, 128, to);
  const uint8_t* source = resolve_range(w, in, Space::shared, Intent::load, 128, 128, from);
  std::memcpy(destination, source, 128);
  ++w.block().progress;
  return Status::next;
}
void decode_cp_fenceproxy(Decode& d) {
  if (!d.take("global") || !d.take("shared::cta")) d.fail("expected .global.shared::cta");
  for (const char* word : {"tensormap::generic", "release", "sync", "aligned"})
    if (!d.take(word)) d.fail(std::string("expected .") + word);
  for (const char* word : {"cta", "cluster", "gpu", "sys"}) d.take(word);
  d.expect_operands(3, 3);
  push_address(d, 0, Space::global);
  push_address(d, 1, Space::shared);
  if (d.immediate(d.operand(2)) != 128) d.fail("expected a size of 128");
  d.flag(Instr::kConverge);
  d.run(run_cp_fenceproxy, Class::fence);
}
const Opcode cp_fenceproxy("tensormap.cp_fenceproxy", decode_cp_fenceproxy);

}  // namespace
}  // namespace tw::vgpu
