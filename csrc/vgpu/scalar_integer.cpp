// Integer arithmetic for 16, 32 and 64 bits: what every program uses, dot products of bytes, carry chains.
#include <bit>
#include <string>
#include <tuple>
#include <type_traits>

#include "vgpu/lanes.h"
#include "vgpu/scalar_dispatch.h"
#include "vgpu/scalar_integer.h"

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

}  // namespace

}  // namespace tw::vgpu
