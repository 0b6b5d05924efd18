// tensormap.*: tensor maps that a kernel changes itself.
#include <bit>
#include <cstring>

#include "vgpu/async.h"
#include "vgpu/lanes.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

using ptx::Space;

namespace {

// Shows the observer that a lane reads or writes the tensor map at a shared address. How the hardware accesses it is not
// known, so that it is not counted.
void observe_map(Warp& w, const Instr& in, int lane, bool store, uint64_t address, uint8_t* host) {
  Observer* const observer = w.block().observer();
  if (!observer) return;
  uint64_t addresses[kLanes] = {};
  uint8_t* hosts[kLanes] = {};
  addresses[lane] = address | kSharedWindow;
  hosts[lane] = host;
  Access a;
  a.load = !store;
  a.store = store;
  a.counted = false;
  a.bytes = sizeof(TensorMap);
  a.lanes = uint32_t{1} << lane;
  a.address = addresses;
  a.host = hosts;
  a.space = Space::shared;
  observer->access(w, in, a);
}

// op: 0 address, 1 value; 2 ordinal; detail: kWideAddress and field << 1; op[6]: space
Status run_replace(Warp& w, const Instr& in) {
  const Space space = static_cast<Space>(in.op[6]);
  uint64_t address[kLanes];
  load_addresses(w, in, 0, space, address);
  for_lanes(w.exec, [&](int lane) {
    const AsLane as(w, lane);
    uint8_t* at = resolve_range(w, in, space, Intent::store, sizeof(TensorMap), 64, address[lane]);
    for (const bool store : {false, true})
      if (space == Space::shared) observe_map(w, in, lane, store, address[lane], at);
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
  uint8_t* source = resolve_range(w, in, Space::shared, Intent::load, 128, 128, from);
  observe_map(w, in, lane, false, from, source);
  std::memcpy(destination, source, 128);
  if (Observer* o = w.block().observer()) o->tensor_map(w, in, lane, destination, MapUse::written);
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
