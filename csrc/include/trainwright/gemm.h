// Matrix product on the CPU:  C (M, N) = store(A (M, K) B (K, N)), any strides of A and B, any mix
// of storage types; products are summed in fp32 (fp64 for fp64) and rounded once, by the epilogue.
//
// Blocking (Goto and van de Geijn 2008, as in BLIS):
//   micro-kernel  MR x NR results in registers, K_BLOCK steps over a packed panel of A (MR wide)
//                 and one of B (NR wide). Both panels together fill the L1 cache.
//   task          up to M_BLOCK x N_BLOCK results and the whole of K. Its panels of A are packed
//                 into the L2 cache of its thread; its results wait there, as tiles, between K
//                 blocks.
//   call          the panels of B, at most PACKED_BYTES at a time, are packed once by all threads.
// Up to SKINNY_PANELS panels of rows (M of a few dozen) it pays less to write the packed B to
// memory and read it again: each thread then packs a few panels, uses them at once and forgets
// them.
//
// Packing widens to the type of the sums, so that the micro-kernel is the same for every storage
// type: a CPU without bf16 arithmetic runs bf16 at its fp32 rate; for one with it see
// trainwright/gemm_bf16.h. Every sum runs over k in
// ascending order within a K block, and over the blocks in ascending order. So a result depends on
// its row of A and its column of B alone: not on strides, M, N, the threads or the blocking above.
//
// 2 M N K FLOPs; M K + K N + M N elements of memory. Bound: the FMA units.
#pragma once
#include <utility>

#include "trainwright/activation.h"
#include "trainwright/parallel.h"
#include "trainwright/scratch.h"
#include "trainwright/vec.h"

TW_BEGIN

// One side of the product: element (p, k), p a row of A or a column of B, is data[p * stride + k *
// k_stride].
struct GemmOperand {
  const void* data;
  int64_t stride, k_stride;
  DType dtype;
};

// What becomes of a tile of finished sums (S: float or double).
template<class S>
struct GemmStore {
  // tile: NR wide; rows and cols of it count, and belong at (row, col) of C.
  void (*run)(const GemmStore&, const S* tile, int64_t row, int64_t col, int64_t rows,
              int64_t cols);
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

template<class S>
struct Gemm {
  static constexpr int L = lanes<S>;
  // 28 + 2 of 32 registers with AVX-512, 12 + 2 of 16 with AVX2: as many sums as hide the latency
  // of the FMA units, and fewest loads per FMA.
  static constexpr int MR = TW_VEC_BYTES == 64 ? 14 : 6;
  static constexpr int NR = 2 * L;
  static constexpr int64_t K_BLOCK = 256;  // a panel of B: 16 KiB with AVX2, half an L1 cache
  static constexpr int64_t M_BLOCK = TW_VEC_BYTES == 64 ? 16 * MR : 168 * 4 / int(sizeof(S));
  static constexpr int64_t N_BLOCK = 512;
  static constexpr int64_t PACKED_BYTES = 16 << 20;
  static constexpr int64_t SKINNY_PANELS = 4;
  static constexpr int64_t GROUP = 4;               // panels of B that a skinny task packs together
  static constexpr int64_t SERIAL_FLOPS = 1 << 18;  // below, waking the threads costs more

  // lower: the result is known to be symmetric (M = N), and the tiles above its diagonal are left
  // out: half the work.
  static void run(int64_t M, int64_t N, int64_t K, GemmOperand a, GemmOperand b,
                  const GemmStore<S>& store, bool lower = false);
};

// ---- packing ----------------------------------------------------------------------------------

// Transposes L registers of L lanes: exchanges blocks of 1, 2, 4 ... lanes between pairs of them.
template<int W, class V, size_t... I>
TW_HD void exchange_lanes(V& x, V& y, std::index_sequence<I...>) {
  constexpr int L = sizeof...(I);
  const V a = x, b = y;
  x = __builtin_shufflevector(a, b, ((I & W) ? L + int(I) - W : int(I))...);
  y = __builtin_shufflevector(a, b, ((I & W) ? L + int(I) : int(I) + W)...);
}
template<int L, int W = 1, class V>
TW_HD void transpose(V (&r)[L]) {
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i)
    if (!(i & W)) exchange_lanes<W>(r[i], r[i | W], std::make_index_sequence<L>{});
  if constexpr (2 * W < L) transpose<L, 2 * W>(r);
}

// Stores x to p: all lanes, or only n of them where the rest would overwrite what is there already.
template<int n, class S>
TW_HD void store_lanes(S* p, vec<S> x) {
  memcpy(p, &x, sizeof(S) * (n < lanes<S> ? n : lanes<S>));
}

// Packs `panels` panels, W wide, of kc steps: dst[(panel * kc + k) * W + p]. src is element (0, 0);
// `count` elements along p exist, and the panels are filled up with zeros.
template<class S, int W, class T>
void pack_panels(S* dst, const void* source, int64_t stride, int64_t k_stride, int64_t count,
                 int64_t panels, int64_t kc) {
  constexpr int L = lanes<S>;
  const T* src = static_cast<const T*>(source);
  if (stride == 1) {  // p is contiguous: widen rows of p
    constexpr int padded = (W + L - 1) / L * L;
    constexpr int64_t AHEAD = 8;
    for (int64_t k = 0; k < kc; ++k) {
      const T* from = src + k * k_stride;
      S* to = dst + k * W;
      // Rows lie far apart: the hardware sees no stream to fetch ahead.
      for (int64_t i = 0; i < count && i < panels * W; i += 64 / int(sizeof(T)))
        __builtin_prefetch(from + AHEAD * k_stride + i);
      for (int64_t left = count, j = 0; j < panels; ++j, left -= W, from += W, to += kc * W) {
        if (left >= padded) {
#pragma GCC unroll 4
          for (int i = 0; i < padded; i += L)
            if (i + L <= W)
              store_lanes<L>(to + i, vload<S>(from + i));
            else
              store_lanes<W % L ? W % L : L>(to + i, vload<S>(from + i));
        } else {
          for (int i = 0; i < W; ++i) to[i] = i < left ? load_as<S>(from[i]) : S(0);
        }
      }
    }
    return;
  }
  for (int64_t j = 0; j < panels; ++j, src += W * stride, dst += kc * W, count -= W) {
    const int64_t width = count < W ? count : W;
    int64_t k = 0;
    if (k_stride == 1) {  // k is contiguous: transpose squares of L rows
      // Two bf16 travel as one 32-bit lane and part after the transpose.
      constexpr int PAIR = sizeof(T) == 2 && sizeof(S) == 4 && std::is_same_v<T, bf16> ? 2 : 1;
      for (; k + PAIR * L <= kc; k += PAIR * L) {
#pragma GCC unroll 4
        for (int p0 = 0; p0 < W; p0 += L) {
          constexpr int tail = W % L;
          vec<S> r[L];
#pragma GCC unroll 16
          for (int i = 0; i < L; ++i) {
            if (p0 + i < W && p0 + i < width) {
              const T* from = src + (p0 + i) * stride + k;
              if constexpr (PAIR == 2)
                memcpy(&r[i], from, sizeof r[i]);
              else
                r[i] = vload<S>(from);
            } else {
              r[i] = vec<S>{};
            }
          }
          transpose<L>(r);
          S* to = dst + k * W + p0;
#pragma GCC unroll 16
          for (int i = 0; i < L; ++i) {
            if constexpr (PAIR == 2) {
              const vu u = (vu)r[i];
              const vf even = (vf)(u << 16), odd = (vf)(u & 0xffff0000u);
              if (p0 + L <= W) {
                store_lanes<L>(to + (2 * i) * W, even);
                store_lanes<L>(to + (2 * i + 1) * W, odd);
              } else {
                store_lanes<tail ? tail : L>(to + (2 * i) * W, even);
                store_lanes<tail ? tail : L>(to + (2 * i + 1) * W, odd);
              }
            } else if (p0 + L <= W) {
              store_lanes<L>(to + i * W, r[i]);
            } else {
              store_lanes<tail ? tail : L>(to + i * W, r[i]);
            }
          }
        }
      }
    }
    for (; k < kc; ++k)
      for (int p = 0; p < W; ++p)
        dst[k * W + p] = p < width ? load_as<S>(src[p * stride + k * k_stride]) : S(0);
  }
}

template<class S>
using PackFn = void (*)(S*, const void*, int64_t, int64_t, int64_t, int64_t, int64_t);

template<class S, int W>
PackFn<S> pack_function(DType t) {
  if constexpr (sizeof(S) == 8) {
    return &pack_panels<S, W, double>;
  } else {
    return t == DType::f32    ? &pack_panels<S, W, float>
           : t == DType::bf16 ? &pack_panels<S, W, bf16>
                              : &pack_panels<S, W, f16>;
  }
}

// ---- micro-kernel -----------------------------------------------------------------------------

// tile (ROWS, NR) = or += panel of A (kc, MR) x panel of B (kc, NR). Only the first ROWS of A's MR.
template<class S, int ROWS>
void micro_kernel(int64_t kc, const S* a, const S* b, S* tile, bool add) {
  constexpr int L = Gemm<S>::L, MR = Gemm<S>::MR, NR = Gemm<S>::NR;
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

template<class S>
using MicroFn = void (*)(int64_t, const S*, const S*, S*, bool);

template<class S, size_t... I>
MicroFn<S> micro_function(int64_t rows, std::index_sequence<I...>) {
  static constexpr MicroFn<S> table[] = {&micro_kernel<S, int(I) + 1>...};
  return table[rows - 1];
}
template<class S>
MicroFn<S> micro_function(int64_t rows) {
  return micro_function<S>(rows, std::make_index_sequence<Gemm<S>::MR>{});
}

TW_END
#include "trainwright/gemm_bf16.h"
TW_BEGIN

// ---- epilogue ---------------------------------------------------------------------------------

// out = act(tile + bias) + residual, in S, rounded once to T; pre = tile + bias.
template<class S, class T, class Act>
void store_tile(const GemmStore<S>& s, const S* tile, int64_t row, int64_t col, int64_t rows,
                int64_t cols) {
  const S* bias = s.bias ? s.bias + col : nullptr;
  for (int64_t i = 0; i < rows; ++i, ++row, tile += Gemm<S>::NR) {
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

// ---- driver -----------------------------------------------------------------------------------

template<class S>
struct GemmCall {
  using G = Gemm<S>;
  int64_t M, N, K;  // K: steps of `step` k
  GemmOperand a, b;
  const GemmStore<S>& store;
  bool lower = false;
  int64_t step = 1;
  MicroFn<S> (*micro_for)(int64_t rows) = &micro_function<S>;
  PackFn<S> pack_a = pack_function<S, G::MR>(a.dtype), pack_b = pack_function<S, G::NR>(b.dtype);
  int64_t m_panels = (M + G::MR - 1) / G::MR, n_panels = (N + G::NR - 1) / G::NR;

  const void* at(const GemmOperand& o, int64_t p, int64_t k) const {
    return static_cast<const char*>(o.data) +
           (p * o.stride + k * step * o.k_stride) * dtype_bytes(o.dtype);
  }
  // Pairs of k, where the CPU multiplies and adds them in one instruction.
  void use_pairs() {
#ifdef TW_DOT_BF16
    if constexpr (sizeof(S) == 4) {
      if (a.dtype != DType::bf16 || b.dtype != DType::bf16 || K % 2 || !has_dot_bf16()) return;
      K /= 2;
      step = 2;
      pack_a = &pack_pairs<G::MR>;
      pack_b = &pack_pairs<G::NR>;
      micro_for = [](int64_t rows) {
        return dot_function<G::MR, G::NR>(rows, std::make_index_sequence<G::MR>{});
      };
    }
#endif
  }
  static int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

  // Panels [first, first + panels) of A or B, steps [k, k + kc).
  void pack_rows(S* to, int64_t first, int64_t panels, int64_t k, int64_t kc) const {
    pack_a(to, at(a, first * G::MR, k), a.stride, a.k_stride, M - first * G::MR, panels, kc);
  }
  void pack_cols(S* to, int64_t first, int64_t panels, int64_t k, int64_t kc) const {
    pack_b(to, at(b, first * G::NR, k), b.stride, b.k_stride, N - first * G::NR, panels, kc);
  }

  // Panels m0 .. m0 + mp of A against n0 .. n0 + np of B for one K block; tile (j, i) is tiles[(j *
  // mp + i) * MR * NR]. Without `tiles` (K fits one block) each tile goes to the epilogue at once.
  void block(int64_t m0, int64_t mp, int64_t n0, int64_t np, int64_t kc, const S* pa, const S* pb,
             S* tiles, bool first, bool last) const {
    alignas(64) S one[G::MR * G::NR];
    const MicroFn<S> whole = micro_for(G::MR);
    for (int64_t j = 0; j < np; ++j) {
      const int64_t col = (n0 + j) * G::NR, cols = smaller(G::NR, N - col);
      const int64_t above = lower && col / G::MR > m0 ? col / G::MR - m0 : 0;
      for (int64_t i = above; i < mp; ++i) {
        const int64_t row = (m0 + i) * G::MR, rows = smaller(G::MR, M - row);
        S* tile = tiles ? tiles + (j * mp + i) * G::MR * G::NR : one;
        const MicroFn<S> micro = rows == G::MR ? whole : micro_for(rows);
        if (last) store.prefetch(row, col, rows);
        micro(kc, pa + i * kc * G::MR, pb + j * kc * G::NR, tile, !first);
        if (last) store.run(store, tile, row, col, rows, cols);
      }
    }
  }

  int64_t threads() const { return 2 * M * N * K < G::SERIAL_FLOPS ? 1 : num_threads(); }

  template<class F>
  void tasks(int64_t count, F&& f) const {
    if (threads() == 1)
      for (int64_t t = 0; t < count; ++t) f(t);
    else
      parallel_dynamic(count, f);
  }

  // A packed whole; each task owns a few panels of B from packing to the epilogue.
  void skinny() const {
    S* pa = static_cast<S*>(
        scratch(Scratch::gemm_packed, static_cast<size_t>(m_panels * G::MR * K) * sizeof(S)));
    for (int64_t k = 0; k < K; k += G::K_BLOCK)
      pack_rows(pa + k * m_panels * G::MR, 0, m_panels, k, smaller(G::K_BLOCK, K - k));
    const int64_t groups = (n_panels + G::GROUP - 1) / G::GROUP;
    tasks(groups, [&](int64_t group) {
      const int64_t n0 = group * G::GROUP, np = smaller(G::GROUP, n_panels - n0);
      S* pb = static_cast<S*>(scratch(
          Scratch::gemm_task,
          static_cast<size_t>(G::GROUP * G::NR * (G::K_BLOCK + m_panels * G::MR)) * sizeof(S)));
      S* tiles = K > G::K_BLOCK ? pb + G::GROUP * G::NR * G::K_BLOCK : nullptr;
      for (int64_t k = 0; k < K; k += G::K_BLOCK) {
        const int64_t kc = smaller(G::K_BLOCK, K - k);
        pack_cols(pb, n0, np, k, kc);
        block(0, m_panels, n0, np, kc, pa + k * m_panels * G::MR, pb, tiles, k == 0, k + kc == K);
      }
    });
  }

  void blocked() const {
    const int64_t most = G::PACKED_BYTES / int64_t(sizeof(S)) / (K * G::NR);  // panels at a time
    const int64_t chunk = smaller(n_panels, most < 1 ? 1 : most);
    S* packed = static_cast<S*>(
        scratch(Scratch::gemm_packed, static_cast<size_t>(chunk * G::NR * K) * sizeof(S)));
    for (int64_t n0 = 0; n0 < n_panels; n0 += chunk) {
      const int64_t np = smaller(chunk, n_panels - n0);
      pack_chunk(packed, n0, np);
      multiply_chunk(packed, n0, np);
    }
  }

  // packed: K block after K block, each with np panels.
  void pack_chunk(S* packed, int64_t n0, int64_t np) const {
    const int64_t k_blocks = (K + G::K_BLOCK - 1) / G::K_BLOCK;
    const int64_t groups = (np + G::GROUP - 1) / G::GROUP;
    tasks(groups * k_blocks, [&](int64_t task) {
      const int64_t first = task % groups * G::GROUP, k = task / groups * G::K_BLOCK;
      const int64_t kc = smaller(G::K_BLOCK, K - k);
      pack_cols(packed + k * np * G::NR + first * kc * G::NR, n0 + first,
                smaller(G::GROUP, np - first), k, kc);
    });
  }

  void multiply_chunk(const S* packed, int64_t n0, int64_t np) const {
    // Equal tasks: as large as the caches take, but at least four per thread to even out the end,
    // unless they would become so small that packing A again for each shows.
    int64_t tm = (m_panels * G::MR + G::M_BLOCK - 1) / G::M_BLOCK;
    int64_t tn = (np * G::NR + G::N_BLOCK - 1) / G::N_BLOCK;
    // Of a triangle's tasks half are empty or small.
    const int64_t wanted = threads() == 1 ? 1 : (lower ? 8 : 4) * threads();
    while (tm * tn < wanted && m_panels / (tm + 1) >= 4) ++tm;
    while (tm * tn < wanted && np / (tn + 1) >= 8) ++tn;
    const int64_t most_m = (m_panels + tm - 1) / tm, most_n = (np + tn - 1) / tn;
    const int64_t tiles_size = K > G::K_BLOCK ? most_m * most_n * G::MR * G::NR : 0;
    const int64_t rows_size = most_m * G::MR * smaller(K, G::K_BLOCK);
    tasks(tm * tn, [&](int64_t task) {
      const int64_t ti = task % tm, tj = task / tm;
      const int64_t m0 = ti * m_panels / tm, mp = (ti + 1) * m_panels / tm - m0;
      const int64_t first = tj * np / tn, count = (tj + 1) * np / tn - first;
      if (lower && (m0 + mp) * G::MR <= (n0 + first) * G::NR) return;  // all above the diagonal
      S* tiles = static_cast<S*>(
          scratch(Scratch::gemm_task, static_cast<size_t>(tiles_size + rows_size) * sizeof(S)));
      S* pa = tiles + tiles_size;
      for (int64_t k = 0; k < K; k += G::K_BLOCK) {
        const int64_t kc = smaller(G::K_BLOCK, K - k);
        pack_rows(pa, m0, mp, k, kc);
        block(m0, mp, n0 + first, count, kc, pa, packed + k * np * G::NR + first * kc * G::NR,
              tiles_size ? tiles : nullptr, k == 0, k + kc == K);
      }
    });
  }

  // K = 0: every sum is 0.
  void empty() const {
    alignas(64) S zero[G::MR * G::NR] = {};
    for (int64_t row = 0; row < M; row += G::MR)
      for (int64_t col = 0; col < N; col += G::NR)
        store.run(store, zero, row, col, smaller(G::MR, M - row), smaller(G::NR, N - col));
  }
};

template<class S>
void Gemm<S>::run(int64_t M, int64_t N, int64_t K, GemmOperand a, GemmOperand b,
                  const GemmStore<S>& store, bool lower) {
  if (M == 0 || N == 0) return;
  GemmCall<S> call{M, N, K, a, b, store, lower};
  call.use_pairs();
  if (K == 0)
    call.empty();
  else if (call.m_panels <= SKINNY_PANELS)
    call.skinny();
  else
    call.blocked();
}

TW_END
