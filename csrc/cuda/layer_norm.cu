// Layer norm on CUDA (formula in trainwright/layer_norm.h).
//
// forward   each thread of a row keeps its packs in registers (cuda/rows.cuh), so the row is read
//           once: its sum gives the mean, then deviations and their squares are summed together.
// backward  a fixed number of blocks, each walking a contiguous range of rows in order and keeping
//           its part of dw and db in registers; the partial rows are summed in a fixed order, so
//           repeats are bit-equal.
// Bytes per element: forward 2s (4s with residual), backward 3s (s = element size), and w and b once
// per row from L1, dw and db once per block. Bound: memory bandwidth. Accesses are 16 bytes where C
// and the pointers allow, one element otherwise. Counted on the virtual GPU; not yet timed on a GPU.
#include "trainwright/layer_norm.h"

#include "cuda/row_binding.cuh"

namespace tw {

struct LayerNormFwd {
  const void *x, *residual, *weight, *bias;  // (N, C), (N, C) or null, (C) or null, (C) or null
  void *y, *sum, *stats;                     // (N, C), (N, C) or null, (N, 3) in acc type
  int64_t N, C;
  double eps;
  DType weight_dtype, bias_dtype;
};
struct LayerNormBwd {
  const void *dy, *dsum, *x, *weight, *stats;
  void *dx, *dw_partial, *db_partial;  // dx or both others may be null; (slots, C) in acc type
  int64_t N, C, slots;
  DType weight_dtype;
};

// The elements of a vector from c on, or `missing` where there is no vector.
template<int VEC, class A>
__device__ __forceinline__ void load_vector(const void* p, DType dtype, int c, int C, A missing,
                                            A (&out)[VEC]) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) out[i] = missing;
  if (p) load_span<VEC>(p, dtype, c, C, out);
}
template<class T, int VEC, int R>
__global__ void __launch_bounds__(kRowThreads, 1) layer_norm_fwd_kernel(LayerNormFwd a) {
  using A = acc_t<T>;
  __shared__ A shared_sum[1][32], shared_moments[2][32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int length = static_cast<int>(a.C), C = row < a.N ? length : 0;
  const int mine = threadIdx.x * VEC, stride = blockDim.x * VEC;
  const int64_t at = row * a.C;
  const T* x = static_cast<const T*>(a.x) + at;
  const T* residual = a.residual ? static_cast<const T*>(a.residual) + at : nullptr;
  T *y = static_cast<T*>(a.y) + at, *sum = static_cast<T*>(a.sum) + at;

  Pack<T, VEC> h[R == 0 ? 1 : R];
  A total[1] = {};
  if constexpr (R == 0) {
    for (int c = mine; c < C; c += stride) {
      A v[VEC];
      unpack(load_sum<VEC>(x, residual, sum, c), v);
#pragma unroll
      for (int i = 0; i < VEC; ++i) total[0] += v[i];
    }
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (mine + r * stride < C) h[r] = load_once<VEC>(x + mine + r * stride);
    if (residual) {
      Pack<T, VEC> more[R];
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (mine + r * stride < C) more[r] = load_once<VEC>(residual + mine + r * stride);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (mine + r * stride >= C) continue;
        A v[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = load_as<A>(h[r].v[i]) + load_as<A>(more[r].v[i]);
        h[r] = pack_as<T>(v);
        store_pack(sum + mine + r * stride, h[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (mine + r * stride >= C) continue;
#pragma unroll
      for (int i = 0; i < VEC; ++i) total[0] += load_as<A>(h[r].v[i]);
    }
  }
  row_sum(total, shared_sum);
  const A mean = total[0] / static_cast<A>(a.C);

  const T* rows = residual ? sum : x;
  A moments[2] = {};  // sums of d = x - mean and of d^2
  if constexpr (R == 0) {
    for (int c = mine; c < C; c += stride) {
      A v[VEC];
      unpack(load_pack<VEC>(rows + c), v);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A d = v[i] - mean;
        moments[0] += d;
        moments[1] += d * d;
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (mine + r * stride >= C) continue;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A d = load_as<A>(h[r].v[i]) - mean;
        moments[0] += d;
        moments[1] += d * d;
      }
    }
  }
  row_sum(moments, shared_moments);
  const LayerNormStats<A> stats =
      layer_norm_stats<A>(mean, moments[0], moments[1], a.C, static_cast<A>(a.eps));
  const LayerNormRow<A> factors = layer_norm_row<A>(stats, A(0), A(0), a.C);
  if (threadIdx.x == 0 && row < a.N) static_cast<LayerNormStats<A>*>(a.stats)[row] = stats;

  if constexpr (R == 0) {
    for (int j = 0; j * stride < length; ++j) {
      const int c = j * stride + mine;
      A v[VEC], w[VEC], b[VEC];
      load_vector(a.weight, a.weight_dtype, c, length, A(1), w);
      load_vector(a.bias, a.bias_dtype, c, length, A(0), b);
      if (c >= C) continue;
      unpack(load_pack<VEC>(rows + c), v);
#pragma unroll
      for (int i = 0; i < VEC; ++i) v[i] = layer_norm_xhat(v[i], factors) * w[i] + b[i];
      store_pack(y + c, pack_as<T>(v));
    }
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      A w[VEC], b[VEC], v[VEC];
      load_vector(a.weight, a.weight_dtype, mine + r * stride, length, A(1), w);
      load_vector(a.bias, a.bias_dtype, mine + r * stride, length, A(0), b);
      if (mine + r * stride >= C) continue;
#pragma unroll
      for (int i = 0; i < VEC; ++i)
        v[i] = layer_norm_xhat(load_as<A>(h[r].v[i]), factors) * w[i] + b[i];
      store_pack(y + mine + r * stride, pack_as<T>(v));
    }
  }
}

template<class T, int VEC, int R>
__global__ void __launch_bounds__(kRowThreads, 1) layer_norm_bwd_kernel(LayerNormBwd a) {
  using A = acc_t<T>;
  extern __shared__ __align__(16) char dynamic[];
  __shared__ A shared[2][2][32];
  const int length = static_cast<int>(a.C), mine = threadIdx.x * VEC, stride = blockDim.x * VEC;
  const int64_t first = blockIdx.x * a.N / a.slots, last = (blockIdx.x + 1) * a.N / a.slots;
  ColumnSums<A, VEC, R, 2> partial(reinterpret_cast<A*>(dynamic), length);  // dw, db
  int turn = 0;  // two buffers in turn: slow warps may still read the one of the row before
  for (int64_t begin = first; begin < last; begin += blockDim.y, turn ^= 1) {
    const int64_t row = begin + threadIdx.y, at = row * a.C;
    const int C = row < last ? length : 0;
    const T *x = static_cast<const T*>(a.x) + at, *dy = static_cast<const T*>(a.dy) + at;
    const T* dsum = a.dsum ? static_cast<const T*>(a.dsum) + at : nullptr;
    T* dx = static_cast<T*>(a.dx) + at;
    LayerNormStats<A> stats{};
    if (row < last) stats = static_cast<const LayerNormStats<A>*>(a.stats)[row];
    Pack<T, VEC> xs[R == 0 ? 1 : R]{}, gs[R == 0 ? 1 : R]{};
    A sums[2] = {};  // of g and of g (x - mean)
    if constexpr (R == 0) {
      for (int j = 0; j * stride < length; ++j) {
        const int c = j * stride + mine;
        A h[VEC], g[VEC], w[VEC];
        load_vector(a.weight, a.weight_dtype, c, length, A(1), w);
        if (c >= C) continue;
        unpack(load_pack<VEC>(x + c), h);
        unpack(load_pack<VEC>(dy + c), g);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          sums[0] += g[i] * w[i];
          sums[1] += g[i] * w[i] * (h[i] - stats.mean);
        }
      }
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (mine + r * stride >= C) continue;
        xs[r] = load_once<VEC>(x + mine + r * stride);
        gs[r] = load_once<VEC>(dy + mine + r * stride);
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        A w[VEC];
        load_vector(a.weight, a.weight_dtype, mine + r * stride, length, A(1), w);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const A g = load_as<A>(gs[r].v[i]) * w[i];
          sums[0] += g;
          sums[1] += g * (load_as<A>(xs[r].v[i]) - stats.mean);
        }
      }
    }
    row_sum(sums, shared[turn]);
    const LayerNormRow<A> factors = layer_norm_row<A>(stats, sums[0], sums[1], a.C);
    if constexpr (R == 0) {
      for (int j = 0; j * stride < length; ++j) {
        const int c = j * stride + mine;
        A h[VEC], g[VEC], w[VEC], more[VEC] = {};
        load_vector(a.weight, a.weight_dtype, c, length, A(1), w);
        if (c >= C) continue;
        unpack(load_pack<VEC>(x + c), h);
        unpack(load_pack<VEC>(dy + c), g);
        if (dsum) unpack(load_once<VEC>(dsum + c), more);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const A xhat = layer_norm_xhat(h[i], factors);
          partial.slot(j, 0, i) += g[i] * xhat;
          partial.slot(j, 1, i) += g[i];
          h[i] = layer_norm_dx(g[i] * w[i], xhat, factors) + more[i];
        }
        if (a.dx) store_pack(dx + c, pack_as<T>(h));
      }
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        A w[VEC], d[VEC];
        load_vector(a.weight, a.weight_dtype, mine + r * stride, length, A(1), w);
        Pack<T, VEC> extra{};
        if (dsum && mine + r * stride < C) extra = load_once<VEC>(dsum + mine + r * stride);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const A dyv = load_as<A>(gs[r].v[i]);
          const A xhat = layer_norm_xhat(load_as<A>(xs[r].v[i]), factors);
          partial.sums[r][0][i] += dyv * xhat;  // dy is 0 past the end
          partial.sums[r][1][i] += dyv;
          d[i] = layer_norm_dx(dyv * w[i], xhat, factors) + load_as<A>(extra.v[i]);
        }
        if (a.dx && mine + r * stride < C) store_pack(dx + mine + r * stride, pack_as<T>(d));
      }
    }
  }
  if (a.dw_partial) partial.store({a.dw_partial, a.db_partial}, length);
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

template<class T>
void launch_layer_norm_fwd(const LayerNormFwd& a, cudaStream_t stream) {
  const bool wide = aligned16(a.x, a.residual, a.weight, a.bias, a.y, a.sum);
  with_row_layout<T>(a.C, wide, [&](auto vec, auto r, dim3 block) {
    const auto blocks = static_cast<unsigned>(divide_up(a.N, block.y));
    layer_norm_fwd_kernel<T, decltype(vec)::value, decltype(r)::value>
        <<<blocks, block, 0, stream>>>(a);
  });
}

template<class T>
void launch_layer_norm_bwd(const LayerNormBwd& a, cudaStream_t stream) {
  const bool wide = aligned16(a.x, a.dy, a.dsum, a.weight, a.dx, a.dw_partial, a.db_partial);
  with_row_layout<T>(a.C, wide, [&](auto vec, auto r, dim3 block) {
    constexpr int VEC = decltype(vec)::value, R = decltype(r)::value;
    const int bytes = partial_bytes<acc_t<T>, VEC, R, 2>(a.C, block);
    const auto kernel = layer_norm_bwd_kernel<T, VEC, R>;
    allow_shared(kernel, bytes);
    kernel<<<static_cast<unsigned>(a.slots), block, bytes, stream>>>(a);
  });
}

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd_cuda(const Tensor& x,
                                                       const std::optional<Tensor>& residual,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias,
                                                       double eps) {
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  check_rows<2>("layer_norm", x, C);
  const OnDevice here(x);
  Tensor y = empty(shape_of(x), x);
  Tensor sum = residual ? empty(shape_of(x), x) : empty({0}, x);
  Tensor stats = empty({N, 3}, x, acc_dtype(x));
  if (N == 0) return {y, sum, stats};
  const LayerNormFwd a = {device_data(x),
                          device_data(residual),
                          device_data(weight),
                          device_data(bias),
                          device_data(y),
                          residual ? device_data(sum) : nullptr,
                          device_data(stats),
                          N,
                          C,
                          eps,
                          weight ? dtype_of(*weight) : DType::f32,
                          bias ? dtype_of(*bias) : DType::f32};
  with_float_type(dtype_of(x),
                  [&](auto t) { launch_layer_norm_fwd<decltype(t)>(a, stream_of(x)); });
  check_launch("layer_norm_fwd_kernel");
  return {y, sum, stats};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd_cuda(
    const Tensor& dy, const std::optional<Tensor>& dsum, const Tensor& x,
    const std::optional<Tensor>& weight, const Tensor& stats, bool need_dx, bool need_dw) {
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  check_rows<2>("layer_norm", x, C);
  TW_CHECK_CONTIGUOUS(dy);
  const OnDevice here(x);
  const int64_t slots = row_slots(N, C, dtype_bytes(dtype_of(x)));
  Tensor dx = empty(need_dx ? shape_of(x) : std::vector<int64_t>{0}, x);
  Tensor dw = empty({need_dw ? slots : 0, C}, x, acc_dtype(x));
  Tensor db = empty({need_dw ? slots : 0, C}, x, acc_dtype(x));
  if (N > 0) {
    const LayerNormBwd a = {device_data(dy),
                            device_data(dsum),
                            device_data(x),
                            device_data(weight),
                            device_data(stats),
                            need_dx ? device_data(dx) : nullptr,
                            need_dw ? device_data(dw) : nullptr,
                            need_dw ? device_data(db) : nullptr,
                            N,
                            C,
                            slots,
                            weight ? dtype_of(*weight) : DType::f32};
    with_float_type(dtype_of(x),
                    [&](auto t) { launch_layer_norm_bwd<decltype(t)>(a, stream_of(x)); });
    check_launch("layer_norm_bwd_kernel");
  }
  if (!need_dw) return {dx, empty({0}, x, acc_dtype(x)), empty({0}, x, acc_dtype(x))};
  return {dx, sum_slots(dw), sum_slots(db)};
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&tw::layer_norm_fwd_cuda));
  m.impl("layer_norm_bwd", TORCH_BOX(&tw::layer_norm_bwd_cuda));
}
