// Batches of matrix products on the CPU, with K split on request (method in trainwright/gemm.h):
//
//   out (B, M, N) = sum over s of  a (B, M, K_s) b (B, K_s, N),   K_s = K in `splits` even parts
//
// Each part is summed in fp32 (fp64 for fp64) in the order of k; the parts are added in the order of
// s, and the total is rounded once. So the bits depend on the number of splits, which the caller
// chooses from the sizes, and on nothing else. One product takes all threads, unless there are
// enough of them, or they are so small, that one thread each is better.
// 2 B M N K FLOPs. Bound: the FMA units; below a few hundred FLOPs per byte, memory.
#include "cpu/kernel.h"
#ifdef TW_CPU_ISA
#include "trainwright/gemm.h"
#endif

namespace tw {

struct MatmulArgs {
  const void *a, *b;
  void* out;      // (B, M, N) dense
  void* partial;  // (B, splits, M, N) dense, in the type of the sums; null for one split
  int64_t B, M, N, K, splits;
  int64_t a_batch, a_row, a_k, b_batch, b_k, b_col;  // strides, in elements
  DType a_dtype, b_dtype, out_dtype;
};

}  // namespace tw

TW_DECLARE_KERNEL(matmul, MatmulArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

const void* element(const void* p, int64_t index, DType t) {
  return static_cast<const char*>(p) + index * dtype_bytes(t);
}

template<class S>
void one_product(const MatmulArgs& g, int64_t task) {
  const int64_t batch = task / g.splits, split = task % g.splits;
  const int64_t k0 = split * g.K / g.splits, k1 = (split + 1) * g.K / g.splits;
  const DType type = g.partial ? (sizeof(S) == 8 ? DType::f64 : DType::f32) : g.out_dtype;
  void* to =
      static_cast<char*>(g.partial ? g.partial : g.out) + task * g.M * g.N * dtype_bytes(type);
  const GemmStore<S> store{store_function<S>(type, Activation::none),
                           to,
                           nullptr,
                           nullptr,
                           nullptr,
                           g.N,
                           g.N,
                           0,
                           dtype_bytes(type)};
  Gemm<S>::run(g.M, g.N, k1 - k0,
               {element(g.a, batch * g.a_batch + k0 * g.a_k, g.a_dtype), g.a_row, g.a_k, g.a_dtype},
               {element(g.b, batch * g.b_batch + k0 * g.b_k, g.b_dtype), g.b_col, g.b_k, g.b_dtype},
               store);
}

// out = the sum of the splits, in order.
template<class S, class T>
void add_splits(const MatmulArgs& g) {
  const int64_t size = g.M * g.N;
  parallel_for(0, g.B * size, 1 + 65536 / g.splits, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t batch = i / size, at = i % size;
      const int64_t count = size - at < end - i ? size - at : end - i;
      const S* first = static_cast<const S*>(g.partial) + batch * g.splits * size + at;
      T* out = static_cast<T*>(g.out) + i;
      for_lanes<S>(count, [&](int64_t j, auto n) {
        vec<S> sum = vload<S>(first + j, n);
        for (int64_t s = 1; s < g.splits; ++s) sum += vload<S>(first + s * size + j, n);
        vstore<S>(out + j, sum, n);
      });
      i += count;
    }
  });
}

template<class S>
void matmul_in(const MatmulArgs& g) {
  const int64_t products = g.B * g.splits;
  const bool small = 2 * g.M * g.N * (g.K / g.splits) < 16 * Gemm<S>::SERIAL_FLOPS;
  if (products > 1 && (small || products >= 4 * num_threads()))
    parallel_dynamic(products, [&](int64_t task) { one_product<S>(g, task); });
  else
    for (int64_t task = 0; task < products; ++task) one_product<S>(g, task);
}

}  // namespace

void matmul(const MatmulArgs& g) {
  if (g.out_dtype == DType::f64)
    matmul_in<double>(g);
  else
    matmul_in<float>(g);
  if (g.partial)
    with_float_type(g.out_dtype, [&](auto tag) {
      using T = decltype(tag);
      add_splits<acc_t<T>, T>(g);
    });
}

TW_END

#else  // ---- torch bindings --------------------------------------------------------------------

namespace tw {
namespace {

Tensor matmul_cpu(const Tensor& a, const Tensor& b, ScalarType dtype, int64_t splits) {
  STD_TORCH_CHECK(a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0) && a.size(2) == b.size(1),
                  "matmul: expected a (B, M, K) and b (B, K, N)");
  const auto wide = [](ScalarType t) { return t == ScalarType::Double; };
  STD_TORCH_CHECK(wide(a.scalar_type()) == wide(dtype) && wide(b.scalar_type()) == wide(dtype),
                  "matmul: fp64 does not mix with other dtypes");
  STD_TORCH_CHECK(splits >= 1, "matmul: splits: expected at least 1, got ", splits);
  const int64_t B = a.size(0), M = a.size(1), K = a.size(2), N = b.size(2);
  splits = splits < K ? splits : K < 1 ? 1 : K;
  Tensor out = empty({B, M, N}, a, dtype);
  Tensor partial = splits > 1 ? empty({B, splits, M, N}, a, acc_dtype(out)) : out;
  matmul({data(a), data(b), mutable_data(out), splits > 1 ? mutable_data(partial) : nullptr, B, M,
          N, K, splits, a.stride(0), a.stride(1), a.stride(2), b.stride(0), b.stride(1),
          b.stride(2), dtype_of(a), dtype_of(b), static_cast<DType>(dtype)});
  return out;
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) { m.impl("matmul", TORCH_BOX(&tw::matmul_cpu)); }

#endif
