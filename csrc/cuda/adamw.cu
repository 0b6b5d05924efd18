// AdamW over a list of tensors on CUDA (formula in trainwright/adamw.h).
//
// scalars   one thread per parameter raises its step count and computes what its elements share, in
//           double.
// update    one block per kListBlock elements of a parameter (cuda/tensor_list.cuh); master, AMSGrad
//           and the dtype of the gradient are the same for a whole block.
// Hyper-parameters, step counts, gradient multiplier and skip flag are read from device memory, so
// nothing waits for the host. Elements are independent: the same bits for any launch.
// Bytes per parameter: fp32 28 (p, m, v read and written, g read); bf16 parameter and gradient with an
// fp32 master 28 (the parameter is only written). Bound: memory bandwidth. Accesses of state are 16
// bytes where pointers allow, one element otherwise. Counted on the virtual GPU; not yet timed on a
// GPU.
//
// build: no fused multiply-add
#include "trainwright/adamw.h"

#include "cuda/tensor_list_binding.cuh"
#include "trainwright/state_format.h"

namespace tw {

struct AdamWRow {
  void *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *master;  // the last two may be null
  const void* grad;
  int64_t n;
  int first_block, number;  // its place in the list
  DType grad_dtype;
  bool wide;  // every address is a multiple of 16
};
// hyper: lr, beta1, beta2, eps, weight decay, maximize. control: multiplier of the gradients, and
// whether to skip the step; or null.
struct AdamWStep {
  double* step;
  const double* hyper;
  void* scalars;  // AdamWScalars<float or double>
  bool is_double;
};
struct AdamWSteps {
  static constexpr int kCapacity = 1000;
  AdamWStep rows[kCapacity];
  int count;
};
using AdamWTable = RowTable<AdamWRow>;
constexpr int64_t kScalarsBytes = sizeof(AdamWScalars<double>);

__global__ void adamw_scalars_kernel(const __grid_constant__ AdamWSteps table,
                                     const double* control) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= table.count || (control && control[1] != 0.0)) return;
  const AdamWStep& row = table.rows[i];
  const double* h = row.hyper;
  const double step = *row.step + 1.0, scale = control ? control[0] : 1.0;
  const double multiplier = h[5] != 0.0 ? -scale : scale;
  *row.step = step;
  if (row.is_double)
    *static_cast<AdamWScalars<double>*>(row.scalars) =
        adamw_scalars<double>(h[0], h[1], h[2], h[3], h[4], step, multiplier);
  else
    *static_cast<AdamWScalars<float>*>(row.scalars) =
        adamw_scalars<float>(h[0], h[1], h[2], h[3], h[4], step, multiplier);
}

// Elements i ... i + VEC - 1.
template<class P, int VEC, class A>
__device__ __forceinline__ void adamw_pack(const AdamWRow& row, int64_t i,
                                           const AdamWScalars<A>& s) {
  P* param = static_cast<P*>(row.param) + i;
  A *exp_avg = static_cast<A*>(row.exp_avg) + i, *exp_avg_sq = static_cast<A*>(row.exp_avg_sq) + i;
  A* max_sq = static_cast<A*>(row.max_exp_avg_sq) + i;
  A* master = static_cast<A*>(row.master) + i;
  A p[VEC], g[VEC];
  load_any<VEC>(row.grad, row.grad_dtype, i, g);
  Pack<A, VEC> m = load_once<VEC>(exp_avg), v = load_once<VEC>(exp_avg_sq), h;
  if (row.max_exp_avg_sq) h = load_once<VEC>(max_sq);
  if (row.master)
    unpack(load_once<VEC>(master), p);
  else
    unpack(load_once<VEC>(param), p);
#pragma unroll
  for (int k = 0; k < VEC; ++k)
    p[k] = adamw_update(p[k], g[k], m.v[k], v.v[k], s, [&](A x) {
      if (!row.max_exp_avg_sq) return x;
      h.v[k] = x > h.v[k] || x != x ? x : h.v[k];
      return h.v[k];
    });
  store_pack(exp_avg, m);
  store_pack(exp_avg_sq, v);
  if (row.max_exp_avg_sq) store_pack(max_sq, h);
  if (row.master) store_pack(master, pack_as<A>(p));
  store_pack(param, pack_as<P>(p));
}

template<class P>
__global__ void __launch_bounds__(kListThreads, 2)
    adamw_kernel(const __grid_constant__ AdamWTable table, const void* scalars,
                 const double* control) {
  using A = acc_t<P>;
  constexpr int VEC = 16 / sizeof(A);
  if (control && control[1] != 0.0) return;
  const AdamWRow& row = row_of_block(table);
  constexpr int part = 16 / sizeof(A);
  const A* numbers =
      reinterpret_cast<const A*>(static_cast<const char*>(scalars) + row.number * kScalarsBytes);
  AdamWScalars<A> s;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(s) / 16); ++i)
    reinterpret_cast<Pack<A, part>*>(&s)[i] = load_pack<part>(numbers + i * part);
  const int64_t begin = (blockIdx.x - row.first_block) * kListBlock;
  const int64_t end = row.n < begin + kListBlock ? row.n : begin + kListBlock;
  int64_t i = begin;
  if (row.wide) {
    for (i += threadIdx.x * VEC; i + VEC <= end; i += kListThreads * VEC)
      adamw_pack<P, VEC>(row, i, s);
    i = end / VEC * VEC;  // blocks begin at a multiple of VEC
  }
  for (i += threadIdx.x; i < end; i += kListThreads) adamw_pack<P, 1>(row, i, s);
}

// ---- launchers: raw pointers, sizes, stream -----------------------------------------------------

// scalars: kScalarsBytes for each of the `count` steps, in their order.
void launch_adamw_scalars(AdamWStep* steps, int64_t count, void* scalars, const double* control,
                          cudaStream_t stream) {
  for (int64_t first = 0; first < count; first += AdamWSteps::kCapacity) {
    AdamWSteps table;
    table.count = static_cast<int>(std::min<int64_t>(count - first, AdamWSteps::kCapacity));
    for (int i = 0; i < table.count; ++i) {
      table.rows[i] = steps[first + i];
      table.rows[i].scalars = static_cast<char*>(scalars) + (first + i) * kScalarsBytes;
    }
    const auto blocks = static_cast<unsigned>(divide_up(table.count, 128));
    adamw_scalars_kernel<<<blocks, 128, 0, stream>>>(table, control);
  }
}

// Rows of parameters of type P.
template<class P>
void launch_adamw(AdamWRow* rows, int64_t count, const void* scalars, const double* control,
                  cudaStream_t stream) {
  for (int64_t i = 0; i < count; ++i)
    rows[i].wide = aligned16(rows[i].param, rows[i].exp_avg, rows[i].exp_avg_sq,
                             rows[i].max_exp_avg_sq, rows[i].master, rows[i].grad);
  for_tables(
      rows, count, [](const AdamWRow& r) { return r.n; },
      [&](const AdamWTable& table, unsigned blocks, int64_t) {
        adamw_kernel<P><<<blocks, kListThreads, 0, stream>>>(table, scalars, control);
      });
}

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

// See python/trainwright/ops/_optimizer.py for the arguments.
void adamw_cuda(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> masters,
                std::vector<Tensor> states, std::vector<Tensor> steps, std::vector<int64_t> spec,
                std::vector<int64_t>, Tensor hyper, std::optional<Tensor> control, int64_t,
                std::optional<Tensor> lost) {
  const size_t count = params.size();
  STD_TORCH_CHECK(grads.size() == count && steps.size() == count && spec.size() == count,
                  "lists of one length expected");
  if (count == 0) return;
  const OnDevice here(params[0]);
  const cudaStream_t stream = stream_of(params[0]);
  const Tensor scalars =
      empty({static_cast<int64_t>(count), kScalarsBytes / 8}, params[0], ScalarType::Double);
  const double* h = static_cast<const double*>(device_data(hyper));
  const double* c = static_cast<const double*>(device_data(control));
  FlatTensors flat;
  std::vector<AdamWStep> step_rows;
  std::vector<AdamWRow> rows[4];  // by type of the parameter
  constexpr DType types[4] = {DType::f32, DType::bf16, DType::f16, DType::f64};
  size_t next_state = 0, next_master = 0;
  for (size_t i = 0; i < count; ++i) {
    const Tensor &p = params[i], &g = grads[i];
    const TensorSpec kind = tensor_spec(spec[i]);
    STD_TORCH_CHECK(kind.master != MasterFormat::split16 && kind.state == StateFormat::full &&
                        !kind.stochastic && !lost,
                    "adamw_: not implemented on CUDA");
    const Tensor& exp_avg = states.at(next_state++);
    const Tensor& exp_avg_sq = states.at(next_state++);
    const Tensor* max = kind.flags & 1 ? &states.at(next_state++) : nullptr;
    const Tensor* master = kind.master == MasterFormat::f32 ? &masters.at(next_master++) : nullptr;
    const ScalarType acc = acc_dtype(p);
    STD_TORCH_CHECK(g.numel() == p.numel(), "gradient and parameter must have one size");
    for (const Tensor* s : {&exp_avg, &exp_avg_sq, max, master})
      STD_TORCH_CHECK(!s || (s->scalar_type() == acc && s->numel() == p.numel()),
                      "state must have the size of the parameter and be fp32 (fp64 for fp64)");
    STD_TORCH_CHECK(steps[i].scalar_type() == ScalarType::Double, "steps must be fp64");
    step_rows.push_back({static_cast<double*>(device_data(steps[i])), h + 6 * kind.group, nullptr,
                         dtype_of(p) == DType::f64});
    // The order in memory that the elements are taken in: the parameter's own if it has no gaps.
    const std::vector<int64_t> order = is_dense(p) ? strides_of(p) : row_major_strides(p);
    AdamWRow row = {};
    row.n = p.numel();
    row.number = static_cast<int>(i);
    row.grad_dtype = dtype_of(g);
    if (row.n > 0) {
      row.param = flat.strided(p, order, true);
      row.grad = flat.strided(g, order, false);
      row.exp_avg = flat.strided(exp_avg, order, true);
      row.exp_avg_sq = flat.strided(exp_avg_sq, order, true);
      row.max_exp_avg_sq = max ? flat.strided(*max, order, true) : nullptr;
      row.master = master ? flat.strided(*master, order, true) : nullptr;
    }
    for (int t = 0; t < 4; ++t)
      if (types[t] == dtype_of(p)) rows[t].push_back(row);
  }
  void* shared = device_data(scalars);
  launch_adamw_scalars(step_rows.data(), static_cast<int64_t>(count), shared, c, stream);
  check_launch("adamw_scalars_kernel");
  for (int t = 0; t < 4; ++t)
    with_float_type(types[t], [&](auto tag) {
      launch_adamw<decltype(tag)>(rows[t].data(), static_cast<int64_t>(rows[t].size()), shared, c,
                                  stream);
    });
  check_launch("adamw_kernel");
  flat.finish();
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) { m.impl("adamw_", TORCH_BOX(&tw::adamw_cuda)); }
