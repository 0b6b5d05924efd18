// Gated activations on CUDA (formulas in trainwright/glu.h).
//
// A thread takes one 16-byte pack of every operand; where all rows follow each other they are one
// row. Rows need only be contiguous inside: gate and up may be the two halves of one (N, 2C) tensor,
// and are not copied. Backward recomputes act(gate); nothing is saved but the inputs.
// Bytes per element: forward 3s, backward 5s (s = element size); one exp and one division per
// element (geglu: erfc). Bound: memory bandwidth, about level with arithmetic for 16-bit geglu.
// Accesses are 16 bytes where sizes and pointers allow, one element otherwise. Counted on the virtual
// GPU; not yet timed on a GPU.
#include "trainwright/glu.h"

#include "cpu/glu_binding.h"
#include "cuda/binding.cuh"
#include "cuda/launch.cuh"
#include "trainwright/pack.cuh"

namespace tw {

// N rows of C elements; *_stride: elements from a row to the next. Outputs are dense.
struct GluFwd {
  const void *gate, *up;
  void* y;
  int64_t gate_stride, up_stride, N, C;
};
struct GluBwd {
  const void *dy, *gate, *up;
  void *dgate, *dup;  // either may be null
  int64_t dy_stride, gate_stride, up_stride, N, C;
};

constexpr int kGluThreads = 256;

// Calls whole(c) for the pack of VEC columns of this thread and single(c) for the columns of a last
// pack that is not whole.
template<int VEC, class F, class G>
__device__ __forceinline__ void for_columns(int64_t C, F&& whole, G&& single) {
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
  if (c + VEC <= C)
    whole(c);
  else
    for (int64_t i = c; i < C; ++i) single(i);
}
// The rows of this thread.
template<class F>
__device__ __forceinline__ void for_grid_rows(int64_t N, F&& f) {
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  for (int64_t n = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; n < N; n += step)
    f(n);
}

template<class T, class Act, int VEC>
__global__ void __launch_bounds__(kGluThreads, 4) glu_fwd_kernel(GluFwd a) {
  using A = acc_t<T>;
  for_grid_rows(a.N, [&](int64_t n) {
    const T* gate = static_cast<const T*>(a.gate) + n * a.gate_stride;
    const T* up = static_cast<const T*>(a.up) + n * a.up_stride;
    T* y = static_cast<T*>(a.y) + n * a.C;
    for_columns<VEC>(
        a.C,
        [&](int64_t c) {
          const Pack<T, VEC> g = load_once<VEC>(gate + c), u = load_once<VEC>(up + c);
          A v[VEC];
#pragma unroll
          for (int i = 0; i < VEC; ++i)
            v[i] = glu_value<Act>(load_as<A>(g.v[i]), load_as<A>(u.v[i]));
          store_pack(y + c, pack_as<T>(v));
        },
        [&](int64_t c) {
          y[c] = store_as<T>(glu_value<Act>(load_as<A>(gate[c]), load_as<A>(up[c])));
        });
  });
}

// In fp64 the functions are calls, around which registers spill if there are few.
template<class T, class Act, int VEC>
__global__ void __launch_bounds__(kGluThreads, sizeof(T) == 8 ? 2 : 4) glu_bwd_kernel(GluBwd a) {
  using A = acc_t<T>;
  for_grid_rows(a.N, [&](int64_t n) {
    const T* dy = static_cast<const T*>(a.dy) + n * a.dy_stride;
    const T* gate = static_cast<const T*>(a.gate) + n * a.gate_stride;
    const T* up = static_cast<const T*>(a.up) + n * a.up_stride;
    T* dgate = a.dgate ? static_cast<T*>(a.dgate) + n * a.C : nullptr;
    T* dup = a.dup ? static_cast<T*>(a.dup) + n * a.C : nullptr;
    for_columns<VEC>(
        a.C,
        [&](int64_t c) {
          const Pack<T, VEC> d = load_once<VEC>(dy + c), g = load_once<VEC>(gate + c);
          Pack<T, VEC> u{};
          if (dgate) u = load_once<VEC>(up + c);  // dup alone does not need it
          A gates[VEC], ups[VEC];
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            const GluGradients<A> grads =
                glu_gradients<Act>(load_as<A>(d.v[i]), load_as<A>(g.v[i]), load_as<A>(u.v[i]));
            gates[i] = grads.gate;
            ups[i] = grads.up;
          }
          if (dgate) store_pack(dgate + c, pack_as<T>(gates));
          if (dup) store_pack(dup + c, pack_as<T>(ups));
        },
        [&](int64_t c) {
          const GluGradients<A> grads =
              glu_gradients<Act>(load_as<A>(dy[c]), load_as<A>(gate[c]), load_as<A>(up[c]));
          if (dgate) dgate[c] = store_as<T>(grads.gate);
          if (dup) dup[c] = store_as<T>(grads.up);
        });
  });
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

// Calls f(VEC as a type, grid, block).
template<class T, class F>
void with_glu_layout(int64_t N, int64_t C, bool wide, F&& f) {
  constexpr int full = 16 / sizeof(T);
  auto run = [&](auto vec) {
    const int64_t packs = divide_up(C, decltype(vec)::value);
    unsigned x = 1;
    while (x < packs && x < kGluThreads) x *= 2;
    const dim3 block(x, kGluThreads / x);
    const int64_t rows = std::min<int64_t>(divide_up(N, block.y), 65535);
    f(vec, dim3(static_cast<unsigned>(divide_up(packs, x)), static_cast<unsigned>(rows)), block);
  };
  if (wide)
    run(Int<full>{});
  else
    run(Int<1>{});
}

// Whether rows `stride` apart all start at a multiple of 16 bytes.
inline bool rows_aligned(const void* p, int64_t N, int64_t stride, int64_t element_bytes) {
  return aligned16(p) && (N == 1 || stride * element_bytes % 16 == 0);
}

template<class T, class Act>
void launch_glu_fwd(const GluFwd& a, cudaStream_t stream) {
  const bool wide = rows_aligned(a.gate, a.N, a.gate_stride, sizeof(T)) &&
                    rows_aligned(a.up, a.N, a.up_stride, sizeof(T)) &&
                    rows_aligned(a.y, a.N, a.C, sizeof(T));
  with_glu_layout<T>(a.N, a.C, wide, [&](auto vec, dim3 grid, dim3 block) {
    glu_fwd_kernel<T, Act, decltype(vec)::value><<<grid, block, 0, stream>>>(a);
  });
}

template<class T, class Act>
void launch_glu_bwd(const GluBwd& a, cudaStream_t stream) {
  const bool wide = rows_aligned(a.dy, a.N, a.dy_stride, sizeof(T)) &&
                    rows_aligned(a.gate, a.N, a.gate_stride, sizeof(T)) &&
                    rows_aligned(a.up, a.N, a.up_stride, sizeof(T)) &&
                    rows_aligned(a.dgate, a.N, a.C, sizeof(T)) &&
                    rows_aligned(a.dup, a.N, a.C, sizeof(T));
  with_glu_layout<T>(a.N, a.C, wide, [&](auto vec, dim3 grid, dim3 block) {
    glu_bwd_kernel<T, Act, decltype(vec)::value><<<grid, block, 0, stream>>>(a);
  });
}

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

Tensor glu_fwd_cuda(const Tensor& gate, const Tensor& up, std::string activation) {
  const OnDevice here(gate);
  const Rows g = rows_of(gate), u = rows_of(up);
  const int64_t C = gate.dim() ? gate.size(gate.dim() - 1) : 1;
  const Sizes s = sizes_of(gate, g.stride == C && u.stride == C);
  Tensor y = empty(shape_of(gate), gate);
  if (s.N == 0) return y;
  const GluFwd a = {
      device_data(g.tensor), device_data(u.tensor), device_data(y), g.stride, u.stride, s.N, s.C};
  with_glu_types(dtype_of(gate), activation_of(activation), [&](auto t, auto act) {
    launch_glu_fwd<decltype(t), decltype(act)>(a, stream_of(gate));
  });
  check_launch("glu_fwd_kernel");
  return y;
}

std::tuple<Tensor, Tensor> glu_bwd_cuda(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                        std::string activation, bool need_gate, bool need_up) {
  const OnDevice here(gate);
  const Rows d = rows_of(dy), g = rows_of(gate), u = rows_of(up);
  const int64_t C = gate.dim() ? gate.size(gate.dim() - 1) : 1;
  const Sizes s = sizes_of(gate, d.stride == C && g.stride == C && u.stride == C);
  Tensor dgate = empty(need_gate ? shape_of(gate) : std::vector<int64_t>{0}, gate);
  Tensor dup = empty(need_up ? shape_of(gate) : std::vector<int64_t>{0}, gate);
  if (s.N == 0) return {dgate, dup};
  const GluBwd a = {device_data(d.tensor),
                    device_data(g.tensor),
                    device_data(u.tensor),
                    need_gate ? device_data(dgate) : nullptr,
                    need_up ? device_data(dup) : nullptr,
                    d.stride,
                    g.stride,
                    u.stride,
                    s.N,
                    s.C};
  with_glu_types(dtype_of(gate), activation_of(activation), [&](auto t, auto act) {
    launch_glu_bwd<decltype(t), decltype(act)>(a, stream_of(gate));
  });
  check_launch("glu_bwd_kernel");
  return {dgate, dup};
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("glu_fwd", TORCH_BOX(&tw::glu_fwd_cuda));
  m.impl("glu_bwd", TORCH_BOX(&tw::glu_bwd_cuda));
}
