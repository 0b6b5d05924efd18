// RMS norm on the CPU (formula in trainwright/rms_norm.h).
//
// forward   one row at a time: pass 1 adds the residual, stores the sum and accumulates x^2; pass 2
// scales. A row of up
//           to a few thousand elements stays in L1, so memory sees one read of x and one write of
//           y.
// backward  one row at a time: pass 1 accumulates g.x, pass 2 writes dx and adds dy*x*rstd to this
// thread's dw row;
//           the per-thread rows are summed in a fixed order, so repeats are bit-equal for a given
//           thread count.
// Bytes per element: forward 2s (4s with residual), backward 3s (s = element size). Bound: memory
// bandwidth.
#include "cpu/kernel.h"
#include "trainwright/rms_norm.h"

namespace tw {

struct RmsNormFwdArgs {
  const void *x, *residual, *weight;  // (N, C), (N, C) or null, (C) or null
  void *y, *sum, *rstd;               // (N, C), (N, C) or null, (N) in acc type
  int64_t N, C;
  double eps, weight_offset;
  DType dtype, weight_dtype;
};

struct RmsNormBwdArgs {
  const void *dy, *dsum, *x, *weight, *rstd;  // dsum: gradient of the returned sum, or null
  void* dx;                                   // (N, C)
  void* dw_partial;                           // (slots, C) in acc type, or null
  int64_t N, C, slots;
  double weight_offset;
  DType dtype, weight_dtype;
};

}  // namespace tw

TW_DECLARE_KERNEL(rms_norm_fwd, RmsNormFwdArgs)
TW_DECLARE_KERNEL(rms_norm_bwd, RmsNormBwdArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

// w + offset as A, for the whole row; 1 where there is no weight.
template<class A>
void effective_weight(A* out, const void* w, DType dtype, int64_t C, A offset) {
  if (!w) {
    for (int64_t c = 0; c < C; ++c) out[c] = A(1);
    return;
  }
  with_float_type(dtype, [&](auto tag) {
    const auto* p = static_cast<const decltype(tag)*>(w);
    for (int64_t c = 0; c < C; ++c) out[c] = load_as<A>(p[c]) + offset;
  });
}

template<class T>
void forward_rows(const RmsNormFwdArgs& a, const acc_t<T>* w, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for (int64_t n = begin; n < end; ++n) {
    const T* x = static_cast<const T*>(a.x) + n * a.C;
    const T* r = a.residual ? static_cast<const T*>(a.residual) + n * a.C : nullptr;
    T* s = a.residual ? static_cast<T*>(a.sum) + n * a.C : nullptr;
    T* y = static_cast<T*>(a.y) + n * a.C;
    vec<A> squares{};
    if (r) {
      for_lanes<A>(a.C, [&](int64_t i, auto k) {
        vstore<A>(s + i, vload<A>(x + i, k) + vload<A>(r + i, k), k);
        const vec<A> v = vload<A>(s + i, k);  // the norm sees the sum as it was stored, rounded
        squares += v * v;
      });
    } else {
      for_lanes<A>(a.C, [&](int64_t i, auto k) {
        const vec<A> v = vload<A>(x + i, k);
        squares += v * v;
      });
    }
    const A rstd = rms_rstd<A>(hsum<A>(squares), a.C, static_cast<A>(a.eps));
    static_cast<A*>(a.rstd)[n] = rstd;
    const T* in = r ? s : x;
    for_lanes<A>(a.C, [&](int64_t i, auto k) {
      vstore<A>(y + i, rms_y(vload<A>(in + i, k), rstd, vload<A>(w + i, k)), k);
    });
  }
}

template<class T>
void backward_rows(const RmsNormBwdArgs& a, const acc_t<T>* w, acc_t<T>* dw, int64_t begin,
                   int64_t end) {
  using A = acc_t<T>;
  for (int64_t n = begin; n < end; ++n) {
    const T* x = static_cast<const T*>(a.x) + n * a.C;
    const T* dy = static_cast<const T*>(a.dy) + n * a.C;
    const T* dsum = a.dsum ? static_cast<const T*>(a.dsum) + n * a.C : nullptr;
    T* dx = static_cast<T*>(a.dx) + n * a.C;
    const A rstd = static_cast<const A*>(a.rstd)[n];
    vec<A> gx{};
    for_lanes<A>(a.C, [&](int64_t i, auto k) {
      gx += vload<A>(dy + i, k) * vload<A>(w + i, k) * vload<A>(x + i, k);
    });
    const A mean_gx = hsum<A>(gx) / static_cast<A>(a.C);
    for_lanes<A>(a.C, [&](int64_t i, auto k) {
      const vec<A> xv = vload<A>(x + i, k), dyv = vload<A>(dy + i, k);
      vec<A> d = rms_dx(dyv * vload<A>(w + i, k), xv, rstd, mean_gx);
      if (dsum) d += vload<A>(dsum + i, k);
      vstore<A>(dx + i, d, k);
      if (dw) vstore<A>(dw + i, vload<A>(dw + i, k) + dyv * xv * rstd, k);
    });
  }
}

}  // namespace

void rms_norm_fwd(const RmsNormFwdArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    A* w = new A[static_cast<size_t>(a.C)];
    effective_weight<A>(w, a.weight, a.weight_dtype, a.C, static_cast<A>(a.weight_offset));
    parallel_for(0, a.N, 1 + 16384 / (a.C + 1),
                 [&](int64_t b, int64_t e) { forward_rows<T>(a, w, b, e); });
    delete[] w;
  });
}

void rms_norm_bwd(const RmsNormBwdArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    A* w = new A[static_cast<size_t>(a.C)];
    effective_weight<A>(w, a.weight, a.weight_dtype, a.C, static_cast<A>(a.weight_offset));
    // Slot s owns rows [s*N/slots, (s+1)*N/slots): which thread runs a slot does not matter.
    parallel_for(0, a.slots, 1, [&](int64_t b, int64_t e) {
      for (int64_t s = b; s < e; ++s) {
        A* dw = a.dw_partial ? static_cast<A*>(a.dw_partial) + s * a.C : nullptr;
        if (dw) memset(dw, 0, static_cast<size_t>(a.C) * sizeof(A));
        backward_rows<T>(a, w, dw, s * a.N / a.slots, (s + 1) * a.N / a.slots);
      }
    });
    delete[] w;
  });
}

TW_END

#else  // ---- torch bindings
       // ------------------------------------------------------------------------------------------

namespace tw {
namespace {

std::tuple<Tensor, Tensor, Tensor> rms_norm_fwd_cpu(const Tensor& x,
                                                    const std::optional<Tensor>& residual,
                                                    const std::optional<Tensor>& weight, double eps,
                                                    double weight_offset) {
  TW_CHECK_CONTIGUOUS(x);
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  Tensor y = empty(shape_of(x), x);
  Tensor sum = residual ? empty(shape_of(x), x) : empty({0}, x);
  Tensor rstd = empty({N}, x, acc_dtype(x));
  rms_norm_fwd({data(x), data(residual), data(weight), mutable_data(y), mutable_data(sum),
                mutable_data(rstd), N, C, eps, weight_offset, dtype_of(x),
                weight ? dtype_of(*weight) : DType::f32});
  return {y, sum, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd_cpu(const Tensor& dy, const std::optional<Tensor>& dsum,
                                            const Tensor& x, const std::optional<Tensor>& weight,
                                            const Tensor& rstd, double weight_offset) {
  TW_CHECK_CONTIGUOUS(dy);
  TW_CHECK_CONTIGUOUS(x);
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  // 16 slots whatever the thread count: the sum over rows has the same bits on every machine.
  const int64_t slots = 16;
  Tensor dx = empty(shape_of(x), x);
  Tensor partial = empty({weight ? slots : 0, C}, x, acc_dtype(x));
  rms_norm_bwd({data(dy), data(dsum), data(x), data(weight), data(rstd), mutable_data(dx),
                weight ? mutable_data(partial) : nullptr, N, C, slots, weight_offset, dtype_of(x),
                weight ? dtype_of(*weight) : DType::f32});
  if (!weight) return {dx, partial};
  const std::vector<int64_t> rows = {0};
  return {dx, torch::stable::sum(partial, rows, false, std::nullopt)};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("rms_norm_fwd", TORCH_BOX(&tw::rms_norm_fwd_cpu));
  m.impl("rms_norm_bwd", TORCH_BOX(&tw::rms_norm_bwd_cpu));
}

#endif
