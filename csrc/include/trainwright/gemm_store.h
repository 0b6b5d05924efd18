// The epilogue of gemm.h: what becomes of a tile of finished sums.
#pragma once
#include "trainwright/activation.h"

TW_BEGIN

// What becomes of a tile of finished sums (S: float or double).
template<class S>
struct GemmStore {
  static constexpr int LARGEST_TILE = 32 * 32;  // of any CPU: rows * cols is at most this
  // tile: rows tile_stride apart; rows and cols of it count, and belong at (row, col) of C.
  void (*run)(const GemmStore&, const S* tile, int64_t tile_stride, int64_t row, int64_t col,
              int64_t rows, int64_t cols);
  void* out;             // (M, N), rows out_stride apart
  void* pre;             // (M, N) dense: receives the sums + bias; or null
  const S* bias;         // (N) or null
  const void* residual;  // (M, N), rows residual_stride apart; or null. May be `out`.
  int64_t N, out_stride, residual_stride;
  int64_t element_bytes;  // of out, pre and residual

  // Asks for the residual of a tile while its sums are made: its rows are far apart in memory.
  void prefetch(int64_t row, int64_t col, int64_t rows) const {
    if (!residual) return;
    const char* p =
        static_cast<const char*>(residual) + (row * residual_stride + col) * element_bytes;
    for (int64_t i = 0; i < rows; ++i) __builtin_prefetch(p + i * residual_stride * element_bytes);
  }
};

// out = act(tile + bias) + residual, in S, rounded once to T; pre = tile + bias.
template<class S, class T, class Act>
void store_tile(const GemmStore<S>& s, const S* tile, int64_t tile_stride, int64_t row, int64_t col,
                int64_t rows, int64_t cols) {
  const S* bias = s.bias ? s.bias + col : nullptr;
  for (int64_t i = 0; i < rows; ++i, ++row, tile += tile_stride) {
    T* out = static_cast<T*>(s.out) + row * s.out_stride + col;
    T* pre = s.pre ? static_cast<T*>(s.pre) + row * s.N + col : nullptr;
    const T* residual =
        s.residual ? static_cast<const T*>(s.residual) + row * s.residual_stride + col : nullptr;
    for_lanes<S>(cols, [&](int64_t j, auto n) {
      vec<S> z = vload<S>(tile + j);
      if (bias) z += vload<S>(bias + j, n);
      if (pre) vstore<S>(pre + j, z, n);
      z = Act::value(z);
      if (residual) z += vload<S>(residual + j, n);
      vstore<S>(out + j, z, n);
    });
  }
}

template<class S>
auto store_function(DType t, Activation activation) -> decltype(GemmStore<S>::run) {
  decltype(GemmStore<S>::run) f = nullptr;
  with_activation(activation, [&](auto act) {
    using Act = decltype(act);
    if constexpr (sizeof(S) == 8)
      f = &store_tile<S, double, Act>;
    else
      f = t == DType::f32    ? &store_tile<S, float, Act>
          : t == DType::bf16 ? &store_tile<S, bf16, Act>
                             : &store_tile<S, f16, Act>;
  });
  return f;
}

TW_END
