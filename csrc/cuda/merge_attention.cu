// Two partial results of attention put together on CUDA, forward and backward (trainwright/merge_attention.h).
//
// A group of lanes, a power of two, has a row (b, t, h) and four elements of it at a time. Bytes of a row of Dv
// elements: forward Dv (s_a + s_b + s_out) + 12, backward Dv (s_out + 2 s_a + 2 s_b) + 20. Bound: memory bandwidth.
// Counted on the virtual GPU (tests/vgpu/test_attention_counts.py); not yet timed on a GPU.
#include "trainwright/merge_attention.h"

#include "cuda/binding.cuh"
#include "cuda/launch.cuh"
#include "trainwright/pack.cuh"

TW_BEGIN

constexpr int kMergeThreads = 128, kMergePack = 4;

struct MergeRows {
  void* data;  // (B, T, H, Dv), contiguous; null: not wanted
  DType type;
};

template<class A>
struct MergeAttention {
  MergeRows out_a, out_b, out, dout_a, dout_b;  // backward: out is dout
  const A *lse_a, *lse_b, *dlse;                // (B, H, T); dlse may be null
  A *lse, *dlse_a, *dlse_b;
  int64_t rows, T, H;
  int Dv, lanes;  // lanes: of a row
  bool wide;      // rows begin at multiples of 16 bytes and have whole packs
};

template<class A, class F>
__device__ __forceinline__ void with_row_type(DType type, F&& f) {
  if (type == DType::f32)
    f(float{});
  else if (type == DType::bf16)
    f(bf16{});
  else if (type == DType::f16)
    f(f16{});
  else if constexpr (sizeof(A) == 8)
    f(double{});
}

// Elements at, at + 1, .. of a row, of which `left` exist; the others are 0.
template<class A>
__device__ __forceinline__ void load_some(const MergeRows& x, int64_t at, int left, bool wide,
                                          A (&y)[kMergePack]) {
  with_row_type<A>(x.type, [&](auto tag) {
    using T = decltype(tag);
    constexpr int VEC = sizeof(T) == 8 ? 2 : kMergePack;
    const T* p = static_cast<const T*>(x.data) + at;
#pragma unroll
    for (int i = 0; i < kMergePack; i += VEC) {
      Pack<T, VEC> pack = {};
      if (wide) {
        pack = load_once<VEC>(p + i);
      } else {
#pragma unroll
        for (int k = 0; k < VEC; ++k)
          if (i + k < left) pack.v[k] = p[i + k];
      }
#pragma unroll
      for (int k = 0; k < VEC; ++k) y[i + k] = load_as<A>(pack.v[k]);
    }
  });
}
template<class A>
__device__ __forceinline__ void store_some(const MergeRows& x, int64_t at, int left, bool wide,
                                           const A (&y)[kMergePack]) {
  with_row_type<A>(x.type, [&](auto tag) {
    using T = decltype(tag);
    constexpr int VEC = sizeof(T) == 8 ? 2 : kMergePack;
    T* p = static_cast<T*>(x.data) + at;
#pragma unroll
    for (int i = 0; i < kMergePack; i += VEC) {
      Pack<T, VEC> pack;
#pragma unroll
      for (int k = 0; k < VEC; ++k) pack.v[k] = store_as<T>(y[i + k]);
      if (wide) {
        store_pack(p + i, pack);
      } else {
#pragma unroll
        for (int k = 0; k < VEC; ++k)
          if (i + k < left) p[i + k] = pack.v[k];
      }
    }
  });
}

template<class A, bool BACKWARD>
__global__ void __launch_bounds__(kMergeThreads)
    merge_attention_kernel(const __grid_constant__ MergeAttention<A> m) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x;
  const int64_t row = thread / m.lanes, h = row % m.H, t = row / m.H % m.T, b = row / m.H / m.T;
  const int lane = threadIdx.x % m.lanes;
  const bool exists = row < m.rows;
  const int64_t at = exists ? (b * m.H + h) * m.T + t : 0;
  const A lse_a = m.lse_a[at], lse_b = m.lse_b[at];
  LseSum<A> sum;
  sum.add(lse_a);
  sum.add(lse_b);
  const A weight_a = sum.weight(lse_a), weight_b = sum.weight(lse_b);
  A dot = 0;
  if (exists)
    for (int c = lane * kMergePack; c < m.Dv; c += m.lanes * kMergePack) {
      const int64_t first = row * m.Dv + c;
      const int left = m.Dv - c;
      A x[kMergePack], y[kMergePack], z[kMergePack];
      load_some(m.out_a, first, left, m.wide, x);
      load_some(m.out_b, first, left, m.wide, y);
      if constexpr (BACKWARD) {
        load_some(m.out, first, left, m.wide, z);
        A da[kMergePack], db[kMergePack];
#pragma unroll
        for (int k = 0; k < kMergePack; ++k) {
          dot += z[k] * (merged_part(x[k], lse_a, A(1)) - merged_part(y[k], lse_b, A(1)));
          da[k] = merged_part(z[k], lse_a, weight_a);
          db[k] = merged_part(z[k], lse_b, weight_b);
        }
        if (m.dout_a.data) store_some(m.dout_a, first, left, m.wide, da);
        if (m.dout_b.data) store_some(m.dout_b, first, left, m.wide, db);
      } else {
#pragma unroll
        for (int k = 0; k < kMergePack; ++k)
          z[k] = merged_part(x[k], lse_a, weight_a) + merged_part(y[k], lse_b, weight_b);
        store_some(m.out, first, left, m.wide, z);
      }
    }
  if constexpr (BACKWARD) {
    dot = warp_sum(dot, m.lanes);
    if (!exists || lane != 0) return;
    const A up = m.dlse ? m.dlse[at] : A(0);
    if (m.dlse_a) m.dlse_a[at] = merged_part(up + weight_b * dot, lse_a, weight_a);
    if (m.dlse_b) m.dlse_b[at] = merged_part(up - weight_a * dot, lse_b, weight_b);
  } else if (exists && lane == 0) {
    m.lse[at] = sum.lse();
  }
}

template<class A, bool BACKWARD>
void launch_merge_attention(MergeAttention<A> m, cudaStream_t stream) {
  if (m.rows == 0) return;
  m.lanes = 1;
  while (m.lanes < 32 && m.lanes * kMergePack < m.Dv) m.lanes *= 2;
  m.wide = m.Dv % kMergePack == 0 &&
           aligned16(m.out_a.data, m.out_b.data, m.out.data, m.dout_a.data, m.dout_b.data);
  merge_attention_kernel<A, BACKWARD>
      <<<static_cast<unsigned>(divide_up(m.rows * m.lanes, kMergeThreads)), kMergeThreads, 0,
         stream>>>(m);
}

TW_END

namespace tw {
namespace {

MergeRows merge_rows(const Tensor& x) {
  return {x.numel() > 0 ? device_data(x) : nullptr, dtype_of(x)};
}

// What forward and backward have in common.
template<class A>
MergeAttention<A> merge_parts(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                              const Tensor& lse_b, const Tensor& out) {
  TW_CHECK_CONTIGUOUS(out_a);
  TW_CHECK_CONTIGUOUS(lse_a);
  TW_CHECK_CONTIGUOUS(out_b);
  TW_CHECK_CONTIGUOUS(lse_b);
  TW_CHECK_CONTIGUOUS(out);
  MergeAttention<A> m = {};
  m.out_a = merge_rows(out_a);
  m.out_b = merge_rows(out_b);
  m.out = merge_rows(out);
  m.lse_a = static_cast<const A*>(device_data(lse_a));
  m.lse_b = static_cast<const A*>(device_data(lse_b));
  m.rows = lse_a.numel();
  m.T = out.size(1);
  m.H = out.size(2);
  m.Dv = static_cast<int>(out.size(3));
  return m;
}

template<class F>
void with_merge_type(const Tensor& lse, F&& f) {
  if (dtype_of(lse) == DType::f64)
    f(double{});
  else
    f(float{});
}

std::tuple<Tensor, Tensor> merge_attention_fwd_cuda(const Tensor& out_a, const Tensor& lse_a,
                                                    const Tensor& out_b, const Tensor& lse_b) {
  const OnDevice here(out_a);
  const DType a = dtype_of(out_a), b = dtype_of(out_b);
  const int64_t bytes = std::max(dtype_bytes(a), dtype_bytes(b));
  const ScalarType type = bytes == 8             ? ScalarType::Double
                          : bytes == 4 || a != b ? ScalarType::Float
                                                 : out_a.scalar_type();
  Tensor out = empty(shape_of(out_a), out_a, type), lse = empty(shape_of(lse_a), lse_a);
  with_merge_type(lse_a, [&](auto tag) {
    using A = decltype(tag);
    MergeAttention<A> m = merge_parts<A>(out_a, lse_a, out_b, lse_b, out);
    m.lse = static_cast<A*>(device_data(lse));
    launch_merge_attention<A, false>(m, stream_of(out_a));
  });
  check_launch("merge_attention_kernel");
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> merge_attention_bwd_cuda(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& out_a, const Tensor& lse_a,
    const Tensor& out_b, const Tensor& lse_b, std::vector<bool> need) {
  STD_TORCH_CHECK(need.size() == 4, "need must have 4 entries");
  if (dlse) TW_CHECK_CONTIGUOUS(*dlse);
  const OnDevice here(out_a);
  const auto gradient = [&](bool needed, const Tensor& of) {
    return empty(needed ? shape_of(of) : std::vector<int64_t>{0}, of);
  };
  Tensor dout_a = gradient(need[0], out_a), dlse_a = gradient(need[1], lse_a);
  Tensor dout_b = gradient(need[2], out_b), dlse_b = gradient(need[3], lse_b);
  with_merge_type(lse_a, [&](auto tag) {
    using A = decltype(tag);
    const auto written = [](const Tensor& x) {
      return x.numel() > 0 ? static_cast<A*>(device_data(x)) : nullptr;
    };
    MergeAttention<A> m = merge_parts<A>(out_a, lse_a, out_b, lse_b, dout);
    m.dlse = static_cast<const A*>(device_data(dlse));
    m.dout_a = merge_rows(dout_a);
    m.dout_b = merge_rows(dout_b);
    m.dlse_a = written(dlse_a);
    m.dlse_b = written(dlse_b);
    launch_merge_attention<A, true>(m, stream_of(out_a));
  });
  check_launch("merge_attention_kernel");
  return {dout_a, dlse_a, dout_b, dlse_b};
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("merge_attention_fwd", TORCH_BOX(&tw::merge_attention_fwd_cuda));
  m.impl("merge_attention_bwd", TORCH_BOX(&tw::merge_attention_bwd_cuda));
}
