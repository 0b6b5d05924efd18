// What the attention kernels are made of: the copies that fill tiles (cuda/mma.cuh) of queries, keys and values, and
// the products that read them. A head dim is padded to the next of 64, 96, 128 and 256 with zeros, which cp.async
// writes for nothing.
//
// A warp owns MT times 16 rows of the left operand. Its accumulators, rounded, are the left operand of the next
// product: so the probabilities go from one to the other in registers.
#pragma once
#include <cfloat>

#include "cuda/mma.cuh"
#include "trainwright/flash_attention.h"

TW_BEGIN

constexpr int kFar = 1 << 30;  // longer than any sequence

// ---- arguments ----------------------------------------------------------------------------------

// (B, T, heads, D): rows are contiguous, aligned to 16 bytes and of a multiple of 8 elements that may be read.
struct HeadRows {
  const void* data;
  int64_t batch, row, head;  // strides in elements
};

// Sequences of a packed batch lie behind each other in T; `first` has one more entry than there are.
struct AttentionShape {
  const int32_t *first_q, *first_k;  // null: a dense batch
  int B, H, G, D, Dv;                // B: sequences
  int Tq, Tk;                        // of a dense batch; of a packed one the longest
  int64_t total_q;                   // rows of lse per head
  int64_t left, right;               // kNoLimit for none
  bool top_left;
};

// The number of the block of threads, read in a way that hides that it is always the same: what is computed from
// it inside or after a loop is computed there, rather than before and kept in registers.
__device__ __forceinline__ int hidden_block() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ int hidden_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Where the sequence b of the batch lies.
struct Sequence {
  int64_t q_row, k_row;  // its first
  int Tq, Tk;

  __device__ __forceinline__ Sequence(const AttentionShape& a, int b)
      : q_row(0), k_row(0), Tq(a.Tq), Tk(a.Tk) {
    if (a.first_q) {
      q_row = a.first_q[b];
      k_row = a.first_k[b];
      Tq = a.first_q[b + 1] - static_cast<int>(q_row);
      Tk = a.first_k[b + 1] - static_cast<int>(k_row);
    }
  }
  __device__ __forceinline__ Band band(const AttentionShape& a) const {
    return {Tq, Tk, a.top_left ? 0 : int64_t{Tk} - Tq, a.left, a.right};
  }
  // Query i sees the keys in [i + low, i + high) that exist.
  struct Reach {
    int low, high;
  };
  __device__ __forceinline__ Reach reach(const AttentionShape& a) const {
    const int offset = a.top_left ? 0 : Tk - Tq;
    return {static_cast<int>(max(offset - a.left, int64_t{-kFar})),
            static_cast<int>(min(offset + a.right + 1, int64_t{kFar}))};
  }
};

// Rare options. Kernels without them are compiled apart.
struct AttentionTerms {
  bool any;              // whether the call has one
  float scale, softcap;  // softcap: 0 for none
  const float* alibi;
  int64_t alibi_batch, alibi_head;
  const void* bias;  // (B, H, Tq, Tk), stride 0 where it is broadcast
  DType bias_type;
  int64_t bias_stride[4];
  const float* sinks;   // (H,)
  const int64_t* seed;  // of dropout, and the first head; null: none
  uint32_t last_dropped;
  float keep;  // what is kept is multiplied by
};

// Where the parts of a split forward go: each sequence's slots, one a piece, have `rows` rows of `width` fp32 elements
// for each KV head, and as many lse, natural and without the sink.
struct AttentionSplit {
  int pieces;  // at most, of a sequence; 0: none is split
  bool
      compact;  // whether the slots of a packed batch begin by where its keys do, else every `pieces`
  int rows, width;
  float *out, *lse;

  __device__ __forceinline__ int64_t row(int G, int b, int kv_head, int64_t k_row,
                                         int piece) const {
    const int64_t first = compact ? k_row / kSplitKeys + b : static_cast<int64_t>(b) * pieces;
    return ((first + piece) * G + kv_head) * rows;
  }
};

struct AttentionForward {
  AttentionShape shape;
  HeadRows q, k, v, out;
  float* lse;
  int q_blocks;  // per sequence and head
  AttentionTerms terms;
  float c;        // |scale| log2(e), above 0
  bool negative;  // whether the scale is
  bool wide;      // whether rows of out begin at multiples of 16 bytes
  AttentionSplit split;
};

// Defined in flash_attention_fwd.cuh and flash_attention_bwd.cuh, instantiated in flash_attention_d<HD>.cu.
template<class T, int HD>
void launch_attention_forward(AttentionForward a, cudaStream_t stream);

// What the backward knows of a query: lse, in base 2 where there are no terms (inf where it sees no key, so that p is
// 0), and delta.
// Each sequence begins at a multiple of kStatsRows and is followed by rows of (inf, 0) to the next.
constexpr int kStatsRows = 64;

struct AttentionBackward {
  AttentionShape shape;
  HeadRows q, k, v, dout;
  HeadRows dq, dk, dv;  // no data where not wanted
  float* stats;         // lse; delta is stats_delta elements later
  float* alibi;         // of each query, like stats: its part of the slope's gradient; or null
  int64_t stats_head, stats_delta;  // stats_head: elements for a head
  int blocks;
  AttentionTerms terms;
  float c, scale;        // c = scale log2(e)
  bool wide_qk, wide_v;  // whether rows of dq and dk, of dv begin at multiples of 16 bytes
};

template<class T, int HD>
void launch_attention_backward(AttentionBackward a, cudaStream_t stream);

// Defined in flash_attention_dbias.cuh.
struct BiasGradient {
  AttentionBackward a;
  float* out;   // of the bias's shape
  int size[4];  // that shape: each that of (B, H, Tq, Tk), or 1
  int query_blocks, key_blocks;
};
template<class T, int HD>
void launch_attention_bias_gradient(BiasGradient s, cudaStream_t stream);

__device__ __forceinline__ int64_t stats_of(const AttentionBackward& a, const Sequence& s, int b,
                                            int h) {
  if (!a.shape.first_q) return (static_cast<int64_t>(b) * a.shape.H + h) * a.stats_head;
  return h * a.stats_head + (s.q_row / kStatsRows + b) * kStatsRows;
}

// First element of a head's rows of sequence b.
template<class T>
__device__ __forceinline__ const T* head_of(const HeadRows& x, const AttentionShape& a, int b,
                                            int64_t first_row, int head) {
  return static_cast<const T*>(x.data) + (a.first_q ? 0 : b * x.batch) + first_row * x.row +
         head * x.head;
}
__device__ __forceinline__ int64_t lse_of(const AttentionShape& a, const Sequence& s, int b,
                                          int h) {
  return (a.first_q ? h : static_cast<int64_t>(b) * a.H + h) * a.total_q + s.q_row;
}

// ---- tiles --------------------------------------------------------------------------------------

// How the threads of a block share the chunks of a tile of ROWS rows: each has the same chunks of every
// kStep-th row.
template<int HD, int ROWS, int THREADS>
struct TileCopy {
  static constexpr int kAcross = Tile<HD>::kXor;  // threads side by side in a row
  static constexpr int kStep = THREADS / kAcross;
  static constexpr int kGroups = HD / 8 / kAcross;
  static_assert(ROWS % kStep == 0 && kStep % 8 == 0);
  int row, chunk, offset;

  __device__ __forceinline__ explicit TileCopy(int thread = threadIdx.x)
      : row(thread / kAcross), chunk(thread % kAcross), offset(Tile<HD>::at(row, chunk)) {}

  // This thread's part of rows that begin at `from`.
  template<class T>
  __device__ __forceinline__ const T* part(const T* from, int64_t stride) const {
    return from + row * stride + chunk * 8;
  }
  // Of rows of `width` elements those before `rows`; the others, and chunks past the width, become 0.
  // `p` is a part().
  template<class T>
  __device__ __forceinline__ void start(uint32_t tile, const T* p, int64_t stride, int rows,
                                        int width) const {
    int size[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) size[g] = (chunk + g * kAcross) * 8 < width ? 16 : 0;
    if (rows >= ROWS) {
#pragma unroll
      for (int r = 0; r < ROWS; r += kStep, p += kStep * stride)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) copy(tile, p, r, g, size[g]);
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; r += kStep, p += kStep * stride)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) copy(tile, p, r, g, row + r < rows ? size[g] : 0);
    }
  }
  // The same of rows that lie anywhere: row i at from(i).
  template<class F>
  __device__ __forceinline__ void start_rows(uint32_t tile, F&& from, int rows, int width) const {
#pragma unroll 1
    for (int r = 0; r < ROWS; r += kStep) {
      const bool exists = row + r < rows;
      const auto* p = from(exists ? row + r : 0) + chunk * 8;
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        copy(tile, p, r, g, exists && (chunk + g * kAcross) * 8 < width ? 16 : 0);
    }
  }
  template<class T>
  __device__ __forceinline__ void copy(uint32_t tile, const T* p, int r, int g, int size) const {
    copy_async(tile + offset + r * Tile<HD>::kPitch + g * kAcross * 16, p + g * kAcross * 8, size);
  }
  // Calls f(word) for the 4-byte words of the chunks that this thread copied: after its wait, before the
  // barrier that shows them to the others.
  template<class F>
  __device__ __forceinline__ void for_words(char* tile, F&& f) const {
#pragma unroll 1
    for (int r = 0; r < ROWS; r += kStep)
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        uint4* p =
            reinterpret_cast<uint4*>(tile + offset + r * Tile<HD>::kPitch + g * kAcross * 16);
        uint4 x = *p;
        f(x.x), f(x.y), f(x.z), f(x.w);
        *p = x;
      }
  }
};

// inf and NaN become 0. Whether there was one.
template<class T>
__device__ __forceinline__ bool clean_pair(uint32_t& pair) {
  constexpr uint32_t exponent = std::is_same_v<T, bf16> ? 0x7f80u : 0x7c00u;
  const bool low = (pair & exponent) == exponent;
  const bool high = (pair >> 16 & exponent) == exponent;
  if (low) pair &= 0xffff0000u;
  if (high) pair &= 0x0000ffffu;
  return low || high;
}

// ---- products -----------------------------------------------------------------------------------

// acc (16 MT, N) += left . right^T over HD; `left` begins at the warp's rows.
template<class T, int HD, int MT, int N>
__device__ __forceinline__ void product_of_rows(float (&acc)[MT][N / 8][4], uint32_t left,
                                                const Lanes<HD>& down, uint32_t right,
                                                const Lanes<HD>& across) {
#pragma unroll
  for (int i = 0; i < HD / 16; ++i) {
    const int k = Lanes<HD>::ordered(i);
    uint32_t a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) load_matrices(a[m], down.of(left, 16 * m, k));
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, across.of(right, 16 * n, k));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        multiply<T>(acc[m][2 * n], a[m], b[0], b[1]);
        multiply<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Accumulators (16 MT, N), rounded to T, as left operands of a product over N.
template<class T, int MT, int N>
__device__ __forceinline__ void to_operands(const float (&x)[MT][N / 8][4],
                                            uint32_t (&a)[MT][N / 16][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int k = 0; k < N / 16; ++k)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        a[m][k][r] =
            pair_bits<T>(x[m][2 * k + r / 2][r % 2 * 2], x[m][2 * k + r / 2][r % 2 * 2 + 1]);
}

// acc (16 MT, HD) += a . right, a (16 MT, N).
template<class T, int HD, int MT, int N>
__device__ __forceinline__ void product_with(float (&acc)[MT][HD / 8][4],
                                             const uint32_t (&a)[MT][N / 16][4], uint32_t right,
                                             const Lanes<HD>& down) {
#pragma unroll
  for (int k = 0; k < N / 16; ++k)
#pragma unroll
    for (int i = 0; i < HD / 16; ++i) {
      const int d = Lanes<HD>::ordered(i);
      uint32_t b[4];
      load_transposed(b, down.of(right, 16 * k, d));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        multiply<T>(acc[m][2 * d], a[m][k], b[0], b[1]);
        multiply<T>(acc[m][2 * d + 1], a[m][k], b[2], b[3]);
      }
    }
}

// Writes a warp's 16 MT rows of accumulators, each row times factor[m][half], as T: through `tile`, whose rows
// (of the warp) no one else uses, so that 16 bytes go at a time where `wide`. `to` is element 0 of the warp's
// first row, of which there are `rows`.
template<class T, int HD, int MT>
__device__ __forceinline__ void store_rows(const float (&acc)[MT][HD / 8][4],
                                           const float (&factor)[MT][2], char* tile, T* to,
                                           int64_t stride, int rows, int width, bool wide) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < HD / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<uint32_t*>(tile + Tile<HD>::at(16 * m + 8 * half + g, n) + 4 * t) =
            pair_bits<T>(acc[m][n][2 * half] * factor[m][half],
                         acc[m][n][2 * half + 1] * factor[m][half]);
  __syncwarp();
  constexpr int across = Tile<HD>::kXor;
#pragma unroll 1
  for (int row = lane / across; row < 16 * MT && row < rows; row += 32 / across)
#pragma unroll
    for (int c = 0; c < HD / 8; c += across) {
      const int chunk = c + lane % across;
      if (chunk * 8 >= width) continue;
      const Pack<T, 8> x = *reinterpret_cast<const Pack<T, 8>*>(tile + Tile<HD>::at(row, chunk));
      T* p = to + row * stride + chunk * 8;
      if (wide) {
        store_pack(p, x);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (chunk * 8 + i < width) p[i] = x.v[i];
      }
    }
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

TW_END
