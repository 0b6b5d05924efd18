// The elementwise half of the backward of `linear` on CUDA (its products are in gemm.cu): with z the pre-activation,
//
//   dz = dy * act'(z),   dbias = sum over rows of dz
//
// in fp32; dz is rounded once to the storage type, dbias sums the unrounded values. A block of threads has 32 packs of 16
// bytes of columns and one of kSlots ranges of rows, of which each of its kDown rows of threads walks every kDown-th;
// their sums are added in order, and those of the slots by torch, so repeats are bit-equal on any device.
// Bytes per element: 3s (s without activation; s = element size). Bound: memory bandwidth.
#include "cuda/binding.cuh"
#include "cuda/launch.cuh"
#include "trainwright/activation.h"
#include "trainwright/pack.cuh"

TW_BEGIN

constexpr int kDown = 8, kSlots = 64;

struct LinearBwd {
  const void *dy, *pre;  // (N, C); pre is null without activation
  void* dz;              // (N, C), or null without activation
  float* partial;        // (kSlots, C), or null: no bias gradient wanted
  int64_t N;
  int C;
  Activation activation;
  bool wide;  // rows begin at multiples of 16 bytes
};

template<class T, int VEC>
__device__ __forceinline__ void load_columns(const T* p, int n, bool wide, float (&x)[VEC]) {
  if (wide) {
    Pack<T, VEC> pack{};
    if (n > 0) pack = load_once<VEC>(p);
    return unpack(pack, x);
  }
#pragma unroll
  for (int k = 0; k < VEC; ++k) x[k] = k < n ? load_as<float>(p[k]) : 0.0f;
}

template<class T>
__global__ void __launch_bounds__(32 * kDown)
    linear_bwd_kernel(const __grid_constant__ LinearBwd a) {
  constexpr int VEC = 16 / sizeof(T);
  __shared__ float sums[kDown][VEC][32];
  const int col = (blockIdx.x * 32 + threadIdx.x) * VEC, n = min(a.C - col, VEC);
  const int64_t begin = blockIdx.y * a.N / kSlots, end = (blockIdx.y + 1) * a.N / kSlots;
  float total[VEC] = {};
  for (int64_t row = begin + threadIdx.y; row < end; row += kDown) {
    const int64_t at = row * a.C + col;
    float d[VEC];
    load_columns(static_cast<const T*>(a.dy) + at, n, a.wide, d);
    if (a.pre) {
      float z[VEC];
      load_columns(static_cast<const T*>(a.pre) + at, n, a.wide, z);
      with_activation(a.activation, [&](auto act) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) d[k] *= act.value_slope(z[k]).slope;
      });
      T* dz = static_cast<T*>(a.dz) + at;
      if (a.wide) {
        if (n > 0) store_pack(dz, pack_as<T>(d));
      } else {
#pragma unroll
        for (int k = 0; k < VEC; ++k)
          if (k < n) dz[k] = store_as<T>(d[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < VEC; ++k) total[k] += d[k];
  }
  if (!a.partial) return;
#pragma unroll
  for (int k = 0; k < VEC; ++k) sums[threadIdx.y][k][threadIdx.x] = total[k];
  __syncthreads();
  for (int i = threadIdx.y * 32 + threadIdx.x; i < 32 * VEC; i += 32 * kDown) {
    const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 * VEC + i;
    if (c >= a.C) return;
    float sum = 0.0f;
    for (int y = 0; y < kDown; ++y) sum += sums[y][i % VEC][i / VEC];
    a.partial[blockIdx.y * static_cast<int64_t>(a.C) + c] = sum;
  }
}

template<class T>
void launch_linear_bwd(const LinearBwd& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(a.C, 32 * 16 / sizeof(T))), kSlots);
  linear_bwd_kernel<T><<<grid, dim3(32, kDown), 0, stream>>>(a);
}

TW_END

// ---- torch bindings -----------------------------------------------------------------------------

namespace tw {
namespace {

std::tuple<Tensor, Tensor> linear_bwd_cuda(const Tensor& dy, const std::optional<Tensor>& pre,
                                           int64_t activation, bool with_bias) {
  TW_CHECK_CONTIGUOUS(dy);
  STD_TORCH_CHECK(0 <= activation && activation <= 4, "linear_bwd: unknown activation");
  STD_TORCH_CHECK((activation == 0) == !pre, "linear_bwd: pre goes with an activation");
  STD_TORCH_CHECK(dy.dim() == 2, "linear_bwd: dy: expected 2 dimensions");
  if (pre)
    STD_TORCH_CHECK(pre->is_contiguous() && pre->scalar_type() == dy.scalar_type() &&
                        shape_of(*pre) == shape_of(dy),
                    "linear_bwd: pre: expected shape and dtype of dy");
  const OnDevice here(dy);
  const int64_t N = dy.size(0), C = dy.size(1);
  STD_TORCH_CHECK(C < (int64_t{1} << 31), "linear_bwd: up to 2^31 columns");
  Tensor dz = pre ? empty({N, C}, dy) : empty({0}, dy);
  Tensor partial = empty({with_bias ? kSlots : 0, C}, dy, ScalarType::Float);
  if (C > 0 && (pre || with_bias)) {
    LinearBwd a = {device_data(dy),
                   device_data(pre),
                   pre ? device_data(dz) : nullptr,
                   with_bias ? static_cast<float*>(device_data(partial)) : nullptr,
                   N,
                   static_cast<int>(C),
                   static_cast<Activation>(activation),
                   false};
    a.wide = aligned16(a.dy, a.pre, a.dz) && C * dtype_bytes(dtype_of(dy)) % 16 == 0;
    switch (dtype_of(dy)) {
      case DType::f32:
        launch_linear_bwd<float>(a, stream_of(dy));
        break;
      case DType::bf16:
        launch_linear_bwd<bf16>(a, stream_of(dy));
        break;
      case DType::f16:
        launch_linear_bwd<f16>(a, stream_of(dy));
        break;
      default:
        STD_TORCH_CHECK(false, "linear_bwd: cuda: expected fp32, bf16 or fp16");
    }
    check_launch("linear_bwd_kernel");
  }
  if (!with_bias) return {dz, partial};
  const std::vector<int64_t> rows = {0};
  return {dz, torch::stable::sum(partial, rows, false, std::nullopt)};
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) { m.impl("linear_bwd", TORCH_BOX(&tw::linear_bwd_cuda)); }
