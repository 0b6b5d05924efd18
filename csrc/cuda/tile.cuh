// How a warp moves a tile of kTile elements between memory and registers, kPer of them per lane, whatever
// their size: an element stays in the lane and register that the tile's layout gives it, for operands
// of every type.
//
// packs    kPack elements, 16 bytes of the arithmetic type, next to each other, then those of the next
//          lane: accesses of 16 bytes for fp32, 8 for 16-bit types, 4 for bytes. Each access of a warp is
//          made of whole sectors.
// runs     all of a lane's elements next to each other: 16 bytes of 16-bit types, 8 bytes of codes.
//          For tiles in which no operand has more than 2 bytes per element.
// singles  32 lanes apart, one element an access: any alignment, and tiles that are cut off.
//
// All functions are called by whole warps.
#pragma once
#include "trainwright/pack.cuh"
#include "trainwright/state_format.h"

TW_BEGIN

constexpr int kPer = 8, kTile = 32 * kPer;
static_assert(kTile == kStateBlock, "a warp rounds whole blocks of codes");

enum class Layout : uint8_t { singles, packs, runs };

// N bytes in one access of up to 16, to and from words.
template<int N>
__device__ __forceinline__ void load_words(const char* p, uint32_t* w) {
  constexpr int part = N < 16 ? N / 4 : 4;
#pragma unroll
  for (int i = 0; i < N / 4; i += part)
    reinterpret_cast<Pack<uint32_t, part>&>(w[i]) =
        load_once<part>(reinterpret_cast<const uint32_t*>(p) + i);
}
template<int N>
__device__ __forceinline__ void store_words(char* p, const uint32_t* w) {
  constexpr int part = N < 16 ? N / 4 : 4;
#pragma unroll
  for (int i = 0; i < N / 4; i += part)
    store_pack(reinterpret_cast<uint32_t*>(p) + i,
               reinterpret_cast<const Pack<uint32_t, part>&>(w[i]));
}

// threadIdx.x, read anew: what the compiler derives from it is not kept in registers, of which a tile has none to spare.
__device__ __forceinline__ int thread_number() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

// Where the tile of a warp lies in its tensor. A is the arithmetic type.
template<class A>
struct TilePlace {
  static constexpr int kPack = 16 / sizeof(A);
  int64_t begin;  // first element
  int count;      // elements, kTile unless they are singles
  int lane;
  Layout layout;

  __device__ __forceinline__ TilePlace(int64_t begin, int count, Layout layout)
      : begin(begin), count(count), lane(threadIdx.x % 32), layout(layout) {
    forget();
  }
  // Makes the compiler compute offsets anew from here on. Those of all layouts and types together are more
  // than there are registers, and would be computed before the loop over tiles, or kept from load to store.
  __device__ __forceinline__ void forget() { asm volatile("" : "+r"(lane)); }
  // Register k of this lane, as an element of the tile.
  __device__ __forceinline__ int at(int k) const {
    if (layout == Layout::singles) return 32 * k + lane;
    if (layout == Layout::runs) return kPer * lane + k;
    return (k / kPack * 32 + lane) * kPack + k % kPack;
  }
  __device__ __forceinline__ bool has(int k) const {
    return layout != Layout::singles || at(k) < count;
  }

  // This lane's elements of BYTES bytes, in order, packed into words; 0 for those that do not exist.
  template<int BYTES>
  __device__ __forceinline__ void load(const void* base, uint32_t (&w)[kPer * BYTES / 4]) const {
    const char* p = static_cast<const char*>(base) + begin * BYTES;
    if (layout == Layout::singles) {
#pragma unroll
      for (int i = 0; i < kPer * BYTES / 4; ++i) w[i] = 0;
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if (at(k) >= count) continue;
        const char* x = p + at(k) * BYTES;
        if constexpr (BYTES == 1)
          w[k / 4] |= uint32_t{__ldcs(reinterpret_cast<const uint8_t*>(x))} << (k % 4 * 8);
        else if constexpr (BYTES == 2)
          w[k / 2] |= uint32_t{__ldcs(reinterpret_cast<const uint16_t*>(x))} << (k % 2 * 16);
        else
          load_words<BYTES>(x, w + k * (BYTES / 4));
      }
    } else if (BYTES <= 2 && layout == Layout::runs) {
      load_words<kPer * BYTES>(p + lane * (kPer * BYTES), w);
    } else {
#pragma unroll
      for (int k = 0; k < kPer; k += kPack)
        load_words<kPack * BYTES>(p + at(k) * BYTES, w + k * BYTES / 4);
    }
  }
  template<int BYTES>
  __device__ __forceinline__ void store(void* base, const uint32_t (&w)[kPer * BYTES / 4]) const {
    char* p = static_cast<char*>(base) + begin * BYTES;
    if (layout == Layout::singles) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if (at(k) >= count) continue;
        char* x = p + at(k) * BYTES;
        if constexpr (BYTES == 1)
          __stwb(reinterpret_cast<uint8_t*>(x), static_cast<uint8_t>(w[k / 4] >> (k % 4 * 8)));
        else if constexpr (BYTES == 2)
          __stwb(reinterpret_cast<uint16_t*>(x), static_cast<uint16_t>(w[k / 2] >> (k % 2 * 16)));
        else
          store_words<BYTES>(x, w + k * (BYTES / 4));
      }
    } else if (BYTES <= 2 && layout == Layout::runs) {
      store_words<kPer * BYTES>(p + lane * (kPer * BYTES), w);
    } else {
#pragma unroll
      for (int k = 0; k < kPer; k += kPack)
        store_words<kPack * BYTES>(p + at(k) * BYTES, w + k * BYTES / 4);
    }
  }
};

// ---- elements as they are stored ----------------------------------------------------------------
// An operand as loaded, before it is converted, so that the loads of all operands are under way before
// the first of them is waited for. Narrow types use the first words.
template<class A>
struct Raw {
  uint32_t w[kPer * sizeof(A) / 4];
  template<int BYTES>
  __device__ __forceinline__ uint32_t (&words())
      [kPer * BYTES / 4] { return reinterpret_cast<uint32_t (&)[kPer * BYTES / 4]>(w); }
};

// Floats of any type of at most sizeof(A) bytes; types other than A are those of a float tile.
template<class A>
__device__ __forceinline__ void load_floats(const TilePlace<A>& at, const void* base, DType type,
                                            Raw<A>& raw) {
  if (sizeof(A) == 8 || type == DType::f32)
    at.template load<sizeof(A)>(base, raw.w);
  else
    at.template load<2>(base, raw.template words<2>());
}
template<class A>
__device__ __forceinline__ void store_floats(const TilePlace<A>& at, void* base, DType type,
                                             Raw<A>& raw) {
  if (sizeof(A) == 8 || type == DType::f32)
    at.template store<sizeof(A)>(base, raw.w);
  else
    at.template store<2>(base, raw.template words<2>());
}

template<class A>
__device__ __forceinline__ uint32_t half_of(const Raw<A>& raw, int k) {
  return k % 2 ? raw.w[k / 2] >> 16 : raw.w[k / 2] & 0xffffu;
}
template<class A>
__device__ __forceinline__ void set_halves(Raw<A>& raw, int pair, uint32_t low, uint32_t high) {
  raw.w[pair] = low | high << 16;
}

template<class A>
__device__ __forceinline__ void decode_floats(const Raw<A>& raw, DType type, A (&x)[kPer]) {
  if constexpr (sizeof(A) == 8) {
#pragma unroll
    for (int k = 0; k < kPer; ++k)
      x[k] = __hiloint2double(static_cast<int>(raw.w[2 * k + 1]), static_cast<int>(raw.w[2 * k]));
  } else if (type == DType::f32) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) x[k] = bits_float(raw.w[k]);
  } else if (type == DType::bf16) {
#pragma unroll
    for (int k = 0; k < kPer; ++k)
      x[k] = bits_float(k % 2 ? raw.w[k / 2] & 0xffff0000u : raw.w[k / 2] << 16);
  } else {
#pragma unroll
    for (int k = 0; k < kPer; ++k) x[k] = to_float(f16{static_cast<uint16_t>(half_of(raw, k))});
  }
}
// To nearest.
template<class A>
__device__ __forceinline__ void encode_floats(const A (&x)[kPer], DType type, Raw<A>& raw) {
  if constexpr (sizeof(A) == 8) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      raw.w[2 * k] = static_cast<uint32_t>(__double2loint(x[k]));
      raw.w[2 * k + 1] = static_cast<uint32_t>(__double2hiint(x[k]));
    }
  } else if (type == DType::f32) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) raw.w[k] = float_bits(x[k]);
  } else if (type == DType::bf16) {
#pragma unroll
    for (int k = 0; k < kPer; k += 2) raw.w[k / 2] = pair_bits<bf16>(x[k], x[k + 1]);
  } else {
#pragma unroll
    for (int k = 0; k < kPer; k += 2) raw.w[k / 2] = pair_bits<f16>(x[k], x[k + 1]);
  }
}

// ---- block8 -------------------------------------------------------------------------------------
template<bool kSigned>
__device__ __forceinline__ void decode_codes(const Raw<float>& raw, float scale, float (&x)[kPer]) {
  const float unit = block8_unit(scale);
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const uint32_t byte = raw.w[k / 4] >> (k % 4 * 8) & 0xffu;
    if constexpr (kSigned)
      x[k] = block8_signed_value(static_cast<float>(static_cast<int8_t>(byte)), unit);
    else
      x[k] = block8_unsigned_value(static_cast<float>(static_cast<int32_t>(byte)), unit);
  }
}
// The codes of the warp's tile; returns its scale.
template<bool kSigned, bool kStochastic>
__device__ __forceinline__ float encode_codes(const TilePlace<float>& at, const float (&x)[kPer],
                                              const uint32_t (&words)[kPer], Raw<float>& raw) {
  uint32_t largest = 0;  // the bits of |x| are ordered like |x|, with NaN on top
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const uint32_t bits = float_bits(x[k]) & 0x7fffffffu;
    if (at.has(k) && bits > largest) largest = bits;
  }
  const float scale = block8_scale(bits_float(__reduce_max_sync(0xffffffffu, largest)));
  const float inverse = block8_inverse(scale);
  raw.w[0] = raw.w[1] = 0;
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const int32_t code =
        kSigned ? block8_signed_code<kStochastic>(x[k], inverse, signed_noise(words[k]))
                : block8_unsigned_code<kStochastic>(x[k], inverse, unsigned_noise(words[k]));
    raw.w[k / 4] |= (static_cast<uint32_t>(code) & 0xffu) << (k % 4 * 8);
  }
  return scale;
}

TW_END
