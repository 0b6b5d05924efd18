// ldmatrix, stmatrix, movmatrix and mma.sync.
#include <cstdio>
#include <cstring>
#include <utility>

#include "vgpu/block.h"
#include "vgpu/fragments.h"
#include "vgpu/lanes.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

namespace {

struct Fragment {
  const uint32_t* offsets;
  const Warp& w;
  void* operator()(int i) const { return w.lanes<uint8_t>(offsets[i]); }
};

// ---- mma.sync

Status run_mma(Warp& w, const Instr& in) {
  MmaShape s;
  std::memcpy(&s, &in.imm, sizeof(s));
  const uint32_t* pool = w.pool(in);
  const Fragment d{pool, w}, a{d.offsets + s.d_registers, w}, b{a.offsets + s.a_registers, w},
      c{b.offsets + s.b_registers, w};
  alignas(64) double left[32 * 16], right[8 * 32], sum[8 * 16];
  load_a(s.a, s.rows, s.k, a, left);
  load_b(s.b, s.k, b, right);
  load_accumulator(s.accumulator, s.rows, c, sum);
  if (s.a == Element::f64)
    multiply_fused(sum, left, right, s.rows, 8, s.k);
  else if (s.rows == 16)
    multiply<16>(sum, left, right, 8, s.k, s.k, 1);
  else
    multiply<8>(sum, left, right, 8, s.k, s.k, 1);
  store_accumulator(s.accumulator, s.rows, d, sum);
  return Status::next;
}

void decode_mma(Decode& d) {
  d.expect_operands(4, 4);
  const MmaName name = take_mma_shape(d);
  if (!d.take("row") || !d.take("col")) d.fail("mma.sync: only .row.col");
  const bool satfinite = d.take("satfinite");
  const std::vector<std::string> types = take_last(d, 4);  // of D, A, B, C
  MmaShape s{};
  s.a = element_named(d, types[1]);
  s.b = element_named(d, types[2]);
  s.accumulator = accumulator_named(d, types[0], satfinite);
  s.rows = static_cast<uint8_t>(name.m);
  s.k = static_cast<uint8_t>(name.k);
  if (types[0] != types[3]) d.fail("mma.sync: accumulators of different types");
  check_mma_types(d, s);
  const int width = block_width(s.a);
  const bool tall = name.m == 16, wide = s.a == Element::f64;
  const bool small =
      name.m == 8 && name.k == width && (wide || s.a == Element::s8 || s.a == Element::u8);
  if (!(tall || small) || name.n != 8 || name.k < width || name.k % width ||
      name.k > (wide ? 4 : 2) * width)
    d.fail("mma.sync: unsupported shape");
  s.d_registers = static_cast<uint8_t>(accumulator_registers(s.accumulator, name.m));
  s.a_registers = static_cast<uint8_t>(name.m / 8 * (name.k / width));
  s.b_registers = static_cast<uint8_t>(name.k / width);
  const int bits = accumulator_bits(s.accumulator);
  push_registers(d, 0, s.d_registers, bits, true);
  push_registers(d, 1, s.a_registers, element_bits(s.a) == 64 ? 64 : 32, false);
  push_registers(d, 2, s.b_registers, element_bits(s.a) == 64 ? 64 : 32, false);
  push_registers(d, 3, s.d_registers, bits, false);
  std::memcpy(&d.out.imm, &s, sizeof(s));
  d.flag(Instr::kConverge);
  d.run(run_mma, Class::tensor);
}
const Opcode mma("mma.sync.aligned", decode_mma);

// ---- ldmatrix, stmatrix: lane 8 j + i holds the address of row i of matrix j

constexpr uint8_t kTransposed = 2;  // in Instr::detail, beside kWideAddress

template<bool Store>
Status run_matrix(Warp& w, const Instr& in) {
  uint64_t address[kLanes];
  uint8_t* host[kLanes];
  const ptx::Space space = static_cast<ptx::Space>(in.op[1]);
  load_addresses(w, in, 0, space, address);
  const int count = static_cast<int>(in.op[2]);
  const uint32_t all = w.exec;
  w.exec = count == 4 ? kAllLanes : (1u << 8 * count) - 1;
  resolve(w, in, space, Store ? Intent::store : Intent::load, 16, address, host);
  if (w.block().observer()) {
    alignas(16) uint8_t value[kLanes * 16];
    for (int j = 0; Store && j < count; ++j) {
      uint8_t* rows[8];
      for (int i = 0; i < 8; ++i) rows[i] = value + 16 * (8 * j + i);
      store_matrix(rows, in.detail & kTransposed, w.lanes<uint32_t>(w.pool(in)[j]));
    }
    observe(w, in, space,
            {.load = !Store, .store = Store, .value = Store ? value : nullptr, .value_stride = 16},
            address, host);
  }
  w.exec = all;
  for (int j = 0; j < count; ++j) {
    uint32_t* reg = w.lanes<uint32_t>(w.pool(in)[j]);
    if constexpr (Store)
      store_matrix(host + 8 * j, in.detail & kTransposed, reg);
    else
      load_matrix(host + 8 * j, in.detail & kTransposed, reg);
  }
  if constexpr (Store) ++w.block().progress;
  return Status::next;
}

template<bool Store>
void decode_matrix(Decode& d) {
  d.expect_operands(2, 2);
  if (!d.take("m8n8")) d.fail("only .m8n8");
  const int count = d.take("x1") ? 1 : d.take("x2") ? 2 : d.take("x4") ? 4 : 0;
  if (!count) d.fail("expected .x1, .x2 or .x4");
  if (d.take("trans")) d.out.detail |= kTransposed;
  const ptx::Space space = d.take_space();
  if (!d.take("b16")) d.fail("only .b16");
  if (space != ptx::Space::shared && space != ptx::Space::generic) d.fail("only shared memory");
  set_address(d.out, 0, d.address(d.operand(Store ? 0 : 1), space));
  d.out.op[1] = static_cast<uint32_t>(space);
  d.out.op[2] = static_cast<uint32_t>(count);
  d.out.bytes = 16;
  push_registers(d, Store ? 1 : 0, count, 32, !Store);
  d.flag(Instr::kConverge);
  d.run(run_matrix<Store>, Class::shared_memory);
}
const Opcode ldmatrix("ldmatrix.sync.aligned", decode_matrix<false>);
const Opcode stmatrix("stmatrix.sync.aligned", decode_matrix<true>);

// ---- movmatrix.sync.aligned.m8n8.trans.b16 d, a

Status run_movmatrix(Warp& w, const Instr& in) {
  uint16_t m[64];
  std::memcpy(m, w.lanes<uint32_t>(in.op[1]), sizeof(m));
  transpose_8x8(m);
  std::memcpy(w.lanes<uint32_t>(in.op[0]), m, sizeof(m));
  return Status::next;
}
void decode_movmatrix(Decode& d) {
  d.expect_operands(2, 2);
  if (!d.take("m8n8") || !d.take("trans") || !d.take("b16")) d.fail("only .m8n8.trans.b16");
  d.out.op[0] = d.destination(0, 32);
  d.out.op[1] = d.source(1, 32);
  d.flag(Instr::kConverge);
  d.run(run_movmatrix, Class::shuffle);
}
const Opcode movmatrix("movmatrix.sync.aligned", decode_movmatrix);

}  // namespace

// ---- shared with the other files

void push_registers(Decode& d, size_t operand, int count, int bits, bool destination) {
  const ptx::Operand& o = d.operand(operand);
  const bool vector = o.kind == ptx::Operand::Kind::vector;
  const size_t have = vector ? o.items.size() : 1;
  if (have != static_cast<size_t>(count))
    d.fail("operand " + std::to_string(operand) + " has " + std::to_string(have) +
           " registers, expected " + std::to_string(count));
  for (size_t i = 0; i < have; ++i) {
    const ptx::Operand& item = vector ? o.items[i] : o;
    d.push(destination ? d.destination(item, bits) : d.source(item, bits));
  }
}

std::vector<std::string> take_last(Decode& d, size_t count) {
  if (d.in.parts.size() < count + 1) d.fail("a type is missing");
  std::vector<std::string> words(d.in.parts.end() - static_cast<std::ptrdiff_t>(count),
                                 d.in.parts.end());
  for (const std::string& word : words)
    if (!d.take(word)) d.fail("a type is missing");
  return words;
}

MmaName take_mma_shape(Decode& d) {
  for (const std::string& word : d.in.parts) {
    MmaName s{};
    char end = 0;
    if (std::sscanf(word.c_str(), "m%dn%dk%d%c", &s.m, &s.n, &s.k, &end) == 3 && d.take(word))
      return s;
  }
  d.fail("no shape");
  return {};
}

Element element_named(Decode& d, const std::string& type) {
  static constexpr std::pair<const char*, Element> kNames[] = {
      {"f16", Element::f16},   {"bf16", Element::bf16}, {"tf32", Element::tf32},
      {"e4m3", Element::e4m3}, {"e5m2", Element::e5m2}, {"s8", Element::s8},
      {"u8", Element::u8},     {"f64", Element::f64}};
  for (const auto& [name, element] : kNames)
    if (type == name) return element;
  d.fail("operands of type ." + type + " are not supported");
  return Element::f16;
}

Accumulator accumulator_named(Decode& d, const std::string& type, bool satfinite) {
  if (satfinite && type != "s32") d.fail(".satfinite is for .s32");
  if (type == "f32") return Accumulator::f32;
  if (type == "f16") return Accumulator::f16;
  if (type == "f64") return Accumulator::f64;
  if (type == "s32") return satfinite ? Accumulator::s32_satfinite : Accumulator::s32;
  d.fail("accumulators of type ." + type + " are not supported");
  return Accumulator::f32;
}

void check_mma_types(Decode& d, const MmaShape& s) {
  const auto integer = [](Element e) { return e == Element::s8 || e == Element::u8; };
  const auto fp8 = [](Element e) { return e == Element::e4m3 || e == Element::e5m2; };
  const bool same = s.a == s.b || (integer(s.a) && integer(s.b)) || (fp8(s.a) && fp8(s.b));
  const bool fits = integer(s.a) ? s.accumulator == Accumulator::s32 ||
                                       s.accumulator == Accumulator::s32_satfinite
                    : s.a == Element::f64
                        ? s.accumulator == Accumulator::f64
                        : s.accumulator == Accumulator::f32 || (s.accumulator == Accumulator::f16 &&
                                                                (s.a == Element::f16 || fp8(s.a)));
  if (!same || !fits) d.fail("no such combination of types");
}

void push_address(Decode& d, size_t operand, ptx::Space space) {
  const Decode::Address a = d.address(d.operand(operand), space);
  if (a.offset != static_cast<int32_t>(a.offset)) d.fail("address offset too large");
  d.push(a.base);
  d.push(a.wide);
  d.push(static_cast<uint32_t>(a.offset));
}
uint64_t pool_address(const Warp& w, const uint32_t* words, ptx::Space space, int lane) {
  const uint64_t base = words[0] == kNone ? 0
                        : words[1]        ? w.lanes<uint64_t>(words[0])[lane]
                                          : w.lanes<uint32_t>(words[0])[lane];
  const uint64_t address = base + static_cast<uint64_t>(static_cast<int32_t>(words[2]));
  return space == ptx::Space::shared ? static_cast<uint32_t>(address) : address;
}
void pool_addresses(const Warp& w, const uint32_t* words, ptx::Space space, uint64_t* address) {
  for (int l = 0; l < kLanes; ++l) address[l] = pool_address(w, words, space, l);
}

}  // namespace tw::vgpu
