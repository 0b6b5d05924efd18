// What the torch side of the matrix products shares.
#pragma once
#include "cuda/binding.cuh"
#include "cuda/gemm.cuh"

namespace tw {

inline int gemm_size(const char* op, int64_t size) {
  STD_TORCH_CHECK(size < (int64_t{1} << 31) - 64, op, ": sizes up to 2^31 - 65, got ", size);
  return static_cast<int>(size);
}

// The side of `t` whose p is dimension `p` and whose k is dimension `k`. Of three dimensions the first is the batch.
inline GemmOperand gemm_side(const char* op, const Tensor& t, int64_t p, int64_t k) {
  const DType type = dtype_of(t);
  STD_TORCH_CHECK(type == DType::f32 || type == DType::bf16 || type == DType::f16, op,
                  ": cuda: expected fp32, bf16 or fp16");
  return {device_data(t), t.stride(p), t.stride(k), t.dim() == 3 ? t.stride(0) : 0, type, false};
}

// A dense result of a type without bias or anything else.
inline GemmStore gemm_store(const Tensor& out) {
  const int64_t d = out.dim();
  GemmStore to = {};
  to.out = device_data(out);
  to.batch = out.size(d - 2) * out.size(d - 1);
  to.type = dtype_of(out);
  return to;
}

// Runs the call with its K in up to `splits` parts.
inline void run_gemm(GemmCall g, int64_t splits, const Tensor& like) {
  if (g.M == 0 || g.N == 0 || g.batches == 0) return;
  split_depth(g, splits);
  const int64_t floats = g.splits > 1 ? int64_t{g.batches} * g.splits * g.M * g.N : 0;
  const Tensor workspace = empty({floats}, like, ScalarType::Float);
  launch_gemm(g, floats ? static_cast<float*>(device_data(workspace)) : nullptr, stream_of(like));
  check_launch("gemm_kernel");
}

}  // namespace tw
