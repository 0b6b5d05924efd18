// Device code only: runs of VEC elements that move as one access, their conversion, and sums over a
// warp and a block.
#pragma once
#include <type_traits>

#include "trainwright/types.h"

TW_BEGIN

template<class T, int VEC>
struct alignas(VEC * sizeof(T)) Pack {
  T v[VEC];
};

// The integer type that moves a pack of that many bytes in one instruction.
template<int BYTES>
struct WordOf;
template<>
struct WordOf<2> {
  using type = uint16_t;
};
template<>
struct WordOf<4> {
  using type = uint32_t;
};
template<>
struct WordOf<8> {
  using type = uint2;
};
template<>
struct WordOf<16> {
  using type = uint4;
};

// One access. `p` is a multiple of the pack's size.
template<int VEC, class T>
__device__ __forceinline__ Pack<T, VEC> load_pack(const T* p) {
  using Word = typename WordOf<VEC * sizeof(T)>::type;
  const Word word = *reinterpret_cast<const Word*>(p);
  return reinterpret_cast<const Pack<T, VEC>&>(word);
}
// The same for data that is read once, so that it does not drive out of L1 what is read again.
template<int VEC, class T>
__device__ __forceinline__ Pack<T, VEC> load_once(const T* p) {
  using Word = typename WordOf<VEC * sizeof(T)>::type;
  const Word word = __ldcs(reinterpret_cast<const Word*>(p));
  return reinterpret_cast<const Pack<T, VEC>&>(word);
}
// To global memory. The compiler would take some of these stores apart; of an intrinsic it does not.
template<int VEC, class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, VEC>& x) {
  using Word = typename WordOf<VEC * sizeof(T)>::type;
  __stwb(reinterpret_cast<Word*>(p), reinterpret_cast<const Word&>(x));
}

template<class T, int VEC, class A>
__device__ __forceinline__ void unpack(const Pack<T, VEC>& p, A (&x)[VEC]) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) x[i] = load_as<A>(p.v[i]);
}
// Rounded to T; 16-bit types two at a time, which the hardware converts in one instruction.
template<class T, int VEC, class A>
__device__ __forceinline__ Pack<T, VEC> pack_as(const A (&x)[VEC]) {
  Pack<T, VEC> p;
  if constexpr (sizeof(T) == 2 && VEC % 2 == 0) {
    uint32_t pairs[VEC / 2];
#pragma unroll
    for (int i = 0; i < VEC / 2; ++i)
      pairs[i] = pair_bits<T>(static_cast<float>(x[2 * i]), static_cast<float>(x[2 * i + 1]));
    p = reinterpret_cast<const Pack<T, VEC>&>(pairs);
  } else {
#pragma unroll
    for (int i = 0; i < VEC; ++i) p.v[i] = store_as<T>(x[i]);
  }
  return p;
}

// Two packs added, rounded to T.
template<class T, int VEC>
__device__ __forceinline__ Pack<T, VEC> pack_sum(const Pack<T, VEC>& a, const Pack<T, VEC>& b) {
  acc_t<T> x[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) x[i] = load_as<acc_t<T>>(a.v[i]) + load_as<acc_t<T>>(b.v[i]);
  return pack_as<T>(x);
}

template<class T>
__device__ __forceinline__ T exchange(T x, int lanes) {  // with the lane whose number differs there
  return __shfl_xor_sync(0xffffffffu, x, lanes);
}
__device__ __forceinline__ uint4 exchange(uint4 x, int lanes) {
  return {exchange(x.x, lanes), exchange(x.y, lanes), exchange(x.z, lanes), exchange(x.w, lanes)};
}

// I is an integer type. Elements c ... c + VEC - 1 of p, of which the first `n` exist, as A; whole packs exist or not. All
// lanes of the warp call it, with c rising by VEC from each even lane to the next. Two lanes that
// each need 32 bytes fetch them together, so that each load of theirs covers a whole sector.
template<class W, int VEC, class A, class I>
__device__ __forceinline__ void load_span(const W* p, I c, I n, A (&x)[VEC]) {
  constexpr int bytes = VEC * static_cast<int>(sizeof(W));
  if constexpr (bytes <= 16) {
    Pack<W, VEC> pack{};
    if (c < n) pack = load_pack<VEC>(p + c);
    unpack(pack, x);
  } else if constexpr (bytes == 32) {
    constexpr int half = VEC / 2;
    const int odd = threadIdx.x & 1;
    const I first = c - odd * half, second = first + VEC;
    uint4 a{}, b{};
    if (first < n) a = *reinterpret_cast<const uint4*>(p + first);
    if (second < n) b = *reinterpret_cast<const uint4*>(p + second);
    const uint4 other = exchange(odd ? a : b, 1);
    const uint4 both[2] = {odd ? other : a, odd ? b : other};
#pragma unroll
    for (int i = 0; i < VEC; ++i) x[i] = load_as<A>(reinterpret_cast<const W(&)[VEC]>(both)[i]);
  } else {
    constexpr int part = 16 / sizeof(W);
#pragma unroll
    for (int k = 0; k < VEC / part; ++k) {
      Pack<W, part> pack{};
      if (c < n) pack = load_pack<part>(p + c + k * part);
#pragma unroll
      for (int i = 0; i < part; ++i) x[k * part + i] = load_as<A>(pack.v[i]);
    }
  }
}
// The same for a dtype that the whole grid agrees on, so that its branches do not diverge.
template<int VEC, class A, class I>
__device__ __forceinline__ void load_span(const void* p, DType dtype, I c, I n, A (&x)[VEC]) {
  if (dtype == DType::f32)
    load_span(static_cast<const float*>(p), c, n, x);
  else if (dtype == DType::bf16)
    load_span(static_cast<const bf16*>(p), c, n, x);
  else if (dtype == DType::f16)
    load_span(static_cast<const f16*>(p), c, n, x);
  else
    load_span(static_cast<const double*>(p), c, n, x);
}
// The reverse of load_span.
template<class W, int VEC, class A, class I>
__device__ __forceinline__ void store_span(W* p, I c, I n, const A (&x)[VEC]) {
  constexpr int bytes = VEC * static_cast<int>(sizeof(W));
  static_assert(bytes <= 32);
  const Pack<W, VEC> pack = pack_as<W>(x);
  if constexpr (bytes <= 16) {
    if (c < n) store_pack(p + c, pack);
  } else {
    constexpr int half = VEC / 2;
    const int odd = threadIdx.x & 1;
    const I first = c - odd * half, second = first + VEC;
    const uint4(&both)[2] = reinterpret_cast<const uint4(&)[2]>(pack);
    const uint4 other = exchange(odd ? both[0] : both[1], 1);
    if (first < n) __stwb(reinterpret_cast<uint4*>(p + first), odd ? other : both[0]);
    if (second < n) __stwb(reinterpret_cast<uint4*>(p + second), odd ? both[1] : other);
  }
}
// VEC elements of any floating dtype from p[i] on, each thread for itself: to be aligned as a pack, of
// 16 bytes at most.
template<int VEC, class A>
__device__ __forceinline__ void load_any(const void* p, DType dtype, int64_t i, A (&x)[VEC]) {
  const auto load = [&](const auto* typed) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    constexpr int part = VEC * sizeof(T) <= 16 ? VEC : 16 / sizeof(T);
#pragma unroll
    for (int k = 0; k < VEC; k += part) {
      const Pack<T, part> pack = load_once<part>(typed + i + k);
#pragma unroll
      for (int j = 0; j < part; ++j) x[k + j] = load_as<A>(pack.v[j]);
    }
  };
  if (dtype == DType::f32)
    load(static_cast<const float*>(p));
  else if (dtype == DType::bf16)
    load(static_cast<const bf16*>(p));
  else if (dtype == DType::f16)
    load(static_cast<const f16*>(p));
  else
    load(static_cast<const double*>(p));
}
template<int VEC, class A>
__device__ __forceinline__ void store_any(void* p, DType dtype, int64_t i, const A (&x)[VEC]) {
  const auto store = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int part = VEC * sizeof(T) <= 16 ? VEC : 16 / sizeof(T);
#pragma unroll
    for (int k = 0; k < VEC; k += part) {
      A some[part];
#pragma unroll
      for (int j = 0; j < part; ++j) some[j] = x[k + j];
      store_pack(typed + i + k, pack_as<T>(some));
    }
  };
  if (dtype == DType::f32)
    store(static_cast<float*>(p));
  else if (dtype == DType::bf16)
    store(static_cast<bf16*>(p));
  else if (dtype == DType::f16)
    store(static_cast<f16*>(p));
  else
    store(static_cast<double*>(p));
}
// One element of any floating dtype.
template<class A>
__device__ __forceinline__ A load_one(const void* p, DType dtype, int64_t i = 0) {
  if (dtype == DType::f32) return static_cast<A>(static_cast<const float*>(p)[i]);
  if (dtype == DType::bf16) return load_as<A>(static_cast<const bf16*>(p)[i]);
  if (dtype == DType::f16) return load_as<A>(static_cast<const f16*>(p)[i]);
  return static_cast<A>(static_cast<const double*>(p)[i]);
}

// x as it reads back after a store.
template<class A>
__device__ __forceinline__ A rounded_to(A x, DType dtype) {
  if (dtype == DType::f32) return static_cast<A>(static_cast<float>(x));
  if (dtype == DType::bf16) return load_as<A>(store_as<bf16>(x));
  if (dtype == DType::f16) return load_as<A>(store_as<f16>(x));
  return x;
}

// Sum over groups of `lanes` (a power of two up to 32) lanes, in each of them.
template<class A>
__device__ __forceinline__ A warp_sum(A x, int lanes = 32) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += exchange(x, offset);
  return x;
}
template<class A>
__device__ __forceinline__ A warp_max(A x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const A other = exchange(x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// K sums over a row of threads, blockDim.x of them, in each of its threads: a power of two up to 32,
// or a multiple of 32; 32 warps a block at most. With more than one warp to a row all threads of the
// block call it, and `shared` may be used again without a barrier in between only if another buffer
// served in between.
template<int K, class A>
__device__ __forceinline__ void row_sum(A (&x)[K], A (*shared)[32]) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
  for (int k = 0; k < K; ++k) x[k] = warp_sum(x[k], blockDim.x < 32 ? blockDim.x : 32);
  if (warps <= 1) return;
  const int first = threadIdx.y * warps;
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (lane == 0) shared[k][first + threadIdx.x / 32] = x[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) x[k] = warp_sum(lane < warps ? shared[k][first + lane] : A(0));
}

TW_END
