// Attention backward on tensor cores (sm_80 and later; formulas in trainwright/flash_attention.h): one kernel, run
// twice. A block of threads keeps rows of two tensors and walks over blocks of rows of two others:
//
//              keeps   streams   of its rows it sums
//   by keys    k, v    q, dout   dv += p^T dout, dk += ds^T q, over the query heads of the group too
//   by queries q, dout k, v      dq += ds k
//
// with x = (first kept) . (first streamed)^T the scores or their transpose, and y = (second kept) . (second
// streamed)^T. Both ways p and ds stay in registers as left operands of the products that sum them. Seven
// products instead of the five that would do with a sum of dq over blocks of threads, but no atomics, no
// second copy of dq in memory, and the same bits every time. Sums are in fp32.
//
// A kernel before prepares lse in base 2 and delta for each query. Only blocks on the edge of the band compare
// positions; there, inf and NaN of what is streamed and summed become 0 in shared memory: q and k with one have an
// lse that tells (p is NaN where it is seen), a dout has a delta that tells, and for dv they are added after
// the loop.
// FLOPs: 14 Tq Tk D per head. Bound: tensor cores, close to the bandwidth of shared memory. Counted on the virtual
// GPU, tests/vgpu/test_attention_counts.py; not yet timed on a GPU.
#pragma once
#include "cuda/flash_attention_terms.cuh"

TW_BEGIN

// Registers hold the 16 MT x HD sums, twice by keys, and the 16 MT x kColumns scores, twice. With D = 256, and
// with terms from 128 on, dk and dv take a launch each. Shared memory as in the forward: two blocks of threads on a multiprocessor of sm_80.
template<int HD, bool KEYS, bool TERMS>
struct BackwardTiles {
  static constexpr int MT = HD == 64 && !TERMS ? 2 : 1, kWarps = 4;
  static constexpr int kRows = 16 * MT * kWarps;
  static constexpr int kColumns = HD == 256 ? 16 : TERMS || (HD == 64 && KEYS) ? 32 : 64;
  static constexpr int kSlots = HD == 64 || HD == 256 || TERMS ? 4 : 3;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeptBytes = kRows * Tile<HD>::kPitch;
  static constexpr int kSlotBytes = kColumns * Tile<HD>::kPitch;
  static constexpr int kStatsBytes =
      KEYS ? 2 * 2 * kColumns * 4 : 0;  // two buffers of lse and delta
  static constexpr int kShared = 2 * kKeptBytes + kSlots * kSlotBytes + kStatsBytes;
  static constexpr int kBlocks = HD == 256 ? 1 : 2;  // on a multiprocessor
  static_assert(kStatsRows % kColumns == 0);
};

// What a block of threads keeps.
template<int ROWS, bool KEYS>
struct KeptBlock {
  int b, head, r0;  // r0: its first row
  Sequence seq;

  // The blocks with the most work under a causal mask come first.
  __device__ __forceinline__ KeptBlock(const AttentionShape& a, int blocks, int block)
      : b(block / blocks / (KEYS ? a.G : a.H)),
        head(block / blocks % (KEYS ? a.G : a.H)),
        r0((KEYS ? block % blocks : blocks - 1 - block % blocks) * ROWS),
        seq(a, b) {}
  __device__ __forceinline__ int rows() const { return KEYS ? seq.Tk : seq.Tq; }
  __device__ __forceinline__ int64_t first_row() const { return KEYS ? seq.k_row : seq.q_row; }
  __device__ __forceinline__ int streamed_rows() const { return KEYS ? seq.Tq : seq.Tk; }
};

// Of the blocks of N streamed rows those that some kept row sees or is seen by, [first, last), and among them
// [full_first, full_last), in which no pair is hidden.
template<int ROWS, bool KEYS, int N>
struct StreamedBlocks {
  int first, last, full_first, full_last;

  __device__ __forceinline__ StreamedBlocks(const AttentionShape& a,
                                            const KeptBlock<ROWS, KEYS>& at) {
    const Sequence& seq = at.seq;
    const Band band = seq.band(a);
    const int64_t r0 = at.r0, r1 = min(at.r0 + ROWS, at.rows());
    const int64_t begin = KEYS ? band.first_row(r0) : band.begin(r0);
    const int64_t end = KEYS ? band.end_row(r1) : band.end(r1 - 1);
    // Rows in [full, full_end) see, or are seen by, all that is kept.
    const int64_t full = KEYS ? band.first_row(r1 - 1) : band.begin(r1 - 1);
    const int64_t full_end = KEYS ? band.end_row(r0 + 1) : band.end(r0);
    first = static_cast<int>(begin) / N;
    last = static_cast<int>(end + N - 1) / N;
    full_first = static_cast<int>(full + N - 1) / N;
    // By keys, queries past the end have p = 0.
    full_last = KEYS && full_end == seq.Tq ? last : static_cast<int>(full_end) / N;
  }
  __device__ __forceinline__ bool edge(int m) const { return m < full_first || m >= full_last; }
};

template<class T, int HD, bool KEYS, bool FIRST, bool SECOND, bool TERMS>
__global__ void __launch_bounds__(BackwardTiles<HD, KEYS, TERMS>::kThreads,
                                  BackwardTiles<HD, KEYS, TERMS>::kBlocks)
    flash_attention_bwd_kernel(const __grid_constant__ AttentionBackward a) {
  using Tiles = BackwardTiles<HD, KEYS, TERMS>;
  constexpr int MT = Tiles::MT, N = Tiles::kColumns, SLOTS = Tiles::kSlots;
  extern __shared__ __align__(128) char memory[];
  const AttentionShape& shape = a.shape;
  const KeptBlock<Tiles::kRows, KEYS> at(shape, a.blocks, hidden_block());
  const Sequence& seq = at.seq;
  const int r0 = at.r0, b = at.b, head = at.head;
  if (r0 >= at.rows()) return;
  const StreamedBlocks<Tiles::kRows, KEYS, N> blocks(shape, at);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_row = threadIdx.x / 32 * 16 * MT;

  const HeadRows &kept0 = KEYS ? a.k : a.q, &kept1 = KEYS ? a.v : a.dout;
  const HeadRows &from0 = KEYS ? a.q : a.k, &from1 = KEYS ? a.dout : a.v;
  const int64_t from_row = KEYS ? seq.q_row : seq.k_row;
  const uint32_t tile0 = shared_address(memory), tile1 = tile0 + Tiles::kKeptBytes;
  const uint32_t ring = tile1 + Tiles::kKeptBytes;
  float* stats = reinterpret_cast<float*>(memory + Tiles::kShared - Tiles::kStatsBytes);

  const TileCopy<HD, Tiles::kRows, Tiles::kThreads> copy_kept;
  copy_kept.start(tile0,
                  copy_kept.part(head_of<T>(kept0, shape, b, at.first_row() + r0, head), kept0.row),
                  kept0.row, at.rows() - r0, shape.D);
  copy_kept.start(tile1,
                  copy_kept.part(head_of<T>(kept1, shape, b, at.first_row() + r0, head), kept1.row),
                  kept1.row, at.rows() - r0, shape.Dv);

  // Streamed: by keys the query heads of the group one after the other. x of block m of head `of`.
  const int group = shape.H / shape.G, stream_heads = KEYS ? group : 1;
  const int first_head = KEYS ? head * group : head / group;
  const auto fetch = [&](uint32_t tile, const HeadRows& x, int of, int m, int width) {
    const TileCopy<HD, N, Tiles::kThreads> copy(hidden_thread());
    const T* rows = head_of<T>(x, shape, b, from_row + int64_t{m} * N, first_head + of);
    copy.start(tile, copy.part(rows, x.row), x.row, at.streamed_rows() - m * N, width);
  };
  const auto fetch_stats = [&](int of, int m, int buffer) {
    if constexpr (KEYS) {
      constexpr int chunks = N / 4;
      const int which = threadIdx.x / chunks, i = threadIdx.x % chunks * 4;
      if (which < 2)
        copy_async(
            shared_address(stats + (2 * buffer + which) * N + i),
            a.stats + which * a.stats_delta + stats_of(a, seq, b, first_head + of) + m * N + i, 16);
    }
  };
  const auto slot = [&](int tile) { return ring + tile % SLOTS * Tiles::kSlotBytes; };
  struct Step {
    int of, m;
  };
  const auto next = [&](Step s) {
    return s.m + 1 < blocks.last ? Step{s.of, s.m + 1} : Step{s.of + 1, blocks.first};
  };
  const int steps = max(blocks.last - blocks.first, 0) * stream_heads;

  const Lanes<HD> down = Lanes<HD>::down(), across = Lanes<HD>::across();
  const uint32_t rows0 = tile0 + warp_row * Tile<HD>::kPitch;
  const uint32_t rows1 = tile1 + warp_row * Tile<HD>::kPitch;
  float acc0[FIRST ? MT : 1][HD / 8][4], acc1[SECOND ? MT : 1][HD / 8][4];
  if constexpr (FIRST) clear(acc0);
  if constexpr (SECOND) clear(acc1);
  float row_lse[MT][2], row_delta[MT][2];
  [[maybe_unused]] float row_alibi[MT][2] = {};
  if constexpr (!KEYS) {
    const float* mine = a.stats + stats_of(a, seq, b, head) + r0 + warp_row + g;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = r0 + warp_row + g + 16 * m + 8 * half;
        const bool exists = row < at.rows();
        row_lse[m][half] = exists ? mine[16 * m + 8 * half] : INFINITY;
        row_delta[m][half] = exists ? mine[a.stats_delta + 16 * m + 8 * half] : 0.0f;
      }
  }
  bool odd = false;

  Step now{0, blocks.first};
  if (steps > 0) {
    fetch(slot(0), from0, 0, blocks.first, shape.D);
    fetch_stats(0, blocks.first, 0);
    if constexpr (SLOTS == 4) fetch(slot(1), from1, 0, blocks.first, shape.Dv);
  }
  commit_copies();
#pragma unroll 1
  for (int i = 0; i < steps; ++i, now = next(now)) {
    const bool edge = (TERMS && a.terms.bias) || blocks.edge(now.m);
    const uint32_t slot0 = slot(2 * i), slot1 = slot(2 * i + 1);
    const auto clean = [&](uint32_t tile) {
      bool found = false;
      const TileCopy<HD, N, Tiles::kThreads> copy(hidden_thread());
      copy.for_words(memory + (tile - tile0), [&](uint32_t& x) { found |= clean_pair<T>(x); });
      return found;
    };
    // The first of this step is there, with four slots the second too; the step before is done with.
    wait_copies<0>();
    if (edge) {
      clean(slot0);
      if (SLOTS == 4 && SECOND) odd |= clean(slot1);
    }
    __syncthreads();
    if constexpr (SLOTS == 3) {
      fetch(slot1, from1, now.of, now.m, shape.Dv);
      commit_copies();
    }
    if (i + 1 < steps) {
      const Step ahead = next(now);
      fetch(slot(2 * i + 2), from0, ahead.of, ahead.m, shape.D);
      fetch_stats(ahead.of, ahead.m, (i + 1) % 2);
      if constexpr (SLOTS == 4) fetch(slot(2 * i + 3), from1, ahead.of, ahead.m, shape.Dv);
    }
    commit_copies();

    float x[MT][N / 8][4];
    clear(x);
    product_of_rows<T, HD, MT, N>(x, rows0, down, slot0, across);
    // With terms: the slope of each score, below 0 for a pair that is hidden, and whether it is dropped.
    [[maybe_unused]] float slope[TERMS ? MT : 1][N / 8][4];
    [[maybe_unused]] uint32_t dropped = 0;
    const auto is_dropped = [&](int m, int j, int r) {
      return TERMS && (dropped >> ((m * N / 8 + j) * 4 + r) & 1);
    };
    const auto pairs_here = [&] {
      const KeptBlock<Tiles::kRows, KEYS> here(shape, a.blocks, hidden_block());
      const int h = KEYS ? here.head * (shape.H / shape.G) + now.of : here.head;
      return Pairs<KEYS, MT, N>{
          a.terms, here.seq.Tq, here.seq.Tk, here.b, h, here.r0 + warp_row + g, now.m * N + 2 * t};
    };
    if constexpr (TERMS) {
      const auto pairs = pairs_here();
      pairs.score(x, [&](int m, int j, int r, float derivative) { slope[m][j][r] = derivative; });
      if (a.terms.seed) dropped = pairs.dropped();
      if (a.terms.bias)
        pairs.for_each([&](int m, int j, int r) {
          if (x[m][j][r] == -INFINITY) slope[m][j][r] = -1.0f;
        });
    }
    const float* column_stats = stats + i % 2 * 2 * N + 2 * t;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float lse = 0.0f;
        if constexpr (KEYS) lse = column_stats[8 * j + e];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& p = x[m][j][2 * half + e];
            const float from = KEYS ? lse : row_lse[m][half];
            p = exp2_fast(TERMS ? (p - from) * kLog2e : fmaf(p, a.c, -from));
          }
      }
    // f of every element that belongs to a pair that is not seen.
    const auto for_hidden = [&](auto&& f) {
      // From places that hide that all of it could be computed before the loop.
      const KeptBlock<Tiles::kRows, KEYS> here(shape, a.blocks, hidden_block());
      const auto [low, high] = here.seq.reach(shape);
      const int row = here.r0 + warp_row + g, past = here.streamed_rows();
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row + 16 * m + 8 * half, c0 = now.m * N + 2 * t;
          const int from = (KEYS ? r - high + 1 : r + low) - c0;
          const int to = min(KEYS ? r - low + 1 : r + high, past) - c0;
#pragma unroll
          for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (8 * j + e < from || 8 * j + e >= to) f(m, j, 2 * half + e);
        }
    };
    if (edge)
      for_hidden([&](int m, int j, int r) {
        x[m][j][r] = 0.0f;
        if constexpr (TERMS) slope[m][j][r] = -1.0f;
      });
    if constexpr (TERMS)
      Pairs<KEYS, MT, N>::for_each([&](int m, int j, int r) {
        if (slope[m][j][r] < 0.0f) x[m][j][r] = 0.0f;
      });
    if constexpr (SLOTS == 3) {
      wait_copies<1>();
      if (edge && SECOND) odd |= clean(slot1);
      __syncthreads();
    }
    if constexpr (SECOND)
      if (a.dv.data) {
        uint32_t p[MT][N / 16][4];
        if constexpr (TERMS) {
          float kept[MT][N / 8][4];
          Pairs<KEYS, MT, N>::for_each([&](int m, int j, int r) {
            kept[m][j][r] = is_dropped(m, j, r) ? 0.0f : x[m][j][r];
          });
          to_operands<T, MT, N>(kept, p);
        } else {
          to_operands<T, MT, N>(x, p);
        }
        product_with<T, HD, MT, N>(acc1, p, slot1, down);
      }
    if constexpr (FIRST) {
      if (KEYS && SECOND && !a.dk.data) continue;
      // By queries with D = 64, half of the columns at a time: all of y beside x spills on sm_120.
      constexpr int PARTS = HD == 64 && !KEYS && !TERMS ? 2 : 1, NY = N / PARTS;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const uint32_t first_row = part * NY * Tile<HD>::kPitch;
        float y[MT][NY / 8][4];
        clear(y);
        product_of_rows<T, HD, MT, NY>(y, rows1, down, slot1 + first_row, across);
#pragma unroll
        for (int j = 0; j < NY / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float delta = 0.0f;
            if constexpr (KEYS) delta = column_stats[N + 8 * j + e];
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int r = 2 * half + e;
                float dp = y[m][j][r];
                if constexpr (TERMS) dp = is_dropped(m, j, r) ? 0.0f : dp * a.terms.keep;
                y[m][j][r] =
                    x[m][part * NY / 8 + j][r] * (dp - (KEYS ? delta : row_delta[m][half]));
              }
          }
        if constexpr (TERMS) {
          Pairs<KEYS, MT, N>::for_each([&](int m, int j, int r) {
            if (slope[m][j][r] < 0.0f) y[m][j][r] = 0.0f;
          });
          if (!KEYS && a.alibi) {
            const auto pairs = pairs_here();
            pairs.for_each([&](int m, int j, int r) {
              row_alibi[m][r / 2] -=
                  y[m][j][r] * pairs.distance(pairs.query(m, j, r), pairs.key(m, j, r));
            });
          }
          Pairs<KEYS, MT, N>::for_each([&](int m, int j, int r) {
            if (slope[m][j][r] >= 0.0f) y[m][j][r] *= slope[m][j][r];
          });
        } else if (edge) {
          for_hidden([&](int m, int j, int r) {
            if (j / (NY / 8) == part) y[m][j % (NY / 8)][r] = 0.0f;
          });
        }
        uint32_t ds[MT][NY / 16][4];
        to_operands<T, MT, NY>(y, ds);
        product_with<T, HD, MT, NY>(acc0, ds, slot0 + first_row, down);
      }
    }
  }

  wait_copies<0>();
  const bool any_odd = __syncthreads_or(odd);
  const KeptBlock<Tiles::kRows, KEYS> kept(shape, a.blocks, hidden_block());
  const int rows = kept.rows() - kept.r0 - warp_row;
  if constexpr (SECOND) {
    if (any_odd) {
      const Band band = kept.seq.band(shape);
      const StreamedBlocks<Tiles::kRows, KEYS, N> streamed(shape, kept);
      const int heads = shape.H / shape.G;
      const auto sees = [&](int i, int key, int h) {
        if (key >= kept.seq.Tk || !band.sees(i, key)) return false;
        return !TERMS ||
               !Pairs<KEYS, MT, N>{a.terms, kept.seq.Tq, kept.seq.Tk, kept.b, h, 0, 0}.hides(h, i,
                                                                                             key);
      };
#pragma unroll 1
      for (int h = kept.head * heads; h < (kept.head + 1) * heads; ++h)
#pragma unroll 1
        for (int i = streamed.first * N; i < min(streamed.last * N, kept.seq.Tq); ++i) {
          if (!(TERMS && a.terms.bias) && !streamed.edge(i / N)) continue;
          const T* dout = head_of<T>(a.dout, shape, kept.b, kept.seq.q_row + i, h) + 2 * t;
#pragma unroll
          for (int d = 0; d < HD / 8; ++d) {
            if (8 * d + 2 * t >= shape.Dv) continue;
            const Pack<T, 2> pair = load_pack<2>(dout + 8 * d);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float x = load_as<float>(pair.v[e]);
              if (isfinite(x)) continue;
#pragma unroll
              for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                  if (sees(i, kept.r0 + warp_row + 16 * m + 8 * half + g, h))
                    acc1[m][d][2 * half + e] += x;
            }
          }
        }
    }
  }

  const auto store = [&](const auto& acc, const HeadRows& to, float scale, int tile, int width,
                         bool wide) {
    float factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m) factor[m][0] = factor[m][1] = scale;
    T* out = const_cast<T*>(
        head_of<T>(to, shape, kept.b, kept.first_row() + kept.r0 + warp_row, kept.head));
    store_rows<T, HD, MT>(acc, factor, memory + tile + warp_row * Tile<HD>::kPitch, out, to.row,
                          rows, width, wide);
  };
  if constexpr (TERMS && !KEYS)
    if (a.alibi) {
      float* sums = a.alibi + stats_of(a, kept.seq, kept.b, kept.head) + kept.r0 + warp_row + g;
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x = row_alibi[m][half];
          x += exchange(x, 1);
          x += exchange(x, 2);
          if (t == 0 && 16 * m + 8 * half + g < rows) sums[16 * m + 8 * half] = x;
        }
    }
  if constexpr (FIRST) {
    const HeadRows& to = KEYS ? a.dk : a.dq;
    if (to.data) store(acc0, to, a.scale, 0, shape.D, a.wide_qk);
  }
  if constexpr (SECOND)
    if (a.dv.data)
      store(acc1, a.dv, TERMS ? a.terms.keep : 1.0f, Tiles::kKeptBytes, shape.Dv, a.wide_v);
}

template<class T, int HD, bool KEYS, bool FIRST, bool SECOND, bool TERMS>
void launch_attention_backward_pass(AttentionBackward a, cudaStream_t stream) {
  using Tiles = BackwardTiles<HD, KEYS, TERMS>;
  const int rows = KEYS ? a.shape.Tk : a.shape.Tq, heads = KEYS ? a.shape.G : a.shape.H;
  if (rows == 0 || heads == 0 || a.shape.B == 0) return;
  a.blocks = static_cast<int>(divide_up(rows, Tiles::kRows));
  const auto kernel = flash_attention_bwd_kernel<T, HD, KEYS, FIRST, SECOND, TERMS>;
  allow_shared(kernel, Tiles::kShared);
  kernel<<<static_cast<unsigned>(int64_t{a.blocks} * a.shape.B * heads), Tiles::kThreads,
           Tiles::kShared, stream>>>(a);
}

template<class T, int HD, bool TERMS>
void launch_attention_backward_passes(const AttentionBackward& a, cudaStream_t stream) {
  if constexpr (HD == 256 || (HD == 128 && TERMS)) {
    if (a.dk.data) launch_attention_backward_pass<T, HD, true, true, false, TERMS>(a, stream);
    if (a.dv.data) launch_attention_backward_pass<T, HD, true, false, true, TERMS>(a, stream);
  } else if (a.dk.data || a.dv.data) {
    launch_attention_backward_pass<T, HD, true, true, true, TERMS>(a, stream);
  }
  if (a.dq.data || a.alibi)
    launch_attention_backward_pass<T, HD, false, true, false, TERMS>(a, stream);
}

template<class T, int HD>
void launch_attention_backward(AttentionBackward a, cudaStream_t stream) {
  with_bool(a.terms.any, [&](auto terms) {
    launch_attention_backward_passes<T, HD, decltype(terms)::value>(a, stream);
  });
}

TW_END
