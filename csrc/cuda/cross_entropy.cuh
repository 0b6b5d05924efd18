// Cross entropy on CUDA (formulas in trainwright/cross_entropy.h).
//
// scale     one block: the factors of a mean, from targets and class weights.
// rows      one block per row. Each thread walks the row with an online softmax of its own (running
//           maximum and sum); the block joins them in double. The logits are read once.
// sum       one block adds the rows' losses in order.
// backward  one block per span of a row; exp(z - lse) again, one read and one write per logit.
// Rows may begin at any element: the elements before the first 32-byte boundary and after the last
// whole pack are taken one by one. No atomics: repeats are bit-equal. A target out of range gives NaN.
// Bytes per logit: forward s, backward 2s (s = element size). Bound: memory bandwidth, in bf16 about
// level with the exponentials. Counted on the virtual GPU; not yet timed on a GPU.
#pragma once
#include "cuda/launch.cuh"
#include "trainwright/cross_entropy.h"
#include "trainwright/pack.cuh"
#include "trainwright/vec_math.h"

namespace tw {

struct CrossEntropyTile {
  const void* logits;     // (N, columns), the columns first ... first + columns - 1 of the row
  const int64_t* target;  // (N)
  const void* weight;     // (classes) in acc type, or null
  int64_t N, columns, first;
  CrossEntropyOptions options;  // weight_total is not set
};
struct CrossEntropyRows {
  CrossEntropyTile tile;
  double* state;        // (N, 4), updated; the tile with first = 0 starts it. Or null, then:
  const double* scale;  // (2) factors of loss and z-loss
  double *lse, *loss;   // (N) and (N)
};
struct CrossEntropyGrad {
  CrossEntropyTile tile;
  const double *lse, *scale;
  const double* weight_total;  // or null: the number of classes
  const void* upstream;        // in acc type, element n * upstream_stride; or null, then
  double upstream_value;
  int64_t upstream_stride;
  void* grad;  // (N, columns); may be the logits themselves
};

constexpr int kScaleThreads = 512;
constexpr int kGradThreads = 256;
constexpr int kGradPacks = 4;  // per thread: enough loads in flight, few reads of the row's numbers

// exp(d) for d <= 0 (or barely above, from rounding): 0 below 2^-126, NaN stays. Within two units in
// the last place near 0; further down the rounding of d log2(e) adds |d| / 2 of them.
__device__ __forceinline__ float exp_nonpositive(float d) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d * 1.44269504088896341f));
  return y;
}
__device__ __forceinline__ double exp_nonpositive(double d) { return exp(d); }

// z of a logit. SOFTCAP is known at compile time so that the plain loop carries nothing of it.
template<bool SOFTCAP, class A>
struct Cap {
  A cap, inverse;
  __device__ explicit Cap(double c)
      : cap(static_cast<A>(c)), inverse(SOFTCAP ? static_cast<A>(1 / c) : A(0)) {}
  __device__ __forceinline__ A operator()(A x) const {
    if constexpr (SOFTCAP) return vtanh(x * inverse) * cap;
    return x;
  }
  __device__ __forceinline__ A slope(A z) const {  // dz/dx
    const A y = z * inverse;
    return A(1) - y * y;
  }
};

// The elements before the first 32-byte boundary of a row of n: packs of a warp then fill sectors.
template<class T>
__device__ __forceinline__ int64_t unaligned_head(const T* row, int64_t n) {
  const int64_t head = (32 - reinterpret_cast<uintptr_t>(row) % 32) % 32 / sizeof(T);
  return head < n ? head : n;
}

// weight[c] ... weight[c + VEC - 1].
template<int VEC, class A>
__device__ __forceinline__ void load_weights(const A* weight, int64_t c, A (&w)[VEC]) {
  constexpr int part = 16 / sizeof(A);
  if (VEC % part == 0 && reinterpret_cast<uintptr_t>(weight + c) % 16 == 0) {
    load_any<VEC>(weight, sizeof(A) == 8 ? DType::f64 : DType::f32, c, w);
  } else {
#pragma unroll
    for (int i = 0; i < VEC; ++i) w[i] = weight[c + i];
  }
}

template<class A>
__device__ __forceinline__ double target_weight(const CrossEntropyTile& a, int64_t t) {
  return a.weight && t >= 0 && t < a.options.classes
             ? static_cast<double>(static_cast<const A*>(a.weight)[t])
             : 1.0;
}

// What a thread has seen of a row.
template<class A>
struct OnlineSoftmax {
  A max = -INFINITY, sum_exp = A(0);
  double sum_wz = 0.0, sum_w = 0.0;

  template<bool SOFTCAP, int VEC, class T>
  __device__ __forceinline__ void add(const Pack<T, VEC>& x, const Cap<SOFTCAP, A>& capped,
                                      bool smooth, const A* weight, int64_t c) {
    A z[VEC], largest = max;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      z[i] = capped(load_as<A>(x.v[i]));
      largest = z[i] > largest ? z[i] : largest;  // NaN is passed over; the sum carries it
    }
    // All -inf so far (a masked vocabulary): any finite reference gives exp(-inf) = 0.
    const A base = largest == -INFINITY ? A(0) : largest;
    sum_exp *= exp_nonpositive(max - base);
    max = largest;
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum_exp += exp_nonpositive(z[i] - base);
    if (!smooth) return;
    // sum w z = sum w (z - base) + base sum w: small terms in A, the large one in double.
    A w[VEC], sum_wd = A(0), pack_w = A(0);
#pragma unroll
    for (int i = 0; i < VEC; ++i) w[i] = A(1);
    if (weight) load_weights(weight, c, w);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      sum_wd += (z[i] - base) * w[i];
      pack_w += w[i];
    }
    sum_wz += static_cast<double>(sum_wd) + static_cast<double>(base) * pack_w;
    sum_w += pack_w;
  }
};

// Joins what the threads have seen: every thread gets the row's state, and in sum_w the sum of the
// weights. blockDim.y = 1.
template<class A>
__device__ __forceinline__ CrossEntropyState join(const OnlineSoftmax<A>& mine, double& sum_w) {
  __shared__ A maxima[32];
  __shared__ double sums[3][32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  A max = warp_max(mine.max);
  if (warps > 1) {
    if (lane == 0) maxima[threadIdx.x / 32] = max;
    __syncthreads();
    max = warp_max(lane < warps ? maxima[lane] : static_cast<A>(-INFINITY));
  }
  const double base = max == -INFINITY ? 0.0 : static_cast<double>(max);
  double x[3] = {mine.sum_exp * exp(static_cast<double>(mine.max) - base), mine.sum_wz, mine.sum_w};
  row_sum(x, sums);
  sum_w = x[2];
  return {static_cast<double>(max), x[0], x[1], NAN};
}

// A tile's state after those before it.
__device__ __forceinline__ CrossEntropyState follow(const CrossEntropyState& before,
                                                    const CrossEntropyState& tile) {
  const double max = before.max > tile.max ? before.max : tile.max;
  const double base = max == -INFINITY ? 0.0 : max;
  return {max, before.sum_exp * exp(before.max - base) + tile.sum_exp * exp(tile.max - base),
          before.sum_wz + tile.sum_wz, tile.target == tile.target ? tile.target : before.target};
}

template<class T, bool SOFTCAP>
__global__ void __launch_bounds__(512, 1) cross_entropy_rows_kernel(CrossEntropyRows a) {
  using A = acc_t<T>;
  constexpr int VEC = 16 / sizeof(T), AHEAD = 4;  // packs loaded before the first is needed
  const CrossEntropyTile& tile = a.tile;
  const int64_t n = blockIdx.x, t = tile.target[n];
  const bool ignored = t == tile.options.ignore_index;
  const int64_t columns = ignored ? 0 : tile.columns;  // nothing is read of an ignored row
  const T* x = static_cast<const T*>(tile.logits) + n * tile.columns;
  const Cap<SOFTCAP, A> capped(tile.options.softcap);
  const bool smooth = tile.options.label_smoothing != 0;
  const A* weight = tile.weight ? static_cast<const A*>(tile.weight) + tile.first : nullptr;
  OnlineSoftmax<A> mine;
  const auto single = [&](int64_t c) { mine.add(Pack<T, 1>{{x[c]}}, capped, smooth, weight, c); };
  const int64_t head = unaligned_head(x, columns), body = head + (columns - head) / VEC * VEC;
  if (threadIdx.x < head) single(threadIdx.x);
  const int64_t stride = static_cast<int64_t>(blockDim.x) * VEC;
  int64_t c = head + threadIdx.x * VEC;
  for (; c + (AHEAD - 1) * stride < body; c += AHEAD * stride) {
    Pack<T, VEC> packs[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) packs[i] = load_once<VEC>(x + c + i * stride);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) mine.add(packs[i], capped, smooth, weight, c + i * stride);
  }
  for (; c < body; c += stride) mine.add(load_once<VEC>(x + c), capped, smooth, weight, c);
  if (body + threadIdx.x < columns) single(body + threadIdx.x);

  double sum_w = 0;
  CrossEntropyState s = join(mine, sum_w);
  if (threadIdx.x != 0) return;
  if (!ignored && t >= tile.first && t < tile.first + columns)
    s.target = static_cast<double>(capped(load_as<A>(x[t - tile.first])));
  if (a.state) {
    auto* state = reinterpret_cast<CrossEntropyState*>(a.state) + n;
    if (tile.first > 0)
      *state = ignored ? *state : follow(*state, s);
    else
      *state = ignored ? CrossEntropyState{-INFINITY, 0, 0, NAN} : s;
    return;
  }
  double loss = 0, lse = 0;
  if (!ignored) {
    CrossEntropyOptions options = tile.options;
    options.weight_total = sum_w;
    lse = cross_entropy_lse(s);
    loss = cross_entropy_loss(s, lse, target_weight<A>(tile, t), options) * a.scale[0];
    if (options.z_loss != 0) loss += options.z_loss * lse * lse * a.scale[1];
  }
  a.lse[n] = lse;
  a.loss[n] = loss;
}

// In fp64 the functions are calls, around which registers spill if there are few.
template<class T, bool SOFTCAP>
__global__ void __launch_bounds__(kGradThreads, sizeof(T) == 8 ? 2 : 4)
    cross_entropy_grad_kernel(CrossEntropyGrad a) {
  using A = acc_t<T>;
  constexpr int VEC = 16 / sizeof(T);
  __shared__ CrossEntropyCoefficients<A> shared;
  const CrossEntropyTile& tile = a.tile;
  const int64_t n = blockIdx.x, t = tile.target[n], columns = tile.columns;
  const bool ignored = t == tile.options.ignore_index;
  if (threadIdx.x == 0) {
    CrossEntropyOptions options = tile.options;
    options.weight_total = a.weight_total ? *a.weight_total : static_cast<double>(options.classes);
    const double g =
        a.upstream ? static_cast<double>(static_cast<const A*>(a.upstream)[n * a.upstream_stride])
                   : a.upstream_value;
    shared = cross_entropy_coefficients<A>(a.lse[n], target_weight<A>(tile, t), g * a.scale[0],
                                           g * a.scale[1], options);
  }
  __syncthreads();
  const CrossEntropyCoefficients<A> k = shared;
  const T* x = static_cast<const T*>(tile.logits) + n * columns;
  T* grad = static_cast<T*>(a.grad) + n * columns;
  const Cap<SOFTCAP, A> capped(tile.options.softcap);
  const A* weight = tile.weight ? static_cast<const A*>(tile.weight) + tile.first : nullptr;
  const int64_t at = t - tile.first;  // the target's column, if it lies in this tile

  const auto pack = [&](auto vec, int64_t c) {
    constexpr int W = decltype(vec)::value;
    A d[W];
    if (ignored) {
#pragma unroll
      for (int i = 0; i < W; ++i) d[i] = A(0);
    } else {
      const Pack<T, W> logits = load_once<W>(x + c);
      A w[W];
#pragma unroll
      for (int i = 0; i < W; ++i) w[i] = A(1);
      if (weight && k.weight != A(0)) load_weights(weight, c, w);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const A z = capped(load_as<A>(logits.v[i]));
        d[i] = exp_nonpositive(z - k.lse) * k.softmax - w[i] * k.weight;
        if (c + i == at) d[i] -= k.target;
        if constexpr (SOFTCAP) d[i] *= capped.slope(z);
      }
    }
    store_pack(grad + c, pack_as<T>(d));
  };
  // Packs need both rows to reach a boundary at the same element.
  const bool together =
      (reinterpret_cast<uintptr_t>(x) - reinterpret_cast<uintptr_t>(grad)) % 16 == 0;
  const int64_t head = together ? unaligned_head(x, columns) : columns;
  const int64_t body = head + (columns - head) / VEC * VEC;
  if (blockIdx.y == 0)
    for (int64_t c = threadIdx.x; c < head; c += kGradThreads) pack(Int<1>{}, c);
  const int64_t span = static_cast<int64_t>(kGradThreads) * VEC;
  int64_t c = head + (blockIdx.y * kGradPacks * kGradThreads + threadIdx.x) * VEC;
#pragma unroll
  for (int i = 0; i < kGradPacks; ++i, c += span)
    if (c < body) pack(Int<VEC>{}, c);
  if (blockIdx.y == 0 && body + threadIdx.x < columns) pack(Int<1>{}, body + threadIdx.x);
}

// scale = {1 / sum of the kept rows' class weights, 1 / number of kept rows}, 0 if no row is kept.
template<class A>
__global__ void __launch_bounds__(kScaleThreads, 1)
    cross_entropy_scale_kernel(CrossEntropyTile a, double* scale) {
  __shared__ double shared[2][32];
  double x[2] = {};  // weight, kept
  for (int64_t n = threadIdx.x; n < a.N; n += kScaleThreads) {
    const int64_t t = a.target[n];
    if (t == a.options.ignore_index) continue;
    x[0] += target_weight<A>(a, t);
    x[1] += 1.0;
  }
  row_sum(x, shared);
  const double mine = threadIdx.x == 0 ? x[0] : x[1];
  if (threadIdx.x < 2) scale[threadIdx.x] = x[1] == 0.0 ? 0.0 : 1.0 / mine;
}

// out[0] = sum of n numbers, in an order that depends on n alone.
template<class From, class To>
__global__ void __launch_bounds__(kScaleThreads, 1)
    cross_entropy_sum_kernel(const From* x, int64_t n, To* out) {
  __shared__ double shared[1][32];
  double sum[1] = {};
  for (int64_t i = threadIdx.x; i < n; i += kScaleThreads) sum[0] += static_cast<double>(x[i]);
  row_sum(sum, shared);
  if (threadIdx.x == 0) *out = static_cast<To>(sum[0]);
}
template<class To>
__global__ void __launch_bounds__(kScaleThreads, 1)
    cross_entropy_losses_kernel(const double* x, int64_t n, To* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kScaleThreads + threadIdx.x;
  if (i < n) out[i] = static_cast<To>(x[i]);
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

template<class T>
void launch_cross_entropy_rows(const CrossEntropyRows& a, cudaStream_t stream) {
  if (a.tile.N == 0) return;
  // Four packs per thread, up to 512 threads.
  const int64_t warps = divide_up(a.tile.columns, 32 * 4 * (16 / sizeof(T)));
  const auto threads =
      static_cast<unsigned>(32 * std::min<int64_t>(std::max<int64_t>(warps, 1), 16));
  const auto rows = static_cast<unsigned>(a.tile.N);
  with_bool(a.tile.options.softcap != 0, [&](auto softcap) {
    cross_entropy_rows_kernel<T, decltype(softcap)::value><<<rows, threads, 0, stream>>>(a);
  });
}

template<class T>
void launch_cross_entropy_grad(const CrossEntropyGrad& a, cudaStream_t stream) {
  if (a.tile.N == 0 || a.tile.columns == 0) return;
  constexpr int64_t span = kGradThreads * kGradPacks * (16 / sizeof(T));
  const dim3 grid(static_cast<unsigned>(a.tile.N),
                  static_cast<unsigned>(divide_up(a.tile.columns, span)));
  with_bool(a.tile.options.softcap != 0, [&](auto softcap) {
    cross_entropy_grad_kernel<T, decltype(softcap)::value><<<grid, kGradThreads, 0, stream>>>(a);
  });
}

template<class A>
void launch_cross_entropy_scale(const CrossEntropyTile& a, double* scale, cudaStream_t stream) {
  cross_entropy_scale_kernel<A><<<1, kScaleThreads, 0, stream>>>(a, scale);
}

// The sum of n losses to out[0], or each to out[n], as A.
template<class A>
void launch_cross_entropy_losses(const double* losses, int64_t n, bool each, A* out,
                                 cudaStream_t stream) {
  if (!each)
    cross_entropy_sum_kernel<<<1, kScaleThreads, 0, stream>>>(losses, n, out);
  else if (n > 0)
    cross_entropy_losses_kernel<<<static_cast<unsigned>(divide_up(n, kScaleThreads)), kScaleThreads,
                                  0, stream>>>(losses, n, out);
}

template<class A>
void launch_cross_entropy_weight_total(const A* weight, int64_t classes, double* total,
                                       cudaStream_t stream) {
  cross_entropy_sum_kernel<<<1, kScaleThreads, 0, stream>>>(weight, classes, total);
}

}  // namespace tw
