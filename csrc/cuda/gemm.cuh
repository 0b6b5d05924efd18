// Matrix products on CUDA:  C (M, N) = activation(A (M, K) B (K, N) + bias) + residual, any strides of A and B, for one
// product, a batch, parts of K, or groups of rows that only the device knows. What the kernels of gemm_mma.cuh (tensor
// cores, 16-bit operands) and gemm_fma.cuh (any types) share: the call, a block's place in it, and the epilogue.
//
// Sums are fp32 in the order of k; bias, activation and residual act on them, and the result is rounded once. With K in
// parts the sums of each go to a workspace, and gemm_sum_kernel adds them in order: no atomics, repeats are bit-equal.
#pragma once
#include "cuda/launch.cuh"
#include "trainwright/activation.h"
#include "trainwright/pack.cuh"

TW_BEGIN

// One side of the product: element (p, k), p a row of A or a column of B, is data[p * stride + k * k_stride], and
// `batch` elements further on for the next product or group.
struct GemmOperand {
  const void* data;
  int64_t stride, k_stride, batch;
  DType dtype;
  bool wide;  // set by the launcher: whether 16-byte copies can read it
};

// What becomes of the sums.
struct GemmStore {
  void* out;             // (M, N) dense, `batch` elements from one product to the next
  void* pre;             // likewise: receives the sums + bias; or null
  const void* bias;      // (N) or null
  const void* residual;  // (M, N), rows residual_stride apart; or null
  int64_t batch, residual_stride;
  DType type, bias_type;  // type: of out, pre and residual
  Activation activation;
  bool wide;  // set by the launcher: whether four columns can be accessed at a time
};

enum class Groups : int32_t {
  none,
  rows,  // group e: rows [ends[e - 1], ends[e]) of A and C, product e of B. Rows past the last end become 0.
  depth,  // group e: those k, product e of C
};

struct GemmCall {
  GemmOperand a, b;
  GemmStore to;
  int M, N, K;
  int batches, splits, part;  // split s sums k in [s * part, (s + 1) * part)
  Groups groups;
  const int32_t* ends;  // wherever they lead: they are clamped as they are read
  int E;
  int tiles_m, tiles_n;  // set by the launcher
};

// What a block of threads computes: one tile of C over k in [k0, k1).
struct GemmPlace {
  int row, row_end, col, k0, k1;
  int64_t a, b, out;  // number of the product in each tensor
};

constexpr int kTileGroup = 8;

// Blocks run in groups of kTileGroup rows of tiles, so that the tiles of A and B that are read at the same time share
// the L2 cache. Returns false for a block without work.
template<int BM, int BN>
__device__ __forceinline__ bool find_place(const GemmCall& g, GemmPlace& at) {
  const int tiles = g.tiles_m * g.tiles_n;
  const int tile = static_cast<int>(blockIdx.x) % tiles,
            copy = static_cast<int>(blockIdx.x) / tiles;
  const int first = tile / (kTileGroup * g.tiles_n) * kTileGroup;
  const int height = min(g.tiles_m - first, kTileGroup), within = tile % (kTileGroup * g.tiles_n);
  int left = first + within % height;
  const int batch = copy / g.splits;
  at.k0 = min(copy % g.splits * g.part, g.K);
  at.k1 = min(at.k0 + g.part, g.K);
  at.row = left * BM;
  at.row_end = g.M;
  at.col = within / height * BN;
  at.a = at.b = batch;
  at.out = copy;
  if (g.groups == Groups::none) return true;
  const bool by_rows = g.groups == Groups::rows;
  int begin = 0;
  for (int e = 0; e < (by_rows ? g.E : batch + 1); ++e) {
    const int end = min(max(g.ends[e], begin), by_rows ? g.M : g.K);
    if (by_rows) {  // the tiles of rows are counted over the groups in order
      const int here = (end - begin + BM - 1) / BM;
      if (left < here) {
        at.row = begin + left * BM;
        at.row_end = end;
        at.b = e;
        return true;
      }
      left -= here;
    } else {
      at.k0 = begin;
      at.k1 = end;
    }
    begin = end;
  }
  if (by_rows) {  // past the last group
    at.row = begin + left * BM;
    at.k1 = at.k0 = 0;
    return at.row < g.M;
  }
  at.a = at.b = 0;
  return true;
}

// ---- epilogue -----------------------------------------------------------------------------------

// Elements i .. i + 3, or the first n of them one by one; the others are 0.
__device__ __forceinline__ void load_four(const void* p, DType type, int64_t i, int n, bool wide,
                                          float (&x)[4]) {
  if (wide) return load_any<4>(p, type, i, x);
#pragma unroll
  for (int k = 0; k < 4; ++k) x[k] = k < n ? load_one<float>(p, type, i + k) : 0.0f;
}
__device__ __forceinline__ void store_four(void* p, DType type, int64_t i, int n, bool wide,
                                           const float (&x)[4]) {
  if (wide) return store_any<4>(p, type, i, x);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k >= n) break;
    if (type == DType::f32)
      static_cast<float*>(p)[i + k] = x[k];
    else if (type == DType::bf16)
      static_cast<bf16*>(p)[i + k] = to_bf16(x[k]);
    else
      static_cast<f16*>(p)[i + k] = to_f16(x[k]);
  }
}

// Four sums of a row, from column `col` on, of which there are N.
__device__ __forceinline__ void finish_four(const GemmStore& s, int64_t product, int row, int col,
                                            int N, float (&x)[4]) {
  const int64_t at = product * s.batch + static_cast<int64_t>(row) * N + col;
  const int n = N - col;
  float more[4];
  if (s.bias) {
    load_four(s.bias, s.bias_type, col, n, s.wide, more);
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] += more[k];
  }
  if (s.pre) store_four(s.pre, s.type, at, n, s.wide, x);
  with_activation(s.activation, [&](auto act) {
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = act.value(x[k]);
  });
  if (s.residual) {
    load_four(s.residual, s.type, row * s.residual_stride + col, n, s.wide, more);
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] += more[k];
  }
  store_four(s.out, s.type, at, n, s.wide, x);
}

// ---- launchers ----------------------------------------------------------------------------------

// A call on tensors that are there already; with splits > 1 it needs `workspace`, batches * splits * M * N floats.
// Defined in gemm.cu.
void launch_gemm(GemmCall g, float* workspace, cudaStream_t stream);

// 16-bit operands of one type on tensor cores. Defined in gemm_mma.cuh, instantiated in gemm_bf16.cu and gemm_f16.cu.
template<class T>
void launch_gemm_mma(GemmCall g, cudaStream_t stream);

// How many parts of K give every multiprocessor of a large GPU (an H100 has 132) a tile, as long as each is long enough
// to be worth the workspace. From the sizes alone, so that the bits do not depend on the device.
inline int gemm_splits(int64_t M, int64_t N, int64_t K) {
  const int64_t tiles = divide_up(M, 128) * divide_up(N, 128);
  return static_cast<int>(std::max<int64_t>(
      1, std::min(132 / std::max<int64_t>(tiles, 1), std::min<int64_t>(K / 1024, 64))));
}

// Into parts of a multiple of 64, so that each begins where 16-byte copies can.
inline void split_depth(GemmCall& g, int64_t splits) {
  g.part = static_cast<int>(divide_up(divide_up(std::max(g.K, 1), splits), 64) * 64);
  g.splits = static_cast<int>(std::max<int64_t>(divide_up(g.K, g.part), 1));
}

TW_END
