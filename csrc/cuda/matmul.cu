// Batches of matrix products on CUDA, with K split on request (kernels and numerics in gemm.cuh):
//
//   out (B, M, N) = sum over s of  a (B, M, K_s) b (B, K_s, N)
//
// Parts of K are multiples of 64; their sums wait in fp32 in a workspace of 4 B splits M N bytes and are added in order.
#include "cuda/gemm_binding.cuh"

namespace tw {
namespace {

Tensor matmul_cuda(const Tensor& a, const Tensor& b, ScalarType dtype, int64_t splits) {
  STD_TORCH_CHECK(a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0) && a.size(2) == b.size(1),
                  "matmul: expected a (B, M, K) and b (B, K, N)");
  STD_TORCH_CHECK(splits >= 1, "matmul: splits: expected at least 1, got ", splits);
  const OnDevice here(a);
  GemmCall g = {};
  g.a = gemm_side("matmul", a, 1, 2);
  g.b = gemm_side("matmul", b, 2, 1);
  g.batches = gemm_size("matmul", a.size(0));
  g.M = gemm_size("matmul", a.size(1));
  g.N = gemm_size("matmul", b.size(2));
  g.K = gemm_size("matmul", a.size(2));
  Tensor out = empty({g.batches, g.M, g.N}, a, dtype);
  g.to = gemm_store(out);
  run_gemm(g, splits, a);
  return out;
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) { m.impl("matmul", TORCH_BOX(&tw::matmul_cuda)); }
