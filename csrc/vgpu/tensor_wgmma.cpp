// wgmma: products of a warpgroup with operands in shared memory. Each warp computes its own 16 of the 64 rows,
// all four when the first of them waits.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "vgpu/async.h"
#include "vgpu/fragments.h"
#include "vgpu/lanes.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

namespace {

constexpr uint8_t kNegate = 2, kTransposeA = 4, kTransposeB = 8;  // Instr::detail
constexpr int kMaxN = 256, kMaxK = 32;

struct Tiles {
  alignas(64) double a[kMaxK * 16];
  alignas(64) double b[kMaxK * kMaxN];
  alignas(64) double sum[kMaxN * 16];
};

// A 16-byte chunk of an operand in shared memory; faults if it is out of bounds.
struct SharedOperand {
  const Warp& w;
  const Instr& in;
  const uint8_t* memory;
  uint32_t end;
  const uint8_t* operator()(uint32_t address) const {
    if (address < kSharedBase || address + 16 > end) [[unlikely]]
      w.fault(Fault::Kind::memory, in, -1,
              "shared memory: an operand of wgmma at " + hex(address) +
                  " is out of bounds: the block has [" + hex(kSharedBase) + ", " + hex(end) + ")",
              address);
    return memory + address;
  }
};

struct Fragment {
  const uint32_t* offsets;
  const Warp& w;
  void* operator()(int i) const { return w.lanes<uint8_t>(offsets[i]); }
};

}  // namespace

// Shared memory that a wgmma reads, when it is issued and when it is done.
static void observe_wgmma(Warp& w, const Wgmma& op, bool done) {
  Observer* const observer = w.block().observer();
  if (!observer) return;
  const Instr& in = *op.in;
  MmaShape s;
  std::memcpy(&s, &in.imm, sizeof(s));
  const int n = static_cast<int>(in.op[4]), bytes = element_bits(s.a) / 8;
  const SharedOperand shared{w, in, w.block().shared(), w.block().shared_end()};
  static thread_local std::vector<uint32_t> chunks;
  chunks.clear();
  const auto add = [&](int, int, uint32_t address) {
    shared(address);
    chunks.push_back(address);
  };
  const auto add_operand = [&](uint64_t descriptor, bool transposed, int first, int count) {
    if (transposed)
      for_chunks_mn_major(MatrixDescriptor(descriptor), first, count, s.k, add);
    else
      for_chunks_k_major(MatrixDescriptor(descriptor), first, count, bytes, add);
  };
  if (in.op[0] != kNone)
    add_operand(op.a, in.detail & kTransposeA, static_cast<int>(w.index() % 4) * 16, 16);
  add_operand(op.b, in.detail & kTransposeB, 0, n);
  AsyncAccess access;
  access.kind = AsyncAccess::Kind::wgmma;
  access.done = done;
  access.id = op.id;
  access.block = &w.block();
  access.address = chunks.data();
  access.count = static_cast<uint32_t>(chunks.size());
  access.bytes = 16;
  observer->async(w, in, -1, access);
}

// Its registers, from issue to the wait of its warp.
static void observe_registers(Warp& w, const Instr& in, bool done) {
  Observer* const observer = w.block().observer();
  if (!observer) return;
  MmaShape s;
  std::memcpy(&s, &in.imm, sizeof(s));
  const uint32_t registers = s.d_registers + (in.op[0] == kNone ? s.a_registers : 0u);
  observer->registers(w, in, w.pool(in), s.d_registers, registers, done);
}

void run_wgmma(Warp& w, const Wgmma& op) {
  static thread_local Tiles t;
  const Instr& in = *op.in;
  MmaShape s;
  std::memcpy(&s, &in.imm, sizeof(s));
  const int n = static_cast<int>(in.op[4]), k = s.k;
  const int bytes = element_bits(s.a) / 8, per_chunk = 16 / bytes;
  const int first_row = static_cast<int>(w.index() % 4) * 16;
  const uint32_t* pool = w.pool(in);
  const SharedOperand shared{w, in, w.block().shared(), w.block().shared_end()};

  if (in.op[0] == kNone) {
    load_a(s.a, 16, k, Fragment{pool + s.d_registers, w}, t.a);
  } else if (in.detail & kTransposeA) {
    for_chunks_mn_major(MatrixDescriptor(op.a), first_row, 16, k, [&](int i, int l, uint32_t at) {
      unpack(s.a, shared(at), 8, t.a + l * 16 + i);
    });
  } else {
    double chunk[16];
    for_chunks_k_major(MatrixDescriptor(op.a), first_row, 16, bytes,
                       [&](int r, int l, uint32_t at) {
                         unpack(s.a, shared(at), per_chunk, chunk);
                         for (int i = 0; i < per_chunk; ++i) t.a[(l + i) * 16 + r] = chunk[i];
                       });
  }
  if (in.detail & kNegate)
    for (int i = 0; i < 16 * k; ++i) t.a[i] = -t.a[i];

  int step_n = k, step_k = 1;
  if (in.detail & kTransposeB) {
    step_n = 1;
    step_k = n;
    for_chunks_mn_major(MatrixDescriptor(op.b), 0, n, k, [&](int i, int l, uint32_t at) {
      unpack(s.b, shared(at), 8, t.b + l * n + i);
    });
  } else {
    for_chunks_k_major(MatrixDescriptor(op.b), 0, n, bytes, [&](int r, int l, uint32_t at) {
      unpack(s.b, shared(at), per_chunk, t.b + r * k + l);
    });
  }

  const int registers = accumulator_registers(s.accumulator, 16);
  if (op.accumulate)
    for (int j = 0; j < n / 8; ++j)
      load_accumulator(s.accumulator, 16, Fragment{pool + j * registers, w}, t.sum + j * 8 * 16);
  else
    std::memset(t.sum, 0, sizeof(double) * 16 * static_cast<size_t>(n));
  multiply<16>(t.sum, t.a, t.b, n, k, step_n, step_k);
  for (int j = 0; j < n / 8; ++j)
    store_accumulator(s.accumulator, 16, Fragment{pool + j * registers, w}, t.sum + j * 8 * 16);
}

// The warps of a warpgroup: those of the block from w / 4 * 4 on.
template<class F>
static bool all_of_warpgroup(Warp& w, F f) {
  auto& warps = w.block().warps();
  const size_t first = w.index() / 4 * size_t{4};
  for (size_t i = first; i < std::min(first + 4, warps.size()); ++i)
    if (!f(warps[i])) return false;
  return true;
}

bool Async::wait_wgmmas(Warp& w, uint32_t pending) {
  OfWarp& mine = of(w);
  size_t due = 0;
  for (; due < mine.wgmmas.size(); ++due) {
    const uint32_t group = mine.wgmmas[due].group;
    if (mine.wgmma_groups <= group || mine.wgmma_groups - group <= pending) break;
  }
  if (!due) return true;
  const Wgmma last = mine.wgmmas[due - 1];
  if (!last.done) {
    if (!all_of_warpgroup(w, [&](Warp& p) { return of(p).issued_wgmmas > last.id; })) return false;
    ++w.block().progress;
    all_of_warpgroup(w, [&](Warp& p) {
      for (Wgmma& op : of(p).wgmmas) {
        if (op.done || op.id > last.id) continue;
        run_wgmma(p, op);
        op.done = true;
        observe_wgmma(p, op, true);
      }
      return true;
    });
  }
  if (Observer* const observer = w.block().observer()) {
    for (size_t i = 0; i < due; ++i) observe_registers(w, *mine.wgmmas[i].in, true);
    observer->wgmma_leave(w, *last.in, last.id);
  }
  mine.wgmmas.erase(mine.wgmmas.begin(), mine.wgmmas.begin() + static_cast<std::ptrdiff_t>(due));
  return true;
}

namespace {

// op: 0 descriptor of A or kNone, 1 of B, 2 scale-d, 3 its flip, 4 n; pool: D, then A if in registers
Status run_mma_async(Warp& w, const Instr& in) {
  if (w.exec != kAllLanes)
    w.fault(Fault::Kind::barrier, in, -1, "wgmma needs all lanes of the warp");
  Async::OfWarp& mine = async_of(w).of(w);
  Wgmma op;
  op.in = &in;
  op.a = in.op[0] == kNone ? 0 : w.lanes<uint64_t>(in.op[0])[0];
  op.b = w.lanes<uint64_t>(in.op[1])[0];
  op.accumulate = (w.mask(in.op[2]) ^ in.op[3]) & 1;
  op.group = mine.wgmma_groups;
  for (const uint64_t d : {op.a, op.b})
    if (MatrixDescriptor(d).base_offset)
      w.fault(Fault::Kind::memory, in, -1,
              "matrix descriptors with a base offset are not supported");
  op.id = mine.issued_wgmmas++;
  observe_registers(w, in, false);
  observe_wgmma(w, op, false);
  mine.wgmmas.push_back(op);
  return Status::next;
}

bool sign_of(Decode& d, size_t operand) {
  const auto value = static_cast<int64_t>(d.immediate(d.operand(operand)));
  if (value != 1 && value != -1 && value != 0xffffffff) d.fail("wgmma: a scale must be 1 or -1");
  return value != 1;
}

void decode_mma_async(Decode& d) {
  d.expect_operands(4, 8);
  const MmaName name = take_mma_shape(d);
  const bool satfinite = d.take("satfinite");
  const std::vector<std::string> types = take_last(d, 3);  // of D, A, B
  MmaShape s{};
  s.a = element_named(d, types[1]);
  s.b = element_named(d, types[2]);
  s.accumulator = accumulator_named(d, types[0], satfinite);
  s.rows = 16;
  s.k = static_cast<uint8_t>(name.k);
  check_mma_types(d, s);
  if (s.a == Element::f64 || name.m != 64 || name.k != 256 / element_bits(s.a) || name.n < 8 ||
      name.n > kMaxN || name.n % 8)
    d.fail("wgmma: no such shape");
  const bool a_in_registers = d.operand(1).kind == ptx::Operand::Kind::vector;
  const bool integer = types[0] == "s32", wide = element_bits(s.a) == 16;
  const size_t transposes = !wide ? 0 : a_in_registers ? 1 : 2;
  const size_t expected = 4 + (integer ? 0 : 2) + transposes;
  d.expect_operands(expected, expected);
  s.d_registers = static_cast<uint8_t>(name.n / 8 * accumulator_registers(s.accumulator, 16));
  s.a_registers = 4;
  push_registers(d, 0, s.d_registers, 32, true);
  d.keep(d.operand(0));
  if (a_in_registers) {
    push_registers(d, 1, s.a_registers, 32, false);
    d.keep(d.operand(1));
  } else {
    d.out.op[0] = d.source(1, 64);
  }
  d.out.op[1] = d.source(2, 64);
  std::tie(d.out.op[2], d.out.op[3]) = d.predicate(d.operand(3));
  d.out.op[4] = static_cast<uint32_t>(name.n);
  if (!integer && sign_of(d, 4) != sign_of(d, 5)) d.out.detail |= kNegate;
  const auto transposed = [&](size_t operand) { return d.immediate(d.operand(operand)) != 0; };
  if (transposes == 2 && transposed(6)) d.out.detail |= kTransposeA;
  if (transposes && transposed(expected - 1)) d.out.detail |= kTransposeB;
  std::memcpy(&d.out.imm, &s, sizeof(s));
  d.flag(Instr::kConverge);
  d.run(run_mma_async, Class::tensor);
}
const Opcode mma_async("wgmma.mma_async.sync.aligned", decode_mma_async);

Status run_fence(Warp& w, const Instr& in) {
  if (Observer* o = w.block().observer()) o->fence(w, in);
  return Status::next;
}
Status run_commit(Warp& w, const Instr&) {
  Async& async = async_of(w);
  Async::OfWarp& mine = async.of(w);
  if (!w.ticket()) ++mine.wgmma_groups;
  w.ticket() = 1;
  // Triton unpacks f16 accumulators between the commit and the wait, and ptxas copes by waiting earlier.
  if (w.block().launch().check == Check::strict) return Status::next;
  bool halves = false;
  for (const Wgmma& op : mine.wgmmas) {
    MmaShape s;
    std::memcpy(&s, &op.in->imm, sizeof(s));
    halves |= s.accumulator == Accumulator::f16;
  }
  return !halves || async.wait_wgmmas(w, 0) ? Status::next : Status::wait;
}
Status run_wait(Warp& w, const Instr& in) {
  return async_of(w).wait_wgmmas(w, static_cast<uint32_t>(in.imm)) ? Status::next : Status::wait;
}
std::string explain_wait(Warp& w, const Instr&) {
  return "warp " + std::to_string(w.index()) +
         " has issued a wgmma.mma_async that another warp of its warpgroup has not";
}
void decode_fence(Decode& d) {
  d.expect_operands(0, 0);
  d.flag(Instr::kConverge);
  d.run(run_fence, Class::fence);
}
void decode_commit(Decode& d) {
  d.expect_operands(0, 0);
  d.flag(Instr::kConverge);
  d.explain(explain_wait);
  d.run(run_commit, Class::async_copy);
}
void decode_wait(Decode& d) {
  d.expect_operands(1, 1);
  d.out.imm = static_cast<int64_t>(d.immediate(d.operand(0)));
  d.flag(Instr::kConverge);
  d.explain(explain_wait);
  d.run(run_wait, Class::barrier);
}
const Opcode wgmma_fence("wgmma.fence.sync.aligned", decode_fence);
const Opcode wgmma_commit("wgmma.commit_group.sync.aligned", decode_commit);
const Opcode wgmma_wait("wgmma.wait_group.sync.aligned", decode_wait);

}  // namespace
}  // namespace tw::vgpu
