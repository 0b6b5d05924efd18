// Rotary position embedding on CUDA (formula in trainwright/rope.h), of q and k in one launch.
//
// A block takes a few rows of cos and sin and widens them into shared memory; then every thread rotates
// the same unit, VEC pairs or VEC elements that pass through, of one head after another, of all the
// sequences that share the tables or, where that would leave the device idle, of a range of them.
// Heads need only be contiguous inside: q and k may be slices of one (B, T, (H + 2G) D) projection, and
// are not copied.
// Bytes per element: 2s (s = element size), and the tables once. Bound: memory bandwidth. Accesses are
// 16 bytes where sizes and pointers allow, one element otherwise. Counted on the virtual GPU
// (tests/vgpu/test_counts.py): bytes within 2% of that; not yet timed on a GPU.
#include "trainwright/rope.h"

#include "cuda/binding.cuh"
#include "cuda/launch.cuh"
#include "trainwright/pack.cuh"

namespace tw {

// (B, T, heads, D), contiguous in D; out is contiguous.
struct RopeTensor {
  const void* in;
  void* out;
  int64_t heads, batch_stride, token_stride, head_stride;
};
struct Rope {
  RopeTensor q, k;        // k may have no heads
  const void *cos, *sin;  // (rows, R / 2); row n is for token n % T of the sequences from n / T on
  int64_t rows, sharing, T, D, half;  // sharing: how many sequences those are; half = R / 2
  bool interleaved, inverse;
  DType table_dtype;
};

constexpr int kRopeThreads = 512;

// Elements of a table row in shared memory, a little more than `half`.
__host__ __device__ inline int table_row(int half) { return (half + 79) / 16 * 16; }

// Where element p of it lies. A thread reads VEC elements in a row; where those are 32 bytes, their
// first and second 16 bytes are kept apart, half the banks shifted: then neither the reads of 16
// bytes nor the writes of single elements meet in a bank.
template<int VEC, class A>
__device__ __forceinline__ int table_slot(int p, int half) {
  constexpr int part = 16 / sizeof(A);
  if constexpr (VEC <= part) return p;
  const int chunk = p / part, evens = (half / part + 1) / 2 * part;
  const int odds = (evens + 15) / 32 * 32 + 16;
  return chunk % 2 * odds + chunk / 2 * part + p % part;
}
template<int VEC, class A>
__device__ __forceinline__ void load_table(const A* table, int p, int half, A (&x)[VEC]) {
  constexpr int part = VEC < 16 / static_cast<int>(sizeof(A)) ? VEC : 16 / sizeof(A);
#pragma unroll
  for (int k = 0; k < VEC / part; ++k) {
    const Pack<A, part> pack = load_pack<part>(table + table_slot<VEC, A>(p + k * part, half));
#pragma unroll
    for (int i = 0; i < part; ++i) x[k * part + i] = pack.v[i];
  }
}

// blockDim = (units, heads, tokens).
template<class T, int VEC>
__global__ void __launch_bounds__(kRopeThreads, 2) rope_kernel(Rope a) {
  using A = acc_t<T>;
  // Pairs of a unit: VEC, or VEC / 2 of interleaved ones (at least one).
  constexpr int PAIRS = VEC == 1 ? 1 : VEC / 2;
  extern __shared__ __align__(16) char dynamic[];
  const int half = static_cast<int>(a.half), D = static_cast<int>(a.D);
  const int row = table_row(half);
  A* tables = reinterpret_cast<A*>(dynamic);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.z;
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  const int me = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const bool split = !a.interleaved;  // a unit of pairs (p, p + R / 2) reads VEC of each table

  for (int z = 0; z < static_cast<int>(blockDim.z) && first + z < a.rows; ++z) {
    const int64_t at = (first + z) * a.half;
    A *cos = tables + 2 * z * row, *sin = cos + row;
    for (int p = me; p < half; p += threads) {
      const int slot = split ? table_slot<VEC, A>(p, half) : p;
      const A s = load_one<A>(a.sin, a.table_dtype, at + p);
      cos[slot] = load_one<A>(a.cos, a.table_dtype, at + p);
      sin[slot] = a.inverse ? -s : s;
    }
  }
  __syncthreads();
  const int64_t n = first + threadIdx.z;
  if (n >= a.rows) return;
  const int64_t t = n % a.T, batch = n / a.T;
  const int64_t begin = batch + blockIdx.y * a.sharing / gridDim.y;
  const int64_t end = batch + (blockIdx.y + 1) * a.sharing / gridDim.y;
  const A *cos = tables + 2 * threadIdx.z * row, *sin = cos + row;
  const int heads = static_cast<int>(a.q.heads + a.k.heads);
  // Units that rotate, then units of the rest of the head.
  const int per_unit = split ? VEC : PAIRS;
  const int rotating = half / per_unit, units = rotating + (D - 2 * half) / VEC;
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    A c[VEC], s[VEC];
    if (unit < rotating) {
      if (split) {
        load_table<VEC>(cos, unit * VEC, half, c);
        load_table<VEC>(sin, unit * VEC, half, s);
      } else {
        const Pack<A, PAIRS> cs = load_pack<PAIRS>(cos + unit * PAIRS);
        const Pack<A, PAIRS> ss = load_pack<PAIRS>(sin + unit * PAIRS);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
          c[i] = cs.v[i];
          s[i] = ss.v[i];
        }
      }
    }
    for (int64_t b = begin; b < end; ++b) {
      for (int h = threadIdx.y; h < heads; h += blockDim.y) {
        const bool of_q = h < static_cast<int>(a.q.heads);
        const RopeTensor& x = of_q ? a.q : a.k;
        const int64_t head = of_q ? h : h - a.q.heads;
        const T* in = static_cast<const T*>(x.in) + b * x.batch_stride + t * x.token_stride +
                      head * x.head_stride;
        T* out = static_cast<T*>(x.out) + ((b * a.T + t) * x.heads + head) * D;
        if (unit >= rotating) {
          const int d = 2 * half + (unit - rotating) * VEC;
          store_pack(out + d, load_once<VEC>(in + d));
        } else if (split) {
          const int p = unit * VEC;
          const Pack<T, VEC> first_half = load_once<VEC>(in + p);
          const Pack<T, VEC> second_half = load_once<VEC>(in + half + p);
          A v[VEC], w[VEC];
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            const Pair<A> y =
                rope_rotate(load_as<A>(first_half.v[i]), load_as<A>(second_half.v[i]), c[i], s[i]);
            v[i] = y.a;
            w[i] = y.b;
          }
          store_pack(out + p, pack_as<T>(v));
          store_pack(out + half + p, pack_as<T>(w));
        } else if constexpr (VEC == 1) {
          const Pair<A> y =
              rope_rotate(load_as<A>(in[2 * unit]), load_as<A>(in[2 * unit + 1]), c[0], s[0]);
          out[2 * unit] = store_as<T>(y.a);
          out[2 * unit + 1] = store_as<T>(y.b);
        } else {
          const Pack<T, VEC> pairs = load_once<VEC>(in + unit * VEC);
          A v[VEC];
#pragma unroll
          for (int i = 0; i < PAIRS; ++i) {
            const Pair<A> y =
                rope_rotate(load_as<A>(pairs.v[2 * i]), load_as<A>(pairs.v[2 * i + 1]), c[i], s[i]);
            v[2 * i] = y.a;
            v[2 * i + 1] = y.b;
          }
          store_pack(out + unit * VEC, pack_as<T>(v));
        }
      }
    }
  }
}

// ---- launcher: raw pointers, sizes, stream ------------------------------------------------------

template<class T>
void launch_rope(const Rope& a, cudaStream_t stream) {
  constexpr int full = 16 / sizeof(T);
  const auto whole = [&](int64_t elements) { return elements % full == 0; };
  const auto fits = [&](const RopeTensor& x) {
    return x.heads == 0 || (aligned16(x.in, x.out) && whole(x.batch_stride) &&
                            whole(x.token_stride) && whole(x.head_stride));
  };
  const bool wide =
      whole(a.D) && fits(a.q) && fits(a.k) && whole(a.interleaved ? 2 * a.half : a.half);
  const auto run = [&](auto vec) {
    constexpr int VEC = decltype(vec)::value;
    const int64_t per_unit = a.interleaved && VEC > 1 ? VEC / 2 : VEC;
    const int64_t units = a.half / per_unit + (a.D - 2 * a.half) / VEC;
    const int64_t heads = a.q.heads + a.k.heads;
    const int64_t x = std::min<int64_t>(units, kRopeThreads);
    // Heads in as few rounds as there are threads for, and evenly.
    const int64_t rounds = divide_up(heads, std::min(heads, kRopeThreads / x));
    const int64_t y = divide_up(heads, rounds);
    const int64_t token_bytes = 2 * table_row(static_cast<int>(a.half)) * sizeof(acc_t<T>);
    const int64_t shared = 32 * 1024;  // leaves room for several blocks on a multiprocessor
    const int64_t z =
        std::max<int64_t>(1, std::min({256 / (x * y), shared / token_bytes, int64_t{32}, a.rows}));
    const dim3 block(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
    // Sequences are split only as far as it takes to fill the device.
    const int64_t blocks = divide_up(a.rows, z);
    const int64_t splits = std::min(divide_up(int64_t{8} * multiprocessors(), blocks), a.sharing);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(splits));
    rope_kernel<T, VEC><<<grid, block, static_cast<size_t>(z * token_bytes), stream>>>(a);
  };
  if (a.rows == 0 || a.sharing == 0 || a.D == 0 || a.q.heads + a.k.heads == 0) return;
  if (wide)
    run(Int<full>{});
  else
    run(Int<1>{});
}

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

constexpr int64_t kLongestHead =
    4096;  // its tables fit in the 48 KiB of shared memory that need no asking

// x with contiguous heads: x itself, or a copy if the strides ask for one.
Tensor with_whole_heads(const Tensor& x) {
  return x.size(3) <= 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

RopeTensor describe(const Tensor& x, const Tensor& out) {
  return {device_data(x), device_data(out), x.size(2), x.stride(0), x.stride(1), x.stride(2)};
}

std::tuple<Tensor, Tensor> rope_cuda(const Tensor& q, const std::optional<Tensor>& k,
                                     const Tensor& cos, const Tensor& sin, bool interleaved,
                                     bool inverse) {
  TW_CHECK_CONTIGUOUS(cos);
  TW_CHECK_CONTIGUOUS(sin);
  const int64_t B = q.size(0), T = q.size(1), D = q.size(3), half = cos.size(cos.dim() - 1);
  TW_CHECK_SHAPE(2 * half <= D, "rope: cos has more columns than half of D");
  TW_CHECK_SHAPE(D <= kLongestHead, "rope: D must be at most ", kLongestHead, ", got ", D);
  const OnDevice here(q);
  const Tensor q_in = with_whole_heads(q), k_in = k ? with_whole_heads(*k) : q_in;
  Tensor q_out = empty(shape_of(q), q);
  Tensor k_out = k ? empty(shape_of(*k), *k) : empty({0}, q);
  const Rope a = {describe(q_in, q_out),
                  k ? describe(k_in, k_out) : RopeTensor{},
                  device_data(cos),
                  device_data(sin),
                  cos.dim() == 3 ? B * T : T,
                  cos.dim() == 3 ? 1 : B,
                  T,
                  D,
                  half,
                  interleaved,
                  inverse,
                  dtype_of(cos)};
  with_float_type(dtype_of(q), [&](auto t) { launch_rope<decltype(t)>(a, stream_of(q)); });
  check_launch("rope_kernel");
  return {q_out, k_out};
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) { m.impl("rope", TORCH_BOX(&tw::rope_cuda)); }
