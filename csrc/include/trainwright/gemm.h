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
// Packing (gemm_pack.h) widens to the type of the sums, so that the micro-kernel (gemm_fma.h) is the
// same for every storage type: a CPU without bf16 arithmetic runs bf16 at its fp32 rate. For one with
// it, AVX512-BF16 (gemm_bf16.h) and AMX (gemm_amx.h) are other "tiles": micro-kernel, MR, NR and
// panels; the blocking here and the epilogue (gemm_store.h) are the same. Every sum runs over k in an
// order that K alone decides. So a result depends on its row of A and its column of B: not on strides,
// M, N, the threads or the blocking above.
//
// 2 M N K FLOPs; M K + K N + M N elements of memory. Bound: the FMA units.
#pragma once
#include "trainwright/gemm_amx.h"
#include "trainwright/gemm_bf16.h"
#include "trainwright/gemm_store.h"
#include "trainwright/parallel.h"
#include "trainwright/scratch.h"

TW_BEGIN

template<class S>
struct Gemm {
  static constexpr int64_t SERIAL_FLOPS = 1 << 18;  // below, waking the threads costs more

  // lower: the result is known to be symmetric (M = N), and the tiles above its diagonal are left
  // out: half the work. packed: B as pack() left it, for which b.data is not read; or null.
  static void run(int64_t M, int64_t N, int64_t K, GemmOperand a, GemmOperand b,
                  const GemmStore<S>& store, bool lower = false, const S* packed = nullptr);

  // B (K, N) for several products with operands A of a_dtype: packed_bytes() of memory.
  static int64_t packed_bytes(int64_t N, int64_t K, DType a_dtype, DType b_dtype);
  static void pack(int64_t N, int64_t K, DType a_dtype, GemmOperand b, S* to);
};

template<class S, class Tile>
struct GemmCall {
  static constexpr int MR = Tile::MR, NR = Tile::NR;
  static constexpr int64_t K_BLOCK =
      256;  // steps; a panel of B: 16 KiB with AVX2, half an L1 cache
  static constexpr int64_t M_BLOCK = TW_VEC_BYTES == 64 ? 224 : 168 * 4 / int(sizeof(S));
  static constexpr int64_t N_BLOCK = 512;
  static constexpr int64_t PACKED_BYTES = 16 << 20;
  static constexpr int64_t SKINNY_PANELS = 4;
  static constexpr int64_t GROUP = 4;  // panels of B that a skinny task packs together
  static_assert(K_BLOCK % Tile::UNIT == 0);

  int64_t M, N, K;
  GemmOperand a, b;
  const GemmStore<S>& store;
  bool lower = false;
  PackFn<S> pack_a = Tile::pack_a(a.dtype), pack_b = Tile::pack_b(b.dtype);
  int64_t m_panels = (M + MR - 1) / MR, n_panels = (N + NR - 1) / NR;
  int64_t steps = (K + Tile::STEP * Tile::UNIT - 1) / (Tile::STEP * Tile::UNIT) * Tile::UNIT;

  static int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
  static const void* at(const GemmOperand& o, int64_t p, int64_t k) {
    return static_cast<const char*>(o.data) +
           (p * o.stride + k * Tile::STEP * o.k_stride) * dtype_bytes(o.dtype);
  }
  int64_t depth(int64_t k, int64_t kc) const {  // k that steps [k, k + kc) hold
    return smaller(kc * Tile::STEP, K - k * Tile::STEP);
  }

  // Panels [first, first + panels) of A or B, steps [k, k + kc).
  void pack_rows(S* to, int64_t first, int64_t panels, int64_t k, int64_t kc) const {
    pack_a(to, at(a, first * MR, k), a.stride, a.k_stride, M - first * MR, panels, depth(k, kc),
           kc);
  }
  void pack_cols(S* to, int64_t first, int64_t panels, int64_t k, int64_t kc) const {
    pack_b(to, at(b, first * NR, k), b.stride, b.k_stride, N - first * NR, panels, depth(k, kc),
           kc);
  }

  // Panels m0 .. m0 + mp of A against n0 .. n0 + np of B for one K block; tile (j, i) is tiles[(j *
  // mp + i) * MR * NR]. Without `tiles` (K fits one block) each tile goes to the epilogue at once.
  void block(int64_t m0, int64_t mp, int64_t n0, int64_t np, int64_t kc, const S* pa, const S* pb,
             S* tiles, bool first, bool last) const {
    alignas(64) S one[MR * NR];
    [[maybe_unused]] const typename Tile::Session session;
    const typename Tile::MicroFn whole = Tile::micro(MR);
    for (int64_t j = 0; j < np; ++j) {
      const int64_t col = (n0 + j) * NR, cols = smaller(NR, N - col);
      const int64_t above = lower && col / MR > m0 ? col / MR - m0 : 0;
      for (int64_t i = above; i < mp; ++i) {
        const int64_t row = (m0 + i) * MR, rows = smaller(MR, M - row);
        S* tile = tiles ? tiles + (j * mp + i) * MR * NR : one;
        const typename Tile::MicroFn micro = rows == MR ? whole : Tile::micro(rows);
        if (last) store.prefetch(row, col, rows);
        micro(kc, pa + i * kc * MR, pb + j * kc * NR, tile, !first);
        if (last) store.run(store, tile, NR, row, col, rows, cols);
      }
    }
  }

  int64_t threads() const { return 2 * M * N * K < Gemm<S>::SERIAL_FLOPS ? 1 : num_threads(); }

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
        scratch(Scratch::gemm_packed, static_cast<size_t>(m_panels * MR * steps) * sizeof(S)));
    for (int64_t k = 0; k < steps; k += K_BLOCK)
      pack_rows(pa + k * m_panels * MR, 0, m_panels, k, smaller(K_BLOCK, steps - k));
    const int64_t groups = (n_panels + GROUP - 1) / GROUP;
    tasks(groups, [&](int64_t group) {
      const int64_t n0 = group * GROUP, np = smaller(GROUP, n_panels - n0);
      S* pb = static_cast<S*>(
          scratch(Scratch::gemm_task,
                  static_cast<size_t>(GROUP * NR * (K_BLOCK + m_panels * MR)) * sizeof(S)));
      S* tiles = steps > K_BLOCK ? pb + GROUP * NR * K_BLOCK : nullptr;
      for (int64_t k = 0; k < steps; k += K_BLOCK) {
        const int64_t kc = smaller(K_BLOCK, steps - k);
        pack_cols(pb, n0, np, k, kc);
        block(0, m_panels, n0, np, kc, pa + k * m_panels * MR, pb, tiles, k == 0, k + kc == steps);
      }
    });
  }

  void blocked() const {
    const int64_t most = PACKED_BYTES / int64_t(sizeof(S)) / (steps * NR);  // panels at a time
    const int64_t chunk = smaller(n_panels, most < 1 ? 1 : most);
    S* packed = static_cast<S*>(
        scratch(Scratch::gemm_packed, static_cast<size_t>(chunk * NR * steps) * sizeof(S)));
    for (int64_t n0 = 0; n0 < n_panels; n0 += chunk) {
      const int64_t np = smaller(chunk, n_panels - n0);
      pack_chunk(packed, n0, np);
      multiply_chunk(packed, n0, np);
    }
  }

  // packed: K block after K block, each with np panels.
  void pack_chunk(S* packed, int64_t n0, int64_t np) const {
    const int64_t k_blocks = (steps + K_BLOCK - 1) / K_BLOCK;
    const int64_t groups = (np + GROUP - 1) / GROUP;
    tasks(groups * k_blocks, [&](int64_t task) {
      const int64_t first = task % groups * GROUP, k = task / groups * K_BLOCK;
      const int64_t kc = smaller(K_BLOCK, steps - k);
      pack_cols(packed + k * np * NR + first * kc * NR, n0 + first, smaller(GROUP, np - first), k,
                kc);
    });
  }

  void multiply_chunk(const S* packed, int64_t n0, int64_t np) const {
    // Equal tasks: as large as the caches take, but at least four per thread to even out the end,
    // unless they would become so small that packing A again for each shows.
    int64_t tm = (m_panels * MR + M_BLOCK - 1) / M_BLOCK;
    int64_t tn = (np * NR + N_BLOCK - 1) / N_BLOCK;
    // Of a triangle's tasks half are empty or small.
    const int64_t wanted = threads() == 1 ? 1 : (lower ? 8 : 4) * threads();
    while (tm * tn < wanted && m_panels / (tm + 1) >= 4) ++tm;
    while (tm * tn < wanted && np / (tn + 1) >= 8) ++tn;
    const int64_t most_m = (m_panels + tm - 1) / tm, most_n = (np + tn - 1) / tn;
    const int64_t tiles_size = steps > K_BLOCK ? most_m * most_n * MR * NR : 0;
    const int64_t rows_size = most_m * MR * smaller(steps, K_BLOCK);
    tasks(tm * tn, [&](int64_t task) {
      const int64_t ti = task % tm, tj = task / tm;
      const int64_t m0 = ti * m_panels / tm, mp = (ti + 1) * m_panels / tm - m0;
      const int64_t first = tj * np / tn, count = (tj + 1) * np / tn - first;
      if (lower && (m0 + mp) * MR <= (n0 + first) * NR) return;  // all above the diagonal
      S* tiles = static_cast<S*>(
          scratch(Scratch::gemm_task, static_cast<size_t>(tiles_size + rows_size) * sizeof(S)));
      S* pa = tiles + tiles_size;
      for (int64_t k = 0; k < steps; k += K_BLOCK) {
        const int64_t kc = smaller(K_BLOCK, steps - k);
        pack_rows(pa, m0, mp, k, kc);
        block(m0, mp, n0 + first, count, kc, pa, packed + k * np * NR + first * kc * NR,
              tiles_size ? tiles : nullptr, k == 0, k + kc == steps);
      }
    });
  }

  void run(const S* packed) const {
    if (K == 0)
      empty();
    else if (packed)
      multiply_chunk(packed, 0, n_panels);
    else if (m_panels <= SKINNY_PANELS)
      skinny();
    else
      blocked();
  }

  // K = 0: every sum is 0.
  void empty() const {
    alignas(64) S zero[MR * NR] = {};
    for (int64_t row = 0; row < M; row += MR)
      for (int64_t col = 0; col < N; col += NR)
        store.run(store, zero, NR, row, col, smaller(MR, M - row), smaller(NR, N - col));
  }
};

// Calls f with the tile that multiplies operands of these dtypes, as a value of its class (a tag; use decltype).
template<class S, class F>
void with_gemm_tile(DType a, DType b, F&& f) {
  if constexpr (sizeof(S) == 4)
    if (a == DType::bf16 && b == DType::bf16) {
#ifdef TW_AMX
      if (has_amx_bf16()) return f(AmxTile<Amx>{});
      if (emulates_amx_bf16()) return f(AmxTile<EmulatedAmx>{});
#endif
#ifdef TW_DOT_BF16
      if (has_dot_bf16()) return f(DotTile{});
#endif
    }
  f(FmaTile<S>{});
}

template<class S>
void Gemm<S>::run(int64_t M, int64_t N, int64_t K, GemmOperand a, GemmOperand b,
                  const GemmStore<S>& store, bool lower, const S* packed) {
  if (M == 0 || N == 0) return;
  with_gemm_tile<S>(a.dtype, b.dtype, [&](auto tile) {
    GemmCall<S, decltype(tile)>{M, N, K, a, b, store, lower}.run(packed);
  });
}

template<class S>
int64_t Gemm<S>::packed_bytes(int64_t N, int64_t K, DType a_dtype, DType b_dtype) {
  int64_t bytes = 0;
  with_gemm_tile<S>(a_dtype, b_dtype, [&](auto tile) {
    const GemmStore<S> none{};
    const GemmCall<S, decltype(tile)> call{
        1, N, K, {nullptr, 0, 0, a_dtype}, {nullptr, 0, 0, b_dtype}, none};
    bytes = call.n_panels * call.NR * call.steps * int64_t(sizeof(S));
  });
  return bytes;
}

template<class S>
void Gemm<S>::pack(int64_t N, int64_t K, DType a_dtype, GemmOperand b, S* to) {
  with_gemm_tile<S>(a_dtype, b.dtype, [&](auto tile) {
    const GemmStore<S> none{};
    // As many rows as columns: enough work for the threads.
    const GemmCall<S, decltype(tile)> call{N, N, K, {nullptr, 0, 0, a_dtype}, b, none};
    if (N && K) call.pack_chunk(to, 0, call.n_panels);
  });
}

TW_END
