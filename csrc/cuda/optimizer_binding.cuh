// The torch side of the optimizers on CUDA: lists of tensors to rows (cuda/optimizer.cuh). The arguments
// are those of python/trainwright/ops/_optimizer.py.
#pragma once
#include "cuda/optimizer.cuh"
#include "cuda/tensor_list_binding.cuh"

namespace tw {

// Rows of one kind take one launch: those of the kernels without extras, with them, and of fp64.
enum class RowKind : int { plain, extra, f64 };
constexpr int kRowKinds = 3;
template<class F>
void with_row_kind(int kind, F&& f) {
  if (kind == static_cast<int>(RowKind::plain))
    f(float{}, std::false_type{});
  else if (kind == static_cast<int>(RowKind::extra))
    f(float{}, std::true_type{});
  else
    f(double{}, std::true_type{});
}

struct OptimizerArguments {
  std::vector<Tensor> params, grads, masters, states, steps;
  std::vector<int64_t> spec, offsets;
  Tensor hyper;
  std::optional<Tensor> control;
  int64_t seed;
  std::optional<Tensor> lost;
};

// The rows of a call by kind; the copies of tensors that do not lie as the kernels want them.
class OptimizerLists {
 public:
  FlatTensors flat;
  std::vector<OptimizerRow> rows[kRowKinds];
  int64_t units[kRowKinds] = {};

  OptimizerLists(const OptimizerInfo& info, const OptimizerArguments& a) : info_(info), a_(a) {
    const size_t count = a.params.size();
    STD_TORCH_CHECK(a.grads.size() == count && a.steps.size() == count && a.spec.size() == count &&
                        a.offsets.size() == count,
                    "lists of one length expected");
    for (size_t i = 0; i < count; ++i) add(i);
  }

 private:
  // t as flat memory in the row's order, checked.
  void* operand(const Tensor& t, ScalarType type, bool written) {
    STD_TORCH_CHECK(
        t.numel() == n_ && t.scalar_type() == type,
        "gradients, masters and states must have the size of the parameter and the dtype "
        "that spec says");
    if (n_ == 0) return nullptr;
    void* p = flat.strided(t, order_, written);
    aligned_ = aligned_ && aligned16(p);
    narrow_ = narrow_ && dtype_bytes(dtype_of(t)) <= 2;
    return p;
  }

  void add(size_t i) {
    const Tensor &p = a_.params[i], &g = a_.grads[i];
    const TensorSpec kind = tensor_spec(a_.spec[i]);
    const bool block8 = kind.state == StateFormat::block8;
    // The order in memory that the elements are taken in: the parameter's own if it has no gaps, or the
    // logical one, which blocks of codes and random numbers go by.
    order_ = is_dense(p) && !block8 && !kind.stochastic ? strides_of(p) : row_major_strides(p);
    n_ = p.numel();
    aligned_ = narrow_ = true;
    OptimizerRow row = {};
    row.n = n_;
    row.offset = a_.offsets[i];
    row.dtype = dtype_of(p);
    row.grad_dtype = dtype_of(g);
    row.master_format = kind.master;
    row.state_format = kind.state;
    row.flags = static_cast<uint8_t>(kind.flags);
    row.stochastic = kind.stochastic;
    row.param = operand(p, p.scalar_type(), true);
    row.grad = operand(g, g.scalar_type(), false);
    if (kind.master != MasterFormat::none)
      row.master =
          operand(a_.masters.at(next_master_++),
                  kind.master == MasterFormat::f32 ? ScalarType::Float : ScalarType::Short, true);
    for (int s = 0; s < info_.states; ++s)
      if (info_.has(s, kind.flags)) add_state(row, s, acc_dtype(p));
    STD_TORCH_CHECK(a_.steps[i].scalar_type() == ScalarType::Double, "steps must be fp64");
    row.step = static_cast<double*>(device_data(a_.steps[i]));
    row.hyper = static_cast<const double*>(device_data(a_.hyper)) + info_.hyper * kind.group;
    row.layout = !aligned_ ? Layout::singles : narrow_ ? Layout::runs : Layout::packs;
    const bool extra = block8 || kind.stochastic || a_.lost;
    const auto k = static_cast<int>(row.dtype == DType::f64 ? RowKind::f64
                                    : extra                 ? RowKind::extra
                                                            : RowKind::plain);
    row.first_unit = units[k];
    units[k] += divide_up(n_, kUnit);
    rows[k].push_back(row);
  }

  void add_state(OptimizerRow& row, int s, ScalarType full) {
    const Tensor& state = a_.states.at(next_state_++);
    if (row.state_format != StateFormat::block8) {
      row.state[s] =
          operand(state, row.state_format == StateFormat::bf16 ? ScalarType::BFloat16 : full, true);
      return;
    }
    row.state[s] =
        operand(state, info_.state[s].is_signed ? ScalarType::Char : ScalarType::Byte, true);
    const Tensor& scales = a_.states.at(next_state_++);
    STD_TORCH_CHECK(state.is_contiguous() && scales.is_contiguous() &&
                        scales.scalar_type() == ScalarType::Float &&
                        scales.numel() == divide_up(n_, kStateBlock),
                    "codes must be contiguous, with one fp32 scale for each 256");
    row.scale[s] = static_cast<float*>(device_data(scales));
  }

  const OptimizerInfo& info_;
  const OptimizerArguments& a_;
  size_t next_master_ = 0, next_state_ = 0;
  // of the tensor being added
  std::vector<int64_t> order_;
  int64_t n_ = 0;
  bool aligned_ = true, narrow_ = true;
};

// One step. update(kind's types, table, step, stream) launches the kernels of one kind of rows.
template<class Rule, class Update>
void optimizer_cuda(const OptimizerArguments& a, Update&& update) {
  const auto count = static_cast<int64_t>(a.params.size());
  if (count == 0) return;
  const Tensor& like = a.params[0];
  const OnDevice here(like);
  const cudaStream_t stream = stream_of(like);
  OptimizerLists lists(Rule::info, a);
  constexpr int64_t row_words = sizeof(TableRow) / 8;
  const Tensor memory = empty({count, row_words + 1}, like, ScalarType::Double);
  const auto* control = static_cast<const double*>(device_data(a.control));
  OptimizerTable tables[kRowKinds];
  int64_t warps = 0, before = 0;
  auto* words = static_cast<double*>(device_data(memory));
  for (int k = 0; k < kRowKinds; ++k) {
    OptimizerTable& t = tables[k];
    t.count = static_cast<int>(lists.rows[k].size());
    t.units = lists.units[k];
    t.rows = reinterpret_cast<TableRow*>(words) + before;
    t.first_unit = reinterpret_cast<int64_t*>(words + count * row_words) + before;
    before += t.count;
    with_row_kind(k, [&](auto acc, auto extra) {
      warps += kWarps * optimizer_blocks<Rule, decltype(acc), decltype(extra)::value>(t.units);
    });
    launch_optimizer_begin<Rule>(lists.rows[k].data(), t.count, t, control, stream);
  }
  check_launch("optimizer_begin_kernel");
  const Tensor partials = empty({a.lost ? warps : 0, 2}, like, ScalarType::Double);
  auto* partial = a.lost ? static_cast<double*>(device_data(partials)) : nullptr;
  OptimizerStep step = {control, static_cast<uint64_t>(a.seed), partial};
  for (int k = 0; k < kRowKinds; ++k) {
    if (tables[k].units == 0) continue;
    with_row_kind(k, [&](auto acc, auto extra) {
      update(acc, extra, tables[k], step, stream);
      if (step.lost)
        step.lost += 2 * kWarps *
                     optimizer_blocks<Rule, decltype(acc), decltype(extra)::value>(tables[k].units);
    });
  }
  if (a.lost && warps > 0)
    launch_add_lost(partial, warps, static_cast<double*>(device_data(*a.lost)), control, stream);
  check_launch("optimizer_kernel");
  lists.flat.finish();
}

template<class Rule>
void optimizer_cuda(const OptimizerArguments& a) {
  optimizer_cuda<Rule>(a, [](auto acc, auto extra, const OptimizerTable& table,
                             const OptimizerStep& step, cudaStream_t stream) {
    launch_optimizer<Rule, decltype(acc), decltype(extra)::value>(table, step, stream);
  });
}

}  // namespace tw

// The binding of op `name`; run(arguments) does its step.
#define TW_CUDA_OPTIMIZER(name, run)                                                          \
  namespace tw {                                                                              \
  namespace {                                                                                 \
  void name##_cuda(std::vector<Tensor> params, std::vector<Tensor> grads,                     \
                   std::vector<Tensor> masters, std::vector<Tensor> states,                   \
                   std::vector<Tensor> steps, std::vector<int64_t> spec,                      \
                   std::vector<int64_t> offsets, Tensor hyper, std::optional<Tensor> control, \
                   int64_t seed, std::optional<Tensor> lost) {                                \
    run({params, grads, masters, states, steps, spec, offsets, hyper, control, seed, lost});  \
  }                                                                                           \
  }                                                                                           \
  }                                                                                           \
  TW_CUDA_LIBRARY(m) { m.impl(#name "_", TORCH_BOX(&tw::name##_cuda)); }
