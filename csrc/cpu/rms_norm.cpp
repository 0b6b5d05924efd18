// RMS norm on the CPU (formula in trainwright/rms_norm.h).
//
// forward   two rows at a time: pass 1 adds the residual, stores the sum and accumulates x^2; pass 2
//           scales, while the next rows are prefetched. Rows of up to a few thousand elements stay
//           in L1, so memory sees one read of x and one write of y.
// backward  four rows at a time: the sum of g x for each row, then dx for the four together with
//           their part of dw, which is loaded and stored once for four rows. dw is summed in slots
//           that depend on N alone (rows.h): the same bits for any number of threads.
// Bytes per element: forward 2s (4s with residual), backward 3s (s = element size). Bound: memory
// bandwidth.
#include "trainwright/rms_norm.h"

#include "cpu/rows.h"

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
  void *dx, *dw;                              // (N, C), or null; (C) in acc type, or null
  int64_t N, C;
  double weight_offset;
  DType dtype, weight_dtype;
};

}  // namespace tw

TW_DECLARE_KERNEL(rms_norm_fwd, RmsNormFwdArgs)
TW_DECLARE_KERNEL(rms_norm_bwd, RmsNormBwdArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

// Rows n .. n + R - 1: two at a time hide the latency of each other's sums.
template<int R, class T>
void forward_rows(const RmsNormFwdArgs& a, const acc_t<T>* w, bool stream, int64_t n) {
  using A = acc_t<T>;
  constexpr int U = 2;
  const T* x = static_cast<const T*>(a.x) + n * a.C;
  T* y = static_cast<T*>(a.y) + n * a.C;
  const T* next = x + R * a.C;
  vec<A> squares[R][U] = {};
  if (a.residual) {
    const T* residual = static_cast<const T*>(a.residual) + n * a.C;
    T* s = static_cast<T*>(a.sum) + n * a.C;
    for_lanes_unrolled<A, U>(a.C, [&](int64_t i, auto k, int u) {
      for_rows<R>([&](int r) {
        const int64_t at = r * a.C + i;
        vstore<A>(s + at, vload<A>(x + at, k) + vload<A>(residual + at, k), k);
        const vec<A> v = vload<A>(s + at, k);  // the norm sees the sum as it was stored, rounded
        squares[r][u] += v * v;
      });
    });
    x = s;
  } else {
    for_lanes_unrolled<A, U>(a.C, [&](int64_t i, auto k, int u) {
      for_rows<R>([&](int r) {
        const vec<A> v = vload<A>(x + r * a.C + i, k);
        squares[r][u] += v * v;
      });
    });
  }
  A rstd[R];
  for_rows<R>([&](int r) {
    rstd[r] = rms_rstd<A>(hsum_all<A>(squares[r]), a.C, static_cast<A>(a.eps));
    static_cast<A*>(a.rstd)[n + r] = rstd[r];
  });
  for_lanes<A>(a.C, [&](int64_t i, auto k) {
    prefetch_rows<A, R>(next, i);
    const vec<A> wv = vload<A>(w + i, k);
    for_rows<R>([&](int r) {
      put<A>(y + r * a.C + i, rms_y(vload<A>(x + r * a.C + i, k), rstd[r], wv), k, stream);
    });
  });
}

// Rows n .. n + R - 1; their part is added to dw.
template<int R, class T, class W>
void backward_rows(const RmsNormBwdArgs& a, W want, const acc_t<T>* w, acc_t<T>* dw, int64_t n) {
  using A = acc_t<T>;
  const int64_t C = a.C;
  const T* x = static_cast<const T*>(a.x) + n * C;
  const T* dy = static_cast<const T*>(a.dy) + n * C;
  const T* dsum = want.dsum ? static_cast<const T*>(a.dsum) + n * C : nullptr;
  T* dx = want.dx ? static_cast<T*>(a.dx) + n * C : nullptr;
  const T *next_x = x + R * C, *next_dy = dy + R * C;
  vec<A> rstd[R], slope[R];  // dx = g rstd - x slope
  for (int r = 0; r < R; ++r) {
    constexpr int U = 4;
    const T *xr = x + r * C, *dyr = dy + r * C;
    vec<A> gx[U] = {};
    if (want.dx) {
      for_lanes_unrolled<A, U>(C, [&](int64_t i, auto k, int u) {
        gx[u] += vload<A>(dyr + i, k) * vload<A>(w + i, k) * vload<A>(xr + i, k);
      });
    }
    const A s = static_cast<const A*>(a.rstd)[n + r];
    rstd[r] = splat<A>(s);
    slope[r] = splat<A>(rms_slope(s, hsum_all<A>(gx), C));
  }
  for_lanes<A>(C, [&](int64_t i, auto k) {
    prefetch_rows<A, R>(next_x, i);
    prefetch_rows<A, R>(next_dy, i);
    const vec<A> wv = vload<A>(w + i, k);
    vec<A> dw_sum{};
    for_rows<R>([&](int r) {
      const int64_t at = r * C + i;
      const vec<A> xv = vload<A>(x + at, k), g = vload<A>(dy + at, k) * rstd[r];
      if (want.dx) {
        vec<A> v = g * wv - xv * slope[r];
        if (want.dsum) v += vload<A>(dsum + at, k);
        put<A>(dx + at, v, k, want.stream);
      }
      dw_sum += g * xv;
    });
    if (want.dw) vstore<A>(dw + i, vload<A>(dw + i, k) + dw_sum, k);
  });
}

}  // namespace

void rms_norm_fwd(const RmsNormFwdArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    A* w = new A[static_cast<size_t>(a.C)];
    widen_row<A>(w, a.weight, a.weight_dtype, a.C, A(1), static_cast<A>(a.weight_offset));
    const bool stream = can_stream<A>(static_cast<const T*>(a.y), a.C, a.N);
    parallel_for(0, a.N, 1 + 16384 / (a.C + 1), [&](int64_t begin, int64_t end) {
      int64_t n = begin;
      for (; n + 2 <= end; n += 2) forward_rows<2, T>(a, w, stream, n);
      if (n < end) forward_rows<1, T>(a, w, stream, n);
      if (stream) stream_fence();
    });
    delete[] w;
  });
}

void rms_norm_bwd(const RmsNormBwdArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const int64_t slots = slots_for_rows(a.N);
    A* w = new A[static_cast<size_t>((1 + slots) * a.C)];
    A* partial = w + a.C;
    widen_row<A>(w, a.weight, a.weight_dtype, a.C, A(1), static_cast<A>(a.weight_offset));
    const bool stream = a.dx && can_stream<A>(static_cast<const T*>(a.dx), a.C, a.N);
    with_want({a.dx != nullptr, a.dw != nullptr, a.dsum != nullptr, stream}, [&](auto want) {
      parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
          A* dw = partial + s * a.C;
          memset(dw, 0, static_cast<size_t>(a.C) * sizeof(A));
          int64_t n = s * a.N / slots;
          const int64_t last = (s + 1) * a.N / slots;
          for (; n + 4 <= last; n += 4) backward_rows<4, T>(a, want, w, dw, n);
          for (; n < last; ++n) backward_rows<1, T>(a, want, w, dw, n);
        }
        if (stream) stream_fence();
      });
    });
    if (a.dw) add_slots<A>(static_cast<A*>(a.dw), partial, slots, a.C);
    delete[] w;
  });
}

TW_END

#else  // ---- torch bindings ------------------------------------------------------------------

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
                                            const Tensor& rstd, double weight_offset, bool need_dx,
                                            bool need_dw) {
  TW_CHECK_CONTIGUOUS(dy);
  TW_CHECK_CONTIGUOUS(x);
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  Tensor dx = need_dx ? empty(shape_of(x), x) : empty({0}, x);
  Tensor dw = empty({need_dw ? C : 0}, x, acc_dtype(x));
  rms_norm_bwd({data(dy), data(dsum), data(x), data(weight), data(rstd),
                need_dx ? mutable_data(dx) : nullptr, need_dw ? mutable_data(dw) : nullptr, N, C,
                weight_offset, dtype_of(x), weight ? dtype_of(*weight) : DType::f32});
  return {dx, dw};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("rms_norm_fwd", TORCH_BOX(&tw::rms_norm_fwd_cpu));
  m.impl("rms_norm_bwd", TORCH_BOX(&tw::rms_norm_bwd_cpu));
}

#endif
