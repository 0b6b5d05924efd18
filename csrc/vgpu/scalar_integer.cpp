// Integer arithmetic, bits and shifts, for 16, 32 and 64 bits.
#include <bit>
#include <string>
#include <tuple>
#include <type_traits>

#include "vgpu/lanes.h"

namespace tw::vgpu {

namespace {

using ptx::Type;

// Twice as wide, of the same sign.
template<class T>
struct Wider;
template<>
struct Wider<int16_t> {
  using type = int32_t;
};
template<>
struct Wider<uint16_t> {
  using type = uint32_t;
};
template<>
struct Wider<int32_t> {
  using type = int64_t;
};
template<>
struct Wider<uint32_t> {
  using type = uint64_t;
};
template<>
struct Wider<int64_t> {
  using type = __int128;
};
template<>
struct Wider<uint64_t> {
  using type = unsigned __int128;
};
template<class T>
using wider = typename Wider<T>::type;
template<class T>
using unsigned_ = std::make_unsigned_t<T>;

// Arithmetic that wraps: in unsigned, without the promotion of 16 bits to int.
template<class T>
constexpr T wrap_add(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
template<class T>
constexpr T wrap_sub(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
template<class T>
constexpr T wrap_mul(T a, T b) {
  using U = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
}
template<class T>
constexpr T high_product(T a, T b) {
  return static_cast<T>(static_cast<wider<T>>(a) * static_cast<wider<T>>(b) >> (8 * sizeof(T)));
}

// f(T{}) with the C++ type of an integer type (b: unsigned).
template<class F>
void with_integer(Decode& d, Type type, F f) {
  switch (type) {
    case Type::s16:
      f(int16_t{});
      break;
    case Type::u16:
    case Type::b16:
      f(uint16_t{});
      break;
    case Type::s32:
      f(int32_t{});
      break;
    case Type::u32:
    case Type::b32:
      f(uint32_t{});
      break;
    case Type::s64:
      f(int64_t{});
      break;
    case Type::u64:
    case Type::b64:
      f(uint64_t{});
      break;
    default:
      d.fail("." + std::string(ptx::name_of(type)) + " is not supported here");
  }
}
// Destination and `n` sources, all of `bits`.
void take_operands(Decode& d, size_t n, int bits) {
  d.expect_operands(n + 1, n + 1);
  d.out.op[0] = d.destination(0, bits);
  for (size_t i = 1; i <= n; ++i) d.out.op[i] = d.source(i, bits);
}

}  // namespace

// ---- called by the files that own an opcode for several kinds of types (scalar_dispatch.h)

void integer_add(Decode& d, Type type) {
  take_operands(d, 2, ptx::bits_of(type));
  if (d.take("sat")) {
    if (type != Type::s32) d.fail(".sat is for .s32 only");
    d.run(lanewise<[](int32_t a, int32_t b) {
            const int64_t sum = int64_t{a} + b;
            return static_cast<int32_t>(sum > INT32_MAX   ? INT32_MAX
                                        : sum < INT32_MIN ? INT32_MIN
                                                          : sum);
          }>,
          Class::integer);
    return;
  }
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a, T b) { return wrap_add(a, b); }>, Class::integer);
  });
}
void integer_sub(Decode& d, Type type) {
  take_operands(d, 2, ptx::bits_of(type));
  if (d.take("sat")) {
    if (type != Type::s32) d.fail(".sat is for .s32 only");
    d.run(lanewise<[](int32_t a, int32_t b) {
            const int64_t sum = int64_t{a} - b;
            return static_cast<int32_t>(sum > INT32_MAX   ? INT32_MAX
                                        : sum < INT32_MIN ? INT32_MIN
                                                          : sum);
          }>,
          Class::integer);
    return;
  }
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a, T b) { return wrap_sub(a, b); }>, Class::integer);
  });
}
void integer_mul(Decode& d, Type type) {
  const int bits = ptx::bits_of(type);
  if (d.take("wide")) {
    if (bits == 64) d.fail("mul.wide takes 16 or 32 bits");
    d.expect_operands(3, 3);
    d.out.op[0] = d.destination(0, 2 * bits);
    d.out.op[1] = d.source(1, bits);
    d.out.op[2] = d.source(2, bits);
    with_integer(d, type, [&]<class T>(T) {
      if constexpr (sizeof(T) < 8)
        d.run(lanewise<[](T a, T b) {
                return static_cast<wider<T>>(static_cast<wider<T>>(a) * static_cast<wider<T>>(b));
              }>,
              Class::integer);
    });
    return;
  }
  take_operands(d, 2, bits);
  const bool high = d.take("hi");
  if (!high) d.take("lo");
  with_integer(d, type, [&]<class T>(T) {
    if (high)
      d.run(lanewise<[](T a, T b) { return high_product(a, b); }>, Class::integer);
    else
      d.run(lanewise<[](T a, T b) { return wrap_mul(a, b); }>, Class::integer);
  });
}
void integer_mad(Decode& d, Type type) {
  const int bits = ptx::bits_of(type);
  if (d.take("wide")) {
    if (bits == 64) d.fail("mad.wide takes 16 or 32 bits");
    d.expect_operands(4, 4);
    d.out.op[0] = d.destination(0, 2 * bits);
    d.out.op[1] = d.source(1, bits);
    d.out.op[2] = d.source(2, bits);
    d.out.op[3] = d.source(3, 2 * bits);
    with_integer(d, type, [&]<class T>(T) {
      if constexpr (sizeof(T) < 8)
        d.run(lanewise<[](T a, T b, wider<T> c) {
                return wrap_add<wider<T>>(static_cast<wider<T>>(a) * static_cast<wider<T>>(b), c);
              }>,
              Class::integer);
    });
    return;
  }
  take_operands(d, 3, bits);
  const bool high = d.take("hi"), saturate = d.take("sat");
  if (!high) d.take("lo");
  if (saturate) {
    if (type != Type::s32 || !high) d.fail("mad.sat is mad.hi.sat.s32 only");
    d.run(lanewise<[](int32_t a, int32_t b, int32_t c) {
            const int64_t sum = int64_t{high_product(a, b)} + c;
            return static_cast<int32_t>(sum > INT32_MAX   ? INT32_MAX
                                        : sum < INT32_MIN ? INT32_MIN
                                                          : sum);
          }>,
          Class::integer);
    return;
  }
  with_integer(d, type, [&]<class T>(T) {
    if (high)
      d.run(lanewise<[](T a, T b, T c) { return wrap_add(high_product(a, b), c); }>,
            Class::integer);
    else
      d.run(lanewise<[](T a, T b, T c) { return wrap_add(wrap_mul(a, b), c); }>, Class::integer);
  });
}
void integer_div(Decode& d, Type type) {
  take_operands(d, 2, ptx::bits_of(type));
  // Division by zero has no defined result; hardware gives all ones.
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a, T b) {
            if (b == 0) return static_cast<T>(-1);
            if constexpr (std::is_signed_v<T>)
              if (b == -1) return wrap_sub<T>(0, a);
            return static_cast<T>(a / b);
          }>,
          Class::integer);
  });
}
void integer_min(Decode& d, Type type) {
  take_operands(d, 2, ptx::bits_of(type));
  const bool relu = d.take("relu");
  if (relu && type != Type::s32) d.fail(".relu is for .s32 only");
  with_integer(d, type, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, int32_t>)
      if (relu) {
        d.run(lanewise<[](T a, T b) {
                const T m = a < b ? a : b;
                return m < 0 ? 0 : m;
              }>,
              Class::integer);
        return;
      }
    d.run(lanewise<[](T a, T b) { return a < b ? a : b; }>, Class::integer);
  });
}
void integer_max(Decode& d, Type type) {
  take_operands(d, 2, ptx::bits_of(type));
  const bool relu = d.take("relu");
  if (relu && type != Type::s32) d.fail(".relu is for .s32 only");
  with_integer(d, type, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, int32_t>)
      if (relu) {
        d.run(lanewise<[](T a, T b) {
                const T m = a < b ? b : a;
                return m < 0 ? 0 : m;
              }>,
              Class::integer);
        return;
      }
    d.run(lanewise<[](T a, T b) { return a < b ? b : a; }>, Class::integer);
  });
}
void integer_neg(Decode& d, Type type) {
  take_operands(d, 1, ptx::bits_of(type));
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a) { return wrap_sub<T>(0, a); }>, Class::integer);
  });
}
void integer_abs(Decode& d, Type type) {
  take_operands(d, 1, ptx::bits_of(type));
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a) { return a < 0 ? wrap_sub<T>(0, a) : a; }>, Class::integer);
  });
}

namespace {

// ---- rem, sad, mul24, dp4a

void decode_rem(Decode& d) {
  const Type type = d.take_type();
  take_operands(d, 2, ptx::bits_of(type));
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a, T b) {
            if (b == 0) return a;
            if constexpr (std::is_signed_v<T>)
              if (b == -1) return T{0};
            return static_cast<T>(a % b);
          }>,
          Class::integer);
  });
}
const Opcode rem("rem", decode_rem);

void decode_sad(Decode& d) {
  const Type type = d.take_type();
  take_operands(d, 3, ptx::bits_of(type));
  with_integer(d, type, [&]<class T>(T) {
    d.run(lanewise<[](T a, T b, T c) {
            return wrap_add(a < b ? wrap_sub(b, a) : wrap_sub(a, b), c);
          }>,
          Class::integer);
  });
}
const Opcode sad("sad", decode_sad);

template<class T>
constexpr int64_t product24(T a, T b) {
  if constexpr (std::is_signed_v<T>)
    return int64_t{a << 8 >> 8} * (b << 8 >> 8);
  else
    return static_cast<int64_t>(uint64_t{a & 0xffffff} * (b & 0xffffff));
}
template<bool add>
void decode_24(Decode& d) {
  const Type type = d.take_type();
  if (ptx::bits_of(type) != 32) d.fail("only 32 bits");
  take_operands(d, add ? 3 : 2, 32);
  if (!add) d.out.op[3] = d.constant(0, 32);
  const bool high = d.take("hi");
  if (!high) d.take("lo");
  with_integer(d, type, [&]<class T>(T) {
    if constexpr (sizeof(T) == 4) {
      if (high)
        d.run(lanewise<[](T a, T b, T c) {
                return wrap_add(static_cast<T>(product24(a, b) >> 16), c);
              }>,
              Class::integer);
      else
        d.run(lanewise<[](T a, T b, T c) { return wrap_add(static_cast<T>(product24(a, b)), c); }>,
              Class::integer);
    }
  });
}
const Opcode mul24("mul24", decode_24<false>);
const Opcode mad24("mad24", decode_24<true>);

// dp4a.atype.btype d, a, b, c: four products of bytes; dp2a.mode: two of a half by a byte.
template<class A, class B>
constexpr uint32_t dot4(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> 8 * i)) *
                               static_cast<int32_t>(static_cast<B>(b >> 8 * i)));
  return c;
}
template<class A, class B, int first>
constexpr uint32_t dot2(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 2; ++i)
    c += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> 16 * i)) *
                               static_cast<int32_t>(static_cast<B>(b >> 8 * (i + first))));
  return c;
}
std::pair<bool, bool> take_dot_types(Decode& d) {
  const Type a = d.take_type(), b = d.take_type();
  if (ptx::bits_of(a) != 32 || ptx::bits_of(b) != 32) d.fail("the types are u32 or s32");
  take_operands(d, 3, 32);
  return {ptx::is_signed(a), ptx::is_signed(b)};
}
void decode_dp4a(Decode& d) {
  const auto [sa, sb] = take_dot_types(d);
  using U = uint8_t;
  using S = int8_t;
  d.run(sa   ? sb ? lanewise<[](uint32_t a, uint32_t b, uint32_t c) { return dot4<S, S>(a, b, c); }>
                  : lanewise<[](uint32_t a, uint32_t b, uint32_t c) { return dot4<S, U>(a, b, c); }>
        : sb ? lanewise<[](uint32_t a, uint32_t b, uint32_t c) { return dot4<U, S>(a, b, c); }>
             : lanewise<[](uint32_t a, uint32_t b, uint32_t c) { return dot4<U, U>(a, b, c); }>,
        Class::integer);
}
const Opcode dp4a("dp4a", decode_dp4a);

template<int first>
void choose_dp2a(Decode& d, bool sa, bool sb) {
  d.run(sa   ? sb ? lanewise<[](uint32_t a, uint32_t b, uint32_t c) {
          return dot2<int16_t, int8_t, first>(a, b, c);
        }>
                  : lanewise<[](uint32_t a, uint32_t b, uint32_t c) {
                    return dot2<int16_t, uint8_t, first>(a, b, c);
                    }>
        : sb ? lanewise<[](uint32_t a, uint32_t b, uint32_t c) {
            return dot2<uint16_t, int8_t, first>(a, b, c);
          }>
             : lanewise<[](uint32_t a, uint32_t b, uint32_t c) {
                 return dot2<uint16_t, uint8_t, first>(a, b, c);
               }>,
        Class::integer);
}
void decode_dp2a(Decode& d) {
  const bool high = d.take("hi");
  if (!high) d.take("lo");
  const auto [sa, sb] = take_dot_types(d);
  high ? choose_dp2a<2>(d, sa, sb) : choose_dp2a<0>(d, sa, sb);
}
const Opcode dp2a("dp2a", decode_dp2a);

// ---- carry chains: add.cc, addc, sub.cc, subc, mad.cc, madc. The carry of a lane is one bit of Warp::carry.

// d = x + y + carry-in, as the three instructions see it. For a subtraction the carry flag is a borrow.
template<class T, bool subtract, bool use, bool set>
void chain(Warp& w, const Instr& in, auto x, auto y) {
  uint32_t carry = 0;
  const uint32_t before = w.carry;
  write_lanes<T>(w, in.op[0], [&](int l) {
    const T a = x(l), b = y(l), c = use ? before >> l & 1 : 0;
    const T first = subtract ? a - b : a + b, result = subtract ? first - c : first + c;
    const bool out = subtract ? a < b || first < c : first < a || result < first;
    carry |= static_cast<uint32_t>(out) << l;
    return result;
  });
  if (set) blend(w.carry, carry, w.exec);
}
template<class T, bool subtract, bool use, bool set>
Status run_chain(Warp& w, const Instr& in) {
  const T *a = w.lanes<T>(in.op[1]), *b = w.lanes<T>(in.op[2]);
  chain<T, subtract, use, set>(w, in, [=](int l) { return a[l]; }, [=](int l) { return b[l]; });
  return Status::next;
}
template<class T, bool high, bool use, bool set>
Status run_mad_chain(Warp& w, const Instr& in) {
  const T *a = w.lanes<T>(in.op[1]), *b = w.lanes<T>(in.op[2]);
  using U = unsigned_<T>;
  const U* c = w.lanes<U>(in.op[3]);
  chain<U, false, use, set>(
      w, in,
      [=](int l) { return static_cast<U>(high ? high_product(a[l], b[l]) : wrap_mul(a[l], b[l])); },
      [=](int l) { return c[l]; });
  return Status::next;
}
template<class T, bool subtract, bool use>
void choose_chain(Decode& d, bool set) {
  d.run(set ? run_chain<T, subtract, use, true> : run_chain<T, subtract, use, false>,
        Class::integer);
}
// A modifier that may be part of the registered opcode (add.cc), and is taken then.
bool take_chain(Decode& d, const char* modifier) {
  d.take(modifier);
  return d.has(modifier);
}
template<bool subtract, bool use>
void decode_chain(Decode& d) {
  const bool set = take_chain(d, "cc");
  const int bits = ptx::bits_of(d.take_type());
  take_operands(d, 2, bits);
  if (bits == 32)
    choose_chain<uint32_t, subtract, use>(d, set);
  else if (bits == 64)
    choose_chain<uint64_t, subtract, use>(d, set);
}
template<bool use>
void decode_mad_chain(Decode& d) {
  const bool set = take_chain(d, "cc"), high = take_chain(d, "hi");
  take_chain(d, "lo");
  const Type type = d.take_type();
  take_operands(d, 3, ptx::bits_of(type));
  with_integer(d, type, [&]<class T>(T) {
    if (high)
      d.run(set ? run_mad_chain<T, true, use, true> : run_mad_chain<T, true, use, false>,
            Class::integer);
    else
      d.run(set ? run_mad_chain<T, false, use, true> : run_mad_chain<T, false, use, false>,
            Class::integer);
  });
}
const Opcode add_cc("add.cc", decode_chain<false, false>);
const Opcode addc("addc", decode_chain<false, true>);
const Opcode sub_cc("sub.cc", decode_chain<true, false>);
const Opcode subc("subc", decode_chain<true, true>);
const Opcode mad_cc("mad.lo.cc", decode_mad_chain<false>);
const Opcode mad_hi_cc("mad.hi.cc", decode_mad_chain<false>);
const Opcode madc("madc", decode_mad_chain<true>);

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
  int32_t left = offset > 0 ? offset : -offset;
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
