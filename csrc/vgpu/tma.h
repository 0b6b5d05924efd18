// Tensor maps and the tensor memory accelerator: which bytes of a tensor in global memory a box is, where each lies in
// shared memory, and the arithmetic of bulk reductions.
//
// A box is dense in shared memory, coordinate 0 fastest, its 16-byte chunks permuted by the map's swizzle. Parts of a box
// outside the tensor are filled when loaded and skipped when stored. Coordinates are signed and count elements.
//
// The 128 bytes of a tensor map are opaque to programs, so their layout here is our own; cuTensorMapEncodeTiled and
// tensormap.replace both write it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "vgpu/fragments.h"
#include "vgpu/number.h"

namespace tw::vgpu {

// Numbered as by `tensormap.replace ... .elemtype`. The driver's CUtensorMapDataType differs: from_driver_type.
enum class TensorType : uint8_t {
  u8,
  u16,
  u32,
  s32,
  u64,
  s64,
  f16,
  f32,
  f32_ftz,
  f64,
  bf16,
  tf32,
  tf32_ftz,
};  // fmt: skip
constexpr int kTensorTypes = 13;

constexpr int bytes_of(TensorType t) {
  constexpr int8_t bytes[kTensorTypes] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
  return bytes[static_cast<int>(t)];
}
// The number in tensormap.replace of a CUtensorMapDataType, or -1.
constexpr int from_driver_type(int type) {
  constexpr int8_t numbers[kTensorTypes] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 11, 12};
  return type >= 0 && type < kTensorTypes ? numbers[type] : -1;
}

struct TensorMap {
  static constexpr int kMaxRank = 5;

  uint64_t address;
  uint64_t strides[kMaxRank - 1];  // bytes, of dimensions 1..
  uint32_t dims[kMaxRank];
  uint32_t box[kMaxRank];
  uint32_t element_strides[kMaxRank];
  uint8_t rank_less_one;
  uint8_t type;        // TensorType
  uint8_t interleave;  // 0 none, 1 of 16 bytes, 2 of 32
  uint8_t swizzle;     // 0 none, 1, 2, 3: 32, 64, 128 bytes
  uint8_t fill;        // 0 zero, 1 NaN
  uint8_t unused[23];

  int rank() const { return rank_less_one + 1; }
  TensorType element() const { return static_cast<TensorType>(type); }
  int element_bytes() const { return bytes_of(element()); }
  uint32_t swizzle_bytes() const { return swizzle ? 16u << swizzle : 16; }
  // Elements of the box along a dimension. The element stride of dimension 0 does not count without interleaving.
  uint32_t extent(int d) const {
    return d == 0 ? box[0] : (box[d] + element_strides[d] - 1) / element_strides[d];
  }
  uint64_t box_bytes() const {
    uint64_t n = static_cast<uint64_t>(element_bytes());
    for (int d = 0; d < rank(); ++d) n *= extent(d);
    return n;
  }

  // What makes the map unusable, or nothing. Called when a map is made from outside and each time one is used.
  std::string problem() const;
};
static_assert(sizeof(TensorMap) == 128);

inline std::string TensorMap::problem() const {
  const auto number = [](uint64_t n) { return std::to_string(n); };
  const auto at = [&](int d) { return " of dimension " + number(d); };
  if (rank() > kMaxRank) return "tensor map of rank " + number(rank());
  if (type >= kTensorTypes) return "tensor map of element type " + number(type);
  if (interleave) return "interleaved tensor maps are not supported";
  if (swizzle > 3) return "tensor map of swizzle mode " + number(swizzle);
  if (fill > 1) return "tensor map of fill mode " + number(fill);
  if (fill == 1 && (type <= static_cast<int>(TensorType::s64)))
    return "tensor map that fills integers with NaN";
  if (address % 16) return "tensor map: global address not a multiple of 16";
  for (int d = 0; d < rank(); ++d) {
    if (dims[d] == 0) return "tensor map: size 0" + at(d);
    if (box[d] == 0 || box[d] > 256) return "tensor map: box size " + number(box[d]) + at(d);
    if (element_strides[d] == 0 || element_strides[d] > 8)
      return "tensor map: element stride " + number(element_strides[d]) + at(d);
    if (d == 0) continue;
    const uint64_t stride = strides[d - 1];
    if (stride % 16 || stride >> 40)
      return "tensor map: stride of " + number(stride) + " bytes" + at(d) +
             " (must be a multiple of 16, below 2^40)";
  }
  const uint64_t line = uint64_t{box[0]} * element_bytes();
  if (line % 16)
    return "tensor map: lines of the box of " + number(line) + " bytes, not of a multiple of 16";
  if (swizzle && line > swizzle_bytes())
    return "tensor map: lines of the box of " + number(line) + " bytes in a swizzle of " +
           number(swizzle_bytes());
  return {};
}

// cuTensorMapEncodeTiled: arguments as the driver has them (strides of dimensions 1.., data type of the driver's enum).
// Returns what is wrong, or nothing.
inline std::string encode_tiled(TensorMap& map, int driver_type, uint32_t rank, uint64_t address,
                                const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                                const uint32_t* element_strides, int interleave, int swizzle,
                                int fill) {
  std::memset(&map, 0, sizeof(map));
  if (rank < 1 || rank > TensorMap::kMaxRank)
    return "tensor map of rank " + std::to_string(rank) + ", expected 1 to 5";
  if (from_driver_type(driver_type) < 0)
    return "tensor map of data type " + std::to_string(driver_type);
  map.address = address;
  map.rank_less_one = static_cast<uint8_t>(rank - 1);
  map.type = static_cast<uint8_t>(from_driver_type(driver_type));
  map.interleave = static_cast<uint8_t>(interleave);
  map.swizzle = static_cast<uint8_t>(swizzle);
  map.fill = static_cast<uint8_t>(fill);
  for (uint32_t d = 0; d < rank; ++d) {
    if (dims[d] >> 32) return "tensor map: dimension " + std::to_string(d) + " above 2^32 - 1";
    map.dims[d] = static_cast<uint32_t>(dims[d]);
    map.box[d] = box[d];
    map.element_strides[d] = element_strides[d];
    if (d) map.strides[d - 1] = strides[d - 1];
  }
  return map.problem();
}

// tensormap.replace. `ordinal` names a dimension (of strides: 0 is that of dimension 1). False: no such field or ordinal.
enum class TensorMapField : uint8_t {
  global_address,
  rank,
  box_dim,
  global_dim,
  global_stride,
  element_stride,
  elemtype,
  interleave_layout,
  swizzle_mode,
  fill_mode,
};  // fmt: skip
inline bool replace(TensorMap& map, TensorMapField field, int ordinal, uint64_t value) {
  const int last =
      field == TensorMapField::global_stride ? TensorMap::kMaxRank - 2 : TensorMap::kMaxRank - 1;
  if (ordinal < 0 || ordinal > last) return false;
  const uint32_t word = static_cast<uint32_t>(value);
  const uint8_t byte = static_cast<uint8_t>(std::min<uint64_t>(value, 255));
  switch (field) {
    case TensorMapField::global_address:
      map.address = value;
      break;
    case TensorMapField::rank:
      map.rank_less_one = byte;
      break;
    case TensorMapField::box_dim:
      map.box[ordinal] = word;
      break;
    case TensorMapField::global_dim:
      map.dims[ordinal] = word;
      break;
    case TensorMapField::global_stride:
      map.strides[ordinal] = value;
      break;
    case TensorMapField::element_stride:
      map.element_strides[ordinal] = word;
      break;
    case TensorMapField::elemtype:
      map.type = byte;
      break;
    case TensorMapField::interleave_layout:
      map.interleave = byte;
      break;
    case TensorMapField::swizzle_mode:
      map.swizzle = byte;
      break;
    case TensorMapField::fill_mode:
      map.fill = byte;
      break;
  }
  return true;
}

// A line of a box: `box[0]` elements, of which [first, last) lie in the tensor.
struct BoxLine {
  uint32_t offset;   // in the box, bytes, before the swizzle
  uint64_t address;  // global, of element 0 of the line (outside the tensor if first > 0)
  uint32_t first, last;
};

// Calls f(line) for each line of the box at these coordinates.
template<class F>
inline void for_lines(const TensorMap& map, const int32_t* coordinates, F f) {
  const int rank = map.rank();
  const int64_t x = coordinates[0], width = map.box[0];
  const int64_t size = map.dims[0], bytes = map.element_bytes();
  const uint32_t first = static_cast<uint32_t>(std::clamp<int64_t>(-x, 0, width));
  const uint32_t last = static_cast<uint32_t>(std::clamp<int64_t>(size - x, first, width));
  uint32_t at[TensorMap::kMaxRank] = {};
  uint32_t offset = 0;
  for (;;) {
    BoxLine line{offset, map.address + static_cast<uint64_t>(x * bytes), first, last};
    for (int d = 1; d < rank; ++d) {
      const int64_t c = coordinates[d] + int64_t{at[d]} * map.element_strides[d];
      if (c < 0 || c >= map.dims[d]) line.last = line.first;
      line.address += static_cast<uint64_t>(c) * map.strides[d - 1];
    }
    f(line);
    offset += static_cast<uint32_t>(width * bytes);
    int d = 1;
    while (d < rank && ++at[d] == map.extent(d)) at[d++] = 0;
    if (d >= rank) return;
  }
}

// Where a byte of a box at shared address `start` lies.
inline uint32_t box_address(const TensorMap& map, uint32_t start, uint32_t offset) {
  return swizzle(start + offset, map.swizzle_bytes());
}

// One element of the fill pattern, or of 16 bytes of it.
inline void fill_chunk(const TensorMap& map, uint8_t* chunk) {
  std::memset(chunk, 0, 16);
  if (!map.fill) return;
  const auto repeat = [&](auto value) {
    for (size_t i = 0; i < 16; i += sizeof(value)) std::memcpy(chunk + i, &value, sizeof(value));
  };
  switch (map.element()) {
    case TensorType::f16:
      return repeat(static_cast<uint16_t>(F16::nan));
    case TensorType::bf16:
      return repeat(static_cast<uint16_t>(BF16::nan));
    case TensorType::f64:
      return repeat(static_cast<uint64_t>(F64::nan));
    default:
      return repeat(static_cast<uint32_t>(F32::nan));
  }
}

// Copies a box from global to shared memory. `source(address, bytes)` gives the host memory of global bytes; `write(offset)`
// that of the 16-byte chunk at a shared address.
template<class Source, class Write>
inline void load_box(const TensorMap& map, const int32_t* coordinates, uint32_t start,
                     Source source, Write write) {
  const uint32_t bytes = static_cast<uint32_t>(map.element_bytes());
  uint8_t fill[16];
  fill_chunk(map, fill);
  for_lines(map, coordinates, [&](const BoxLine& line) {
    const uint32_t first = line.first * bytes, last = line.last * bytes;
    const uint8_t* from = first < last ? source(line.address + first, last - first) : nullptr;
    for (uint32_t i = 0; i < map.box[0] * bytes; i += 16) {
      uint8_t* to = write(box_address(map, start, line.offset + i));
      const uint32_t low = std::clamp(first, i, i + 16), high = std::clamp(last, low, i + 16);
      if (high - low < 16) std::memcpy(to, fill, 16);
      if (high > low) std::memcpy(to + (low - i), from + (low - first), high - low);
    }
  });
}

// The opposite direction: calls `sink(global address, shared bytes, count)` for each run inside the tensor. `read(address)` gives the host
// memory of the 16-byte chunk at a shared address.
template<class Read, class Sink>
inline void store_box(const TensorMap& map, const int32_t* coordinates, uint32_t start, Read read,
                      Sink sink) {
  const uint32_t bytes = static_cast<uint32_t>(map.element_bytes());
  for_lines(map, coordinates, [&](const BoxLine& line) {
    const uint32_t first = line.first * bytes, last = line.last * bytes;
    for (uint32_t i = first / 16 * 16; i < last; i += 16) {
      const uint32_t low = std::max(first, i), high = std::min(last, i + 16);
      sink(line.address + low, read(box_address(map, start, line.offset + i)) + (low - i),
           high - low);
    }
  });
}

// ---- bulk reductions: memory[i] = memory[i] op value[i]

enum class Reduction : uint8_t { add, min, max, inc, dec, bit_and, bit_or, bit_xor };

namespace detail {

template<class T>
inline T reduce_integer(Reduction op, T a, T b) {
  switch (op) {
    case Reduction::add:
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) +
                            static_cast<std::make_unsigned_t<T>>(b));
    case Reduction::min:
      return std::min(a, b);
    case Reduction::max:
      return std::max(a, b);
    case Reduction::inc:
      return a >= b ? T{0} : static_cast<T>(a + 1);
    case Reduction::dec:
      return a == 0 || a > b ? b : static_cast<T>(a - 1);
    case Reduction::bit_and:
      return a & b;
    case Reduction::bit_or:
      return a | b;
    case Reduction::bit_xor:
      return a ^ b;
  }
  return a;
}
template<class F>
inline typename F::bits reduce_small(Reduction op, typename F::bits a, typename F::bits b) {
  if (op == Reduction::add) return vgpu::add<F>(a, b);
  const float x = widen<F>(a), y = widen<F>(b);
  return narrow<F>(op == Reduction::min ? minimum(x, y) : maximum(x, y));
}
template<class T, class Op>
inline void reduce_each(uint8_t* memory, const uint8_t* values, uint64_t bytes, Op op) {
  for (uint64_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
    T a, b;
    std::memcpy(&a, memory + i, sizeof(T));
    std::memcpy(&b, values + i, sizeof(T));
    a = op(a, b);
    std::memcpy(memory + i, &a, sizeof(T));
  }
}

}  // namespace detail

// Which operations a type has.
inline bool has_reduction(TensorType type, Reduction op) {
  const bool bitwise = op >= Reduction::bit_and;
  const bool order = op == Reduction::min || op == Reduction::max;
  switch (type) {
    case TensorType::u32:
      return true;
    case TensorType::u64:
      return bitwise || order || op == Reduction::add;
    case TensorType::s32:
      return bitwise || order || op == Reduction::add;
    case TensorType::s64:
      return bitwise || order || op == Reduction::add;
    case TensorType::f16:
    case TensorType::bf16:
      return order || op == Reduction::add;
    case TensorType::f32:
    case TensorType::f32_ftz:
    case TensorType::f64:
      return op == Reduction::add;
    default:
      return false;
  }
}

inline void reduce(TensorType type, Reduction op, uint8_t* memory, const uint8_t* values,
                   uint64_t bytes) {
  using detail::reduce_each;
  using detail::reduce_integer;
  const auto integer = [&](auto zero) {
    using T = decltype(zero);
    reduce_each<T>(memory, values, bytes, [&](T a, T b) { return reduce_integer<T>(op, a, b); });
  };
  switch (type) {
    case TensorType::u32:
      return integer(uint32_t{});
    case TensorType::s32:
      return integer(int32_t{});
    case TensorType::u64:
      return integer(uint64_t{});
    case TensorType::s64:
      return integer(int64_t{});
    case TensorType::f16:
      return reduce_each<uint16_t>(memory, values, bytes, [&](uint16_t a, uint16_t b) {
        return detail::reduce_small<F16>(op, a, b);
      });
    case TensorType::bf16:
      return reduce_each<uint16_t>(memory, values, bytes, [&](uint16_t a, uint16_t b) {
        return detail::reduce_small<BF16>(op, a, b);
      });
    case TensorType::f32:
      return reduce_each<float>(memory, values, bytes,
                                [](float a, float b) { return add_f32(a, b); });
    case TensorType::f32_ftz:
      return reduce_each<float>(memory, values, bytes,
                                [](float a, float b) { return add_f32<Rounding::rn, true>(a, b); });
    case TensorType::f64:
      return reduce_each<double>(memory, values, bytes,
                                 [](double a, double b) { return add_f64(a, b); });
    default:
      return;
  }
}

}  // namespace tw::vgpu
