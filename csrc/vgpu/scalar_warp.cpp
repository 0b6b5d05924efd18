// Exchange between the lanes of a warp: shfl, vote, match, activemask, elect, redux.
#include <tuple>

#include "vgpu/block.h"
#include "vgpu/lanes.h"

namespace tw::vgpu {

namespace {

// The member mask is checked by the core: all named lanes stand at this instruction. What is left is that the
// lanes that execute it are members.
void check_members(Warp& w, const Instr& in) {
  const uint32_t* members = w.lanes<uint32_t>(in.op[kMembersOperand]);
  for_lanes(w.exec, [&](int l) {
    if (!(members[l] >> l & 1)) [[unlikely]]
      w.fault(Fault::Kind::barrier, in, l,
              "the lane is not in its own member mask " + hex(members[l]));
  });
}
void take_members(Decode& d, size_t operand) {
  d.take("sync") || d.fail("only the .sync form exists since sm_70");
  d.out.op[kMembersOperand] = d.source(operand, 32);
  d.flag(Instr::kMembers);
}

// ---- shfl.sync.mode.b32 d{|p}, a, b, c, members

enum class Shuffle : uint8_t { up, down, bfly, idx };

// op: 0 d, 1 a, 2 b, 3 c, 4 p or kNone. c holds the clamp lane and the segment mask.
template<Shuffle mode>
Status run_shfl(Warp& w, const Instr& in) {
  check_members(w, in);
  const uint32_t* a = w.lanes<uint32_t>(in.op[1]);
  const uint32_t* b = w.lanes<uint32_t>(in.op[2]);
  const uint32_t* c = w.lanes<uint32_t>(in.op[3]);
  alignas(64) uint32_t value[kLanes];
  uint32_t inside = 0;
  for (int l = 0; l < kLanes; ++l) {
    const int step = static_cast<int>(b[l] & 31), clamp = static_cast<int>(c[l] & 31);
    const int segment = static_cast<int>(c[l] >> 8 & 31);
    const int last = (l & segment) | (clamp & ~segment), first = l & segment;
    int from = l;
    bool in_range = false;
    if constexpr (mode == Shuffle::up) {
      from = l - step;
      in_range = from >= last;  // here the clamp is the lowest lane
    } else if constexpr (mode == Shuffle::down) {
      from = l + step;
      in_range = from <= last;
    } else if constexpr (mode == Shuffle::bfly) {
      from = l ^ step;
      in_range = from <= last;
    } else {
      from = first | (step & ~segment);
      in_range = from <= last;
    }
    if (!in_range) from = l;
    inside |= static_cast<uint32_t>(in_range) << l;
    value[l] = a[from & 31];
  }
  blend(w.lanes<uint32_t>(in.op[0]), value, w.exec);
  if (in.op[4] != kNone) blend(w.mask(in.op[4]), inside, w.exec);
  return Status::next;
}
void decode_shfl(Decode& d) {
  d.expect_operands(5, 5);
  d.take("b32") || d.fail("only .b32 exists");
  const ptx::Operand& to = d.operand(0);
  const bool pair = to.kind == ptx::Operand::Kind::pair;
  d.out.op[0] = d.destination(pair ? to.items[0] : to, 32);
  if (pair) d.out.op[4] = d.destination(to.items[1], 1);
  for (int i = 1; i <= 3; ++i) d.out.op[i] = d.source(static_cast<size_t>(i), 32);
  take_members(d, 4);
  if (d.take("up"))
    d.run(run_shfl<Shuffle::up>, Class::shuffle);
  else if (d.take("down"))
    d.run(run_shfl<Shuffle::down>, Class::shuffle);
  else if (d.take("bfly"))
    d.run(run_shfl<Shuffle::bfly>, Class::shuffle);
  else if (d.take("idx"))
    d.run(run_shfl<Shuffle::idx>, Class::shuffle);
}
const Opcode shfl("shfl", decode_shfl);

// ---- vote.sync.mode d, {!}a, members

enum class Vote : uint8_t { all, any, uni, ballot };

template<Vote mode>
Status run_vote(Warp& w, const Instr& in) {
  check_members(w, in);
  const uint32_t set = w.mask(in.op[1]) ^ in.op[2];
  const uint32_t* members = w.lanes<uint32_t>(in.op[kMembersOperand]);
  uint32_t result = 0;
  alignas(64) uint32_t ballot[kLanes] = {};
  for_lanes(w.exec, [&](int l) {
    const uint32_t group = members[l] & w.exec, yes = set & group;
    ballot[l] = yes;
    const bool value = mode == Vote::all   ? yes == group
                       : mode == Vote::any ? yes != 0
                                           : yes == group || yes == 0;
    result |= static_cast<uint32_t>(value) << l;
  });
  if constexpr (mode == Vote::ballot)
    blend(w.lanes<uint32_t>(in.op[0]), ballot, w.exec);
  else
    blend(w.mask(in.op[0]), result, w.exec);
  return Status::next;
}
void decode_vote(Decode& d) {
  d.expect_operands(3, 3);
  std::tie(d.out.op[1], d.out.op[2]) = d.predicate(d.operand(1));
  take_members(d, 2);
  if (d.take("ballot")) {
    d.take("b32");
    d.out.op[0] = d.destination(0, 32);
    d.run(run_vote<Vote::ballot>, Class::vote);
    return;
  }
  d.take("pred");
  d.out.op[0] = d.destination(0, 1);
  if (d.take("all"))
    d.run(run_vote<Vote::all>, Class::vote);
  else if (d.take("any"))
    d.run(run_vote<Vote::any>, Class::vote);
  else if (d.take("uni"))
    d.run(run_vote<Vote::uni>, Class::vote);
}
const Opcode vote("vote", decode_vote);

// ---- match.any.sync.b32 d, a, members; match.all.sync.b32 d{|p}, a, members

template<class T, bool all>
Status run_match(Warp& w, const Instr& in) {
  check_members(w, in);
  const T* a = w.lanes<T>(in.op[1]);
  const uint32_t* members = w.lanes<uint32_t>(in.op[kMembersOperand]);
  alignas(64) uint32_t value[kLanes] = {};
  uint32_t equal = 0;
  for_lanes(w.exec, [&](int l) {
    const uint32_t group = members[l] & w.exec;
    uint32_t same = 0;
    for_lanes(group, [&](int o) { same |= static_cast<uint32_t>(a[o] == a[l]) << o; });
    if constexpr (all) {
      value[l] = same == group ? group : 0;
      equal |= static_cast<uint32_t>(same == group) << l;
    } else {
      value[l] = same;
    }
  });
  blend(w.lanes<uint32_t>(in.op[0]), value, w.exec);
  if (in.op[2] != kNone) blend(w.mask(in.op[2]), equal, w.exec);
  return Status::next;
}
void decode_match(Decode& d) {
  d.expect_operands(3, 3);
  const bool all = d.take("all");
  all || d.take("any") || d.fail("match needs .any or .all");
  const int bits = ptx::bits_of(d.take_type());
  const ptx::Operand& to = d.operand(0);
  const bool pair = to.kind == ptx::Operand::Kind::pair;
  d.out.op[0] = d.destination(pair ? to.items[0] : to, 32);
  if (pair) d.out.op[2] = d.destination(to.items[1], 1);
  d.out.op[1] = d.source(1, bits);
  take_members(d, 2);
  if (bits == 32)
    d.run(all ? run_match<uint32_t, true> : run_match<uint32_t, false>, Class::vote);
  else if (bits == 64)
    d.run(all ? run_match<uint64_t, true> : run_match<uint64_t, false>, Class::vote);
}
const Opcode match("match", decode_match);

// ---- activemask.b32 d; elect.sync d|p, members

Status run_activemask(Warp& w, const Instr& in) {
  const uint32_t mask = w.fragment_mask();
  write_lanes<uint32_t>(w, in.op[0], [&](int) { return mask; });
  return Status::next;
}
void decode_activemask(Decode& d) {
  d.take("b32");
  d.out.op[0] = d.destination(0, 32);
  d.run(run_activemask, Class::vote);
}
const Opcode activemask("activemask", decode_activemask);

Status run_elect(Warp& w, const Instr& in) {
  check_members(w, in);
  const auto leader = static_cast<uint32_t>(std::countr_zero(w.exec));
  write_lanes<uint32_t>(w, in.op[0], [&](int) { return leader; });
  blend(w.mask(in.op[1]), uint32_t{1} << leader, w.exec);
  return Status::next;
}
void decode_elect(Decode& d) {
  d.expect_operands(2, 2);
  const ptx::Operand& to = d.operand(0);
  if (to.kind != ptx::Operand::Kind::pair) d.fail("elect.sync needs d|p");
  d.out.op[0] = d.destination(to.items[0], 32);
  d.out.op[1] = d.destination(to.items[1], 1);
  take_members(d, 1);
  d.run(run_elect, Class::vote);
}
const Opcode elect("elect", decode_elect);

// ---- redux.sync.op.type d, a, members

template<class T, auto F>
Status run_redux(Warp& w, const Instr& in) {
  check_members(w, in);
  const T* a = w.lanes<T>(in.op[1]);
  const uint32_t* members = w.lanes<uint32_t>(in.op[kMembersOperand]);
  alignas(64) T value[kLanes] = {};
  for_lanes(w.exec, [&](int l) {
    const uint32_t group = members[l] & w.exec;
    T sum = a[std::countr_zero(group)];
    for_lanes(group & (group - 1), [&](int o) { sum = F(sum, a[o]); });
    value[l] = sum;
  });
  blend(w.lanes<T>(in.op[0]), value, w.exec);
  return Status::next;
}
template<class T>
void choose_redux(Decode& d) {
  if (d.take("add"))
    d.run(run_redux<T,
                    [](T a, T b) {
                      return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
                    }>,
          Class::shuffle);
  else if (d.take("min"))
    d.run(run_redux<T, [](T a, T b) { return a < b ? a : b; }>, Class::shuffle);
  else if (d.take("max"))
    d.run(run_redux<T, [](T a, T b) { return b < a ? a : b; }>, Class::shuffle);
  else if (d.take("and"))
    d.run(run_redux<T, [](T a, T b) { return a & b; }>, Class::shuffle);
  else if (d.take("or"))
    d.run(run_redux<T, [](T a, T b) { return a | b; }>, Class::shuffle);
  else if (d.take("xor"))
    d.run(run_redux<T, [](T a, T b) { return a ^ b; }>, Class::shuffle);
}
void decode_redux(Decode& d) {
  d.expect_operands(3, 3);
  const ptx::Type type = d.take_type();
  if (ptx::bits_of(type) != 32 || ptx::is_float(type)) d.fail("only 32-bit integers are supported");
  d.out.op[0] = d.destination(0, 32);
  d.out.op[1] = d.source(1, 32);
  take_members(d, 2);
  if (ptx::is_signed(type))
    choose_redux<int32_t>(d);
  else
    choose_redux<uint32_t>(d);
}
const Opcode redux("redux", decode_redux);

}  // namespace

}  // namespace tw::vgpu
