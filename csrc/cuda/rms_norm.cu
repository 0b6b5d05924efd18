// RMS norm on CUDA (formula in trainwright/rms_norm.h).
//
// forward   one block per row; each thread keeps R packs of VEC elements in registers, so the row is
//           read once.
// backward  a fixed number of blocks, each walking a contiguous range of rows in order and keeping
//           its part of dw in registers; the partial rows are summed in a fixed order, so repeats
//           are bit-equal.
// Bytes per element: forward 2s (4s with residual), backward 3s (s = element size). Bound: memory
// bandwidth. Accesses are 16 bytes where C and the pointers allow, one element otherwise. Not yet
// timed on a GPU.
#include <algorithm>
#include <type_traits>

#include "cuda/binding.cuh"
#include "trainwright/pack.cuh"
#include "trainwright/rms_norm.h"

namespace tw {

constexpr int kMaxThreads =
    512;  // 128 registers a thread: x, g and dw of kMaxElements fit without spills
template<class T>
constexpr int kMaxElements = sizeof(T) == 8 ? 8 : 16;  // per thread; so C <= 8192 (4096 for fp64)

struct RmsNormFwd {
  const void *x, *residual, *weight;
  void *y, *sum, *rstd;
  int64_t N, C;
  double eps, weight_offset;
  DType weight_dtype;
};
struct RmsNormBwd {
  const void *dy, *dsum, *x, *weight, *rstd;
  void *dx, *dw_partial;
  int64_t N, C, slots;
  double weight_offset;
  DType weight_dtype;
};

// w + offset at element c, or 1. The dtype is the same for the whole grid, so the branches do not
// diverge; w is read from L1, and compiling it as a template would double the kernels.
template<class A>
__device__ __forceinline__ A weight_at(const void* w, DType dtype, int64_t c, A offset) {
  if (!w) return A(1);
  if (dtype == DType::f32) return static_cast<A>(static_cast<const float*>(w)[c]) + offset;
  if (dtype == DType::bf16) return load_as<A>(static_cast<const bf16*>(w)[c]) + offset;
  if (dtype == DType::f16) return load_as<A>(static_cast<const f16*>(w)[c]) + offset;
  return static_cast<A>(static_cast<const double*>(w)[c]) + offset;
}

template<class T, int VEC, int R>
__global__ void __launch_bounds__(kMaxThreads, 1) rms_norm_fwd_kernel(RmsNormFwd a) {
  using A = acc_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x, stride = static_cast<int64_t>(blockDim.x) * VEC;
  const T* x = static_cast<const T*>(a.x) + row * a.C;
  const T* residual = a.residual ? static_cast<const T*>(a.residual) + row * a.C : nullptr;
  T* sum = residual ? static_cast<T*>(a.sum) + row * a.C : nullptr;
  T* y = static_cast<T*>(a.y) + row * a.C;

  A h[R][VEC];
  A squares = A(0);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t c = threadIdx.x * static_cast<int64_t>(VEC) + r * stride;
    if (c >= a.C) break;
    Pack<T, VEC> p = load_pack<VEC>(x + c);
    if (residual) {
      const Pack<T, VEC> q = load_pack<VEC>(residual + c);
#pragma unroll
      for (int i = 0; i < VEC; ++i) p.v[i] = store_as<T>(load_as<A>(p.v[i]) + load_as<A>(q.v[i]));
      store_pack<VEC>(sum + c, p);
    }
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      h[r][i] = load_as<A>(p.v[i]);
      squares += h[r][i] * h[r][i];
    }
  }
  const A rstd = rms_rstd<A>(block_sum(squares, shared), a.C, static_cast<A>(a.eps));
  if (threadIdx.x == 0) static_cast<A*>(a.rstd)[row] = rstd;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t c = threadIdx.x * static_cast<int64_t>(VEC) + r * stride;
    if (c >= a.C) break;
    Pack<T, VEC> p;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      p.v[i] = store_as<T>(
          rms_y(h[r][i], rstd,
                weight_at<A>(a.weight, a.weight_dtype, c + i, static_cast<A>(a.weight_offset))));
    }
    store_pack<VEC>(y + c, p);
  }
}

template<class T, int VEC, int R>
__global__ void __launch_bounds__(kMaxThreads, 1) rms_norm_bwd_kernel(RmsNormBwd a) {
  using A = acc_t<T>;
  __shared__ A shared[2][32];
  const int64_t stride = static_cast<int64_t>(blockDim.x) * VEC;
  A dw[R][VEC] = {};
  const int64_t first = blockIdx.x * a.N / a.slots, last = (blockIdx.x + 1) * a.N / a.slots;
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.C;
    const T* dy = static_cast<const T*>(a.dy) + row * a.C;
    const T* dsum = a.dsum ? static_cast<const T*>(a.dsum) + row * a.C : nullptr;
    T* dx = static_cast<T*>(a.dx) + row * a.C;
    const A rstd = static_cast<const A*>(a.rstd)[row];
    Pack<T, VEC> xs[R], gs[R];  // kept in their storage type: half the registers for 16-bit inputs
    A gx = A(0);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t c = threadIdx.x * static_cast<int64_t>(VEC) + r * stride;
      if (c >= a.C) break;
      xs[r] = load_pack<VEC>(x + c);
      gs[r] = load_pack<VEC>(dy + c);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A h = load_as<A>(xs[r].v[i]), g = load_as<A>(gs[r].v[i]);
        dw[r][i] += g * h * rstd;
        gx +=
            g * weight_at<A>(a.weight, a.weight_dtype, c + i, static_cast<A>(a.weight_offset)) * h;
      }
    }
    // Two buffers in turn: the next row may write one while slow warps still read the other.
    const A mean_gx = block_sum(gx, shared[row & 1]) / static_cast<A>(a.C);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t c = threadIdx.x * static_cast<int64_t>(VEC) + r * stride;
      if (c >= a.C) break;
      Pack<T, VEC> out, extra;
      if (dsum) extra = load_pack<VEC>(dsum + c);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A g = load_as<A>(gs[r].v[i]) *
                    weight_at<A>(a.weight, a.weight_dtype, c + i, static_cast<A>(a.weight_offset));
        A d = rms_dx(g, load_as<A>(xs[r].v[i]), rstd, mean_gx);
        if (dsum) d += load_as<A>(extra.v[i]);
        out.v[i] = store_as<T>(d);
      }
      store_pack<VEC>(dx + c, out);
    }
  }
  if (!a.dw_partial) return;
  A* partial = static_cast<A*>(a.dw_partial) + blockIdx.x * a.C;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t c = threadIdx.x * static_cast<int64_t>(VEC) + r * stride;
    if (c >= a.C) break;
#pragma unroll
    for (int i = 0; i < VEC; ++i) partial[c + i] = dw[r][i];
  }
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

// Threads for a row of C elements when each holds `per_thread` of them.
inline int threads_for(int64_t C, int per_thread) {
  const int64_t warps = (C + 32 * per_thread - 1) / (32 * per_thread);
  return static_cast<int>((warps < 1 ? 1 : warps) * 32);
}

// Calls f with the number of packs per thread that keeps a row of C elements within kMaxThreads.
template<class T, int VEC, class F>
void with_packs(int64_t C, F&& f) {
  constexpr int most = kMaxElements<T> / VEC;
  constexpr int some = most >= 4 ? most / 4 : 1;
  if (C <= 256 * VEC)
    f(std::integral_constant<int, 1>{});
  else if (C <= kMaxThreads * VEC * some)
    f(std::integral_constant<int, some>{});
  else
    f(std::integral_constant<int, most>{});
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template<class T>
void launch_rms_norm_fwd(const RmsNormFwd& a, cudaStream_t stream) {
  constexpr int wide = 16 / sizeof(T);
  auto run = [&](auto vec) {
    constexpr int VEC = decltype(vec)::value;
    with_packs<T, VEC>(a.C, [&](auto packs) {
      constexpr int R = decltype(packs)::value;
      const auto blocks = static_cast<unsigned>(a.N);
      rms_norm_fwd_kernel<T, VEC, R><<<blocks, threads_for(a.C, VEC * R), 0, stream>>>(a);
    });
  };
  if (a.C % wide == 0 && aligned(a.x) && aligned(a.residual))
    run(std::integral_constant<int, wide>{});
  else
    run(std::integral_constant<int, 1>{});
}

template<class T>
void launch_rms_norm_bwd(const RmsNormBwd& a, cudaStream_t stream) {
  constexpr int wide = 16 / sizeof(T);
  auto run = [&](auto vec) {
    constexpr int VEC = decltype(vec)::value;
    with_packs<T, VEC>(a.C, [&](auto packs) {
      constexpr int R = decltype(packs)::value;
      const auto blocks = static_cast<unsigned>(a.slots);
      rms_norm_bwd_kernel<T, VEC, R><<<blocks, threads_for(a.C, VEC * R), 0, stream>>>(a);
    });
  };
  if (a.C % wide == 0 && aligned(a.x) && aligned(a.dy) && aligned(a.dsum))
    run(std::integral_constant<int, wide>{});
  else
    run(std::integral_constant<int, 1>{});
}

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

template<class F>
void with_type(const Tensor& x, F&& f) {
  switch (dtype_of(x)) {
    case DType::f32:
      f(float{});
      break;
    case DType::bf16:
      f(bf16{});
      break;
    case DType::f16:
      f(f16{});
      break;
    case DType::f64:
      f(double{});
      break;
    default:
      STD_TORCH_CHECK(false, "rms_norm: unsupported dtype");
  }
}

void check(const Tensor& x, int64_t C) {
  TW_CHECK_CONTIGUOUS(x);
  const int64_t most =
      kMaxThreads * (dtype_of(x) == DType::f64 ? kMaxElements<double> : kMaxElements<float>);
  STD_TORCH_CHECK(C <= most, "rms_norm: C must be at most ", most, ", got ", C);
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_fwd_cuda(const Tensor& x,
                                                     const std::optional<Tensor>& residual,
                                                     const std::optional<Tensor>& weight,
                                                     double eps, double weight_offset) {
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  check(x, C);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor y = empty(shape_of(x), x);
  Tensor sum = residual ? empty(shape_of(x), x) : empty({0}, x);
  Tensor rstd = empty({N}, x, acc_dtype(x));
  if (N == 0) return {y, sum, rstd};
  const RmsNormFwd a = {data(x),
                        data(residual),
                        data(weight),
                        mutable_data(y),
                        mutable_data(sum),
                        mutable_data(rstd),
                        N,
                        C,
                        eps,
                        weight_offset,
                        weight ? dtype_of(*weight) : DType::f32};
  with_type(x, [&](auto t) { launch_rms_norm_fwd<decltype(t)>(a, stream_of(x)); });
  check_launch("rms_norm_fwd_kernel");
  return {y, sum, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd_cuda(const Tensor& dy, const std::optional<Tensor>& dsum,
                                             const Tensor& x, const std::optional<Tensor>& weight,
                                             const Tensor& rstd, double weight_offset, bool need_dx,
                                             bool need_dw) {
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  check(x, C);
  TW_CHECK_CONTIGUOUS(dy);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  // Two blocks a multiprocessor hide the latency of one block's barrier behind the other's loads.
  const int64_t slots = std::min<int64_t>(N, 2 * multiprocessors(x.get_device_index()));
  Tensor dx = empty(shape_of(x), x);  // the kernel always writes it: a choice would cost registers
  Tensor partial = empty({need_dw ? slots : 0, C}, x, acc_dtype(x));
  if (N > 0) {
    const RmsNormBwd a = {data(dy),
                          data(dsum),
                          data(x),
                          data(weight),
                          data(rstd),
                          mutable_data(dx),
                          need_dw ? mutable_data(partial) : nullptr,
                          N,
                          C,
                          slots,
                          weight_offset,
                          weight ? dtype_of(*weight) : DType::f32};
    with_type(x, [&](auto t) { launch_rms_norm_bwd<decltype(t)>(a, stream_of(x)); });
    check_launch("rms_norm_bwd_kernel");
  }
  if (!need_dx) dx = empty({0}, x);
  if (!need_dw) return {dx, empty({0}, x, acc_dtype(x))};
  const std::vector<int64_t> rows = {0};
  return {dx, torch::stable::sum(partial, rows, false, std::nullopt)};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CUDA, m) {
  m.impl("rms_norm_fwd", TORCH_BOX(&tw::rms_norm_fwd_cuda));
  m.impl("rms_norm_bwd", TORCH_BOX(&tw::rms_norm_bwd_cuda));
}
