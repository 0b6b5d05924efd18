// Norm of a list of tensors, and their scaling, on CUDA.
//
// grad_stats    one read: the sum of |x|^p (p = inf: the largest, -inf: the smallest |x|) in double,
//               and whether anything is not finite. Kept per block of kListBlock elements and added
//               in block order: repeats are bit-equal.
// grad_scale    x *= factor, in place; with factor 1 nothing is written.
// Bytes per element: s for the norm, 2s for the scaling. Bound: memory bandwidth. Accesses are 16
// bytes where pointers allow, one element otherwise. Counted on the virtual GPU; not yet timed on a
// GPU.
#include "cuda/stats_binding.cuh"
#include "cuda/tensor_list_binding.cuh"
#include "trainwright/bucket_pack.h"

namespace tw {

struct NormRow {
  void* x;
  int64_t n;
  int first_block;
  bool wide;
};
using NormTable = RowTable<NormRow>;

// Calls f(VEC as a type, i) for the packs of this block's elements that belong to this thread.
template<int VEC, class F>
__device__ __forceinline__ void for_block(const NormRow& row, F&& f) {
  const int64_t begin = (blockIdx.x - row.first_block) * kListBlock;
  const int64_t end = row.n < begin + kListBlock ? row.n : begin + kListBlock;
  int64_t i = begin;
  if (row.wide) {
#pragma unroll 4
    for (i += threadIdx.x * VEC; i + VEC <= end; i += kListThreads * VEC) f(Int<VEC>{}, i);
    i = end / VEC * VEC;  // blocks begin at a multiple of VEC
  }
  for (i += threadIdx.x; i < end; i += kListThreads) f(Int<1>{}, i);
}

enum class Power : int { two, one, count, largest, smallest, any };

template<class T, Power POWER>
__global__ void __launch_bounds__(kListThreads, 4)
    grad_stats_kernel(const __grid_constant__ NormTable table, double* partial, double p) {
  using A = acc_t<T>;
  constexpr Extreme extreme = POWER == Power::largest    ? Extreme::largest
                              : POWER == Power::smallest ? Extreme::smallest
                                                         : Extreme::none;
  const NormRow& row = row_of_block(table);
  const T* x = static_cast<const T*>(row.x);
  GradStats<A> stats;
  double total = POWER == Power::smallest ? static_cast<double>(INFINITY) : 0.0, odd = 0.0;
  for_block<16 / sizeof(T)>(row, [&](auto vec, int64_t i) {
    constexpr int VEC = decltype(vec)::value;
    A v[VEC];
    unpack(load_once<VEC>(x + i), v);
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
      if constexpr (POWER == Power::two) {
        stats.add(v[k]);
      } else {
        const double a = fabs(static_cast<double>(v[k]));
        odd += a - a;
        if constexpr (extreme != Extreme::none)
          total = more_extreme(total, a, extreme);
        else if constexpr (POWER == Power::one)
          total += a;
        else if constexpr (POWER == Power::count)
          total += a != 0.0;
        else
          total += exp2(p * log2(a));  // pow() would be a call
      }
    }
  });
  double sums[2] = {total, odd == 0.0 ? 0.0 : 1.0};
  if constexpr (POWER == Power::two) {
    sums[0] = stats.sum();
    sums[1] = stats.not_finite();
  }
  block_pair_sum(sums);
  if constexpr (extreme != Extreme::none) sums[0] = block_extreme<kListThreads>(total, extreme);
  if (threadIdx.x == 0) store_stats(partial, sums);
}

template<class T>
__global__ void __launch_bounds__(kListThreads, 4)
    grad_scale_kernel(const __grid_constant__ NormTable table, const void* factor, DType dtype) {
  using A = acc_t<T>;
  const double wide = load_one<double>(factor, dtype);
  if (wide == 1.0) return;
  const A scale = static_cast<A>(wide);
  const NormRow& row = row_of_block(table);
  T* x = static_cast<T*>(row.x);
  for_block<16 / sizeof(T)>(row, [&](auto vec, int64_t i) {
    constexpr int VEC = decltype(vec)::value;
    A v[VEC];
    unpack(load_once<VEC>(x + i), v);
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] *= scale;
    store_pack(x + i, pack_as<T>(v));
  });
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

inline int64_t elements_of(const NormRow& row) { return row.n; }

// Calls f(POWER as a type).
template<class F>
void with_power(double p, F&& f) {
  if (p == 2.0) return f(std::integral_constant<Power, Power::two>{});
  if (p == 1.0) return f(std::integral_constant<Power, Power::one>{});
  if (p == 0.0) return f(std::integral_constant<Power, Power::count>{});
  if (p == INFINITY) return f(std::integral_constant<Power, Power::largest>{});
  if (p == -INFINITY) return f(std::integral_constant<Power, Power::smallest>{});
  f(std::integral_constant<Power, Power::any>{});
}

// partial: two doubles for each block of count_blocks.
template<class T>
void launch_grad_stats(const NormRow* rows, int64_t count, double p, double* partial,
                       cudaStream_t stream) {
  with_power(p, [&](auto power) {
    for_tables(rows, count, elements_of,
               [&](const NormTable& table, unsigned blocks, int64_t before) {
                 grad_stats_kernel<T, decltype(power)::value>
                     <<<blocks, kListThreads, 0, stream>>>(table, partial + 2 * before, p);
               });
  });
}

template<class T>
void launch_grad_scale(const NormRow* rows, int64_t count, const void* factor, DType factor_dtype,
                       cudaStream_t stream) {
  for_tables(rows, count, elements_of, [&](const NormTable& table, unsigned blocks, int64_t) {
    grad_scale_kernel<T><<<blocks, kListThreads, 0, stream>>>(table, factor, factor_dtype);
  });
}

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

// The tensors as flat memory, in whatever order, by dtype.
struct NormRows {
  static constexpr DType kTypes[4] = {DType::f32, DType::bf16, DType::f16, DType::f64};
  FlatTensors flat;
  std::vector<NormRow> rows[4];

  NormRows(const std::vector<Tensor>& tensors, bool written) {
    for (const Tensor& t : tensors) {
      if (t.numel() == 0) continue;
      void* x = flat.any_order(t, written);
      for (int i = 0; i < 4; ++i)
        if (kTypes[i] == dtype_of(t)) rows[i].push_back({x, t.numel(), 0, aligned16(x)});
    }
  }
  // Calls f(type tag, rows, their number).
  template<class F>
  void for_types(F&& f) const {
    for (int i = 0; i < 4; ++i)
      with_float_type(kTypes[i], [&](auto tag) {
        f(tag, rows[i].data(), static_cast<int64_t>(rows[i].size()));
      });
  }
};

Tensor grad_stats_cuda(std::vector<Tensor> tensors, double p) {
  STD_TORCH_CHECK(!tensors.empty(), "at least one tensor expected");
  const OnDevice here(tensors[0]);
  const cudaStream_t stream = stream_of(tensors[0]);
  const NormRows lists(tensors, false);
  int64_t blocks = 0;
  for (const auto& rows : lists.rows)
    blocks += count_blocks(rows.data(), static_cast<int64_t>(rows.size()), elements_of);
  const BlockStats stats(tensors[0], blocks);
  double* partial = stats.partial();
  lists.for_types([&](auto tag, const NormRow* rows, int64_t count) {
    launch_grad_stats<decltype(tag)>(rows, count, p, partial, stream);
    partial += 2 * count_blocks(rows, count, elements_of);
  });
  check_launch("grad_stats_kernel");
  return stats.sum(p == INFINITY    ? Extreme::largest
                   : p == -INFINITY ? Extreme::smallest
                                    : Extreme::none,
                   stream);
}

void grad_scale_cuda(std::vector<Tensor> tensors, Tensor factor) {
  if (tensors.empty()) return;
  const OnDevice here(tensors[0]);
  NormRows lists(tensors, true);
  const void* scale = device_data(factor);
  lists.for_types([&](auto tag, const NormRow* rows, int64_t count) {
    launch_grad_scale<decltype(tag)>(rows, count, scale, dtype_of(factor), stream_of(tensors[0]));
  });
  check_launch("grad_scale_kernel");
  lists.flat.finish();
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("grad_stats", TORCH_BOX(&tw::grad_stats_cuda));
  m.impl("grad_scale_", TORCH_BOX(&tw::grad_scale_cuda));
}
