// Gated activations on the CPU (formulas in trainwright/glu.h).
//
// Element by element in blocks of a row. Rows need only be contiguous inside: gate and up may be the
// two halves of one (N, 2C) tensor, and are not copied. Backward recomputes act(gate); nothing is
// saved but the inputs.
// Bytes per element: forward 3s, backward 5s (s = element size); one exp and one division per
// element. Bound: memory bandwidth for 16-bit types and for silu, about level with arithmetic
// otherwise.
#include "cpu/rows.h"
#include "trainwright/glu.h"

namespace tw {

// N rows of C elements; *_stride: elements from a row to the next.
struct GluFwdArgs {
  const void *gate, *up;
  void* y;
  int64_t gate_stride, up_stride;
  int64_t N, C;
  Activation activation;
  DType dtype;
};

struct GluBwdArgs {
  const void *dy, *gate, *up;
  void *dgate, *dup;  // either may be null
  int64_t dy_stride, gate_stride, up_stride;
  int64_t N, C;
  Activation activation;
  DType dtype;
};

}  // namespace tw

TW_DECLARE_KERNEL(glu_fwd, GluFwdArgs)
TW_DECLARE_KERNEL(glu_bwd, GluBwdArgs)

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

constexpr int64_t kBlock = 4096;  // elements; a thread's share is a whole number of blocks

// Calls body(row, first column, columns) for every block of the matrix, in parallel.
template<class F>
void for_blocks(int64_t N, int64_t C, F&& body) {
  const int64_t per_row = (C + kBlock - 1) / kBlock;
  const int64_t grain = 1 + 4 * kBlock / (C < kBlock ? C + 1 : kBlock);
  parallel_for(0, N * per_row, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = t % per_row * kBlock;
      body(t / per_row, first, C - first < kBlock ? C - first : kBlock);
    }
    stream_fence();
  });
}

template<class T, class Act>
void forward(const GluFwdArgs& a, Act) {
  using A = acc_t<T>;
  const bool stream = can_stream<A>(static_cast<const T*>(a.y), a.C, a.N);
  for_blocks(a.N, a.C, [&](int64_t n, int64_t first, int64_t size) {
    const T* gate = static_cast<const T*>(a.gate) + n * a.gate_stride + first;
    const T* up = static_cast<const T*>(a.up) + n * a.up_stride + first;
    T* y = static_cast<T*>(a.y) + n * a.C + first;
    for_lanes<A>(size, [&](int64_t i, auto k) {
      put<A>(y + i, glu_value<Act>(vload<A>(gate + i, k), vload<A>(up + i, k)), k, stream);
    });
  });
}

template<class T, class Act>
void backward(const GluBwdArgs& a, Act) {
  using A = acc_t<T>;
  const T* out = static_cast<const T*>(a.dgate ? a.dgate : a.dup);
  const bool stream = can_stream<A>(out, a.C, a.N);
  for_blocks(a.N, a.C, [&](int64_t n, int64_t first, int64_t size) {
    const T* dy = static_cast<const T*>(a.dy) + n * a.dy_stride + first;
    const T* gate = static_cast<const T*>(a.gate) + n * a.gate_stride + first;
    const T* up = static_cast<const T*>(a.up) + n * a.up_stride + first;
    T* dgate = a.dgate ? static_cast<T*>(a.dgate) + n * a.C + first : nullptr;
    T* dup = a.dup ? static_cast<T*>(a.dup) + n * a.C + first : nullptr;
    for_lanes<A>(size, [&](int64_t i, auto k) {
      const GluGradients<vec<A>> d =
          glu_gradients<Act>(vload<A>(dy + i, k), vload<A>(gate + i, k), vload<A>(up + i, k));
      if (dgate) put<A>(dgate + i, d.gate, k, stream);
      if (dup) put<A>(dup + i, d.up, k, stream);
    });
  });
}

}  // namespace

void glu_fwd(const GluFwdArgs& a) {
  with_glu_types(a.dtype, a.activation,
                 [&](auto tag, auto act) { forward<decltype(tag)>(a, act); });
}
void glu_bwd(const GluBwdArgs& a) {
  with_glu_types(a.dtype, a.activation,
                 [&](auto tag, auto act) { backward<decltype(tag)>(a, act); });
}

TW_END

#else  // ---- torch bindings -----------------------------------------------------------------------

#include "cpu/glu_binding.h"

namespace tw {
namespace {

Tensor glu_fwd_cpu(const Tensor& gate, const Tensor& up, std::string activation) {
  const Rows g = rows_of(gate), u = rows_of(up);
  const int64_t C = gate.dim() ? gate.size(gate.dim() - 1) : 1;
  const Sizes s = sizes_of(gate, g.stride == C && u.stride == C);
  Tensor y = empty(shape_of(gate), gate);
  glu_fwd({data(g.tensor), data(u.tensor), mutable_data(y), g.stride, u.stride, s.N, s.C,
           activation_of(activation), dtype_of(gate)});
  return y;
}

std::tuple<Tensor, Tensor> glu_bwd_cpu(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                       std::string activation, bool need_gate, bool need_up) {
  const Rows d = rows_of(dy), g = rows_of(gate), u = rows_of(up);
  const int64_t C = gate.dim() ? gate.size(gate.dim() - 1) : 1;
  const Sizes s = sizes_of(gate, d.stride == C && g.stride == C && u.stride == C);
  Tensor dgate = need_gate ? empty(shape_of(gate), gate) : empty({0}, gate);
  Tensor dup = need_up ? empty(shape_of(gate), gate) : empty({0}, gate);
  glu_bwd({data(d.tensor), data(g.tensor), data(u.tensor),
           need_gate ? mutable_data(dgate) : nullptr, need_up ? mutable_data(dup) : nullptr,
           d.stride, g.stride, u.stride, s.N, s.C, activation_of(activation), dtype_of(gate)});
  return {dgate, dup};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("glu_fwd", TORCH_BOX(&tw::glu_fwd_cpu));
  m.impl("glu_bwd", TORCH_BOX(&tw::glu_bwd_cpu));
}

#endif
