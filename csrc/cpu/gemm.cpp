// The matrix product as an op: C = activation(A B + bias) + residual (method in
// trainwright/gemm.h).
//
//   gemm      a new C, in any floating dtype; optionally the sums + bias, which a backward needs.
//   gemm_out_ C = A B + bias into memory that is there already, e.g. one tile of logits after another.
//   gemm_add_ C += A B in place, e.g. a weight gradient that is gathered chunk by chunk.
//   gemm_pack_ the panels of B, in gemm_packed_size numbers, for gemm_packed: gemm with a B that several products
//             share, e.g. a weight and the microbatches of a step.
#include "cpu/kernel.h"
#ifdef TW_CPU_ISA
#include "trainwright/gemm.h"
#else
#include "trainwright/types.h"
#endif

namespace tw {

struct GemmArgs {
  const void *a, *b;     // (M, K) and (K, N)
  const void* packed;    // b as gemm_pack left it, in the type of the sums; or null
  const void* bias;      // (N) in bias_dtype, or null
  const void* residual;  // (M, N) in out_dtype, or null
  void *out, *pre;       // (M, N) in out_dtype, dense; pre may be null
  int64_t M, N, K;
  int64_t a_row, a_k, b_col, b_k, residual_row;  // strides, in elements
  DType a_dtype, b_dtype, bias_dtype, out_dtype;
  int64_t activation;
};

// B (K, N) for products with A in a_dtype whose sums are fp64 or fp32.
struct GemmPackArgs {
  const void* b;
  int64_t N, K, b_col, b_k;
  DType a_dtype, b_dtype;
  void* packed;       // receives the panels; or null
  int64_t* elements;  // receives their number; or null
};

}  // namespace tw

TW_DECLARE_KERNEL(gemm, GemmArgs)
TW_DECLARE_KERNEL(gemm_pack, GemmPackArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

template<class S>
void gemm_in(const GemmArgs& g) {
  const S* bias = static_cast<const S*>(g.bias);
  if (bias && dtype_bytes(g.bias_dtype) != sizeof(S)) {
    S* wide = static_cast<S*>(scratch(Scratch::gemm_bias, static_cast<size_t>(g.N) * sizeof(S)));
    with_float_type(g.bias_dtype, [&](auto tag) {
      const auto* from = static_cast<const decltype(tag)*>(g.bias);
      for (int64_t i = 0; i < g.N; ++i) wide[i] = load_as<S>(from[i]);
    });
    bias = wide;
  }
  const GemmStore<S> store{store_function<S>(g.out_dtype, static_cast<Activation>(g.activation)),
                           g.out,
                           g.pre,
                           bias,
                           g.residual,
                           g.N,
                           g.N,
                           g.residual_row,
                           dtype_bytes(g.out_dtype)};
  Gemm<S>::run(g.M, g.N, g.K, {g.a, g.a_row, g.a_k, g.a_dtype}, {g.b, g.b_col, g.b_k, g.b_dtype},
               store, false, static_cast<const S*>(g.packed));
}

template<class S>
void pack_in(const GemmPackArgs& g) {
  if (g.elements)
    *g.elements = Gemm<S>::packed_bytes(g.N, g.K, g.a_dtype, g.b_dtype) / int64_t(sizeof(S));
  if (g.packed)
    Gemm<S>::pack(g.N, g.K, g.a_dtype, {g.b, g.b_col, g.b_k, g.b_dtype}, static_cast<S*>(g.packed));
}

}  // namespace

void gemm(const GemmArgs& g) {
  if (g.out_dtype == DType::f64)
    gemm_in<double>(g);
  else
    gemm_in<float>(g);
}

void gemm_pack(const GemmPackArgs& g) {
  if (g.b_dtype == DType::f64)
    pack_in<double>(g);
  else
    pack_in<float>(g);
}

TW_END

#else  // ---- torch bindings --------------------------------------------------------------------

namespace tw {
namespace {

bool wide(ScalarType t) { return t == ScalarType::Double; }

// The tensors must hold dtypes of one width class: all fp64, or none.
GemmArgs gemm_args(const Tensor& a, const Tensor& b, ScalarType dtype) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0),
                  "gemm: expected a (M, K) and b (K, N)");
  STD_TORCH_CHECK(wide(a.scalar_type()) == wide(dtype) && wide(b.scalar_type()) == wide(dtype),
                  "gemm: fp64 does not mix with other dtypes");
  GemmArgs g{};
  g.a = data(a), g.b = data(b);
  g.M = a.size(0), g.K = a.size(1), g.N = b.size(1);
  g.a_row = a.stride(0), g.a_k = a.stride(1), g.b_col = b.stride(1), g.b_k = b.stride(0);
  g.a_dtype = dtype_of(a), g.b_dtype = dtype_of(b), g.out_dtype = static_cast<DType>(dtype);
  return g;
}

void set_bias(GemmArgs& g, const std::optional<Tensor>& bias) {
  if (!bias) return;
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == g.N && bias->is_contiguous() &&
                      wide(bias->scalar_type()) == (g.out_dtype == DType::f64),
                  "gemm: bias: expected shape (N), contiguous");
  g.bias = data(*bias), g.bias_dtype = dtype_of(*bias);
}

int64_t packed_size(const Tensor& b, ScalarType a_dtype) {
  STD_TORCH_CHECK(b.dim() == 2 && wide(a_dtype) == wide(b.scalar_type()),
                  "gemm_pack: expected b (K, N), and fp64 for both or none");
  int64_t elements = 0;
  gemm_pack({nullptr, b.size(1), b.size(0), 0, 0, static_cast<DType>(a_dtype), dtype_of(b), nullptr,
             &elements});
  return elements;
}

void check_packed(const Tensor& packed, const Tensor& b, ScalarType a_dtype) {
  TW_CHECK_CONTIGUOUS(packed);
  STD_TORCH_CHECK(packed.scalar_type() == acc_dtype(b) && packed.numel() == packed_size(b, a_dtype),
                  "gemm_pack: packed: expected gemm_packed_size numbers in the type of the sums");
}

void gemm_pack_cpu(const Tensor& packed, const Tensor& b, ScalarType a_dtype) {
  check_packed(packed, b, a_dtype);
  gemm_pack({data(b), b.size(1), b.size(0), b.stride(1), b.stride(0), static_cast<DType>(a_dtype),
             dtype_of(b), mutable_data(packed), nullptr});
}

std::tuple<Tensor, Tensor> run_gemm(GemmArgs g, const Tensor& a, const std::optional<Tensor>& bias,
                                    const std::optional<Tensor>& residual, int64_t activation,
                                    ScalarType dtype, bool save_pre) {
  STD_TORCH_CHECK(0 <= activation && activation <= 4, "gemm: unknown activation ", activation);
  set_bias(g, bias);
  if (residual) {
    STD_TORCH_CHECK(residual->dim() == 2 && residual->size(0) == g.M && residual->size(1) == g.N &&
                        (g.M == 0 || g.N <= 1 || residual->stride(1) == 1) &&
                        residual->scalar_type() == dtype,
                    "gemm: residual: expected shape (M, N) with dense rows in the output's dtype");
    g.residual = data(*residual), g.residual_row = residual->stride(0);
  }
  Tensor out = empty({g.M, g.N}, a, dtype);
  Tensor pre = save_pre ? empty({g.M, g.N}, a, dtype) : empty({0}, a, dtype);
  g.out = mutable_data(out), g.pre = save_pre ? mutable_data(pre) : nullptr;
  g.activation = activation;
  gemm(g);
  return {out, pre};
}

std::tuple<Tensor, Tensor> gemm_cpu(const Tensor& a, const Tensor& b,
                                    const std::optional<Tensor>& bias,
                                    const std::optional<Tensor>& residual, int64_t activation,
                                    ScalarType dtype, bool save_pre) {
  return run_gemm(gemm_args(a, b, dtype), a, bias, residual, activation, dtype, save_pre);
}

std::tuple<Tensor, Tensor> gemm_packed_cpu(const Tensor& a, const Tensor& b, const Tensor& packed,
                                           const std::optional<Tensor>& bias,
                                           const std::optional<Tensor>& residual,
                                           int64_t activation, ScalarType dtype, bool save_pre) {
  check_packed(packed, b, a.scalar_type());
  GemmArgs g = gemm_args(a, b, dtype);
  g.packed = data(packed);
  return run_gemm(g, a, bias, residual, activation, dtype, save_pre);
}

// For results that go into c.
GemmArgs gemm_args_into(const Tensor& c, const Tensor& a, const Tensor& b) {
  GemmArgs g = gemm_args(a, b, c.scalar_type());
  TW_CHECK_CONTIGUOUS(c);
  STD_TORCH_CHECK(c.dim() == 2 && c.size(0) == g.M && c.size(1) == g.N,
                  "gemm: c: expected shape (M, N)");
  g.out = mutable_data(c);
  return g;
}

void gemm_out_cpu(const Tensor& c, const Tensor& a, const Tensor& b,
                  const std::optional<Tensor>& bias) {
  GemmArgs g = gemm_args_into(c, a, b);
  set_bias(g, bias);
  gemm(g);
}

void gemm_add_cpu(const Tensor& c, const Tensor& a, const Tensor& b) {
  GemmArgs g = gemm_args_into(c, a, b);
  g.residual = g.out, g.residual_row = g.N;
  gemm(g);
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("gemm", TORCH_BOX(&tw::gemm_cpu));
  m.impl("gemm_packed_size", TORCH_BOX(&tw::packed_size));
  m.impl("gemm_pack_", TORCH_BOX(&tw::gemm_pack_cpu));
  m.impl("gemm_packed", TORCH_BOX(&tw::gemm_packed_cpu));
  m.impl("gemm_out_", TORCH_BOX(&tw::gemm_out_cpu));
  m.impl("gemm_add_", TORCH_BOX(&tw::gemm_add_cpu));
}

#endif
