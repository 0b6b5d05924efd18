// cvt: between integers, floating-point formats and pairs of them, with rounding and saturation.
//
// The everyday conversions have a vectorised loop of their own. All others go through int64 or double, which hold every
// source exactly, lane by lane.
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "vgpu/lanes.h"
#include "vgpu/scalar_float.h"

namespace tw::vgpu {

namespace {

using ptx::Operand;
using ptx::Type;

// Instr::imm of the general conversions.
constexpr int64_t kRounding = 7;  // a Rounding
constexpr int64_t kFtz = 8, kSat = 16, kRelu = 32, kSatfinite = 64;
constexpr int64_t kIntegral = 128;  // .rni, .rzi, .rmi, .rpi
Rounding rounding_of(const Instr& in) { return static_cast<Rounding>(in.imm & kRounding); }

// ---- reading and writing a lane

// op[2], op[3]: bits of the source register; type of the source (integers only).
uint64_t register_lane(const Warp& w, uint32_t offset, uint32_t bits, int l) {
  switch (bits) {
    case 8:
      return w.lanes<uint8_t>(offset)[l];
    case 16:
      return w.lanes<uint16_t>(offset)[l];
    case 32:
      return w.lanes<uint32_t>(offset)[l];
    default:
      return w.lanes<uint64_t>(offset)[l];
  }
}
// The low `bits` of x, extended.
uint64_t extend(uint64_t x, int bits, bool is_signed) {
  const int shift = 64 - bits;
  return is_signed ? static_cast<uint64_t>(static_cast<int64_t>(x << shift) >> shift)
                   : x << shift >> shift;
}
void write_register(Warp& w, uint32_t offset, uint32_t bits, const uint64_t* value) {
  switch (bits) {
    case 8:
      write_lanes<uint8_t>(w, offset, [&](int l) { return static_cast<uint8_t>(value[l]); });
      break;
    case 16:
      write_lanes<uint16_t>(w, offset, [&](int l) { return static_cast<uint16_t>(value[l]); });
      break;
    case 32:
      write_lanes<uint32_t>(w, offset, [&](int l) { return static_cast<uint32_t>(value[l]); });
      break;
    default:
      write_lanes<uint64_t>(w, offset, [&](int l) { return value[l]; });
  }
}

// op: 0 d, 1 a, 2 bits of a's register, 3 type of a, 4 bits of d's register, 5 type of d
Type source_type(const Instr& in) { return static_cast<Type>(in.op[3]); }
Type result_type(const Instr& in) { return static_cast<Type>(in.op[5]); }

uint64_t integer_lane(const Warp& w, const Instr& in, int l) {
  const Type type = source_type(in);
  return extend(register_lane(w, in.op[1], in.op[2], l), ptx::bits_of(type), ptx::is_signed(type));
}
template<class F>
double float_lane(const Warp& w, const Instr& in, int l) {
  const auto bits = w.lanes<typename F::bits>(in.op[1])[l];
  if constexpr (std::is_same_v<F, F64>)
    return f64_of(bits);
  else if constexpr (std::is_same_v<F, F32>)
    return widen<F>(in.imm & kFtz ? flush<F>(bits) : bits);
  else
    return widen<F>(bits);
}

// ---- integer to integer

Status run_integer_to_integer(Warp& w, const Instr& in) {
  const Type from = source_type(in), to = result_type(in);
  const int bits = ptx::bits_of(to);
  uint64_t value[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    uint64_t x = integer_lane(w, in, l);
    if (in.imm & kSat) {
      // Compare as the source's sign says; the bounds of the result lie within 64 bits of either sign.
      const uint64_t top =
          ptx::is_signed(to) ? (uint64_t{1} << (bits - 1)) - 1 : ~uint64_t{0} >> (64 - bits);
      const int64_t bottom = ptx::is_signed(to) ? -static_cast<int64_t>(top) - 1 : 0;
      if (ptx::is_signed(from) && static_cast<int64_t>(x) < bottom)
        x = static_cast<uint64_t>(bottom);
      else if (!(ptx::is_signed(from) && static_cast<int64_t>(x) < 0) && x > top)
        x = top;
    }
    value[l] = extend(x, bits, ptx::is_signed(to));
  }
  write_register(w, in.op[0], in.op[4], value);
  return Status::next;
}

// ---- integer to float

template<class F>
uint64_t from_integer(uint64_t x, bool is_signed, Rounding r) {
  const bool negative = is_signed && static_cast<int64_t>(x) < 0;
  const uint64_t magnitude = negative ? 0 - x : x;
  switch (r) {
    case Rounding::rz:
      return from_unsigned<F, Rounding::rz>(magnitude, negative);
    case Rounding::rm:
      return from_unsigned<F, Rounding::rm>(magnitude, negative);
    case Rounding::rp:
      return from_unsigned<F, Rounding::rp>(magnitude, negative);
    default:
      return from_unsigned<F, Rounding::rn>(magnitude, negative);
  }
}
template<class F>
Status run_integer_to_float(Warp& w, const Instr& in) {
  const bool is_signed = ptx::is_signed(source_type(in));
  uint64_t value[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    value[l] = from_integer<F>(integer_lane(w, in, l), is_signed, rounding_of(in));
    if (in.imm & kSat) value[l] = saturate_bits<F>(static_cast<typename F::bits>(value[l]));
  }
  write_register(w, in.op[0], in.op[4], value);
  return Status::next;
}

// ---- float to integer

template<class I, class S>
uint64_t to_integer_bits(double x, Rounding r) {
  constexpr bool wide = std::is_same_v<S, F64>;
  switch (r) {
    case Rounding::rz:
      return static_cast<uint64_t>(to_integer<I, Rounding::rz, wide>(x));
    case Rounding::rm:
      return static_cast<uint64_t>(to_integer<I, Rounding::rm, wide>(x));
    case Rounding::rp:
      return static_cast<uint64_t>(to_integer<I, Rounding::rp, wide>(x));
    default:
      return static_cast<uint64_t>(to_integer<I, Rounding::rn, wide>(x));
  }
}
template<class I, class S>
Status run_float_to_integer(Warp& w, const Instr& in) {
  uint64_t value[kLanes];
  for (int l = 0; l < kLanes; ++l)
    value[l] = to_integer_bits<I, S>(float_lane<S>(w, in, l), rounding_of(in));
  write_register(w, in.op[0], in.op[4], value);
  return Status::next;
}

// ---- float to float

template<class F, Rounding R>
typename F::bits narrow_to(double x, bool satfinite) {
  return satfinite ? narrow<F, R, true>(x) : narrow<F, R>(x);
}
template<class F>
typename F::bits round_to(double x, Rounding r, bool satfinite) {
  if constexpr (std::is_same_v<F, F64>) {
    return x != x ? F64::nan : to_bits(x);
  } else {
    switch (r) {
      case Rounding::rz:
        return narrow_to<F, Rounding::rz>(x, satfinite);
      case Rounding::rm:
        return narrow_to<F, Rounding::rm>(x, satfinite);
      case Rounding::rp:
        return narrow_to<F, Rounding::rp>(x, satfinite);
      case Rounding::rna:
        return narrow_to<F, Rounding::rna>(x, satfinite);
      default:
        return narrow_to<F, Rounding::rn>(x, satfinite);
    }
  }
}
double round_to_integral(double x, Rounding r) {
  switch (r) {
    case Rounding::rz:
      return integral<Rounding::rz>(x);
    case Rounding::rm:
      return integral<Rounding::rm>(x);
    case Rounding::rp:
      return integral<Rounding::rp>(x);
    default:
      return integral<Rounding::rn>(x);
  }
}
template<class F>
typename F::bits convert_float(double x, const Instr& in) {
  const Rounding r = rounding_of(in);
  if (in.imm & kIntegral) x = round_to_integral(x, r);
  typename F::bits y = round_to<F>(x, in.imm & kIntegral ? Rounding::rn : r, in.imm & kSatfinite);
  if constexpr (std::is_same_v<F, F32>)
    if (in.imm & kFtz) y = flush<F>(y);
  if (in.imm & kSat) y = saturate_bits<F>(y);
  if (in.imm & kRelu) y = relu<F>(y);
  return y;
}
template<class F, class S>
Status run_float_to_float(Warp& w, const Instr& in) {
  using B = typename F::bits;
  write_lanes<B>(w, in.op[0], [&](int l) { return convert_float<F>(float_lane<S>(w, in, l), in); });
  return Status::next;
}

// d = {a, b}, a in the high half: two f32 into f16x2, bf16x2, e4m3x2 or e5m2x2.
template<class F>
Status run_two_to_pair(Warp& w, const Instr& in) {
  using B = typename F::bits;
  using D = std::conditional_t<sizeof(B) == 1, uint16_t, uint32_t>;
  const uint32_t *a = w.lanes<uint32_t>(in.op[1]), *b = w.lanes<uint32_t>(in.op[2]);
  const auto one = [&](uint32_t x) {
    return convert_float<F>(widen<F32>(in.imm & kFtz ? flush<F32>(x) : x), in);
  };
  write_lanes<D>(w, in.op[0],
                 [&](int l) { return static_cast<D>(one(a[l]) << 8 * sizeof(B) | one(b[l])); });
  return Status::next;
}
// Both halves of a pair from one format to another: f16x2 and fp8.
template<class F, class S>
Status run_pair_to_pair(Warp& w, const Instr& in) {
  using D = std::conditional_t<sizeof(typename F::bits) == 1, uint16_t, uint32_t>;
  using A = std::conditional_t<sizeof(typename S::bits) == 1, uint16_t, uint32_t>;
  constexpr int kHalf = 4 * sizeof(A), kResultHalf = 4 * sizeof(D);
  const A* a = w.lanes<A>(in.op[1]);
  const auto one = [&](uint32_t x) {
    return convert_float<F>(widen<S>(x & ((1u << kHalf) - 1)), in);
  };
  write_lanes<D>(w, in.op[0], [&](int l) {
    return static_cast<D>(one(a[l] >> kHalf) << kResultHalf | one(a[l] & ((1u << kHalf) - 1)));
  });
  return Status::next;
}

// ---- choosing

// f(Format{}) of a floating-point type; false if it is none.
template<class F>
bool with_format(Type type, F f) {
  switch (type) {
    case Type::f16:
      f(F16{});
      return true;
    case Type::bf16:
      f(BF16{});
      return true;
    case Type::f32:
      f(F32{});
      return true;
    case Type::f64:
      f(F64{});
      return true;
    default:
      return false;
  }
}
template<class F>
bool with_integer_type(Type type, F f) {
  switch (type) {
    case Type::u8:
      f(uint8_t{});
      return true;
    case Type::s8:
      f(int8_t{});
      return true;
    case Type::u16:
      f(uint16_t{});
      return true;
    case Type::s16:
      f(int16_t{});
      return true;
    case Type::u32:
      f(uint32_t{});
      return true;
    case Type::s32:
      f(int32_t{});
      return true;
    case Type::u64:
      f(uint64_t{});
      return true;
    case Type::s64:
      f(int64_t{});
      return true;
    default:
      return false;
  }
}

// The everyday conversions, without modifiers besides .rn (or .rzi to an integer).
template<class D, class S>
constexpr Handler cast = lanewise<[](S a) { return static_cast<D>(a); }>;

Handler everyday(Type to, Type from, int to_bits, int from_bits, int64_t flags) {
  if (to_bits != ptx::bits_of(to) || from_bits != ptx::bits_of(from)) return nullptr;
  const auto is = [&](Type t, Type f, int64_t wanted) {
    return to == t && from == f && flags == wanted;
  };
  constexpr auto rn = static_cast<int64_t>(Rounding::rn);
  if (is(Type::u64, Type::u32, rn)) return cast<uint64_t, uint32_t>;
  if (is(Type::s64, Type::s32, rn)) return cast<int64_t, int32_t>;
  if (is(Type::u32, Type::u64, rn)) return cast<uint32_t, uint64_t>;
  if (is(Type::u16, Type::u32, rn)) return cast<uint16_t, uint32_t>;
  if (is(Type::u32, Type::u16, rn)) return cast<uint32_t, uint16_t>;
  if (is(Type::s32, Type::s16, rn)) return cast<int32_t, int16_t>;
  if (is(Type::f32, Type::s32, rn)) return cast<float, int32_t>;
  if (is(Type::f64, Type::s32, rn)) return cast<double, int32_t>;
  if (is(Type::f32, Type::bf16, rn)) return lanewise<[](uint16_t a) { return bf16_to_f32(a); }>;
  if (is(Type::f32, Type::f16, rn)) return lanewise<[](uint16_t a) { return f16_to_f32(a); }>;
  if (is(Type::bf16, Type::f32, rn)) return lanewise<[](float a) { return f32_to_bf16(a); }>;
  if (is(Type::f16, Type::f32, rn)) return lanewise<[](float a) { return f32_to_f16(a); }>;
  if (is(Type::f64, Type::f32, rn))
    return lanewise<[](float a) { return a != a ? f64_of(F64::nan) : double{a}; }>;
  return nullptr;
}

std::optional<Rounding> take_integral(Decode& d) {
  if (d.take("rni")) return Rounding::rn;
  if (d.take("rzi")) return Rounding::rz;
  if (d.take("rmi")) return Rounding::rm;
  if (d.take("rpi")) return Rounding::rp;
  return std::nullopt;
}

// The types that only cvt knows.
enum class Pair : uint8_t { none, f16x2, bf16x2, e4m3x2, e5m2x2 };
Pair pair_named(const std::string& part) {
  return part == "f16x2"    ? Pair::f16x2
         : part == "bf16x2" ? Pair::bf16x2
         : part == "e4m3x2" ? Pair::e4m3x2
         : part == "e5m2x2" ? Pair::e5m2x2
                            : Pair::none;
}
// d.run for pairs: cvt.rn{.satfinite}{.relu}.pair.f32 d, a, b; cvt.rn.pair.pair d, a
void decode_pair(Decode& d, Pair to, Pair from) {
  const bool small = to == Pair::e4m3x2 || to == Pair::e5m2x2;
  d.out.op[0] = d.destination(0, small ? 16 : 32);
  if (from == Pair::none) {
    d.take("f32") || d.fail("this source type is not supported");
    d.expect_operands(3, 3);
    d.out.op[1] = d.source(1, 32);
    d.out.op[2] = d.source(2, 32);
    d.run(to == Pair::f16x2    ? run_two_to_pair<F16>
          : to == Pair::bf16x2 ? run_two_to_pair<BF16>
          : to == Pair::e4m3x2 ? run_two_to_pair<E4M3>
                               : run_two_to_pair<E5M2>,
          Class::conversion);
    // The usual one, without modifiers.
    if (to == Pair::bf16x2 && d.out.imm == static_cast<int64_t>(Rounding::rn))
      d.run(lanewise<[](float a, float b) {
              return static_cast<uint32_t>(f32_to_bf16(a)) << 16 | f32_to_bf16(b);
            }>,
            Class::conversion);
    return;
  }
  d.expect_operands(2, 2);
  const bool from_small = from == Pair::e4m3x2 || from == Pair::e5m2x2;
  d.out.op[1] = d.source(1, from_small ? 16 : 32);
  if (to == Pair::f16x2 && from == Pair::e4m3x2)
    d.run(run_pair_to_pair<F16, E4M3>, Class::conversion);
  else if (to == Pair::f16x2 && from == Pair::e5m2x2)
    d.run(run_pair_to_pair<F16, E5M2>, Class::conversion);
  else if (to == Pair::e4m3x2 && from == Pair::f16x2)
    d.run(run_pair_to_pair<E4M3, F16>, Class::conversion);
  else if (to == Pair::e5m2x2 && from == Pair::f16x2)
    d.run(run_pair_to_pair<E5M2, F16>, Class::conversion);
}

void decode_cvt(Decode& d) {
  const auto integral = take_integral(d);
  const Rounding rounding = integral ? *integral : d.take("rna") ? Rounding::rna : take_rounding(d);
  d.out.imm = static_cast<int64_t>(rounding) | (integral ? kIntegral : 0) |
              (d.take("ftz") ? kFtz : 0) | (d.take("sat") ? kSat : 0) |
              (d.take("relu") ? kRelu : 0) | (d.take("satfinite") ? kSatfinite : 0);
  // Pair types first, in the order of the opcode.
  Pair pairs[2] = {Pair::none, Pair::none};
  int found = 0;
  for (size_t i = 1; i < d.in.parts.size(); ++i)
    if (const Pair p = pair_named(d.in.parts[i]); p != Pair::none && found < 2) pairs[found++] = p;
  if (found) {
    for (const char* name : {"f16x2", "bf16x2", "e4m3x2", "e5m2x2"}) {
      d.take(name);
      d.take(name);
    }
    return decode_pair(d, pairs[0], pairs[1]);
  }

  const Type to = d.take_type(), from = d.take_type();
  d.expect_operands(2, 2);
  const Operand& result = d.operand(0);
  const Operand& source = d.operand(1);
  if (to == Type::tf32) {
    if (from != Type::f32) d.fail("only f32 converts to tf32");
    d.out.op[0] = d.destination(0, 32);
    d.out.op[1] = d.source(1, 32);
    d.run(run_float_to_float<TF32, F32>, Class::conversion);
    return;
  }
  // A register may be wider than an integer type.
  const auto width = [&](const Operand& o, Type type) {
    const int own = d.register_bits(o), bits = ptx::bits_of(type);
    if (!own) return std::max(bits, 16);
    if (own < bits || (ptx::is_float(type) && own != bits))
      d.fail("a register's width does not fit its type");
    return own;
  };
  const int to_bits = width(result, to), from_bits = width(source, from);
  d.out.op[0] = d.destination(result, to_bits);
  d.out.op[1] = d.source(source, from_bits);
  d.out.op[2] = static_cast<uint32_t>(from_bits);
  d.out.op[3] = static_cast<uint32_t>(from);
  d.out.op[4] = static_cast<uint32_t>(to_bits);
  d.out.op[5] = static_cast<uint32_t>(to);
  Handler handler = everyday(to, from, to_bits, from_bits, d.out.imm);
  const bool float_to = ptx::is_float(to), float_from = ptx::is_float(from);
  if (!handler && float_to && float_from)
    with_format(to, [&]<class F>(F) {
      with_format(from, [&]<class S>(S) { handler = run_float_to_float<F, S>; });
    });
  else if (!handler && float_to)
    with_format(to, [&]<class F>(F) { handler = run_integer_to_float<F>; });
  else if (!handler && float_from)
    with_format(from, [&]<class S>(S) {
      with_integer_type(to, [&]<class I>(I) { handler = run_float_to_integer<I, S>; });
    });
  else if (!handler && with_integer_type(to, [](auto) {}) && with_integer_type(from, [](auto) {}))
    handler = run_integer_to_integer;
  if (!handler) d.fail("this conversion is not supported");
  d.run(handler, Class::conversion);
}
const Opcode cvt("cvt", decode_cvt);

// cvt.pack.sat.ctype.dtype{.b32} d, a, b{, c}: two saturated integers beside what c has
template<class T>
Status run_cvt_pack(Warp& w, const Instr& in) {
  const int32_t *a = w.lanes<int32_t>(in.op[1]), *b = w.lanes<int32_t>(in.op[2]);
  const uint32_t* c = in.op[3] == kNone ? nullptr : w.lanes<uint32_t>(in.op[3]);
  const auto one = [](int32_t x) {
    using L = std::numeric_limits<T>;
    const int64_t y = x < int64_t{L::min()}   ? int64_t{L::min()}
                      : x > int64_t{L::max()} ? int64_t{L::max()}
                                              : x;
    return static_cast<uint32_t>(static_cast<std::make_unsigned_t<T>>(y));
  };
  constexpr int kBits = 8 * sizeof(T);
  write_lanes<uint32_t>(w, in.op[0], [&](int l) {
    const uint32_t rest = kBits == 8 && c ? c[l] << 16 : 0;
    return rest | one(a[l]) << kBits | one(b[l]);
  });
  return Status::next;
}
void decode_cvt_pack(Decode& d) {
  d.take("sat");
  const Type to = d.take_type();
  if (d.take_type() != Type::s32) d.fail("the sources are s32");
  const bool third = d.take("b32");
  d.expect_operands(third ? 4 : 3, third ? 4 : 3);
  d.out.op[0] = d.destination(0, 32);
  d.out.op[1] = d.source(1, 32);
  d.out.op[2] = d.source(2, 32);
  if (third) d.out.op[3] = d.source(3, 32);
  if (third && ptx::bits_of(to) != 8)
    d.fail("two 16-bit integers leave no room for a third operand");
  if (to == Type::u8)
    d.run(run_cvt_pack<uint8_t>, Class::conversion);
  else if (to == Type::s8)
    d.run(run_cvt_pack<int8_t>, Class::conversion);
  else if (to == Type::u16)
    d.run(run_cvt_pack<uint16_t>, Class::conversion);
  else if (to == Type::s16)
    d.run(run_cvt_pack<int16_t>, Class::conversion);
}
const Opcode cvt_pack("cvt.pack", decode_cvt_pack);

}  // namespace

}  // namespace tw::vgpu
