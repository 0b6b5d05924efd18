// RMS norm on CUDA (formula in trainwright/rms_norm.h).
//
// forward   each thread of a row keeps its packs in registers (cuda/rows.cuh), so the row is read
//           once.
// backward  a fixed number of blocks, each walking a contiguous range of rows in order and keeping
//           its part of dw in registers; the partial rows are summed in a fixed order, so repeats
//           are bit-equal.
// Bytes per element: forward 2s (4s with residual), backward 3s (s = element size), and w once per
// row from L1, dw once per block. Bound: memory bandwidth. Accesses are 16 bytes where C and the
// pointers allow, one element otherwise. Counted on the virtual GPU; not yet timed on a GPU.
#include "trainwright/rms_norm.h"

#include "cuda/row_binding.cuh"

namespace tw {

struct RmsNormFwd {
  const void *x, *residual, *weight;  // (N, C), (N, C) or null, (C) or null
  void *y, *sum, *rstd;               // (N, C), (N, C) or null, (N) in acc type
  int64_t N, C;
  double eps, weight_offset;
  DType weight_dtype;
};
struct RmsNormBwd {
  const void *dy, *dsum, *x, *weight, *rstd;
  void *dx, *dw_partial;  // either may be null; (slots, C) in acc type
  int64_t N, C, slots;
  double weight_offset;
  DType weight_dtype;
};

// w + offset, or 1, for the elements from c on.
template<int VEC, class A>
__device__ __forceinline__ void load_weight(const void* w, DType dtype, int c, int C, A offset,
                                            A (&out)[VEC]) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) out[i] = A(0);
  if (w) load_span<VEC>(w, dtype, c, C, out);
#pragma unroll
  for (int i = 0; i < VEC; ++i) out[i] += w ? offset : A(1);
}

template<class T, int VEC, int R>
__global__ void __launch_bounds__(kRowThreads, 1) rms_norm_fwd_kernel(RmsNormFwd a) {
  using A = acc_t<T>;
  __shared__ A shared[1][32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int length = static_cast<int>(a.C), C = row < a.N ? length : 0;
  const int mine = threadIdx.x * VEC, stride = blockDim.x * VEC;
  const int64_t at = row * a.C;
  const T* x = static_cast<const T*>(a.x) + at;
  const T* residual = a.residual ? static_cast<const T*>(a.residual) + at : nullptr;
  T *y = static_cast<T*>(a.y) + at, *sum = static_cast<T*>(a.sum) + at;
  const A offset = static_cast<A>(a.weight_offset);

  Pack<T, VEC> h[R == 0 ? 1 : R];
  A w[R == 0 ? 1 : R][VEC], squares[1] = {};
  if constexpr (R == 0) {
    for (int c = mine; c < C; c += stride) {
      A v[VEC];
      unpack(load_sum<VEC>(x, residual, sum, c), v);
#pragma unroll
      for (int i = 0; i < VEC; ++i) squares[0] += v[i] * v[i];
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
    for (int r = 0; r < R; ++r)
      load_weight(a.weight, a.weight_dtype, mine + r * stride, length, offset, w[r]);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (mine + r * stride >= C) continue;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A v = load_as<A>(h[r].v[i]);
        squares[0] += v * v;
      }
    }
  }
  row_sum(squares, shared);
  const A rstd = rms_rstd<A>(squares[0], a.C, static_cast<A>(a.eps));
  if (threadIdx.x == 0 && row < a.N) static_cast<A*>(a.rstd)[row] = rstd;
  if constexpr (R == 0) {
    const T* rows = residual ? sum : x;
    for (int j = 0; j * stride < length; ++j) {
      const int c = j * stride + mine;
      A v[VEC], wv[VEC];
      load_weight(a.weight, a.weight_dtype, c, length, offset, wv);
      if (c >= C) continue;
      unpack(load_pack<VEC>(rows + c), v);
#pragma unroll
      for (int i = 0; i < VEC; ++i) v[i] = rms_y(v[i], rstd, wv[i]);
      store_pack(y + c, pack_as<T>(v));
    }
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (mine + r * stride >= C) continue;
      A v[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) v[i] = rms_y(load_as<A>(h[r].v[i]), rstd, w[r][i]);
      store_pack(y + mine + r * stride, pack_as<T>(v));
    }
  }
}

template<class T, int VEC, int R>
__global__ void __launch_bounds__(kRowThreads, 1) rms_norm_bwd_kernel(RmsNormBwd a) {
  using A = acc_t<T>;
  extern __shared__ __align__(16) char dynamic[];
  __shared__ A shared[2][1][32];
  const int length = static_cast<int>(a.C), mine = threadIdx.x * VEC, stride = blockDim.x * VEC;
  const int64_t first = blockIdx.x * a.N / a.slots, last = (blockIdx.x + 1) * a.N / a.slots;
  const A offset = static_cast<A>(a.weight_offset);
  ColumnSums<A, VEC, R, 1> dw(reinterpret_cast<A*>(dynamic), length);
  int turn = 0;  // two buffers in turn: slow warps may still read the one of the row before
  for (int64_t begin = first; begin < last; begin += blockDim.y, turn ^= 1) {
    const int64_t row = begin + threadIdx.y, at = row * a.C;
    const int C = row < last ? length : 0;
    const T *x = static_cast<const T*>(a.x) + at, *dy = static_cast<const T*>(a.dy) + at;
    const T* dsum = a.dsum ? static_cast<const T*>(a.dsum) + at : nullptr;
    T* dx = static_cast<T*>(a.dx) + at;
    const A rstd = row < last ? static_cast<const A*>(a.rstd)[row] : A(0);
    Pack<T, VEC> xs[R == 0 ? 1 : R]{}, gs[R == 0 ? 1 : R]{};
    A gx[1] = {};
    if constexpr (R == 0) {
      for (int j = 0; j * stride < length; ++j) {
        const int c = j * stride + mine;
        A h[VEC], g[VEC], w[VEC];
        load_weight(a.weight, a.weight_dtype, c, length, offset, w);
        if (c >= C) continue;
        unpack(load_pack<VEC>(x + c), h);
        unpack(load_pack<VEC>(dy + c), g);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          dw.slot(j, 0, i) += g[i] * h[i] * rstd;
          gx[0] += g[i] * w[i] * h[i];
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
        load_weight(a.weight, a.weight_dtype, mine + r * stride, length, offset, w);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const A h = load_as<A>(xs[r].v[i]), g = load_as<A>(gs[r].v[i]);
          dw.sums[r][0][i] += g * h * rstd;
          gx[0] += g * w[i] * h;
        }
      }
    }
    if (!a.dx) continue;
    row_sum(gx, shared[turn]);
    const A mean_gx = gx[0] / static_cast<A>(a.C);
    if constexpr (R == 0) {
      for (int j = 0; j * stride < length; ++j) {
        const int c = j * stride + mine;
        A h[VEC], g[VEC], w[VEC], more[VEC] = {};
        load_weight(a.weight, a.weight_dtype, c, length, offset, w);
        if (c >= C) continue;
        unpack(load_pack<VEC>(x + c), h);
        unpack(load_pack<VEC>(dy + c), g);
        if (dsum) unpack(load_once<VEC>(dsum + c), more);
#pragma unroll
        for (int i = 0; i < VEC; ++i) g[i] = rms_dx(g[i] * w[i], h[i], rstd, mean_gx) + more[i];
        store_pack(dx + c, pack_as<T>(g));
      }
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        A w[VEC], d[VEC];
        load_weight(a.weight, a.weight_dtype, mine + r * stride, length, offset, w);
        if (mine + r * stride >= C) continue;
        Pack<T, VEC> extra;
        if (dsum) extra = load_once<VEC>(dsum + mine + r * stride);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const A g = load_as<A>(gs[r].v[i]) * w[i];
          d[i] = rms_dx(g, load_as<A>(xs[r].v[i]), rstd, mean_gx);
          if (dsum) d[i] += load_as<A>(extra.v[i]);
        }
        store_pack(dx + mine + r * stride, pack_as<T>(d));
      }
    }
  }
  if (a.dw_partial) dw.store({a.dw_partial}, length);
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

template<class T>
void launch_rms_norm_fwd(const RmsNormFwd& a, cudaStream_t stream) {
  const bool wide = aligned16(a.x, a.residual, a.weight, a.y, a.sum);
  with_row_layout<T>(a.C, wide, [&](auto vec, auto r, dim3 block) {
    const auto blocks = static_cast<unsigned>(divide_up(a.N, block.y));
    rms_norm_fwd_kernel<T, decltype(vec)::value, decltype(r)::value>
        <<<blocks, block, 0, stream>>>(a);
  });
}

template<class T>
void launch_rms_norm_bwd(const RmsNormBwd& a, cudaStream_t stream) {
  const bool wide = aligned16(a.x, a.dy, a.dsum, a.weight, a.dx, a.dw_partial);
  with_row_layout<T>(a.C, wide, [&](auto vec, auto r, dim3 block) {
    constexpr int VEC = decltype(vec)::value, R = decltype(r)::value;
    const int bytes = partial_bytes<acc_t<T>, VEC, R, 1>(a.C, block);
    const auto kernel = rms_norm_bwd_kernel<T, VEC, R>;
    allow_shared(kernel, bytes);
    kernel<<<static_cast<unsigned>(a.slots), block, bytes, stream>>>(a);
  });
}

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

std::tuple<Tensor, Tensor, Tensor> rms_norm_fwd_cuda(const Tensor& x,
                                                     const std::optional<Tensor>& residual,
                                                     const std::optional<Tensor>& weight,
                                                     double eps, double weight_offset) {
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  check_rows<1>("rms_norm", x, C);
  const OnDevice here(x);
  Tensor y = empty(shape_of(x), x);
  Tensor sum = residual ? empty(shape_of(x), x) : empty({0}, x);
  Tensor rstd = empty({N}, x, acc_dtype(x));
  if (N == 0) return {y, sum, rstd};
  const RmsNormFwd a = {device_data(x),
                        device_data(residual),
                        device_data(weight),
                        device_data(y),
                        residual ? device_data(sum) : nullptr,
                        device_data(rstd),
                        N,
                        C,
                        eps,
                        weight_offset,
                        weight ? dtype_of(*weight) : DType::f32};
  with_float_type(dtype_of(x), [&](auto t) { launch_rms_norm_fwd<decltype(t)>(a, stream_of(x)); });
  check_launch("rms_norm_fwd_kernel");
  return {y, sum, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd_cuda(const Tensor& dy, const std::optional<Tensor>& dsum,
                                             const Tensor& x, const std::optional<Tensor>& weight,
                                             const Tensor& rstd, double weight_offset, bool need_dx,
                                             bool need_dw) {
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  check_rows<1>("rms_norm", x, C);
  TW_CHECK_CONTIGUOUS(dy);
  const OnDevice here(x);
  const int64_t slots = row_slots(N, C, dtype_bytes(dtype_of(x)));
  Tensor dx = empty(need_dx ? shape_of(x) : std::vector<int64_t>{0}, x);
  Tensor partial = empty({need_dw ? slots : 0, C}, x, acc_dtype(x));
  if (N > 0) {
    const RmsNormBwd a = {device_data(dy),
                          device_data(dsum),
                          device_data(x),
                          device_data(weight),
                          device_data(rstd),
                          need_dx ? device_data(dx) : nullptr,
                          need_dw ? device_data(partial) : nullptr,
                          N,
                          C,
                          slots,
                          weight_offset,
                          weight ? dtype_of(*weight) : DType::f32};
    with_float_type(dtype_of(x),
                    [&](auto t) { launch_rms_norm_bwd<decltype(t)>(a, stream_of(x)); });
    check_launch("rms_norm_bwd_kernel");
  }
  return {dx, need_dw ? sum_slots(partial) : empty({0}, x, acc_dtype(x))};
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("rms_norm_fwd", TORCH_BOX(&tw::rms_norm_fwd_cuda));
  m.impl("rms_norm_bwd", TORCH_BOX(&tw::rms_norm_bwd_cuda));
}
