// The micro-kernel of gemm.h for fp32 and fp64 sums, in fused multiply-adds of the operands widened to S.
#pragma once
#include "trainwright/gemm_pack.h"

TW_BEGIN

// What the blocking of gemm.h asks of a way to multiply; so too the tiles of gemm_bf16.h and gemm_amx.h.
template<class S>
struct FmaTile {
  static constexpr int L = lanes<S>;
  // 28 + 2 of 32 registers with AVX-512, 12 + 2 of 16 with AVX2: as many sums as hide the latency
  // of the FMA units, and fewest loads per FMA.
  static constexpr int MR = TW_VEC_BYTES == 64 ? 14 : 6;
  static constexpr int NR = 2 * L;
  static constexpr int64_t STEP = 1;  // k in a step of a panel: MR or NR values of S
  static constexpr int64_t UNIT = 1;  // a panel has a multiple of so many steps
  struct Session {};                  // lives in a thread while it multiplies

  // tile (rows, NR) = or += panel of A (kc, MR) x panel of B (kc, NR), kc steps.
  using MicroFn = void (*)(int64_t kc, const S* a, const S* b, S* tile, bool add);
  static MicroFn micro(int64_t rows);
  static PackFn<S> pack_a(DType t) { return pack_function<S, MR>(t); }
  static PackFn<S> pack_b(DType t) { return pack_function<S, NR>(t); }
};

// Only the first ROWS of A's MR.
template<class S, int ROWS>
void fma_kernel(int64_t kc, const S* a, const S* b, S* tile, bool add) {
  constexpr int L = FmaTile<S>::L, MR = FmaTile<S>::MR, NR = FmaTile<S>::NR;
  vec<S> c[ROWS][2];
#pragma GCC unroll 14
  for (int i = 0; i < ROWS; ++i) {
    c[i][0] = c[i][1] = vec<S>{};
    __builtin_prefetch(tile + i * NR);  // needed only at the end, when `add`
    __builtin_prefetch(tile + i * NR + L);
  }
  // Unrolled: the loop's own instructions would otherwise fill a decoder of four a cycle.
#pragma GCC unroll 4
  for (int64_t k = 0; k < kc; ++k, a += MR, b += NR) {
    const vec<S> b0 = vload<S>(b), b1 = vload<S>(b + L);
#pragma GCC unroll 14
    for (int i = 0; i < ROWS; ++i) {
      const vec<S> x = splat<S>(a[i]);
      c[i][0] += x * b0;
      c[i][1] += x * b1;
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < ROWS; ++i) {
    S* to = tile + i * NR;
    if (add) {
      c[i][0] += vload<S>(to);
      c[i][1] += vload<S>(to + L);
    }
    vstore<S>(to, c[i][0]);
    vstore<S>(to + L, c[i][1]);
  }
}

template<class S, size_t... I>
auto fma_function(int64_t rows, std::index_sequence<I...>) {
  static constexpr typename FmaTile<S>::MicroFn table[] = {&fma_kernel<S, int(I) + 1>...};
  return table[rows - 1];
}
template<class S>
typename FmaTile<S>::MicroFn FmaTile<S>::micro(int64_t rows) {
  return fma_function<S>(rows, std::make_index_sequence<MR>{});
}

TW_END
