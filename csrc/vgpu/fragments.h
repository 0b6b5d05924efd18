// Matrix fragments: which lane and register holds which element of a tile, for ldmatrix, stmatrix, mma.sync and wgmma, and
// the matrix descriptors of wgmma. Plain arrays in and out.
//
// One fact carries all of it. With g = lane / 4 and t = lane % 4, a register of a 16-bit fragment holds elements (g, 2t) and
// (g, 2t + 1): the 32 lanes side by side are an 8 x 8 matrix, row after row. The same holds for every width: 32 lanes of a
// register with `per` elements each are an 8 x (4 per) matrix, row-major. So a fragment is unpacked by whole 8-row
// blocks, and only where a block goes has to be known:
//   A of mma (16 x k)   register r: rows 8 (r % 2).., columns 4 per (r / 2)..
//   B of mma (k x 8)    register r: B transposed, k from 4 per r
//   C of mma, f32/s32   registers 2h and 2h + 1: rows 8h.., even and odd columns
//   C of mma, f16       register h: rows 8h..
//   C of wgmma (64 x n) warp w % 4 owns rows 16 (w % 4)..; its part is n / 8 fragments C of mma, side by side
//
// Products are calculated in double: a product of two f16, bf16, tf32, fp8 or int8 numbers is exact there, and sums of
// one instruction are so nearly exact that their order does not show. The result is rounded once per instruction.
// Tiles of A and C are kept transposed, so that the inner loop runs over the rows of a warp's part: 8 or 16 of them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "vgpu/number.h"

namespace tw::vgpu {

// ---- elements

enum class Element : uint8_t { f16, bf16, tf32, e4m3, e5m2, s8, u8, f64 };

constexpr int element_bits(Element e) {
  return e == Element::f64                         ? 64
         : e == Element::tf32                      ? 32
         : e == Element::f16 || e == Element::bf16 ? 16
                                                   : 8;
}
// Elements in a row of the 8-row block that a register holds.
constexpr int block_width(Element e) { return element_bits(e) >= 32 ? 4 : 128 / element_bits(e); }

namespace detail {

template<class F>
inline const std::array<double, 256>& fp8_table() {
  static const std::array<double, 256> table = [] {
    std::array<double, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) t[i] = widen<F>(i);
    return t;
  }();
  return table;
}

template<class T, class Convert>
inline void unpack_as(const void* in, int n, double* out, Convert convert) {
  const uint8_t* bytes = static_cast<const uint8_t*>(in);
  for (int i = 0; i < n; ++i) {
    T x;
    std::memcpy(&x, bytes + i * sizeof(T), sizeof(T));
    out[i] = convert(x);
  }
}

}  // namespace detail

// n elements that lie side by side, as doubles.
inline void unpack(Element e, const void* in, int n, double* out) {
  using detail::unpack_as;
  switch (e) {
    case Element::f16:
      return unpack_as<uint16_t>(in, n, out, [](uint16_t x) { return double{widen<F16>(x)}; });
    case Element::bf16:
      return unpack_as<uint16_t>(in, n, out,
                                 [](uint16_t x) { return double{f32_of(uint32_t{x} << 16)}; });
    case Element::tf32:
      return unpack_as<uint32_t>(in, n, out, [](uint32_t x) { return double{truncate_tf32(x)}; });
    case Element::e4m3: {
      const auto& table = detail::fp8_table<E4M3>();
      return unpack_as<uint8_t>(in, n, out, [&](uint8_t x) { return table[x]; });
    }
    case Element::e5m2: {
      const auto& table = detail::fp8_table<E5M2>();
      return unpack_as<uint8_t>(in, n, out, [&](uint8_t x) { return table[x]; });
    }
    case Element::s8:
      return unpack_as<int8_t>(in, n, out, [](int8_t x) { return double(x); });
    case Element::u8:
      return unpack_as<uint8_t>(in, n, out, [](uint8_t x) { return double(x); });
    case Element::f64:
      return unpack_as<double>(in, n, out, [](double x) { return x; });
  }
}

// ---- operands in registers. `reg(i)` gives the 32 lanes of register i.

// A, rows x k, to a[k][rows].
template<class Registers>
inline void load_a(Element e, int rows, int k, const Registers& reg, double* a) {
  const int width = block_width(e), halves = rows / 8;
  double block[8 * 16];
  for (int r = 0; r < halves * (k / width); ++r) {
    unpack(e, reg(r), 8 * width, block);
    double* to = a + r / halves * width * rows + 8 * (r % halves);
    for (int i = 0; i < width; ++i)
      for (int g = 0; g < 8; ++g) to[i * rows + g] = block[g * width + i];
  }
}
// B, k x 8, to b[8][k].
template<class Registers>
inline void load_b(Element e, int k, const Registers& reg, double* b) {
  const int width = block_width(e);
  double block[8 * 16];
  for (int r = 0; r < k / width; ++r) {
    unpack(e, reg(r), 8 * width, block);
    for (int g = 0; g < 8; ++g)
      std::memcpy(b + g * k + r * width, block + g * width,
                  sizeof(double) * static_cast<size_t>(width));
  }
}

// ---- accumulators

enum class Accumulator : uint8_t { f32, f16, s32, s32_satfinite, f64 };

constexpr int accumulator_bits(Accumulator a) { return a == Accumulator::f64 ? 64 : 32; }
// Registers of a lane for `rows` x 8 elements.
constexpr int accumulator_registers(Accumulator a, int rows) {
  return rows / 8 * (a == Accumulator::f16 ? 1 : 2);
}

inline float round_f32(double sum) {
  return sum != sum ? f32_of(static_cast<uint32_t>(F32::nan)) : static_cast<float>(sum);
}
inline uint32_t round_s32(double sum, bool satfinite) {
  if (satfinite) sum = std::clamp(sum, -2147483648.0, 2147483647.0);
  return static_cast<uint32_t>(static_cast<int64_t>(sum));
}

// Eight columns of C between registers and c[8][rows].
template<class Registers>
inline void load_accumulator(Accumulator kind, int rows, const Registers& reg, double* c) {
  for (int h = 0; h < rows / 8; ++h) {
    double* half = c + 8 * h;
    if (kind == Accumulator::f16) {
      double block[64];
      unpack(Element::f16, reg(h), 64, block);
      for (int j = 0; j < 8; ++j)
        for (int g = 0; g < 8; ++g) half[j * rows + g] = block[8 * g + j];
      continue;
    }
    const auto each = [&]<class T>(T) {
      for (int e = 0; e < 2; ++e) {
        const T* r = reinterpret_cast<const T*>(reg(2 * h + e));
        for (int t = 0; t < 4; ++t)
          for (int g = 0; g < 8; ++g) half[(2 * t + e) * rows + g] = r[4 * g + t];
      }
    };
    if (kind == Accumulator::f32)
      each(float{});
    else if (kind == Accumulator::f64)
      each(double{});
    else
      each(int32_t{});
  }
}
template<class Registers>
inline void store_accumulator(Accumulator kind, int rows, const Registers& reg, const double* c) {
  for (int h = 0; h < rows / 8; ++h) {
    const double* half = c + 8 * h;
    if (kind == Accumulator::f16) {
      uint16_t* r = reinterpret_cast<uint16_t*>(reg(h));
      for (int g = 0; g < 8; ++g)
        for (int j = 0; j < 8; ++j) r[8 * g + j] = narrow<F16>(half[j * rows + g]);
      continue;
    }
    const auto each = [&]<class T>(T, auto round) {
      for (int e = 0; e < 2; ++e) {
        T* r = reinterpret_cast<T*>(reg(2 * h + e));
        for (int t = 0; t < 4; ++t)
          for (int g = 0; g < 8; ++g) r[4 * g + t] = round(half[(2 * t + e) * rows + g]);
      }
    };
    if (kind == Accumulator::f32)
      each(float{}, [](double x) { return round_f32(x); });
    else if (kind == Accumulator::f64)
      each(double{}, [](double x) { return x; });
    else
      each(uint32_t{}, [&](double x) { return round_s32(x, kind == Accumulator::s32_satfinite); });
  }
}

// ---- products

// c[n][Rows] += b a, where a is a[k][Rows] and element (j, l) of b lies at b[j * step_n + l * step_k]. n is even.
template<int Rows>
inline void multiply(double* c, const double* a, const double* b, int n, int k, int step_n,
                     int step_k) {
  typedef double v4 __attribute__((vector_size(32)));
  constexpr int kVectors = Rows / 4;
  for (int j = 0; j < n; j += 2) {
    v4 sum[2][kVectors];
    std::memcpy(sum, c + j * Rows, sizeof(sum));
    for (int l = 0; l < k; ++l) {
      v4 left[kVectors];
      std::memcpy(left, a + l * Rows, sizeof(left));
      const double* right = b + j * step_n + l * step_k;
      for (int v = 0; v < kVectors; ++v) {
        sum[0][v] += left[v] * right[0];
        sum[1][v] += left[v] * right[step_n];
      }
    }
    std::memcpy(c + j * Rows, sum, sizeof(sum));
  }
}
// For f64 operands, whose products are not exact: fused, in the order of k.
inline void multiply_fused(double* c, const double* a, const double* b, int rows, int n, int k) {
  for (int j = 0; j < n; ++j)
    for (int l = 0; l < k; ++l)
      for (int i = 0; i < rows; ++i)
        c[j * rows + i] = std::fma(a[l * rows + i], b[j * k + l], c[j * rows + i]);
}

// ---- ldmatrix, stmatrix: 8 x 8 matrices of 16 bits between rows in shared memory and a register

inline void transpose_8x8(uint16_t* m) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < i; ++j) std::swap(m[8 * i + j], m[8 * j + i]);
}
// Eight rows of 16 bytes; `reg` are 32 lanes.
inline void load_matrix(const uint8_t* const* rows, bool transposed, uint32_t* reg) {
  uint16_t m[64];
  for (int i = 0; i < 8; ++i) std::memcpy(m + 8 * i, rows[i], 16);
  if (transposed) transpose_8x8(m);
  std::memcpy(reg, m, sizeof(m));
}
inline void store_matrix(uint8_t* const* rows, bool transposed, const uint32_t* reg) {
  uint16_t m[64];
  std::memcpy(m, reg, sizeof(m));
  if (transposed) transpose_8x8(m);
  for (int i = 0; i < 8; ++i) std::memcpy(rows[i], m + 8 * i, 16);
}

// ---- shared-memory tiles of TMA and wgmma

// The address permutation of a `width`-byte swizzle (32, 64 or 128; 16 means none): 16-byte chunks are exchanged within
// lines of 128 bytes, by the absolute shared address.
constexpr uint32_t swizzle(uint32_t address, uint32_t width) {
  return address ^ ((address >> 7 & (width / 16 - 1)) << 4);
}

// A wgmma matrix descriptor.
struct MatrixDescriptor {
  uint32_t start, leading, stride;  // bytes
  uint32_t base_offset;
  uint32_t width;  // of the swizzle, bytes; 16: none

  explicit constexpr MatrixDescriptor(uint64_t d)
      : start(static_cast<uint32_t>(d & 0x3fff) << 4),
        leading(static_cast<uint32_t>(d >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(d >> 32 & 0x3fff) << 4),
        base_offset(static_cast<uint32_t>(d >> 49 & 7)),
        width((d >> 62) == 0 ? 16 : 256u >> (d >> 62)) {}
};

// Calls f(mn, k, address) for each 16-byte chunk of rows [first, first + count) of an operand: 32 bytes of k (K-major), or k
// elements of 16 bits (MN-major). address is that of the chunk in shared memory, (mn, k) its first element; mn counts
// from `first`.
template<class F>
inline void for_chunks_k_major(const MatrixDescriptor& d, int first, int count, int element_bytes,
                               F f) {
  for (int r = 0; r < count; ++r) {
    const uint32_t row = static_cast<uint32_t>(first + r);
    const uint32_t start = d.start + row % 8 * d.width + row / 8 * d.stride;
    f(r, 0, swizzle(start, d.width));
    f(r, 16 / element_bytes, swizzle(start + (d.width == 16 ? d.leading : 16), d.width));
  }
}
template<class F>
inline void for_chunks_mn_major(const MatrixDescriptor& d, int first, int count, int k, F f) {
  const uint32_t per_line = d.width / 2;
  for (int l = 0; l < k; ++l) {
    const uint32_t line = static_cast<uint32_t>(l);
    for (int i = 0; i < count; i += 8) {
      const uint32_t mn = static_cast<uint32_t>(first + i);
      uint32_t offset = line % 8 * d.width;
      offset += d.width == 16 ? mn / 8 * d.stride + line / 8 * d.leading
                              : mn % per_line * 2 + mn / per_line * d.leading + line / 8 * d.stride;
      f(i, l, swizzle(d.start + offset, d.width));
    }
  }
}

}  // namespace tw::vgpu
