// Layer norm on the CPU (formula in trainwright/layer_norm.h).
//
// forward   two rows at a time, three passes: the mean (adding and storing the residual sum first);
//           deviations from it and their squares, while the next rows are prefetched; y. Rows of up
//           to a few thousand elements stay in L1, so memory sees one read of x and one write of y.
// backward  four rows at a time: two sums for each row, then dx for the four together with their part
//           of dw and db, which are loaded and stored once for four rows. dw and db are summed in
//           slots that depend on N alone (rows.h): the same bits for any number of threads.
// Bytes per element: forward 2s (4s with residual), backward 3s (s = element size). Bound: memory
// bandwidth.
#include "trainwright/layer_norm.h"

#include "cpu/rows.h"

namespace tw {

struct LayerNormFwdArgs {
  const void *x, *residual, *weight, *bias;  // (N, C), (N, C) or null, (C) or null, (C) or null
  void *y, *sum, *stats;                     // (N, C), (N, C) or null, (N, 3) in acc type
  int64_t N, C;
  double eps;
  DType dtype, weight_dtype, bias_dtype;
};

struct LayerNormBwdArgs {
  const void *dy, *dsum, *x, *weight, *stats;  // dsum: gradient of the returned sum, or null
  void* dx;                                    // (N, C), or null
  void *dw, *db;                               // (C) in acc type, or null (both or neither)
  int64_t N, C;
  DType dtype, weight_dtype;
};

}  // namespace tw

TW_DECLARE_KERNEL(layer_norm_fwd, LayerNormFwdArgs)
TW_DECLARE_KERNEL(layer_norm_bwd, LayerNormBwdArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

// Rows n .. n + R - 1: two at a time hide the latency of each other's sums.
template<int R, class T>
void forward_rows(const LayerNormFwdArgs& a, const acc_t<T>* w, const acc_t<T>* b, bool stream,
                  int64_t n) {
  using A = acc_t<T>;
  constexpr int U = 2;
  const T* x = static_cast<const T*>(a.x) + n * a.C;
  T* y = static_cast<T*>(a.y) + n * a.C;
  const T* next = x + R * a.C;
  vec<A> sums[R][U] = {};
  if (a.residual) {
    const T* residual = static_cast<const T*>(a.residual) + n * a.C;
    T* s = static_cast<T*>(a.sum) + n * a.C;
    for_lanes_unrolled<A, U>(a.C, [&](int64_t i, auto k, int u) {
      for_rows<R>([&](int r) {
        const int64_t at = r * a.C + i;
        vstore<A>(s + at, vload<A>(x + at, k) + vload<A>(residual + at, k), k);
        sums[r][u] += vload<A>(s + at, k);  // the norm sees the sum as it was stored, rounded
      });
    });
    x = s;
  } else {
    for_lanes_unrolled<A, U>(a.C, [&](int64_t i, auto k, int u) {
      for_rows<R>([&](int r) { sums[r][u] += vload<A>(x + r * a.C + i, k); });
    });
  }
  A mean[R];
  for_rows<R>([&](int r) { mean[r] = hsum_all<A>(sums[r]) / static_cast<A>(a.C); });
  vec<A> deviations[R][U] = {}, squares[R][U] = {};
  for_lanes_unrolled<A, U>(a.C, [&](int64_t i, auto k, int u) {
    prefetch_rows<A, R>(next, i);
    if (!stream) prefetch_rows<A, R>(y, i);
    for_rows<R>([&](int r) {
      const vec<A> d = keep<A>(vload<A>(x + r * a.C + i, k) - mean[r], k, A(0));
      deviations[r][u] += d;
      squares[r][u] += d * d;
    });
  });
  LayerNormRow<vec<A>> row[R];
  for_rows<R>([&](int r) {
    const auto stats = layer_norm_stats<A>(mean[r], hsum_all<A>(deviations[r]),
                                           hsum_all<A>(squares[r]), a.C, static_cast<A>(a.eps));
    static_cast<LayerNormStats<A>*>(a.stats)[n + r] = stats;
    row[r] = layer_norm_row<vec<A>>(stats, A(0), A(0), a.C);
  });
  for_lanes<A>(a.C, [&](int64_t i, auto k) {
    const vec<A> wv = vload<A>(w + i, k), bv = vload<A>(b + i, k);
    for_rows<R>([&](int r) {
      const vec<A> xhat = layer_norm_xhat(vload<A>(x + r * a.C + i, k), row[r]);
      put<A>(y + r * a.C + i, xhat * wv + bv, k, stream);
    });
  });
}

// Rows n .. n + R - 1; their part is added to dw and db.
template<int R, class T, class W>
void backward_rows(const LayerNormBwdArgs& a, W want, const acc_t<T>* w, acc_t<T>* dw, acc_t<T>* db,
                   int64_t n) {
  using A = acc_t<T>;
  const int64_t C = a.C;
  const T* x = static_cast<const T*>(a.x) + n * C;
  const T* dy = static_cast<const T*>(a.dy) + n * C;
  const T* dsum = want.dsum ? static_cast<const T*>(a.dsum) + n * C : nullptr;
  T* dx = want.dx ? static_cast<T*>(a.dx) + n * C : nullptr;
  const T *next_x = x + R * C, *next_dy = dy + R * C;
  LayerNormRow<vec<A>> row[R];
  for (int r = 0; r < R; ++r) {
    constexpr int U = 4;
    const auto stats = static_cast<const LayerNormStats<A>*>(a.stats)[n + r];
    const T *xr = x + r * C, *dyr = dy + r * C;
    vec<A> g_sums[U] = {}, gd_sums[U] = {};
    if (want.dx) {
      for_lanes_unrolled<A, U>(C, [&](int64_t i, auto k, int u) {
        const vec<A> g = vload<A>(dyr + i, k) * vload<A>(w + i, k);
        g_sums[u] += g;
        gd_sums[u] += g * (vload<A>(xr + i, k) - stats.mean);
      });
    }
    row[r] = layer_norm_row<vec<A>>(stats, hsum_all<A>(g_sums), hsum_all<A>(gd_sums), C);
  }
  for_lanes<A>(C, [&](int64_t i, auto k) {
    prefetch_rows<A, R>(next_x, i);
    prefetch_rows<A, R>(next_dy, i);
    const vec<A> wv = vload<A>(w + i, k);
    vec<A> dw_sum{}, db_sum{};
    for_rows<R>([&](int r) {
      const int64_t at = r * C + i;
      const vec<A> g = vload<A>(dy + at, k);
      const vec<A> xhat = layer_norm_xhat(vload<A>(x + at, k), row[r]);
      if (want.dx) {
        vec<A> v = layer_norm_dx(g * wv, xhat, row[r]);
        if (want.dsum) v += vload<A>(dsum + at, k);
        put<A>(dx + at, v, k, want.stream);
      }
      dw_sum += g * xhat;
      db_sum += g;
    });
    if (want.dw) {
      vstore<A>(dw + i, vload<A>(dw + i, k) + dw_sum, k);
      vstore<A>(db + i, vload<A>(db + i, k) + db_sum, k);
    }
  });
}

}  // namespace

void layer_norm_fwd(const LayerNormFwdArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    A* w = new A[static_cast<size_t>(2 * a.C)];
    A* b = w + a.C;
    widen_row<A>(w, a.weight, a.weight_dtype, a.C, A(1));
    widen_row<A>(b, a.bias, a.bias_dtype, a.C, A(0));
    const bool stream = can_stream<A>(static_cast<const T*>(a.y), a.C, a.N);
    parallel_for(0, a.N, 1 + 16384 / (a.C + 1), [&](int64_t begin, int64_t end) {
      int64_t n = begin;
      for (; n + 2 <= end; n += 2) forward_rows<2, T>(a, w, b, stream, n);
      if (n < end) forward_rows<1, T>(a, w, b, stream, n);
      if (stream) stream_fence();
    });
    delete[] w;
  });
}

void layer_norm_bwd(const LayerNormBwdArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const int64_t slots = slots_for_rows(a.N);
    A* w = new A[static_cast<size_t>((1 + 2 * slots) * a.C)];
    A* partial = w + a.C;  // dw of every slot, then db of every slot
    widen_row<A>(w, a.weight, a.weight_dtype, a.C, A(1));
    const bool stream = a.dx && can_stream<A>(static_cast<const T*>(a.dx), a.C, a.N);
    with_want({a.dx != nullptr, a.dw != nullptr, a.dsum != nullptr, stream}, [&](auto want) {
      parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
          A *dw = partial + s * a.C, *db = partial + (slots + s) * a.C;
          memset(dw, 0, static_cast<size_t>(a.C) * sizeof(A));
          memset(db, 0, static_cast<size_t>(a.C) * sizeof(A));
          int64_t n = s * a.N / slots;
          const int64_t last = (s + 1) * a.N / slots;
          for (; n + 4 <= last; n += 4) backward_rows<4, T>(a, want, w, dw, db, n);
          for (; n < last; ++n) backward_rows<1, T>(a, want, w, dw, db, n);
        }
        if (stream) stream_fence();
      });
    });
    if (a.dw) {
      add_slots<A>(static_cast<A*>(a.dw), partial, slots, a.C);
      add_slots<A>(static_cast<A*>(a.db), partial + slots * a.C, slots, a.C);
    }
    delete[] w;
  });
}

TW_END

#else  // ---- torch bindings -----------------------------------------------------------------------

namespace tw {
namespace {

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd_cpu(const Tensor& x,
                                                      const std::optional<Tensor>& residual,
                                                      const std::optional<Tensor>& weight,
                                                      const std::optional<Tensor>& bias,
                                                      double eps) {
  TW_CHECK_CONTIGUOUS(x);
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  Tensor y = empty(shape_of(x), x);
  Tensor sum = residual ? empty(shape_of(x), x) : empty({0}, x);
  Tensor stats = empty({N, 3}, x, acc_dtype(x));
  layer_norm_fwd({data(x), data(residual), data(weight), data(bias), mutable_data(y),
                  mutable_data(sum), mutable_data(stats), N, C, eps, dtype_of(x),
                  weight ? dtype_of(*weight) : DType::f32, bias ? dtype_of(*bias) : DType::f32});
  return {y, sum, stats};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd_cpu(
    const Tensor& dy, const std::optional<Tensor>& dsum, const Tensor& x,
    const std::optional<Tensor>& weight, const Tensor& stats, bool need_dx, bool need_dw) {
  TW_CHECK_CONTIGUOUS(dy);
  TW_CHECK_CONTIGUOUS(x);
  const int64_t C = x.size(x.dim() - 1), N = C ? x.numel() / C : 0;
  Tensor dx = need_dx ? empty(shape_of(x), x) : empty({0}, x);
  Tensor dw = empty({need_dw ? C : 0}, x, acc_dtype(x));
  Tensor db = empty({need_dw ? C : 0}, x, acc_dtype(x));
  layer_norm_bwd({data(dy), data(dsum), data(x), data(weight), data(stats),
                  need_dx ? mutable_data(dx) : nullptr, need_dw ? mutable_data(dw) : nullptr,
                  need_dw ? mutable_data(db) : nullptr, N, C, dtype_of(x),
                  weight ? dtype_of(*weight) : DType::f32});
  return {dx, dw, db};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&tw::layer_norm_fwd_cpu));
  m.impl("layer_norm_bwd", TORCH_BOX(&tw::layer_norm_bwd_cpu));
}

#endif
