// The matrix product as an op on CUDA (gemm.cuh): the choice of kernel, the sum over parts of K, and the torch binding.
//
// It is an op of its own, gemm_cuda: `gemm` on CUDA tensors stays with cuBLAS, through the reference.
#include "cuda/gemm_binding.cuh"
#include "cuda/gemm_fma.cuh"

TW_BEGIN

constexpr int kSumThreads = 256;

// The parts of each product, added in order, through the epilogue. A thread has four columns of a row. Bytes: four for
// each part of an element, and those of the epilogue.
struct GemmSum {
  const float* parts;  // (batches, splits, M, N)
  GemmStore to;
  int M, N, splits;
  int64_t threads;
};

__global__ void __launch_bounds__(kSumThreads) gemm_sum_kernel(const __grid_constant__ GemmSum s) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (at >= s.threads) return;
  const int across = (s.N + 3) / 4, col = static_cast<int>(at % across) * 4;
  const int row = static_cast<int>(at / across % s.M);
  const int64_t product = at / across / s.M, size = static_cast<int64_t>(s.M) * s.N;
  const float* from = s.parts + product * s.splits * size + static_cast<int64_t>(row) * s.N + col;
  const bool wide = s.N % 4 == 0;
  float x[4];
  load_four(from, DType::f32, 0, s.N - col, wide, x);
  for (int split = 1; split < s.splits; ++split) {
    float more[4];
    load_four(from + split * size, DType::f32, 0, s.N - col, wide, more);
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] += more[k];
  }
  finish_four(s.to, product, row, col, s.N, x);
}

void launch_gemm(GemmCall g, float* workspace, cudaStream_t stream) {
  // Four columns at a time: 16 bytes of fp32, which the workspace has too.
  g.to.wide = g.N % 4 == 0 && aligned16(g.to.out, g.to.pre, g.to.bias, g.to.residual) &&
              g.to.residual_stride % 4 == 0;
  const GemmStore to = g.to;
  if (g.splits > 1) {
    g.to = {};
    g.to.out = workspace;
    g.to.batch = static_cast<int64_t>(g.M) * g.N;
    g.to.type = DType::f32;
    g.to.wide = g.N % 4 == 0;
  }
  if (g.a.dtype != g.b.dtype || g.a.dtype == DType::f32)
    launch_gemm_fma(g, stream);
  else if (g.a.dtype == DType::bf16)
    launch_gemm_mma<bf16>(g, stream);
  else
    launch_gemm_mma<f16>(g, stream);
  if (g.splits == 1) return;
  const int64_t threads = static_cast<int64_t>(g.batches) * g.M * divide_up(g.N, 4);
  const GemmSum sum = {workspace, to, g.M, g.N, g.splits, threads};
  gemm_sum_kernel<<<static_cast<unsigned>(divide_up(threads, kSumThreads)), kSumThreads, 0,
                    stream>>>(sum);
}

TW_END

// ---- torch bindings -----------------------------------------------------------------------------

namespace tw {
namespace {

std::tuple<Tensor, Tensor> gemm_cuda(const Tensor& a, const Tensor& b,
                                     const std::optional<Tensor>& bias,
                                     const std::optional<Tensor>& residual, int64_t activation,
                                     ScalarType dtype, bool save_pre) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0),
                  "gemm: expected a (M, K) and b (K, N)");
  STD_TORCH_CHECK(0 <= activation && activation <= 4, "gemm: unknown activation ", activation);
  const OnDevice here(a);
  GemmCall g = {};
  g.a = gemm_side("gemm", a, 0, 1);
  g.b = gemm_side("gemm", b, 1, 0);
  g.M = gemm_size("gemm", a.size(0));
  g.N = gemm_size("gemm", b.size(1));
  g.K = gemm_size("gemm", a.size(1));
  g.batches = 1;
  Tensor out = empty({g.M, g.N}, a, dtype);
  Tensor pre = empty(save_pre ? std::vector<int64_t>{g.M, g.N} : std::vector<int64_t>{0}, a, dtype);
  g.to = gemm_store(out);
  g.to.pre = save_pre ? device_data(pre) : nullptr;
  g.to.activation = static_cast<Activation>(activation);
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == g.N && bias->is_contiguous(),
                    "gemm: bias: expected shape (N), contiguous");
    g.to.bias = device_data(*bias);
    g.to.bias_type = dtype_of(*bias);
  }
  if (residual) {
    STD_TORCH_CHECK(residual->dim() == 2 && residual->size(0) == g.M && residual->size(1) == g.N &&
                        (g.M == 0 || g.N <= 1 || residual->stride(1) == 1) &&
                        residual->scalar_type() == dtype,
                    "gemm: residual: expected shape (M, N) with dense rows in the output's dtype");
    g.to.residual = device_data(*residual);
    g.to.residual_stride = residual->stride(0);
  }
  run_gemm(g, gemm_splits(g.M, g.N, g.K), a);
  return {out, pre};
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) { m.impl("gemm_cuda", TORCH_BOX(&tw::gemm_cuda)); }
