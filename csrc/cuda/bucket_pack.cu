// Gradients in and out of a flat buffer on CUDA.
//
// bucket_pack    flat[slot of i] = (or +=) scale * grads[i], cast, in one pass that also keeps the
//                sum of squares and a finite check of what it wrote; the rest of a slot is zeroed.
// bucket_unpack  outs[i] = scale * flat[slot of i], cast.
// ordered_sum    out = scale * (c0 + c1 + ...), added in rank order in fp32 (fp64 for fp64): the
//                same bits at every position, whatever the bucket or chunk size.
//
// One block per kListBlock elements (cuda/tensor_list.cuh); what each finds is added in block order.
// Bytes per element: pack s_grad + s_flat (+ s_flat when adding), sum W s_chunk + s_out. Bound:
// memory bandwidth. Accesses of the wider side are 16 bytes where pointers allow, one element otherwise.
// Counted on the virtual GPU (tests/vgpu/test_counts.py): bytes within 2% of that; not yet timed on a
// GPU.
#include "trainwright/bucket_pack.h"

#include "cuda/stats_binding.cuh"
#include "cuda/tensor_list_binding.cuh"

namespace tw {

struct PackRow {
  const void* grad;
  int64_t n, slot, length;  // elements of the gradient; its slot in flat: first element, elements
  int first_block;
  DType dtype;
  bool wide;  // every address is a multiple of 16
};
struct UnpackRow {
  void* out;
  int64_t n, slot;
  int first_block;
  DType dtype;
  bool wide;
};
// A factor, times one element in device memory if there is a pointer.
struct Scale {
  double factor;
  const void* tensor;
  DType dtype;
};
struct Chunks {
  static constexpr int kMost = 1024;
  const void* chunks[kMost];
  int count;
};

template<class A>
__device__ __forceinline__ A value_of(const Scale& s) {
  return static_cast<A>(s.tensor ? s.factor * load_one<double>(s.tensor, s.dtype) : s.factor);
}

// Calls f(VEC as a type, i) for this thread's packs of the elements [begin, end) of this block.
template<int VEC, class F>
__device__ __forceinline__ void for_range(int64_t begin, int64_t end, bool wide, F&& f) {
  int64_t i = begin;
  if (wide && end - begin >= VEC) {
#pragma unroll 2
    for (i += threadIdx.x * VEC; i + VEC <= end; i += kListThreads * VEC) f(Int<VEC>{}, i);
    i = begin + (end - begin) / VEC * VEC;
  }
  for (i += threadIdx.x; i < end; i += kListThreads) f(Int<1>{}, i);
}

// The same where other memory of dtype `other` comes in beside that of type F: a pack is 16 bytes of the
// wider of the two, so that the accesses of a warp fill their sectors on both sides.
template<class F, class Fn>
__device__ __forceinline__ void for_range(int64_t begin, int64_t end, bool wide, DType other,
                                          Fn&& f) {
  constexpr int most = 16 / sizeof(F), of_four_bytes = most < 4 ? most : 4;
  const int64_t bytes = dtype_bytes(other);
  if (bytes == 8)
    for_range<2>(begin, end, wide, f);
  else if (bytes == 4)
    for_range<of_four_bytes>(begin, end, wide, f);
  else
    for_range<most>(begin, end, wide, f);
}

// F is the type of flat, A the wider of it and the gradients' (at least float).
template<class F, class A>
__global__ void __launch_bounds__(kListThreads, 4)
    bucket_pack_kernel(const __grid_constant__ RowTable<PackRow> table, F* flat, double* partial,
                       const __grid_constant__ Scale scale, bool accumulate) {
  const PackRow& row = row_of_block(table);
  const A factor = value_of<A>(scale);
  const int64_t begin = (blockIdx.x - row.first_block) * kListBlock, past = begin + kListBlock;
  F* slot = flat + row.slot;
  GradStats<A> stats;
  const DType other = sizeof(A) == 8 ? DType::f64 : row.dtype;
  for_range<F>(begin, row.n < past ? row.n : past, row.wide, other, [&](auto vec, int64_t i) {
    constexpr int VEC = decltype(vec)::value;
    A x[VEC];
    load_any<VEC>(row.grad, row.dtype, i, x);
    Pack<F, VEC> old;
    if (accumulate) old = load_once<VEC>(slot + i);
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
      x[k] *= factor;
      if (accumulate) x[k] = load_as<A>(old.v[k]) + x[k];
    }
    const Pack<F, VEC> packed = pack_as<F>(x);
    store_pack(slot + i, packed);
#pragma unroll
    for (int k = 0; k < VEC; ++k) stats.add(load_as<A>(packed.v[k]));  // as stored, rounded
  });
  if (!accumulate) {
    const int64_t end = row.length < past ? row.length : past;
    for_range<1>(row.n > begin ? row.n : begin, end, false,
                 [&](auto, int64_t i) { slot[i] = F{}; });
  }
  double sums[2] = {stats.sum(), stats.not_finite()};
  block_pair_sum(sums);
  if (threadIdx.x == 0) store_stats(partial, sums);
}

template<class F, class A>
__global__ void __launch_bounds__(kListThreads, 4)
    bucket_unpack_kernel(const __grid_constant__ RowTable<UnpackRow> table, const F* flat,
                         const __grid_constant__ Scale scale) {
  const UnpackRow& row = row_of_block(table);
  const A factor = value_of<A>(scale);
  const int64_t begin = (blockIdx.x - row.first_block) * kListBlock, past = begin + kListBlock;
  const F* slot = flat + row.slot;
  const DType other = sizeof(A) == 8 ? DType::f64 : row.dtype;
  for_range<F>(begin, row.n < past ? row.n : past, row.wide, other, [&](auto vec, int64_t i) {
    constexpr int VEC = decltype(vec)::value;
    A x[VEC];
    unpack(load_once<VEC>(slot + i), x);
#pragma unroll
    for (int k = 0; k < VEC; ++k) x[k] *= factor;
    store_any<VEC>(row.out, row.dtype, i, x);
  });
}

// out may be one of the chunks: each element is read before it is written, by the same thread.
template<class C>
__global__ void __launch_bounds__(kListThreads, 4)
    ordered_sum_kernel(const __grid_constant__ Chunks chunks, void* out, DType dtype, int64_t n,
                       bool wide, double* partial, const __grid_constant__ Scale scale) {
  using A = acc_t<C>;
  const A factor = value_of<A>(scale);
  const int64_t begin = blockIdx.x * kListBlock, past = begin + kListBlock;
  GradStats<A> stats;
  for_range<C>(begin, n < past ? n : past, wide, dtype, [&](auto vec, int64_t i) {
    constexpr int VEC = decltype(vec)::value;
    A x[VEC];
    unpack(load_once<VEC>(static_cast<const C*>(chunks.chunks[0]) + i), x);
#pragma unroll 4
    for (int w = 1; w < chunks.count; ++w) {
      const Pack<C, VEC> next = load_once<VEC>(static_cast<const C*>(chunks.chunks[w]) + i);
#pragma unroll
      for (int k = 0; k < VEC; ++k) x[k] += load_as<A>(next.v[k]);
    }
#pragma unroll
    for (int k = 0; k < VEC; ++k) x[k] *= factor;
    store_any<VEC>(out, dtype, i, x);
#pragma unroll
    for (int k = 0; k < VEC; ++k) stats.add(rounded_to(x[k], dtype));  // as stored
  });
  double sums[2] = {stats.sum(), stats.not_finite()};
  block_pair_sum(sums);
  if (threadIdx.x == 0) store_stats(partial, sums);
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

// Rows whose gradients have the arithmetic type A with flat's type F. partial: two doubles for each
// block of count_blocks.
template<class F, class A>
void launch_bucket_pack(PackRow* rows, int64_t count, F* flat, const Scale& scale, bool accumulate,
                        double* partial, cudaStream_t stream) {
  for (int64_t i = 0; i < count; ++i) rows[i].wide = aligned16(rows[i].grad, flat + rows[i].slot);
  for_tables(
      rows, count, [](const PackRow& r) { return r.length; },
      [&](const RowTable<PackRow>& table, unsigned blocks, int64_t before) {
        bucket_pack_kernel<F, A><<<blocks, kListThreads, 0, stream>>>(
            table, flat, partial + 2 * before, scale, accumulate);
      });
}

template<class F, class A>
void launch_bucket_unpack(UnpackRow* rows, int64_t count, const F* flat, const Scale& scale,
                          cudaStream_t stream) {
  for (int64_t i = 0; i < count; ++i) rows[i].wide = aligned16(rows[i].out, flat + rows[i].slot);
  for_tables(
      rows, count, [](const UnpackRow& r) { return r.n; },
      [&](const RowTable<UnpackRow>& table, unsigned blocks, int64_t) {
        bucket_unpack_kernel<F, A><<<blocks, kListThreads, 0, stream>>>(table, flat, scale);
      });
}

template<class C>
void launch_ordered_sum(const Chunks& chunks, void* out, DType dtype, int64_t n, const Scale& scale,
                        double* partial, cudaStream_t stream) {
  bool wide = aligned16(out);
  for (int w = 0; w < chunks.count; ++w) wide = wide && aligned16(chunks.chunks[w]);
  const auto blocks = static_cast<unsigned>(divide_up(n, kListBlock));
  ordered_sum_kernel<C>
      <<<blocks, kListThreads, 0, stream>>>(chunks, out, dtype, n, wide, partial, scale);
}

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

Scale scale_of(double factor, const std::optional<Tensor>& tensor) {
  return {factor, device_data(tensor), tensor ? dtype_of(*tensor) : DType::f32};
}

void check_slot(const Tensor& flat, int64_t begin, int64_t end, int64_t n) {
  STD_TORCH_CHECK(0 <= begin && begin + n <= end && end <= flat.numel(), "slot ", begin, "..", end,
                  " does not hold ", n, " elements of a buffer of ", flat.numel());
}

// Calls f(type of flat, arithmetic type, `wide`) for rows whose other side is fp64 (wide) or not.
template<class F>
void with_pack_types(DType flat, F&& f) {
  with_float_type(flat, [&](auto tag) {
    f(tag, acc_t<decltype(tag)>{}, false);
    f(tag, double{}, true);
  });
}

int64_t length_of(const PackRow& row) { return row.length; }

Tensor bucket_pack_cuda(Tensor flat, std::vector<Tensor> grads, std::vector<int64_t> offsets,
                        double scale, std::optional<Tensor> scale_tensor, bool accumulate) {
  TW_CHECK_CONTIGUOUS(flat);
  STD_TORCH_CHECK(offsets.size() == grads.size() + 1, "one offset more than gradients expected");
  const OnDevice here(flat);
  const cudaStream_t stream = stream_of(flat);
  FlatTensors dense;
  std::vector<PackRow> rows[2];  // by whether the gradient is fp64
  for (size_t i = 0; i < grads.size(); ++i) {
    const Tensor& g = grads[i];
    const int64_t n = g.numel(), begin = offsets[i], end = offsets[i + 1];
    check_slot(flat, begin, end, n);
    const DType dtype = dtype_of(g);
    rows[dtype == DType::f64].push_back({n ? dense.row_major(g, true, false) : nullptr, n, begin,
                                         accumulate ? n : end - begin, 0, dtype, false});
  }
  int64_t blocks = 0;
  for (const auto& list : rows)
    blocks += count_blocks(list.data(), static_cast<int64_t>(list.size()), length_of);
  const BlockStats stats(flat, blocks);
  double* partial = stats.partial();
  const Scale factor = scale_of(scale, scale_tensor);
  void* out = device_data(flat);
  with_pack_types(dtype_of(flat), [&](auto f, auto a, bool wide) {
    using F = decltype(f);
    auto& list = rows[wide];
    const auto count = static_cast<int64_t>(list.size());
    launch_bucket_pack<F, decltype(a)>(list.data(), count, static_cast<F*>(out), factor, accumulate,
                                       partial, stream);
    partial += 2 * count_blocks(list.data(), count, length_of);
  });
  check_launch("bucket_pack_kernel");
  return stats.sum(Extreme::none, stream);
}

void bucket_unpack_cuda(Tensor flat, std::vector<Tensor> outs, std::vector<int64_t> offsets,
                        double scale, std::optional<Tensor> scale_tensor) {
  TW_CHECK_CONTIGUOUS(flat);
  STD_TORCH_CHECK(offsets.size() == outs.size(), "one offset per output expected");
  const OnDevice here(flat);
  const cudaStream_t stream = stream_of(flat);
  FlatTensors dense;
  std::vector<UnpackRow> rows[2];
  for (size_t i = 0; i < outs.size(); ++i) {
    const Tensor& o = outs[i];
    check_slot(flat, offsets[i], flat.numel(), o.numel());
    if (o.numel() == 0) continue;
    rows[dtype_of(o) == DType::f64].push_back(
        {dense.row_major(o, false, true), o.numel(), offsets[i], 0, dtype_of(o), false});
  }
  const Scale factor = scale_of(scale, scale_tensor);
  const void* in = device_data(flat);
  with_pack_types(dtype_of(flat), [&](auto f, auto a, bool wide) {
    using F = decltype(f);
    auto& list = rows[wide];
    launch_bucket_unpack<F, decltype(a)>(list.data(), static_cast<int64_t>(list.size()),
                                         static_cast<const F*>(in), factor, stream);
  });
  check_launch("bucket_unpack_kernel");
  dense.finish();
}

Tensor ordered_sum_cuda(Tensor out, std::vector<Tensor> chunks, double scale,
                        std::optional<Tensor> scale_tensor) {
  TW_CHECK_CONTIGUOUS(out);
  STD_TORCH_CHECK(!chunks.empty(), "at least one chunk expected");
  STD_TORCH_CHECK(chunks.size() <= Chunks::kMost, "ordered_sum: W must be at most ", Chunks::kMost,
                  ", got ", chunks.size());
  const OnDevice here(out);
  const cudaStream_t stream = stream_of(out);
  Chunks list;
  list.count = 0;
  for (const Tensor& c : chunks) {
    TW_CHECK_CONTIGUOUS(c);
    STD_TORCH_CHECK(c.numel() == out.numel() && c.scalar_type() == chunks[0].scalar_type(),
                    "chunks must have one dtype and the size of out");
    list.chunks[list.count++] = device_data(c);
  }
  const int64_t n = out.numel();
  const BlockStats stats(out, divide_up(n, kListBlock));
  if (n > 0)
    with_float_type(dtype_of(chunks[0]), [&](auto tag) {
      launch_ordered_sum<decltype(tag)>(list, device_data(out), dtype_of(out), n,
                                        scale_of(scale, scale_tensor), stats.partial(), stream);
    });
  check_launch("ordered_sum_kernel");
  return stats.sum(Extreme::none, stream);
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("bucket_pack_", TORCH_BOX(&tw::bucket_pack_cuda));
  m.impl("bucket_unpack_", TORCH_BOX(&tw::bucket_unpack_cuda));
  m.impl("ordered_sum_", TORCH_BOX(&tw::ordered_sum_cuda));
}
