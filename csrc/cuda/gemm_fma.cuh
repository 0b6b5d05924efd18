// Matrix products on the FMA units, for what tensor cores do not multiply exactly: fp32 operands, and pairs of
// different types, as the gradients of a product that keeps its fp32 sums are. Any strides.
//
// A block computes a 64 x 64 tile of C, each of its 256 threads 4 x 4 sums. Steps of 16 k are widened to fp32 in shared
// memory, the next one on its way in registers meanwhile. A thread reads 32 bytes there for its 16 products of a k.
// 2 M N K FLOPs. Bound: the FMA units. Not yet timed on a GPU.
#pragma once
#include "cuda/gemm.cuh"

TW_BEGIN

constexpr int kFmaThreads = 256, kFmaTile = 64, kFmaDepth = 16;
// 16 floats past a multiple of the banks: a warp that writes two k, 16 columns each, finds 32 banks.
constexpr int kFmaPitch = kFmaTile + 16;

// A step of one side: four elements of a thread.
struct FmaSide {
  const GemmOperand& x;
  int64_t base;
  int p, k, p_next, k_next;  // of this thread's first element, and from one to the next
  int count;
  float next[4];

  // Lanes lie along the direction in which memory does.
  __device__ __forceinline__ FmaSide(const GemmOperand& x, int64_t product, int first, int count,
                                     int k0)
      : x(x), base(product * x.batch + first * x.stride + k0 * x.k_stride), count(count) {
    const int t = threadIdx.x;
    const bool along_p = x.stride == 1;
    p = along_p ? t % 16 : t % kFmaTile;
    k = along_p ? t / 16 : t / kFmaTile * 4;
    p_next = along_p ? 16 : 0;
    k_next = along_p ? 0 : 1;
  }
  __device__ __forceinline__ void load(int begin, int end) {  // k from the first on
    const auto from = [&](const auto* data) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pi = p + i * p_next, ki = begin + k + i * k_next;
        next[i] = pi < count && ki < end
                      ? load_as<float>(data[base + pi * x.stride + ki * x.k_stride])
                      : 0.0f;
      }
    };
    if (x.dtype == DType::f32)
      from(static_cast<const float*>(x.data));
    else if (x.dtype == DType::bf16)
      from(static_cast<const bf16*>(x.data));
    else
      from(static_cast<const f16*>(x.data));
  }
  __device__ __forceinline__ void store(float (*to)[kFmaPitch]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[k + i * k_next][p + i * p_next] = next[i];
  }
};

__global__ void __launch_bounds__(kFmaThreads, 2)
    gemm_fma_kernel(const __grid_constant__ GemmCall g) {
  __shared__ __align__(16) float step[2][2][kFmaDepth][kFmaPitch];
  GemmPlace at;
  if (!find_place<kFmaTile, kFmaTile>(g, at)) return;
  FmaSide a(g.a, at.a, at.row, at.row_end - at.row, at.k0);
  FmaSide b(g.b, at.b, at.col, g.N - at.col, at.k0);
  const int depth = at.k1 - at.k0, row = threadIdx.x / 16 * 4, col = threadIdx.x % 16 * 4;
  float acc[4][4] = {};
  a.load(0, depth);
  b.load(0, depth);
#pragma unroll 1
  for (int k = 0, now = 0; k < depth; k += kFmaDepth, now ^= 1) {
    a.store(step[now][0]);
    b.store(step[now][1]);
    __syncthreads();  // the step before last, which was here, has been read by all: they came past this for the last
    a.load(k + kFmaDepth, depth);
    b.load(k + kFmaDepth, depth);
#pragma unroll
    for (int i = 0; i < kFmaDepth; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(&step[now][0][i][row]);
      const float4 y = *reinterpret_cast<const float4*>(&step[now][1][i][col]);
      const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[r][c] += xs[r] * ys[c];
    }
  }
  const int first = at.row + row, column = at.col + col;
#pragma unroll 1
  for (int r = 0; r < 4; ++r) {
    if (first + r >= at.row_end || column >= g.N) break;
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)  // registers have no index
      if (i == r)
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = acc[i][c];
    finish_four(g.to, at.out, first + r, column, g.N, x);
  }
}

inline void launch_gemm_fma(GemmCall g, cudaStream_t stream) {
  g.tiles_m = static_cast<int>(divide_up(g.M, kFmaTile)) + (g.groups == Groups::rows ? g.E : 0);
  g.tiles_n = static_cast<int>(divide_up(g.N, kFmaTile));
  const int64_t blocks = int64_t{g.tiles_m} * g.tiles_n * g.batches * g.splits;
  gemm_fma_kernel<<<static_cast<unsigned>(blocks), kFmaThreads, 0, stream>>>(g);
}

TW_END
