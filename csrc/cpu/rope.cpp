// Rotary position embedding on the CPU (formula in trainwright/rope.h), of q and k in one pass.
//
// One token at a time: its row of cos and sin is widened once, in the order in which it is used, then
// serves all heads of q and k. Heads need only be contiguous inside: q and k may be slices of one
// (B, T, (H + 2G) D) projection, and are not copied.
// Bytes per element: 2s (s = element size), and the tables once per token. Bound: memory bandwidth.
#include "trainwright/rope.h"

#include "cpu/rows.h"

namespace tw {

// (B, T, heads, D), contiguous in D; out is contiguous.
struct RopeTensor {
  const void* in;
  void* out;
  int64_t heads, batch_stride, token_stride, head_stride;
};

struct RopeArgs {
  RopeTensor tensors[2];  // q and k; a tensor without heads is left out
  const void *cos, *sin;  // (T, R / 2) or (B, T, R / 2): batch_stride 0 in the first case
  int64_t table_batch_stride;
  int64_t B, T, D, R;
  bool interleaved, inverse;
  DType dtype, table_dtype;
};

}  // namespace tw

TW_DECLARE_KERNEL(rope, RopeArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

// The neighbour of every lane: (1, 0, 3, 2, ...).
TW_HD vf swap_pairs(vf x) {
#if TW_VEC_BYTES == 64
  return (vf)_mm512_permute_ps((__m512)x, 0xb1);
#elif TW_VEC_BYTES == 32
  return (vf)_mm256_permute_ps((__m256)x, 0xb1);
#else
  return __builtin_shuffle(x, vi{1, 0, 3, 2});
#endif
}
TW_HD vec<double> swap_pairs(vec<double> x) {
#if TW_VEC_BYTES == 64
  return (vec<double>)_mm512_permute_pd((__m512d)x, 0x55);
#elif TW_VEC_BYTES == 32
  return (vec<double>)_mm256_permute_pd((__m256d)x, 0x5);
#else
  return vec<double>{x[1], x[0]};
#endif
}

// One head. cos and sin hold R / 2 elements for half pairs; R for interleaved ones, each cos twice
// and each sin twice, first with its sign changed, so that x' = x cos + swapped(x) sin.
template<class T>
TW_HD void rotate_head(const T* x, T* y, const acc_t<T>* cos, const acc_t<T>* sin, int64_t R,
                       int64_t D, bool interleaved) {
  using A = acc_t<T>;
  if (interleaved) {
    for_lanes<A>(R, [&](int64_t i, auto k) {
      const vec<A> v = vload<A>(x + i, k);
      vstore<A>(y + i, v * vload<A>(cos + i, k) + swap_pairs(v) * vload<A>(sin + i, k), k);
    });
  } else {
    const int64_t half = R / 2;
    for_lanes<A>(half, [&](int64_t i, auto k) {
      const Pair<vec<A>> p = rope_rotate(vload<A>(x + i, k), vload<A>(x + half + i, k),
                                         vload<A>(cos + i, k), vload<A>(sin + i, k));
      vstore<A>(y + i, p.a, k);
      vstore<A>(y + half + i, p.b, k);
    });
  }
  if (R < D) memcpy(y + R, x + R, static_cast<size_t>(D - R) * sizeof(T));
}

// The tables of one token in the order of rotate_head.
template<class A>
void widen_tables(const RopeArgs& a, int64_t offset, A* cos, A* sin) {
  const A sign = a.inverse ? A(-1) : A(1);
  with_float_type(a.table_dtype, [&](auto tag) {
    const auto* c = static_cast<const decltype(tag)*>(a.cos) + offset;
    const auto* s = static_cast<const decltype(tag)*>(a.sin) + offset;
    for (int64_t p = 0; p < a.R / 2; ++p) {
      const A cv = load_as<A>(c[p]), sv = sign * load_as<A>(s[p]);
      if (a.interleaved) {
        cos[2 * p] = cos[2 * p + 1] = cv;
        sin[2 * p] = -sv;
        sin[2 * p + 1] = sv;
      } else {
        cos[p] = cv;
        sin[p] = sv;
      }
    }
  });
}

template<class T>
void rotate_tokens(const RopeArgs& a, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  A* cos = new A[static_cast<size_t>(2 * a.R + 1)];
  A* sin = cos + a.R;
  for (int64_t n = begin; n < end; ++n) {
    const int64_t b = n / a.T, t = n % a.T;
    widen_tables<A>(a, b * a.table_batch_stride + t * (a.R / 2), cos, sin);
    for (const RopeTensor& x : a.tensors) {
      const T* in = static_cast<const T*>(x.in) + b * x.batch_stride + t * x.token_stride;
      T* out = static_cast<T*>(x.out) + n * x.heads * a.D;
      for (int64_t h = 0; h < x.heads; ++h)
        rotate_head<T>(in + h * x.head_stride, out + h * a.D, cos, sin, a.R, a.D, a.interleaved);
    }
  }
  delete[] cos;
}

}  // namespace

void rope(const RopeArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    const int64_t per_token = (a.tensors[0].heads + a.tensors[1].heads) * a.D;
    parallel_for(0, a.B * a.T, 1 + 16384 / (per_token + 1),
                 [&](int64_t begin, int64_t end) { rotate_tokens<decltype(tag)>(a, begin, end); });
  });
}

TW_END

#else  // ---- torch bindings -----------------------------------------------------------------------

namespace tw {
namespace {

// x with contiguous heads: x itself, or a copy if the strides ask for one.
Tensor with_whole_heads(const Tensor& x) {
  return x.size(3) <= 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

RopeTensor describe(const Tensor& x, const Tensor& out) {
  return {data(x), mutable_data(out), x.size(2), x.stride(0), x.stride(1), x.stride(2)};
}

std::tuple<Tensor, Tensor> rope_cpu(const Tensor& q, const std::optional<Tensor>& k,
                                    const Tensor& cos, const Tensor& sin, bool interleaved,
                                    bool inverse) {
  TW_CHECK_CONTIGUOUS(cos);
  TW_CHECK_CONTIGUOUS(sin);
  const int64_t B = q.size(0), T = q.size(1), D = q.size(3), R = 2 * cos.size(cos.dim() - 1);
  TW_CHECK_SHAPE(R <= D, "rope: cos has more columns than half of D");
  const Tensor q_in = with_whole_heads(q);
  Tensor q_out = empty(shape_of(q), q);
  Tensor k_out = k ? empty(shape_of(*k), *k) : empty({0}, q);
  RopeArgs a{};
  a.tensors[0] = describe(q_in, q_out);
  const Tensor k_in = k ? with_whole_heads(*k) : q_in;
  if (k) a.tensors[1] = describe(k_in, k_out);
  a.cos = data(cos);
  a.sin = data(sin);
  a.table_batch_stride = cos.dim() == 3 ? T * (R / 2) : 0;
  a.B = B;
  a.T = T;
  a.D = D;
  a.R = R;
  a.interleaved = interleaved;
  a.inverse = inverse;
  a.dtype = dtype_of(q);
  a.table_dtype = dtype_of(cos);
  if (D > 0) rope(a);
  return {q_out, k_out};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) { m.impl("rope", TORCH_BOX(&tw::rope_cpu)); }

#endif
