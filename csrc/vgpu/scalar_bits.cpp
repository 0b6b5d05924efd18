// Bits of integers and predicates: logic, shifts, counting, fields, permutation of bytes.
#include <bit>
#include <tuple>
#include <type_traits>

#include "vgpu/lanes.h"
#include "vgpu/scalar_integer.h"

namespace tw::vgpu {

namespace {

using ptx::Type;

template<class T>
using unsigned_ = std::make_unsigned_t<T>;

// ---- and, or, xor, not, cnot, lop3

template<auto F>
Status run_logic_predicate(Warp& w, const Instr& in) {
  blend(w.mask(in.op[0]), F(w.mask(in.op[1]) ^ in.op[3], w.mask(in.op[2]) ^ in.op[4]), w.exec);
  return Status::next;
}
template<auto F>
void decode_logic(Decode& d) {
  const int bits = ptx::bits_of(d.take_type());
  if (bits == 1) {
    d.expect_operands(3, 3);
    d.out.op[0] = d.destination(0, 1);
    std::tie(d.out.op[1], d.out.op[3]) = d.predicate(d.operand(1));
    std::tie(d.out.op[2], d.out.op[4]) = d.predicate(d.operand(2));
    d.run(run_logic_predicate<F>, Class::predicate);
    return;
  }
  take_operands(d, 2, bits);
  if (bits == 16)
    d.run(lanewise<[](uint16_t a, uint16_t b) { return static_cast<uint16_t>(F(a, b)); }>,
          Class::integer);
  else if (bits == 32)
    d.run(lanewise<[](uint32_t a, uint32_t b) { return static_cast<uint32_t>(F(a, b)); }>,
          Class::integer);
  else if (bits == 64)
    d.run(lanewise<[](uint64_t a, uint64_t b) { return static_cast<uint64_t>(F(a, b)); }>,
          Class::integer);
}
const Opcode and_("and", decode_logic<[](auto a, auto b) { return a & b; }>);
const Opcode or_("or", decode_logic<[](auto a, auto b) { return a | b; }>);
const Opcode xor_("xor", decode_logic<[](auto a, auto b) { return a ^ b; }>);

Status run_not_predicate(Warp& w, const Instr& in) {
  blend(w.mask(in.op[0]), ~(w.mask(in.op[1]) ^ in.op[2]), w.exec);
  return Status::next;
}
void decode_not(Decode& d) {
  const Type type = d.take_type();
  if (type == Type::pred) {
    d.expect_operands(2, 2);
    d.out.op[0] = d.destination(0, 1);
    std::tie(d.out.op[1], d.out.op[2]) = d.predicate(d.operand(1));
    d.run(run_not_predicate, Class::predicate);
    return;
  }
  take_operands(d, 1, ptx::bits_of(type));
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a) { return static_cast<T>(~a); }>, Class::integer);
  });
}
const Opcode not_("not", decode_not);

void decode_cnot(Decode& d) {
  const Type type = d.take_type();
  take_operands(d, 1, ptx::bits_of(type));
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a) { return static_cast<T>(a == 0); }>, Class::integer);
  });
}
const Opcode cnot("cnot", decode_cnot);

// Any function of three bits by its truth table, `imm`.
Status run_lop3(Warp& w, const Instr& in) {
  const uint32_t *a = w.lanes<uint32_t>(in.op[1]), *b = w.lanes<uint32_t>(in.op[2]),
                 *c = w.lanes<uint32_t>(in.op[3]);
  uint32_t minterm[8];
  for (int i = 0; i < 8; ++i) minterm[i] = in.imm >> i & 1 ? kAllOnes : 0;
  write_lanes<uint32_t>(w, in.op[0], [&](int l) {
    const uint32_t x = a[l], y = b[l], z = c[l];
    return (~x & ~y & ~z & minterm[0]) | (~x & ~y & z & minterm[1]) | (~x & y & ~z & minterm[2]) |
           (~x & y & z & minterm[3]) | (x & ~y & ~z & minterm[4]) | (x & ~y & z & minterm[5]) |
           (x & y & ~z & minterm[6]) | (x & y & z & minterm[7]);
  });
  return Status::next;
}
void decode_lop3(Decode& d) {
  d.take("b32") || d.fail("only .b32 exists");
  d.expect_operands(5, 5);
  d.out.op[0] = d.destination(0, 32);
  for (size_t i = 1; i <= 3; ++i) d.out.op[i] = d.source(i, 32);
  d.out.imm = static_cast<int64_t>(d.immediate(d.operand(4)));
  if (d.out.imm < 0 || d.out.imm > 255) d.fail("the truth table has 8 bits");
  d.run(run_lop3, Class::integer);
}
const Opcode lop3("lop3", decode_lop3);

// ---- shifts: counts are 32 bits and clamp at the width

template<class T>
constexpr T shift_left(T a, uint32_t n) {
  return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<uint64_t>(a) << n);
}
template<class T>
constexpr T shift_right(T a, uint32_t n) {
  constexpr uint32_t width = 8 * sizeof(T);
  if constexpr (std::is_signed_v<T>)
    return static_cast<T>(a >> (n >= width ? width - 1 : n));
  else
    return n >= width ? T{0} : static_cast<T>(a >> n);
}
void decode_shl(Decode& d) {
  const Type type = d.take_type();
  d.expect_operands(3, 3);
  d.out.op[0] = d.destination(0, ptx::bits_of(type));
  d.out.op[1] = d.source(1, ptx::bits_of(type));
  d.out.op[2] = d.source(2, 32);
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a, uint32_t n) { return shift_left(a, n); }>, Class::integer);
  });
}
void decode_shr(Decode& d) {
  const Type type = d.take_type();
  d.expect_operands(3, 3);
  d.out.op[0] = d.destination(0, ptx::bits_of(type));
  d.out.op[1] = d.source(1, ptx::bits_of(type));
  d.out.op[2] = d.source(2, 32);
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a, uint32_t n) { return shift_right(a, n); }>, Class::integer);
  });
}
const Opcode shl("shl", decode_shl);
const Opcode shr("shr", decode_shr);

// shf.l: the high word of b:a << n; shf.r: the low word of b:a >> n.
void decode_shf(Decode& d) {
  d.take("b32") || d.fail("only .b32 exists");
  take_operands(d, 3, 32);
  const bool left = d.take("l"), wrap = d.take("wrap");
  if (!left) d.take("r");
  if (!wrap) d.take("clamp");
  if (left)
    d.run(wrap ? lanewise<[](uint32_t a, uint32_t b, uint32_t n) {
            return static_cast<uint32_t>((uint64_t{b} << 32 | a) << (n & 31) >> 32);
          }>
               : lanewise<[](uint32_t a, uint32_t b, uint32_t n) {
                   return n >= 32 ? a : static_cast<uint32_t>((uint64_t{b} << 32 | a) << n >> 32);
                 }>,
          Class::integer);
  else
    d.run(wrap ? lanewise<[](uint32_t a, uint32_t b, uint32_t n) {
            return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> (n & 31));
          }>
               : lanewise<[](uint32_t a, uint32_t b, uint32_t n) {
                   return n >= 32 ? b : static_cast<uint32_t>((uint64_t{b} << 32 | a) >> n);
                 }>,
          Class::integer);
}
const Opcode shf("shf", decode_shf);

// ---- counting and fields of bits

void decode_popc(Decode& d) {
  const int bits = ptx::bits_of(d.take_type());
  d.expect_operands(2, 2);
  d.out.op[0] = d.destination(0, 32);
  d.out.op[1] = d.source(1, bits);
  if (bits == 32)
    d.run(lanewise<[](uint32_t a) { return static_cast<uint32_t>(std::popcount(a)); }>,
          Class::integer);
  else if (bits == 64)
    d.run(lanewise<[](uint64_t a) { return static_cast<uint32_t>(std::popcount(a)); }>,
          Class::integer);
}
const Opcode popc("popc", decode_popc);

void decode_clz(Decode& d) {
  const int bits = ptx::bits_of(d.take_type());
  d.expect_operands(2, 2);
  d.out.op[0] = d.destination(0, 32);
  d.out.op[1] = d.source(1, bits);
  if (bits == 32)
    d.run(lanewise<[](uint32_t a) { return static_cast<uint32_t>(std::countl_zero(a)); }>,
          Class::integer);
  else if (bits == 64)
    d.run(lanewise<[](uint64_t a) { return static_cast<uint32_t>(std::countl_zero(a)); }>,
          Class::integer);
}
const Opcode clz("clz", decode_clz);

template<class T>
constexpr T reverse_bits(T a) {
  T r = 0;
  for (size_t i = 0; i < 8 * sizeof(T); ++i) r |= (a >> i & 1) << (8 * sizeof(T) - 1 - i);
  return r;
}
void decode_brev(Decode& d) {
  const int bits = ptx::bits_of(d.take_type());
  take_operands(d, 1, bits);
  if (bits == 32)
    d.run(lanewise<[](uint32_t a) { return reverse_bits(a); }>, Class::integer);
  else if (bits == 64)
    d.run(lanewise<[](uint64_t a) { return reverse_bits(a); }>, Class::integer);
}
const Opcode brev("brev", decode_brev);

// The position of the highest bit that differs from the sign, or all ones; with .shiftamt, how far to
// shift it to the top.
template<class T, bool shift>
constexpr uint32_t find_bit(T a) {
  using U = unsigned_<T>;
  const U x = static_cast<U>(std::is_signed_v<T> && a < 0 ? ~a : a);
  if (x == 0) return 0xffffffff;
  const auto zeros = static_cast<uint32_t>(std::countl_zero(x));
  return shift ? zeros : 8 * sizeof(T) - 1 - zeros;
}
void decode_bfind(Decode& d) {
  const bool shift = d.take("shiftamt");
  const Type type = d.take_type();
  d.expect_operands(2, 2);
  d.out.op[0] = d.destination(0, 32);
  d.out.op[1] = d.source(1, ptx::bits_of(type));
  with_integer(d, type, [&]<class T>(T) {
    if (shift)
      d.run(lanewise<[](T a) { return find_bit<T, true>(a); }>, Class::integer);
    else
      d.run(lanewise<[](T a) { return find_bit<T, false>(a); }>, Class::integer);
  });
}
const Opcode bfind("bfind", decode_bfind);

// fns.b32 d, mask, base, offset: the position of the n-th set bit from `base` on.
constexpr uint32_t nth_set(uint32_t mask, uint32_t base, int32_t offset) {
  if (base > 31) return 0xffffffff;
  if (offset == 0) return mask >> base & 1 ? base : 0xffffffff;
  const int step = offset > 0 ? 1 : -1;
  int64_t left = offset > 0 ? int64_t{offset} : -int64_t{offset};
  for (int at = static_cast<int>(base); at >= 0 && at < 32; at += step)
    if (mask >> at & 1 && --left == 0) return static_cast<uint32_t>(at);
  return 0xffffffff;
}
void decode_fns(Decode& d) {
  d.take("b32");
  take_operands(d, 3, 32);
  d.run(lanewise<[](uint32_t mask, uint32_t base, int32_t offset) {
          return nth_set(mask, base, offset);
        }>,
        Class::integer);
}
const Opcode fns("fns", decode_fns);

// bfe d, a, position, length; a signed field is extended by its own top bit, or by that of `a` where
// it reaches past the end.
template<class T>
constexpr T extract(T a, uint32_t position, uint32_t length) {
  constexpr uint32_t width = 8 * sizeof(T);
  position &= 0xff, length &= 0xff;
  using U = unsigned_<T>;
  const bool is_signed = std::is_signed_v<T>;
  const uint32_t top = position + length - 1;
  const bool sign =
      is_signed && length && (static_cast<U>(a) >> (top < width ? top : width - 1) & 1);
  U field = position < width ? static_cast<U>(a) >> position : 0;
  const uint32_t have =
      position < width ? (length < width - position ? length : width - position) : 0;
  const U keep = have >= width ? ~U{0} : (U{1} << have) - 1;
  field = (field & keep) | (sign ? ~keep : 0);
  return static_cast<T>(field);
}
void decode_bfe(Decode& d) {
  const Type type = d.take_type();
  d.expect_operands(4, 4);
  d.out.op[0] = d.destination(0, ptx::bits_of(type));
  d.out.op[1] = d.source(1, ptx::bits_of(type));
  d.out.op[2] = d.source(2, 32);
  d.out.op[3] = d.source(3, 32);
  with_integer(d, type, [&]<class T>(T) {
    if constexpr (sizeof(T) >= 4)
      d.run(lanewise<[](T a, uint32_t p, uint32_t n) { return extract(a, p, n); }>, Class::integer);
  });
}
const Opcode bfe("bfe", decode_bfe);

template<class U>
constexpr U insert(U a, U b, uint32_t position, uint32_t length) {
  constexpr uint32_t width = 8 * sizeof(U);
  position &= 0xff, length &= 0xff;
  if (position >= width || length == 0) return b;
  const U ones = length >= width ? ~U{0} : (U{1} << length) - 1;
  const U field = ones << position;
  return (b & ~field) | (a << position & field);
}
void decode_bfi(Decode& d) {
  const int bits = ptx::bits_of(d.take_type());
  d.expect_operands(5, 5);
  d.out.op[0] = d.destination(0, bits);
  d.out.op[1] = d.source(1, bits);
  d.out.op[2] = d.source(2, bits);
  d.out.op[3] = d.source(3, 32);
  d.out.op[4] = d.source(4, 32);
  if (bits == 32)
    d.run(
        lanewise<[](uint32_t a, uint32_t b, uint32_t p, uint32_t n) { return insert(a, b, p, n); }>,
        Class::integer);
  else if (bits == 64)
    d.run(
        lanewise<[](uint64_t a, uint64_t b, uint32_t p, uint32_t n) { return insert(a, b, p, n); }>,
        Class::integer);
}
const Opcode bfi("bfi", decode_bfi);

void decode_bmsk(Decode& d) {
  d.take("b32");
  const bool wrap = d.take("wrap");
  if (!wrap) d.take("clamp");
  take_operands(d, 2, 32);
  if (wrap)
    d.run(lanewise<[](uint32_t a, uint32_t b) {
            return shift_left(shift_left(1u, b & 31) - 1, a & 31);
          }>,
          Class::integer);
  else
    d.run(lanewise<[](uint32_t a, uint32_t b) { return shift_left(shift_left(1u, b) - 1, a); }>,
          Class::integer);
}
const Opcode bmsk("bmsk", decode_bmsk);

void decode_szext(Decode& d) {
  const bool wrap = d.take("wrap");
  if (!wrap) d.take("clamp");
  const Type type = d.take_type();
  take_operands(d, 2, 32);
  with_integer(d, type, [&]<class T>(T) {
    if constexpr (sizeof(T) == 4) {
      if (wrap)
        d.run(lanewise<[](T a, uint32_t n) { return extract(a, 0, n & 31); }>, Class::integer);
      else
        d.run(lanewise<[](T a, uint32_t n) { return extract(a, 0, n < 32 ? n : 32); }>,
              Class::integer);
    }
  });
}
const Opcode szext("szext", decode_szext);

// ---- prmt: four bytes out of eight

constexpr uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> 4 * i;
    uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (pick & 7)) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;  // replicate the sign
    d |= byte << 8 * i;
  }
  return d;
}
// The selector of a mode, for c's low two bits.
constexpr uint32_t mode_selector(int mode, uint32_t c) {
  constexpr uint16_t kTable[6][4] = {
      {0x3210, 0x4321, 0x5432, 0x6543},  // f4e
      {0x5670, 0x6701, 0x7012, 0x0123},  // b4e
      {0x0000, 0x1111, 0x2222, 0x3333},  // rc8
      {0x3210, 0x3211, 0x3222, 0x3333},  // ecl
      {0x0000, 0x1110, 0x2210, 0x3210},  // ecr
      {0x1010, 0x3232, 0x1010, 0x3232},  // rc16
  };
  return kTable[mode][c & 3];
}
template<int mode>
constexpr Handler permute_mode = lanewise<[](uint32_t a, uint32_t b, uint32_t c) {
  return permute(a, b, mode_selector(mode, c));
}>;

void decode_prmt(Decode& d) {
  d.take("b32") || d.fail("only .b32 exists");
  take_operands(d, 3, 32);
  static constexpr Handler kModes[] = {permute_mode<0>, permute_mode<1>, permute_mode<2>,
                                       permute_mode<3>, permute_mode<4>, permute_mode<5>};
  static constexpr const char* kNames[] = {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  d.run(lanewise<[](uint32_t a, uint32_t b, uint32_t c) { return permute(a, b, c); }>,
        Class::integer);
  for (size_t i = 0; i < 6; ++i)
    if (d.take(kNames[i])) d.run(kModes[i], Class::integer);
}
const Opcode prmt("prmt", decode_prmt);

}  // namespace

}  // namespace tw::vgpu
