// One matrix product per group of rows on CUDA (kernels and numerics in gemm.cuh); the groups are known on the device
// only. offsets[e] is the end of group e, its rows are [offsets[e - 1], offsets[e]):
//
//   grouped_matmul        out (N, C) : out[rows of e] = x[rows of e] (., K) w[e] (K, C); 0 past the last group
//   grouped_matmul_wgrad  dw (E, K, C) : dw[e] = x[rows of e]' dy[rows of e]; 0 for an empty group
//
// A block of threads walks the end rows to its own tile; the grid has enough blocks for any groups, and those too many
// return. Ends outside [0, N] or out of order are clamped as they are read: they never lead outside the tensors.
#include "cuda/gemm_binding.cuh"

namespace tw {
namespace {

const int32_t* ends_of(const Tensor& offsets) {
  STD_TORCH_CHECK(
      offsets.dim() == 1 && offsets.is_contiguous() && offsets.scalar_type() == ScalarType::Int,
      "grouped_matmul: offsets: expected int32, contiguous, one dimension");
  return static_cast<const int32_t*>(device_data(offsets));
}

Tensor grouped_matmul_cuda(const Tensor& x, const Tensor& w, const Tensor& offsets,
                           ScalarType dtype) {
  constexpr auto op = "grouped_matmul";
  STD_TORCH_CHECK(
      x.dim() == 2 && w.dim() == 3 && x.size(1) == w.size(1) && offsets.size(0) == w.size(0),
      "grouped_matmul: expected x (N, K), weights (E, K, C) and offsets (E)");
  const OnDevice here(x);
  GemmCall g = {};
  g.groups = Groups::rows;
  g.a = gemm_side(op, x, 0, 1);
  g.b = gemm_side(op, w, 2, 1);
  g.ends = ends_of(offsets);
  g.M = gemm_size(op, x.size(0));
  g.N = gemm_size(op, w.size(2));
  g.K = gemm_size(op, x.size(1));
  g.E = gemm_size(op, w.size(0));
  g.batches = 1;
  Tensor out = empty({g.M, g.N}, x, dtype);
  g.to = gemm_store(out);
  run_gemm(g, 1, x);
  return out;
}

Tensor grouped_matmul_wgrad_cuda(const Tensor& x, const Tensor& dy, const Tensor& offsets,
                                 ScalarType dtype) {
  constexpr auto op = "grouped_matmul_wgrad";
  STD_TORCH_CHECK(x.dim() == 2 && dy.dim() == 2 && x.size(0) == dy.size(0),
                  "grouped_matmul_wgrad: expected x (N, K) and dy (N, C)");
  const OnDevice here(x);
  GemmCall g = {};
  g.groups = Groups::depth;
  g.a = gemm_side(op, x, 1, 0);
  g.b = gemm_side(op, dy, 1, 0);
  g.ends = ends_of(offsets);
  g.M = gemm_size(op, x.size(1));
  g.N = gemm_size(op, dy.size(1));
  g.K = gemm_size(op, x.size(0));
  g.E = g.batches = gemm_size(op, offsets.size(0));
  Tensor dw = empty({g.E, g.M, g.N}, x, dtype);
  g.to = gemm_store(dw);
  run_gemm(g, 1, x);
  return dw;
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("grouped_matmul", TORCH_BOX(&tw::grouped_matmul_cuda));
  m.impl("grouped_matmul_wgrad", TORCH_BOX(&tw::grouped_matmul_wgrad_cuda));
}
