// Attention forward on tensor cores (sm_80 and later; formulas in trainwright/flash_attention.h).
//
// A block of threads has kRows queries of one head and walks over the blocks of keys that they see, the last
// first. Tiles of K and V arrive in turn in a ring of kSlots tiles of shared memory by cp.async, kSlots - 1
// tiles ahead; each of them costs one barrier. Scores stay in registers: a warp has MT times 16 queries
// by itself, so that a row's maximum takes two shuffles. It is looked for in the first block of keys only: what a
// row's p are relative to stays as it is until those that a lane has of it sum up to more than kMost. The scores of that
// block are then computed again, for their maximum. (The sums are in fp32, which has the room.)
//
// Only the blocks on the edge of the band compare positions. There, inf and NaN of V become 0 in shared
// memory, since 0 * NaN would reach a query that does not see them; if there were any, they are added
// after the loop where they are seen.
// SPLIT: few queries, many keys (trainwright/flash_attention.h). A block of threads has all queries of the heads that
// share keys, packed into one tile, and one piece of the keys; out and lse of each piece go to a workspace in fp32, and
// flash_attention_split.cuh puts them together. It takes every option, so it is compiled with TERMS only.
//
// Bytes: q and out once, k and v once for each block of queries that sees them. FLOPs: 4 Tq Tk D per head.
// Bound: tensor cores. Counted on the virtual GPU, tests/vgpu/test_attention_counts.py; not yet timed on a GPU.
// Issue slots for each tensor-core instruction where a loop has no edge and rescales nothing, in the machine code of
// sm_80 (nvcc 13.0): 4.3 with D = 64, 2.9 with D = 128. FlashAttention-2's method in the same tiles wants 3.7 and 2.4 and
// no addresses: the product, what ldmatrix loads for it (0.3), and of each score a maximum, an FMA, an exp2, a sum and
// half a conversion. Here there is no maximum; the rest is where to copy from and to, with D = 128 computed anew so that
// it takes no registers. A tensor core of sm_80 is busy for 8 slots with each.
#pragma once
#include "cuda/flash_attention_terms.cuh"

TW_BEGIN

// Shared memory stays below the 99 KiB that sm_86, sm_89 and sm_120 have; with D up to 128 two blocks fit
// into the 163 KiB of sm_80. MT = 2: each fragment of K and V that is read from shared memory serves two
// products; with D = 256 the accumulators of two would not fit in registers.
template<int HD, bool TERMS, bool SPLIT>
struct ForwardTiles {
  static constexpr int MT = HD == 256 || TERMS ? 1 : 2, kWarps = HD == 256 && !SPLIT ? 8 : 4;
  static constexpr int kRows = 16 * MT * kWarps, kKeys = HD == 256 ? 32 : 64;
  static constexpr int kSlots = HD == 64 ? 4 : HD == 256 && !SPLIT ? 2 : 3;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kQBytes = kRows * Tile<HD>::kPitch, kSlotBytes = kKeys * Tile<HD>::kPitch;
  static constexpr int kMoreBytes = 48;
  static constexpr int kShared = kQBytes + kSlots * kSlotBytes + kMoreBytes;
  static constexpr int kBlocks = HD == 256 ? 1 : 2;  // on a multiprocessor
  static_assert(!SPLIT || (TERMS && kRows == kSplitRows && kSplitKeys % kKeys == 0));
};

constexpr float kMost = 256.0f;

// The keys that rows of queries see, as blocks of KEYS: [first, last), of which those inside
// [full_begin, full_end) are seen whole by all.
struct KeyBlocks {
  int first, last, full_begin, full_end;

  template<int KEYS>
  __device__ __forceinline__ static KeyBlocks of(const Band& band, int i0, int i1) {
    const int end = static_cast<int>(band.end(i1 - 1));
    return {static_cast<int>(band.begin(i0)) / KEYS, (end + KEYS - 1) / KEYS,
            static_cast<int>(band.begin(i1 - 1)), static_cast<int>(band.end(i0))};
  }
  __device__ __forceinline__ bool edge(int n0, int n1) const {
    return n0 < full_begin || n1 > full_end;
  }
};

// What this block of threads works on.
template<int ROWS, bool SPLIT>
struct QueryBlock {
  int group;  // heads that its rows belong to, from h on: row r is query i0 + r / group of head h + r % group
  int b, h, kv_head, i0, piece;  // i0: its first query
  Sequence seq;

  // Under a causal mask the last queries have the most work, so they come first.
  __device__ __forceinline__ QueryBlock(const AttentionForward& a, int block)
      : group(SPLIT ? a.shape.H / a.shape.G : 1),
        b(SPLIT ? block / a.split.pieces / a.shape.G : block / a.q_blocks / a.shape.H),
        h(SPLIT ? block / a.split.pieces % a.shape.G * group : block / a.q_blocks % a.shape.H),
        kv_head(h / (a.shape.H / a.shape.G)),
        i0(SPLIT ? 0 : (a.q_blocks - 1 - block % a.q_blocks) * ROWS),
        piece(SPLIT ? block % a.split.pieces : 0),
        seq(a.shape, b) {}
  __device__ __forceinline__ int query(int row) const { return SPLIT ? row / group : i0 + row; }
  __device__ __forceinline__ int head(int row) const { return SPLIT ? h + row % group : h; }
  __device__ __forceinline__ int rows() const { return SPLIT ? seq.Tq * group : seq.Tq - i0; }
};

template<class T, int HD, bool TERMS, bool SPLIT = false>
__global__ void __launch_bounds__(ForwardTiles<HD, TERMS, SPLIT>::kThreads,
                                  ForwardTiles<HD, TERMS, SPLIT>::kBlocks)
    flash_attention_fwd_kernel(const __grid_constant__ AttentionForward a) {
  using Tiles = ForwardTiles<HD, TERMS, SPLIT>;
  using Block = QueryBlock<Tiles::kRows, SPLIT>;
  constexpr int MT = Tiles::MT, KEYS = Tiles::kKeys, SLOTS = Tiles::kSlots;
  // Scores are products here, in units of c, and scores themselves in natural units with terms: c is 1 then.
  extern __shared__ __align__(128) char memory[];
  const AttentionShape& shape = a.shape;
  const Block at(a, hidden_block());
  const Sequence& seq = at.seq;
  const int i0 = at.i0;
  if (i0 >= seq.Tq) return;
  const Band band = seq.band(shape);
  if (a.split.pieces && Pieces::split(band, shape.H / shape.G) != SPLIT) return;
  KeyBlocks blocks = KeyBlocks::of<KEYS>(band, i0, SPLIT ? seq.Tq : min(i0 + Tiles::kRows, seq.Tq));
  if constexpr (SPLIT) {
    const Pieces pieces = Pieces::of(band);
    const int piece = static_cast<int>(pieces.first) + at.piece;
    if (piece >= pieces.last) return;
    constexpr int of_piece = kSplitKeys / KEYS;
    blocks.first = max(blocks.first, piece * of_piece);
    blocks.last = min(blocks.last, (piece + 1) * of_piece);
  }
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_row = threadIdx.x / 32 * 16 * MT;

  const uint32_t q_tile = shared_address(memory), ring = q_tile + Tiles::kQBytes;
  // In registers through the loop this would be too much with D = 128.
  struct Shared {
    const T* head[2];  // of k and v: their first rows
    KeyBlocks blocks;
    int Tk, odd;  // odd: whether some V had inf or NaN where not all see it
  };
  Shared& shared = *reinterpret_cast<Shared*>(memory + Tiles::kShared - Tiles::kMoreBytes);
  static_assert(sizeof(Shared) <= Tiles::kMoreBytes);
  if (threadIdx.x == 0)
    shared = {{head_of<T>(a.k, shape, at.b, seq.k_row, at.kv_head),
               head_of<T>(a.v, shape, at.b, seq.k_row, at.kv_head)},
              blocks,
              seq.Tk,
              0};
  __syncthreads();
  // Tiles of K (0) and V (1) of block n. Each call is a group of copies, with or without a tile in it.
  const auto fetch = [&](int which, uint32_t tile, int n) {
    if (n >= blocks.first) {
      // With D = 64 there are registers for where to copy from and to.
      const TileCopy<HD, KEYS, Tiles::kThreads> copy(HD == 64 && !TERMS ? threadIdx.x
                                                                        : hidden_thread());
      const int64_t stride = which ? a.v.row : a.k.row;
      copy.start(tile, copy.part(shared.head[which] + int64_t{n} * KEYS * stride, stride), stride,
                 shared.Tk - n * KEYS, which ? shape.Dv : shape.D);
    }
    commit_copies();
  };
  uint32_t slot = ring;  // where the current tile lies; the next goes where the one before it lay
  const auto before = [&] {
    return slot == ring ? ring + (SLOTS - 1) * Tiles::kSlotBytes : slot - Tiles::kSlotBytes;
  };
  const auto advance = [&] {
    slot += Tiles::kSlotBytes;
    if (slot == ring + SLOTS * Tiles::kSlotBytes) slot = ring;
  };

  const TileCopy<HD, Tiles::kRows, Tiles::kThreads> copy_q;
  if constexpr (SPLIT)
    copy_q.start_rows(
        q_tile,
        [&](int row) {
          return head_of<T>(a.q, shape, at.b, seq.q_row + at.query(row), at.head(row));
        },
        at.rows(), shape.D);
  else
    copy_q.start(q_tile, copy_q.part(head_of<T>(a.q, shape, at.b, seq.q_row + i0, at.h), a.q.row),
                 a.q.row, seq.Tq - i0, shape.D);
  commit_copies();
#pragma unroll
  for (int f = 0; f < SLOTS - 1; ++f) {
    const uint32_t tile = ring + f * Tiles::kSlotBytes;
    fetch(f % 2, tile, blocks.last - 1 - f / 2);
  }
  if (!TERMS && a.negative) {
    wait_copies<SLOTS - 1>();
    copy_q.for_words(memory, [](uint32_t& pair) { pair ^= 0x80008000u; });
  }

  const Lanes<HD> down = Lanes<HD>::down(), across = Lanes<HD>::across();
  using Terms = Pairs<false, MT, KEYS, SPLIT>;
  const bool idle = SPLIT && warp_row >= at.rows();  // a warp without rows
  const uint32_t q_rows = q_tile + warp_row * Tile<HD>::kPitch;
  float acc[MT][HD / 8][4], base[MT][2], sum[MT][2];  // base: what p is relative to, in base 2
  clear(acc);
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) base[m][half] = -FLT_MAX, sum[m][half] = 0.0f;

#pragma unroll 1
  for (int n = blocks.last - 1; n >= blocks.first; --n) {
    const bool edge = (TERMS && a.terms.bias) || shared.blocks.edge(n * KEYS, n * KEYS + KEYS);
    wait_copies<SLOTS - 2>();
    __syncthreads();  // K is there, and the tile before it is done with
    fetch((SLOTS - 1) % 2, before(), n - (SLOTS - 1) / 2);
    float s[MT][KEYS / 8][4], part[MT][2];
    [[maybe_unused]] uint32_t dropped = 0;
    bool rising = n == shared.blocks.last - 1;
    uint32_t over = ~0u;  // a bit for each of this lane's rows: it needs another base
#pragma unroll 1
    while (true) {
      clear(s);
      if (!idle) product_of_rows<T, HD, MT, KEYS>(s, q_rows, down, slot, across);
      if constexpr (TERMS)
        if (!idle) {
          const Block here(a, hidden_block());
          const Terms pairs{a.terms,          here.seq.Tq, here.seq.Tk,
                            here.b,           here.h,      here.i0 + warp_row + g,
                            n * KEYS + 2 * t, here.group};
          pairs.score(s, [](int, int, int, float) {});
          if (a.terms.seed) dropped = pairs.dropped();
        }
      if (edge) {
        const Block here(a, hidden_block());
        const auto [low, high] = here.seq.reach(shape);
        const int Tk = here.seq.Tk;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = here.query(warp_row + 16 * m + 8 * half + g);
            const int begin = i + low - n * KEYS - 2 * t;
            const int end = min(i + high, Tk) - n * KEYS - 2 * t;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
              for (int e = 0; e < 2; ++e)
                if (8 * j + e < begin || 8 * j + e >= end) s[m][j][2 * half + e] = -INFINITY;
          }
      }
      if (rising) {
        over |= __shfl_xor_sync(0xffffffffu, over, 1);
        over |= __shfl_xor_sync(0xffffffffu, over, 2);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float x = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
            for (int j = 1; j < KEYS / 8; ++j)
              x = fmaxf(x, fmaxf(s[m][j][2 * half], s[m][j][2 * half + 1]));
            x = fmaxf(x, exchange(x, 1));
            x = fmaxf(x, exchange(x, 2));
            const float top = TERMS ? x : x * a.c;
            const bool rises = (over >> (2 * m + half) & 1) && top > base[m][half];
            const float falls = base[m][half] - top;
            const float factor = rises ? exp2_fast(TERMS ? falls * kLog2e : falls) : 1.0f;
            if (rises) base[m][half] = top;
            sum[m][half] *= factor;
#pragma unroll
            for (int d = 0; d < HD / 8; ++d) {
              acc[m][d][2 * half] *= factor;
              acc[m][d][2 * half + 1] *= factor;
            }
          }
      }
      over = 0;
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float all = 0.0f;
#pragma unroll
          for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& x = s[m][j][2 * half + e];
              // Not the product with c first: with terms, a score may be the least float.
              x = exp2_fast(TERMS ? (x - base[m][half]) * kLog2e : fmaf(x, a.c, -base[m][half]));
              all += x;
            }
          part[m][half] = all;
          if (all > kMost) over |= 1u << (2 * m + half);
        }
      if (rising || !__any_sync(0xffffffffu, over != 0)) break;
      rising = true;
    }
    advance();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] += part[m][half];

    if constexpr (TERMS)
      Terms::for_each([&](int m, int j, int r) {
        if (dropped >> ((m * KEYS / 8 + j) * 4 + r) & 1) s[m][j][r] = 0.0f;
      });
    uint32_t p[MT][KEYS / 16][4];
    to_operands<T, MT, KEYS>(s, p);

    wait_copies<SLOTS - 2>();
    if (edge) {
      const TileCopy<HD, KEYS, Tiles::kThreads> copy(hidden_thread());
      copy.for_words(memory + (slot - q_tile), [&](uint32_t& x) {
        if (clean_pair<T>(x)) shared.odd = 1;
      });
    }
    __syncthreads();  // V is there, and K is done with
    fetch(SLOTS % 2, before(), n - SLOTS / 2);
    if (!idle) product_with<T, HD, MT, KEYS>(acc, p, slot, down);
    advance();
  }

  wait_copies<0>();
  const Block end(a, hidden_block());
  __syncthreads();
  if (shared.odd) {
    const KeyBlocks blocks = shared.blocks;
    [[maybe_unused]] const Terms pairs{a.terms, end.seq.Tq, end.seq.Tk, end.b, end.h, 0, 0};
    const T* v = head_of<T>(a.v, shape, end.b, end.seq.k_row, end.kv_head) + 2 * t;
#pragma unroll 1
    for (int key = blocks.first * KEYS; key < min(blocks.last * KEYS, end.seq.Tk); ++key) {
      const int n0 = key / KEYS * KEYS;
      if (!(TERMS && a.terms.bias) && !blocks.edge(n0, n0 + KEYS)) continue;
#pragma unroll
      for (int d = 0; d < HD / 8; ++d) {
        if (8 * d + 2 * t >= shape.Dv) continue;
        const Pack<T, 2> pair = load_pack<2>(v + key * a.v.row + 8 * d);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = load_as<float>(pair.v[e]);
          if (isfinite(x)) continue;
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int row = warp_row + 16 * m + 8 * half + g, i = end.query(row);
              if (i >= end.seq.Tq || !end.seq.band(shape).sees(i, key)) continue;
              if constexpr (TERMS)
                if (pairs.hides(end.head(row), i, key)) continue;
              acc[m][d][2 * half + e] += x;
            }
        }
      }
    }
  }

  float factor[MT][2];
  const int rows = end.rows() - warp_row;
  [[maybe_unused]] const int64_t slot_row =
      a.split.row(shape.G, end.b, end.kv_head, end.seq.k_row, end.piece) + warp_row;
  float* lse = SPLIT ? a.split.lse + slot_row
                     : a.lse + lse_of(shape, end.seq, end.b, end.h) + end.i0 + warp_row;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = sum[m][half];
      l += exchange(l, 1);
      l += exchange(l, 2);
      const int row = 16 * m + 8 * half + g;
      const float log = log2f(l) * kLn2;
      const float all = l == 0.0f ? -INFINITY
                        : TERMS   ? base[m][half] + log
                                  : base[m][half] * kLn2 + log;
      if (t == 0 && row < rows) lse[row] = all;
      float x = l == 0.0f ? 0.0f : 1.0f / l;
      if constexpr (TERMS) {
        x *= a.terms.keep;
        if (!SPLIT && a.terms.sinks && l != 0.0f)
          x /= 1.0f + exp2_fast((a.terms.sinks[end.h] - all) * kLog2e);
      }
      factor[m][half] = x;
    }
  if constexpr (SPLIT) {
    float* out = a.split.out + slot_row * a.split.width + 2 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * half + g;
      if (row >= rows) continue;
#pragma unroll
      for (int d = 0; d < HD / 8; ++d)
        if (8 * d < a.split.width)
          store_pack(out + row * a.split.width + 8 * d,
                     Pack<float, 2>{acc[0][d][2 * half] * factor[0][half],
                                    acc[0][d][2 * half + 1] * factor[0][half]});
    }
  } else {
    T* out =
        const_cast<T*>(head_of<T>(a.out, shape, end.b, end.seq.q_row + end.i0 + warp_row, end.h));
    store_rows<T, HD, MT>(acc, factor, memory + warp_row * Tile<HD>::kPitch, out, a.out.row, rows,
                          shape.Dv, a.wide);
  }
}

template<class T, int HD, bool TERMS, bool SPLIT>
void launch_attention_forward_kernel(AttentionForward a, cudaStream_t stream) {
  using Tiles = ForwardTiles<HD, TERMS, SPLIT>;
  a.q_blocks = static_cast<int>(divide_up(a.shape.Tq, Tiles::kRows));
  const int64_t tiles =
      SPLIT ? int64_t{a.split.pieces} * a.shape.G : int64_t{a.q_blocks} * a.shape.H;
  const auto kernel = flash_attention_fwd_kernel<T, HD, TERMS, SPLIT>;
  allow_shared(kernel, Tiles::kShared);
  kernel<<<static_cast<unsigned>(tiles * a.shape.B), Tiles::kThreads, Tiles::kShared, stream>>>(a);
}

template<class T, int HD>
void launch_attention_forward(AttentionForward a, cudaStream_t stream) {
  // A dense batch is split or not; of a packed one, which of its sequences are is known on the device only.
  if (!a.split.pieces || a.shape.first_q)
    with_bool(a.terms.any, [&](auto terms) {
      launch_attention_forward_kernel<T, HD, decltype(terms)::value, false>(a, stream);
    });
  if (a.split.pieces) launch_attention_forward_kernel<T, HD, true, true>(a, stream);
}

TW_END
