// One matrix product per group of rows on the CPU (method in trainwright/gemm.h). offsets[e] is the
// end of group e, its rows are [offsets[e - 1], offsets[e]):
//
//   grouped_matmul        out (N, C) : out[rows of e] = x[rows of e] (., K) w[e] (K, C); 0 past the
//                         last group
//   grouped_matmul_wgrad  dw (E, K, C) : dw[e] = x[rows of e]' dy[rows of e]; 0 for an empty group
//
// Sums in fp32 (fp64 for fp64) in the order of k, rounded once: a row has the bits that it has in
// any other grouping. Groups of little work go to one thread each, larger ones take all threads.
// 2 N K C FLOPs. Bound: the FMA units, or reading w where the groups have few rows.
#include "cpu/kernel.h"
#ifdef TW_CPU_ISA
#include "trainwright/gemm.h"
#endif

namespace tw {

struct GroupedMatmulArgs {
  const void *x, *y;  // (N, K); w (E, K, C), or dy (N, C) for the gradient of w
  const int32_t* offsets;
  void* out;  // (N, C) or (E, K, C), dense
  int64_t N, K, C, E;
  int64_t x_row, x_k, y_group, y_row, y_col;  // strides, in elements; dy has no y_group
  DType x_dtype, y_dtype, out_dtype;
  bool wgrad;
};

}  // namespace tw

TW_DECLARE_KERNEL(grouped_matmul, GroupedMatmulArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

const void* element(const void* p, int64_t index, DType t) {
  return static_cast<const char*>(p) + index * dtype_bytes(t);
}

template<class S>
void one_group(const GroupedMatmulArgs& g, int64_t e) {
  const int64_t begin = e ? g.offsets[e - 1] : 0, rows = g.offsets[e] - begin;
  const int64_t bytes = dtype_bytes(g.out_dtype);
  void* to = static_cast<char*>(g.out) + (g.wgrad ? e * g.K : begin) * g.C * bytes;
  const GemmStore<S> store{store_function<S>(g.out_dtype, Activation::none),
                           to,
                           nullptr,
                           nullptr,
                           nullptr,
                           g.C,
                           g.C,
                           0,
                           bytes};
  const void* x = element(g.x, begin * g.x_row, g.x_dtype);
  if (g.wgrad)
    Gemm<S>::run(g.K, g.C, rows, {x, g.x_k, g.x_row, g.x_dtype},
                 {element(g.y, begin * g.y_row, g.y_dtype), g.y_col, g.y_row, g.y_dtype}, store);
  else
    Gemm<S>::run(rows, g.C, g.K, {x, g.x_row, g.x_k, g.x_dtype},
                 {element(g.y, e * g.y_group, g.y_dtype), g.y_col, g.y_row, g.y_dtype}, store);
}

template<class S>
void grouped_in(const GroupedMatmulArgs& g) {
  const int64_t flops_per_group = 2 * g.N * g.K * g.C / g.E;
  if (g.E > 1 && flops_per_group < 64 * Gemm<S>::SERIAL_FLOPS)
    parallel_dynamic(g.E, [&](int64_t e) { one_group<S>(g, e); });
  else
    for (int64_t e = 0; e < g.E; ++e) one_group<S>(g, e);
}

}  // namespace

void grouped_matmul(const GroupedMatmulArgs& g) {
  const int64_t used = g.E ? g.offsets[g.E - 1] : 0, row = g.C * dtype_bytes(g.out_dtype);
  if (!g.wgrad && used < g.N && row)  // the address of nothing may be null
    memset(static_cast<char*>(g.out) + used * row, 0, static_cast<size_t>((g.N - used) * row));
  if (!g.E) return;
  if (g.out_dtype == DType::f64)
    grouped_in<double>(g);
  else
    grouped_in<float>(g);
}

TW_END

#else  // ---- torch bindings --------------------------------------------------------------------

namespace tw {
namespace {

const int32_t* group_ends(const Tensor& offsets, int64_t rows) {
  STD_TORCH_CHECK(
      offsets.dim() == 1 && offsets.is_contiguous() && offsets.scalar_type() == ScalarType::Int,
      "grouped_matmul: offsets: expected int32, contiguous, one dimension");
  const auto* ends = static_cast<const int32_t*>(data(offsets));
  for (int64_t e = 0; e < offsets.size(0); ++e)
    STD_TORCH_CHECK(ends[e] >= (e ? ends[e - 1] : 0) && ends[e] <= rows,
                    "grouped_matmul: offsets: expected end rows in ascending order within [0, ",
                    rows, "], got ", ends[e], " for group ", e);
  return ends;
}

void check_dtypes(const Tensor& x, const Tensor& y, ScalarType dtype) {
  const auto wide = [](ScalarType t) { return t == ScalarType::Double; };
  STD_TORCH_CHECK(wide(x.scalar_type()) == wide(dtype) && wide(y.scalar_type()) == wide(dtype),
                  "grouped_matmul: fp64 does not mix with other dtypes");
}

Tensor grouped_matmul_cpu(const Tensor& x, const Tensor& w, const Tensor& offsets,
                          ScalarType dtype) {
  STD_TORCH_CHECK(
      x.dim() == 2 && w.dim() == 3 && x.size(1) == w.size(1) && offsets.size(0) == w.size(0),
      "grouped_matmul: expected x (N, K), weights (E, K, C) and offsets (E)");
  check_dtypes(x, w, dtype);
  const int32_t* ends = group_ends(offsets, x.size(0));
  Tensor out = empty({x.size(0), w.size(2)}, x, dtype);
  grouped_matmul({data(x), data(w), ends, mutable_data(out), x.size(0), x.size(1), w.size(2),
                  w.size(0), x.stride(0), x.stride(1), w.stride(0), w.stride(1), w.stride(2),
                  dtype_of(x), dtype_of(w), static_cast<DType>(dtype), false});
  return out;
}

Tensor grouped_matmul_wgrad_cpu(const Tensor& x, const Tensor& dy, const Tensor& offsets,
                                ScalarType dtype) {
  STD_TORCH_CHECK(x.dim() == 2 && dy.dim() == 2 && x.size(0) == dy.size(0),
                  "grouped_matmul_wgrad: expected x (N, K) and dy (N, C)");
  check_dtypes(x, dy, dtype);
  const int32_t* ends = group_ends(offsets, x.size(0));
  const int64_t E = offsets.size(0);
  Tensor dw = empty({E, x.size(1), dy.size(1)}, x, dtype);
  grouped_matmul({data(x), data(dy), ends, mutable_data(dw), x.size(0), x.size(1), dy.size(1), E,
                  x.stride(0), x.stride(1), 0, dy.stride(0), dy.stride(1), dtype_of(x),
                  dtype_of(dy), static_cast<DType>(dtype), true});
  return dw;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("grouped_matmul", TORCH_BOX(&tw::grouped_matmul_cpu));
  m.impl("grouped_matmul_wgrad", TORCH_BOX(&tw::grouped_matmul_wgrad_cpu));
}

#endif
