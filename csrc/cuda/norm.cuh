// The kernels of the norms of rows, for any Norm<A> as RmsNorm in cuda/rms_norm.cu:
//
// forward   h = x + residual, stored; statistics of the row, stored; y = xhat w + b
// backward  with g = dy w: sums over the row; dx = dx(g, xhat) + dsum; sums over the rows of dy xhat and
//           dy, which are the gradients of w and b
//
// A fixed number of blocks, each with a contiguous range of rows (cuda/rows.cuh). Rows are in registers
// between their one read and their one write, w, b and the column sums all along; the next row is on
// its way while this one is summed. The blocks' column sums are added in block order afterwards:
// repeats are bit-equal.
#pragma once
#include "cuda/rows.cuh"

namespace tw {

struct NormFwd {
  const void *x, *residual, *weight, *bias;  // (N, C), (N, C) or null, (C) or null, (C) or null
  void *y, *sum, *stats;                     // (N, C), (N, C) or null, (N) of Norm<A>::Stats
  int64_t N, C;
  double eps, weight_offset;
  DType weight_dtype, bias_dtype;
  bool wide;  // every address is a multiple of 16
};
template<int K>
struct NormBwd {
  const void *dy, *dsum, *x, *weight, *stats;
  void* dx;           // or null
  void* partials[K];  // dw, db: (slots, C) in acc type, or null
  int64_t N, C, slots;
  double weight_offset;
  DType weight_dtype;
  bool wide;
};

// Statistics in memory are so many numbers.
template<template<class> class Norm, class A>
constexpr int kNormStats = sizeof(typename Norm<A>::Stats) / sizeof(A);

// Blocks of kRowThreads on a multiprocessor: two where 64 registers a thread are enough.
template<int R>
constexpr int kNormFwdBlocks = R <= 1 ? 2 : 1;
template<int R>
constexpr int kNormBwdBlocks = R == 0 ? 2 : 1;
// Elements of a row that a thread keeps in registers at most.
template<class T>
constexpr int kNormFwdElements = sizeof(T) == 8 ? 4 : 16;
template<class T, int K>
constexpr int kNormBwdElements = (sizeof(T) == 2 && K > 1 ? 16 : 32) / sizeof(T);

// The vectors w + offset, or 1, and b, or 0. With R > 0 they are loaded once for a block; its threads
// call this together and use `memory` (see share_vector).
template<int R, int VEC, class A>
__device__ __forceinline__ void load_vector_of(const void* p, DType dtype, int c, int C, A missing,
                                               A* memory, A (&out)[VEC]) {
  if constexpr (R == 0)
    load_vector(p, dtype, c, C, missing, out);
  else
    share_vector(p, dtype, c, C, missing, memory, out);
}
template<int R, int VEC, class A>
__device__ __forceinline__ void load_weight(const void* w, DType dtype, int c, int C, A offset,
                                            A* memory, A (&out)[VEC]) {
  load_vector_of<R>(w, dtype, c, C, A(1), memory, out);
#pragma unroll
  for (int i = 0; i < VEC; ++i) out[i] += w ? offset : A(0);
}

template<template<class> class Norm, class T, int VEC, int R>
__global__ void __launch_bounds__(kRowThreads, kNormFwdBlocks<R>) norm_fwd_kernel(NormFwd a) {
  using A = acc_t<T>;
  using N = Norm<A>;
  constexpr int P = R == 0 ? 1 : R, S = kNormStats<Norm, A>;
  __shared__ A shared[2][2][32], staged[R == 0 ? 1 : VEC * kRowThreads / 2];
  const int length = static_cast<int>(a.C);
  const A offset = static_cast<A>(a.weight_offset);
  const int64_t first = first_row(a.N, blockIdx.x), last = first_row(a.N, blockIdx.x + 1);

  A w[P][VEC], b[P][VEC];
  const auto load_vectors = [&](int r, int c) {
    load_weight<R>(a.weight, a.weight_dtype, c, length, offset, staged, w[r]);
    load_vector_of<R>(a.bias, a.bias_dtype, c, length, A(0), staged, b[r]);
  };
  Pack<T, VEC> next[P], more[P], h[P];
  const auto fetch = [&](int64_t begin) {
    const int64_t row = begin + threadIdx.y, at = row * a.C;
    for_packs<VEC, R>(length, [&](int r, int c) {
      if (row >= last || c >= length) return;
      next[r] = load_once<VEC>(static_cast<const T*>(a.x) + at + c);
      if (a.residual) more[r] = load_once<VEC>(static_cast<const T*>(a.residual) + at + c);
    });
  };
  if constexpr (R > 0) {
    fetch(first);
    for_packs<VEC, R>(length, load_vectors);
  }
  int turn = 0;
  const auto sum_over_row = [&](auto& x) {
    row_sum(x, shared[turn]);
    turn ^= 1;
  };

  for (int64_t begin = first; begin < last; begin += blockDim.y) {
    const int64_t row = begin + threadIdx.y, at = row * a.C;
    const int C = row < last ? length : 0;
    const T* x = static_cast<const T*>(a.x) + at;
    const T* residual = a.residual ? static_cast<const T*>(a.residual) + at : nullptr;
    T *y = static_cast<T*>(a.y) + at, *sum = static_cast<T*>(a.sum) + at;
    if constexpr (R > 0) {
      for_packs<VEC, R>(length, [&](int r, int c) {
        h[r] = next[r];
        if (residual && c < C) store_pack(sum + c, h[r] = pack_sum(next[r], more[r]));
      });
      fetch(begin + blockDim.y);
    }
    bool summed = false;  // R = 0: whether `sum` is written
    const auto row_pack = [&](int r, int c) {
      if constexpr (R > 0) return h[r];
      if (summed || !residual) return load_pack<VEC>((residual ? sum : x) + c);
      const Pack<T, VEC> both = pack_sum(load_once<VEC>(x + c), load_once<VEC>(residual + c));
      store_pack(sum + c, both);
      return both;
    };
    const auto for_elements = [&](auto&& f) {
      for_packs<VEC, R>(length, [&](int r, int c) {
        if (c >= C) return;
        A v[VEC];
        unpack(row_pack(r, c), v);
#pragma unroll
        for (int i = 0; i < VEC; ++i) f(v[i]);
      });
      summed = true;
    };
    const typename N::Stats stats =
        N::stats(for_elements, sum_over_row, a.C, static_cast<A>(a.eps));
    const auto& numbers = reinterpret_cast<const A(&)[S]>(stats);
    A number = numbers[0];
#pragma unroll
    for (int s = 1; s < S; ++s) number = threadIdx.x == s ? numbers[s] : number;
    if (row < last && threadIdx.x < S) static_cast<A*>(a.stats)[row * S + threadIdx.x] = number;

    const A none[N::kSums] = {};
    const typename N::Row factors = N::row(stats, none, a.C);
    for_packs<VEC, R>(length, [&](int r, int c) {
      if constexpr (R == 0) load_vectors(0, c);
      if (c >= C) return;
      A v[VEC];
      unpack(row_pack(r, c), v);
#pragma unroll
      for (int i = 0; i < VEC; ++i)
        v[i] = N::y(v[i], factors, w[R == 0 ? 0 : r][i], b[R == 0 ? 0 : r][i]);
      store_pack(y + c, pack_as<T>(v));
    });
  }
}

template<template<class> class Norm, class T, int VEC, int R>
__global__ void __launch_bounds__(kRowThreads, kNormBwdBlocks<R>)
    norm_bwd_kernel(NormBwd<Norm<acc_t<T>>::kColumns> a) {
  using A = acc_t<T>;
  using N = Norm<A>;
  constexpr int P = R == 0 ? 1 : R, S = kNormStats<Norm, A>, K = N::kColumns;
  // With more elements a thread, registers do not hold what the next step needs as well.
  constexpr bool kAhead = R > 0 && R * VEC * sizeof(A) <= (sizeof(A) == 8 && K > 1 ? 16 : 32);
  extern __shared__ __align__(16) char dynamic[];
  __shared__ A shared[N::kSums][32], row_stats[2][kRowThreads / kFewestRowThreads * S];
  const int length = static_cast<int>(a.C);
  const int me = threadIdx.y * blockDim.x + threadIdx.x, rows = blockDim.y;
  const A offset = static_cast<A>(a.weight_offset);
  const int64_t first = first_row(a.N, blockIdx.x), last = first_row(a.N, blockIdx.x + 1);

  ColumnSums<A, VEC, R, K> columns(reinterpret_cast<A*>(dynamic), length);
  A w[P][VEC];
  const auto load_weights = [&](int r, int c) {
    load_weight<R>(a.weight, a.weight_dtype, c, length, offset, columns.memory, w[r]);
  };
  Pack<T, VEC> next_x[P], next_dy[P], x[P], dy[P], dsum[P];
  const auto fetch = [&](int64_t begin) {
    const int64_t row = begin + threadIdx.y, at = row * a.C;
    for_packs<VEC, R>(length, [&](int r, int c) {
      next_x[r] = next_dy[r] = {};
      if (row >= last || c >= length) return;
      next_x[r] = load_once<VEC>(static_cast<const T*>(a.x) + at + c);
      next_dy[r] = load_once<VEC>(static_cast<const T*>(a.dy) + at + c);
    });
  };
  // The statistics of the block's next rows, one number a thread.
  const auto fetch_stat = [&](int64_t begin) {
    const int64_t at = begin * S + me;
    return me < rows * S && at < last * S ? static_cast<const A*>(a.stats)[at] : A(0);
  };
  A next_stat = fetch_stat(first);
  if constexpr (kAhead) fetch(first);
  if constexpr (R > 0) for_packs<VEC, R>(length, load_weights);

  int turn = 0;  // two buffers in turn: slow warps may still read the one of the rows before
  for (int64_t begin = first; begin < last; begin += rows, turn ^= 1) {
    const int64_t row = begin + threadIdx.y, at = row * a.C;
    const int C = row < last ? length : 0;
    if (me < rows * S) row_stats[turn][me] = next_stat;
    if constexpr (R > 0 && !kAhead) fetch(begin);
    for_packs<VEC, R == 0 ? 1 : R>(length, [&](int r, int) {
      x[r] = next_x[r];
      dy[r] = next_dy[r];
    });
    __syncthreads();
    next_stat = fetch_stat(begin + rows);
    if constexpr (kAhead) fetch(begin + rows);
    typename N::Stats stats;
#pragma unroll
    for (int s = 0; s < S; ++s)
      reinterpret_cast<A(&)[S]>(stats)[s] = row_stats[turn][threadIdx.y * S + s];

    // Calls f(r, c) with x[r or 0], dy[r or 0] and w[r or 0] in place; both are 0 past the end.
    const auto for_row = [&](auto&& f) {
      for_packs<VEC, R>(length, [&](int r, int c) {
        if constexpr (R == 0) {
          load_weights(0, c);
          x[0] = dy[0] = {};
          if (c < C) {
            x[0] = load_pack<VEC>(static_cast<const T*>(a.x) + at + c);
            dy[0] = load_pack<VEC>(static_cast<const T*>(a.dy) + at + c);
          }
        }
        f(r, R == 0 ? 0 : r, c);
      });
    };
    A sums[N::kSums] = {};
    for_row([&](int r, int p, int c) {
#pragma unroll
      for (int i = 0; i < VEC; ++i)
        N::add(sums, load_as<A>(dy[p].v[i]) * w[p][i], load_as<A>(x[p].v[i]), stats);
      if (kAhead && a.dsum && c < C)
        dsum[p] = load_once<VEC>(static_cast<const T*>(a.dsum) + at + c);
    });
    row_sum(sums, shared);
    const typename N::Row factors = N::row(stats, sums, a.C);
    for_row([&](int r, int p, int c) {
      A d[VEC];
      if (!kAhead && a.dsum && c < C)
        dsum[p] = load_once<VEC>(static_cast<const T*>(a.dsum) + at + c);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A g = load_as<A>(dy[p].v[i]), xv = load_as<A>(x[p].v[i]), xhat = N::xhat(xv, factors);
        columns(r, 0, i) += g * xhat;
        if constexpr (K > 1) columns(r, 1, i) += g;
        d[i] = N::dx(g * w[p][i], xv, xhat, factors);
        if (a.dsum) d[i] += load_as<A>(dsum[p].v[i]);
      }
      if (a.dx && c < C) store_pack(static_cast<T*>(a.dx) + at + c, pack_as<T>(d));
    });
  }
  if (a.partials[0]) columns.store(a.partials, length);
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

template<template<class> class Norm, class T>
void launch_norm_fwd(const NormFwd& a, cudaStream_t stream) {
  with_row_layout<T, kNormFwdElements<T>>(a.C, a.wide, [&](auto vec, auto r, dim3 block) {
    constexpr int VEC = decltype(vec)::value, R = decltype(r)::value;
    const auto slots = static_cast<unsigned>(row_slots(a.N, block, kNormFwdBlocks<R>));
    norm_fwd_kernel<Norm, T, VEC, R><<<slots, block, 0, stream>>>(a);
  });
}

// Rows of partial sums.
template<class T, int K>
int64_t norm_bwd_slots(int64_t N, int64_t C, bool wide) {
  int64_t slots = 0;
  with_row_layout<T, kNormBwdElements<T, K>>(C, wide, [&](auto, auto r, dim3 block) {
    slots = row_slots(N, block, kNormBwdBlocks<decltype(r)::value>);
  });
  return slots;
}
template<template<class> class Norm, class T, int K>
void launch_norm_bwd(const NormBwd<K>& a, cudaStream_t stream) {
  with_row_layout<T, kNormBwdElements<T, K>>(a.C, a.wide, [&](auto vec, auto r, dim3 block) {
    constexpr int VEC = decltype(vec)::value, R = decltype(r)::value;
    const int bytes = column_bytes<acc_t<T>, VEC, R, K>(a.C, block);
    const auto kernel = norm_bwd_kernel<Norm, T, VEC, R>;
    allow_shared(kernel, bytes);
    kernel<<<static_cast<unsigned>(a.slots), block, bytes, stream>>>(a);
  });
}

}  // namespace tw
