// setp, set and slct: comparisons of integers and floating-point numbers.
#include <string>
#include <tuple>

#include "vgpu/lanes.h"
#include "vgpu/scalar_float.h"

namespace tw::vgpu {

namespace {

using ptx::Operand;
using ptx::Type;

// The unordered ones (equ, ltu, ...) are true if an operand is NaN; lo, ls, hi, hs are lt, le, gt, ge of unsigned.
enum class Compare : uint8_t { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan };

template<Compare c, class T>
inline bool compare(T a, T b) {
  const bool unordered = a != a || b != b;
  switch (c) {
    case Compare::eq:
      return a == b;
    case Compare::ne:
      return !unordered && a != b;
    case Compare::lt:
      return a < b;
    case Compare::le:
      return a <= b;
    case Compare::gt:
      return b < a;
    case Compare::ge:
      return b <= a;
    case Compare::equ:
      return unordered || a == b;
    case Compare::neu:
      return a != b;
    case Compare::ltu:
      return unordered || a < b;
    case Compare::leu:
      return unordered || a <= b;
    case Compare::gtu:
      return unordered || b < a;
    case Compare::geu:
      return unordered || b <= a;
    case Compare::num:
      return !unordered;
    case Compare::nan:
      return unordered;
  }
  return false;
}
// How a register's bits become a comparable value.
template<class F, bool Ftz>
struct As {
  using bits = typename F::bits;
  static auto value(bits a) {
    if constexpr (std::is_same_v<F, F64>)
      return f64_of(a);
    else
      return widen<F>(Ftz ? flush<F>(a) : a);
  }
};
template<class T>
struct AsInteger {
  using bits = T;
  static T value(T a) { return a; }
};

// One loop for each comparison and type; not inlined, so that the forms below need no copies of it.
using CompareLanes = uint32_t (*)(const Warp&, const Instr&);
template<Compare c, class V>
[[gnu::noinline]] uint32_t compare_lanes(const Warp& w, const Instr& in) {
  using B = typename V::bits;
  const B *a = w.lanes<B>(in.op[1]), *b = w.lanes<B>(in.op[2]);
  uint32_t mask = 0;
  for (int l = 0; l < kLanes; ++l)
    mask |= static_cast<uint32_t>(compare<c>(V::value(a[l]), V::value(b[l]))) << l;
  return mask;
}
// Two 16-bit comparisons in a register; the result for the high halves in the high bits.
using ComparePairs = uint64_t (*)(const Warp&, const Instr&);
template<Compare c, class V>
[[gnu::noinline]] uint64_t compare_pairs(const Warp& w, const Instr& in) {
  const uint32_t *a = w.lanes<uint32_t>(in.op[1]), *b = w.lanes<uint32_t>(in.op[2]);
  const auto half = [&](int shift) {
    uint32_t mask = 0;
    for (int l = 0; l < kLanes; ++l) {
      const auto x = static_cast<uint16_t>(a[l] >> shift), y = static_cast<uint16_t>(b[l] >> shift);
      mask |= static_cast<uint32_t>(compare<c>(V::value(x), V::value(y))) << l;
    }
    return mask;
  };
  return half(0) | static_cast<uint64_t>(half(16)) << 32;
}

// What is done with the result. setp: op[3] q; set: op[6] the value for true. Both: op[4] c, op[5] its flip, `detail`
// the boolean operator, `imm` what compares; but run_setp compares by itself.
enum class Bool : uint8_t { none, and_, or_, xor_ };
uint32_t combine(const Warp& w, const Instr& in, uint32_t value) {
  const auto op = static_cast<Bool>(in.detail);
  if (op == Bool::none) return value;
  const uint32_t c = w.mask(in.op[4]) ^ in.op[5];
  return op == Bool::and_ ? value & c : op == Bool::or_ ? value | c : value ^ c;
}
uint32_t compared(const Warp& w, const Instr& in) {
  return reinterpret_cast<CompareLanes>(in.imm)(w, in);
}
uint64_t compared_pairs(const Warp& w, const Instr& in) {
  return reinterpret_cast<ComparePairs>(in.imm)(w, in);
}

template<Compare c, class V>
Status run_setp(Warp& w, const Instr& in) {
  blend(w.mask(in.op[0]), compare_lanes<c, V>(w, in), w.exec);
  return Status::next;
}
Status run_setp_full(Warp& w, const Instr& in) {
  const uint32_t value = compared(w, in);
  const uint32_t p = combine(w, in, value), q = combine(w, in, ~value);
  if (in.op[0] != kNone) blend(w.mask(in.op[0]), p, w.exec);
  if (in.op[3] != kNone) blend(w.mask(in.op[3]), q, w.exec);
  return Status::next;
}
// p for the low halves, q for the high ones.
Status run_setp_pair(Warp& w, const Instr& in) {
  const uint64_t value = compared_pairs(w, in);
  const uint32_t p = combine(w, in, static_cast<uint32_t>(value));
  const uint32_t q = combine(w, in, static_cast<uint32_t>(value >> 32));
  blend(w.mask(in.op[0]), p, w.exec);
  if (in.op[3] != kNone) blend(w.mask(in.op[3]), q, w.exec);
  return Status::next;
}
template<class D>
Status run_set(Warp& w, const Instr& in) {
  const uint32_t value = combine(w, in, compared(w, in));
  const auto yes = static_cast<D>(in.op[6]);
  write_lanes<D>(w, in.op[0], [&](int l) { return value >> l & 1 ? yes : D{0}; });
  return Status::next;
}
Status run_set_pair(Warp& w, const Instr& in) {
  const uint64_t value = compared_pairs(w, in);
  const uint32_t low = in.op[6] & 0xffff, high = low << 16;
  write_lanes<uint32_t>(w, in.op[0], [&](int l) {
    return (value >> l & 1 ? low : 0) | (value >> (32 + l) & 1 ? high : 0);
  });
  return Status::next;
}

struct Choice {
  Handler setp = nullptr;
  CompareLanes lanes = nullptr;
  ComparePairs pairs = nullptr;  // of 16-bit types
};
template<Compare c, class V>
Choice choice_of() {
  if constexpr (sizeof(typename V::bits) == 2)
    return {run_setp<c, V>, compare_lanes<c, V>, compare_pairs<c, V>};
  else
    return {run_setp<c, V>, compare_lanes<c, V>, nullptr};
}
template<class V, Compare... c>
Choice choose_compare(Compare which) {
  Choice choice;
  ((which == c ? void(choice = choice_of<c, V>()) : void()), ...);
  return choice;
}
template<class T>
Choice of_integers(Compare which) {
  using enum Compare;
  return choose_compare<AsInteger<T>, eq, ne, lt, le, gt, ge>(which);
}
template<class V>
Choice of_floats(Compare which) {
  using enum Compare;
  return choose_compare<V, eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, Compare::nan>(
      which);
}

Choice choose(Type type, Compare which, bool ftz) {
  switch (type) {
    case Type::s16:
      return of_integers<int16_t>(which);
    case Type::u16:
    case Type::b16:
      return of_integers<uint16_t>(which);
    case Type::s32:
      return of_integers<int32_t>(which);
    case Type::u32:
    case Type::b32:
      return of_integers<uint32_t>(which);
    case Type::s64:
      return of_integers<int64_t>(which);
    case Type::u64:
    case Type::b64:
      return of_integers<uint64_t>(which);
    case Type::f32:
      return ftz ? of_floats<As<F32, true>>(which) : of_floats<As<F32, false>>(which);
    case Type::f64:
      return of_floats<As<F64, false>>(which);
    case Type::f16:
    case Type::f16x2:
      return ftz ? of_floats<As<F16, true>>(which) : of_floats<As<F16, false>>(which);
    case Type::bf16:
    case Type::bf16x2:
      return of_floats<As<BF16, false>>(which);
    default:
      return {};
  }
}

Compare take_compare(Decode& d) {
  static constexpr std::pair<const char*, Compare> kNames[] = {
      {"eq", Compare::eq},   {"ne", Compare::ne},   {"lt", Compare::lt},   {"le", Compare::le},
      {"gt", Compare::gt},   {"ge", Compare::ge},   {"lo", Compare::lt},   {"ls", Compare::le},
      {"hi", Compare::gt},   {"hs", Compare::ge},   {"equ", Compare::equ}, {"neu", Compare::neu},
      {"ltu", Compare::ltu}, {"leu", Compare::leu}, {"gtu", Compare::gtu}, {"geu", Compare::geu},
      {"num", Compare::num}, {"nan", Compare::nan}};  // fmt: skip
  for (const auto& [name, compare] : kNames)
    if (d.take(name)) return compare;
  d.fail("no comparison");
  return Compare::eq;
}
Bool take_bool(Decode& d) {
  return d.take("and")   ? Bool::and_
         : d.take("or")  ? Bool::or_
         : d.take("xor") ? Bool::xor_
                         : Bool::none;
}

// setp.cmp{.bool}{.ftz}.type p{|q}, a, b{, {!}c}
void decode_setp(Decode& d) {
  const Compare which = take_compare(d);
  const Bool op = take_bool(d);
  const bool ftz = d.take("ftz");
  const Type type = d.take_type();
  const bool pair = type == Type::f16x2 || type == Type::bf16x2;
  d.expect_operands(op == Bool::none ? 3 : 4, op == Bool::none ? 3 : 4);
  const Operand& to = d.operand(0);
  const bool two = to.kind == Operand::Kind::pair;
  d.out.op[0] = d.destination(two ? to.items[0] : to, 1);
  if (two) d.out.op[3] = d.destination(to.items[1], 1);
  d.out.op[1] = d.source(1, ptx::bits_of(type));
  d.out.op[2] = d.source(2, ptx::bits_of(type));
  if (op != Bool::none) std::tie(d.out.op[4], d.out.op[5]) = d.predicate(d.operand(3));
  const Choice chosen = choose(type, which, ftz);
  d.out.detail = static_cast<uint8_t>(op);
  d.out.imm =
      pair ? reinterpret_cast<int64_t>(chosen.pairs) : reinterpret_cast<int64_t>(chosen.lanes);
  d.run(!chosen.setp              ? nullptr
        : pair                    ? run_setp_pair
        : two || op != Bool::none ? run_setp_full
                                  : chosen.setp,
        Class::predicate);
}
const Opcode setp("setp", decode_setp);

// set.cmp{.bool}{.ftz}.dtype.stype d, a, b{, {!}c}: all ones or 1.0 if true, else 0
void decode_set(Decode& d) {
  const Compare which = take_compare(d);
  const Bool op = take_bool(d);
  const bool ftz = d.take("ftz");
  const Type to = d.take_type(), type = d.take_type();
  d.expect_operands(op == Bool::none ? 3 : 4, op == Bool::none ? 3 : 4);
  const int bits = ptx::bits_of(to);
  d.out.op[0] = d.destination(0, bits);
  d.out.op[1] = d.source(1, ptx::bits_of(type));
  d.out.op[2] = d.source(2, ptx::bits_of(type));
  if (op != Bool::none) std::tie(d.out.op[4], d.out.op[5]) = d.predicate(d.operand(3));
  const bool pair = type == Type::f16x2 || type == Type::bf16x2;
  if (pair && op != Bool::none) d.fail("set of pairs with a boolean operator is not supported");
  d.out.op[6] = to == Type::f32                          ? 0x3f800000
                : to == Type::f16 || to == Type::f16x2   ? 0x3c00
                : to == Type::bf16 || to == Type::bf16x2 ? 0x3f80
                                                         : kAllOnes;
  const Choice chosen = choose(type, which, ftz);
  d.out.detail = static_cast<uint8_t>(op);
  d.out.imm =
      pair ? reinterpret_cast<int64_t>(chosen.pairs) : reinterpret_cast<int64_t>(chosen.lanes);
  d.run(!chosen.setp ? nullptr
        : pair       ? run_set_pair
        : bits == 16 ? run_set<uint16_t>
                     : run_set<uint32_t>,
        Class::predicate);
}
const Opcode set("set", decode_set);

// slct.dtype.ctype d, a, b, c: c >= 0 ? a : b
template<class T, class C>
constexpr Handler select_by_sign = lanewise<[](T a, T b, C c) { return c >= 0 ? a : b; }>;

void decode_slct(Decode& d) {
  d.take("ftz");
  const Type to = d.take_type(), by = d.take_type();
  const int bits = ptx::bits_of(to);
  d.expect_operands(4, 4);
  d.out.op[0] = d.destination(0, bits);
  d.out.op[1] = d.source(1, bits);
  d.out.op[2] = d.source(2, bits);
  d.out.op[3] = d.source(3, 32);
  const bool real = by == Type::f32;
  if (bits == 16)
    d.run(real ? select_by_sign<uint16_t, float> : select_by_sign<uint16_t, int32_t>, Class::move);
  else if (bits == 32)
    d.run(real ? select_by_sign<uint32_t, float> : select_by_sign<uint32_t, int32_t>, Class::move);
  else if (bits == 64)
    d.run(real ? select_by_sign<uint64_t, float> : select_by_sign<uint64_t, int32_t>, Class::move);
}
const Opcode slct("slct", decode_slct);

}  // namespace

}  // namespace tw::vgpu
