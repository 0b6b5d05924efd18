// Two partial results of attention put together on the CPU (formulas in trainwright/merge_attention.h).
//
// A task is a block of tokens. Head by head, the weights of its rows are computed side by side in
// vectors (lse lies along T), then the rows are walked. Bytes of a row of Dv elements: forward
// Dv (s_a + s_b + s_out) + 12, backward Dv (s_out + 2 s_a + 2 s_b) + 20. Bound: memory bandwidth.
#include "trainwright/merge_attention.h"

#include "cpu/kernel.h"

namespace tw {

// out_a, out_b, out (B, T, H, Dv) and lse_a, lse_b, lse (B, H, T), contiguous. `type`: of out and
// dout.
struct MergeAttention {
  const void *out_a, *out_b, *lse_a, *lse_b;
  int64_t B, T, H, Dv;
  DType type_a, type_b, type;
};
struct MergeAttentionFwdArgs {
  MergeAttention parts;
  void *out, *lse;
};
struct MergeAttentionBwdArgs {
  MergeAttention parts;
  const void *dout, *dlse;                  // dlse may be null
  void *dout_a, *dlse_a, *dout_b, *dlse_b;  // each may be null
};

}  // namespace tw

TW_DECLARE_KERNEL(merge_attention_fwd, MergeAttentionFwdArgs)
TW_DECLARE_KERNEL(merge_attention_bwd, MergeAttentionBwdArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

constexpr int kTokens = 32;               // of a block: whole vectors in every instruction set
constexpr int64_t kTaskElements = 32768;  // handed to a thread at least: some 20 us

// The lse of a block's rows of one head, and what each part counts there.
template<class A>
struct BlockWeights {
  A lse_a[kTokens], lse_b[kTokens], lse[kTokens], a[kTokens], b[kTokens];

  BlockWeights(const A* from_a, const A* from_b, int64_t n) {
    for_lanes<A>(n, [&](int64_t i, auto k) {
      const vec<A> x = vload<A>(from_a + i, k), y = vload<A>(from_b + i, k);
      LseSum<vec<A>> sum;
      sum.add(x);
      sum.add(y);
      vstore<A>(lse_a + i, x, k);
      vstore<A>(lse_b + i, y, k);
      vstore<A>(lse + i, sum.lse(), k);
      vstore<A>(a + i, sum.weight(x), k);
      vstore<A>(b + i, sum.weight(y), k);
    });
  }
};

// Calls body(weights, first token and head in an lse, first row, tokens) for each block of each head.
template<class A, class F>
void for_blocks_of_heads(const MergeAttention& m, F&& body) {
  const int64_t blocks = (m.T + kTokens - 1) / kTokens;
  const int64_t grain = 1 + kTaskElements / (kTokens * m.H * (m.Dv + 1));
  parallel_for(0, m.B * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / blocks, t = task % blocks * kTokens;
      const int64_t n = m.T - t < kTokens ? m.T - t : kTokens;
      for (int64_t h = 0; h < m.H; ++h) {
        const int64_t at = (b * m.H + h) * m.T + t;
        const BlockWeights<A> w(static_cast<const A*>(m.lse_a) + at,
                                static_cast<const A*>(m.lse_b) + at, n);
        body(w, at, (b * m.T + t) * m.H + h, n);
      }
    }
  });
}

template<class A, class TA, class TB, class T>
void forward(const MergeAttentionFwdArgs& args) {
  const MergeAttention& m = args.parts;
  for_blocks_of_heads<A>(m, [&](const BlockWeights<A>& w, int64_t at, int64_t row, int64_t n) {
    memcpy(static_cast<A*>(args.lse) + at, w.lse, static_cast<size_t>(n) * sizeof(A));
    for (int64_t i = 0; i < n; ++i, row += m.H) {
      const TA* a = static_cast<const TA*>(m.out_a) + row * m.Dv;
      const TB* b = static_cast<const TB*>(m.out_b) + row * m.Dv;
      T* out = static_cast<T*>(args.out) + row * m.Dv;
      for_lanes<A>(m.Dv, [&](int64_t c, auto k) {
        vstore<A>(out + c,
                  merged_part(vload<A>(a + c, k), w.lse_a[i], w.a[i]) +
                      merged_part(vload<A>(b + c, k), w.lse_b[i], w.b[i]),
                  k);
      });
    }
  });
}

template<class A, class TA, class TB, class T>
void backward(const MergeAttentionBwdArgs& args) {
  const MergeAttention& m = args.parts;
  const A* dlse = static_cast<const A*>(args.dlse);
  A* dlse_a = static_cast<A*>(args.dlse_a);
  A* dlse_b = static_cast<A*>(args.dlse_b);
  for_blocks_of_heads<A>(m, [&](const BlockWeights<A>& w, int64_t at, int64_t row, int64_t n) {
    for (int64_t i = 0; i < n; ++i, row += m.H) {
      const TA* a = static_cast<const TA*>(m.out_a) + row * m.Dv;
      const TB* b = static_cast<const TB*>(m.out_b) + row * m.Dv;
      const T* dout = static_cast<const T*>(args.dout) + row * m.Dv;
      TA* da = args.dout_a ? static_cast<TA*>(args.dout_a) + row * m.Dv : nullptr;
      TB* db = args.dout_b ? static_cast<TB*>(args.dout_b) + row * m.Dv : nullptr;
      const A lse_a = w.lse_a[i], lse_b = w.lse_b[i];
      vec<A> dots{};
      for_lanes<A>(m.Dv, [&](int64_t c, auto k) {
        const vec<A> g = vload<A>(dout + c, k);
        const vec<A> difference = merged_part(vload<A>(a + c, k), lse_a, A(1)) -
                                  merged_part(vload<A>(b + c, k), lse_b, A(1));
        dots += keep<A>(g * difference, k, A(0));
        if (da) vstore<A>(da + c, merged_part(g, lse_a, w.a[i]), k);
        if (db) vstore<A>(db + c, merged_part(g, lse_b, w.b[i]), k);
      });
      const A dot = hsum<A>(dots), up = dlse ? dlse[at + i] : A(0);
      if (dlse_a) dlse_a[at + i] = merged_part(up + w.b[i] * dot, lse_a, w.a[i]);
      if (dlse_b) dlse_b[at + i] = merged_part(up - w.a[i] * dot, lse_b, w.b[i]);
    }
  });
}

// f(A, type of out_a, type of out_b, type of out) with values of these types.
template<class F>
void with_merge_types(const MergeAttention& m, F&& f) {
  with_float_type(m.type_a, [&](auto a) {
    with_float_type(m.type_b, [&](auto b) {
      using TA = decltype(a);
      using TB = decltype(b);
      if constexpr (sizeof(TA) == 8 || sizeof(TB) == 8)
        f(double{}, a, b, double{});
      else if constexpr (sizeof(TA) == 2 && __is_same(TA, TB))
        f(float{}, a, b, a);
      else
        f(float{}, a, b, float{});
    });
  });
}

}  // namespace

void merge_attention_fwd(const MergeAttentionFwdArgs& args) {
  with_merge_types(args.parts, [&](auto acc, auto a, auto b, auto out) {
    forward<decltype(acc), decltype(a), decltype(b), decltype(out)>(args);
  });
}
void merge_attention_bwd(const MergeAttentionBwdArgs& args) {
  with_merge_types(args.parts, [&](auto acc, auto a, auto b, auto out) {
    backward<decltype(acc), decltype(a), decltype(b), decltype(out)>(args);
  });
}

TW_END

#else  // ---- torch bindings -----------------------------------------------------------------------

namespace tw {
namespace {

MergeAttention merge_parts(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                           const Tensor& lse_b, const Tensor& out) {
  for (const Tensor* t : {&out_a, &lse_a, &out_b, &lse_b, &out}) TW_CHECK_CONTIGUOUS(*t);
  TW_CHECK_SHAPE(out.dim() == 4 && out_a.numel() == out.numel() && out_b.numel() == out.numel(),
                 "parts must have the shape of the result, (B, T, H, Dv)");
  const int64_t B = out.size(0), T = out.size(1), H = out.size(2), Dv = out.size(3);
  TW_CHECK_SHAPE(lse_a.numel() == B * T * H && lse_b.numel() == B * T * H,
                 "lse must have one element for each row of a part");
  return {data(out_a), data(out_b),     data(lse_a),     data(lse_b),  B, T, H,
          Dv,          dtype_of(out_a), dtype_of(out_b), dtype_of(out)};
}

ScalarType merged_dtype(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == b.scalar_type()) return a.scalar_type();
  const bool wide = a.scalar_type() == ScalarType::Double || b.scalar_type() == ScalarType::Double;
  return wide ? ScalarType::Double : ScalarType::Float;
}

std::tuple<Tensor, Tensor> merge_attention_fwd_cpu(const Tensor& out_a, const Tensor& lse_a,
                                                   const Tensor& out_b, const Tensor& lse_b) {
  Tensor out = empty(shape_of(out_a), out_a, merged_dtype(out_a, out_b));
  Tensor lse = empty(shape_of(lse_a), lse_a);
  merge_attention_fwd(
      {merge_parts(out_a, lse_a, out_b, lse_b, out), mutable_data(out), mutable_data(lse)});
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> merge_attention_bwd_cpu(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& out_a, const Tensor& lse_a,
    const Tensor& out_b, const Tensor& lse_b, std::vector<bool> need) {
  STD_TORCH_CHECK(need.size() == 4, "need must have 4 entries");
  STD_TORCH_CHECK(dout.scalar_type() == merged_dtype(out_a, out_b), "dout must have out's dtype");
  if (dlse) TW_CHECK_CONTIGUOUS(*dlse);
  const auto gradient = [&](bool needed, const Tensor& of) {
    return empty(needed ? shape_of(of) : std::vector<int64_t>{0}, of);
  };
  Tensor dout_a = gradient(need[0], out_a), dlse_a = gradient(need[1], lse_a);
  Tensor dout_b = gradient(need[2], out_b), dlse_b = gradient(need[3], lse_b);
  const auto written = [](bool needed, const Tensor& x) {
    return needed ? mutable_data(x) : nullptr;
  };
  merge_attention_bwd({merge_parts(out_a, lse_a, out_b, lse_b, dout), data(dout), data(dlse),
                       written(need[0], dout_a), written(need[1], dlse_a), written(need[2], dout_b),
                       written(need[3], dlse_b)});
  return {dout_a, dlse_a, dout_b, dlse_b};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("merge_attention_fwd", TORCH_BOX(&tw::merge_attention_fwd_cpu));
  m.impl("merge_attention_bwd", TORCH_BOX(&tw::merge_attention_bwd_cpu));
}

#endif
