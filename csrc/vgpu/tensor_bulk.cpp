// Bulk copies: cp.async.bulk, cp.reduce.async.bulk, their tensor forms (TMA) and groups; st.async.
#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "vgpu/async.h"
#include "vgpu/lanes.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

using ptx::Space;

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
  if (Observer* o = w.block().observer()) o->tensor_map(w, in, lane, from, MapUse::copied);
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

}  // namespace
}  // namespace tw::vgpu
