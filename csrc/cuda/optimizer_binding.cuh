// The torch side of the optimizers on CUDA: lists of tensors, or a table of addresses, to rows
// (cuda/optimizer_table.cuh). The arguments are those of python/trainwright/ops/_optimizer.py.
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

// What is the same for all tensors of a step.
struct OptimizerCall {
  Tensor hyper;
  std::optional<Tensor> control;
  int64_t seed;
  std::optional<Tensor> lost;
};

// ---- rows ---------------------------------------------------------------------------------------
inline Layout layout_of(const OptimizerRow& r) {
  if (!aligned16(r.param, r.grad, r.master, r.state[0], r.state[1], r.state[2]))
    return Layout::singles;
  const bool wide =
      dtype_bytes(r.dtype) > 2 || dtype_bytes(r.grad_dtype) > 2 ||
      r.master_format == MasterFormat::f32 ||
      (r.state[0] || r.state[1] || r.state[2] ? r.state_format == StateFormat::full : false);
  return wide ? Layout::packs : Layout::runs;
}

// The rows of a step by kind.
struct RowLists {
  std::vector<OptimizerRow> rows[kRowKinds];
  int units[kRowKinds] = {};

  void add(OptimizerRow row, bool counts_lost) {
    const bool extra = row.state_format == StateFormat::block8 || row.stochastic || counts_lost;
    const auto kind = static_cast<int>(row.dtype == DType::f64 ? RowKind::f64
                                       : extra                 ? RowKind::extra
                                                               : RowKind::plain);
    row.layout = layout_of(row);
    row.unit = unit_elements(row.n);
    row.first_unit = units[kind];
    const int more = count_units(row.n);
    STD_TORCH_CHECK(more <= (1 << 30) - units[kind], "at most 2^30 units in a call");
    units[kind] += more;
    rows[kind].push_back(row);
  }
};
inline void set_spec(OptimizerRow& row, int64_t bits) {
  const TensorSpec spec = tensor_spec(bits);
  row.group = static_cast<int>(spec.group);
  row.flags = static_cast<uint8_t>(spec.flags);
  row.stochastic = spec.stochastic;
  row.state_format = spec.state;
  row.master_format = spec.master;
}

// From lists of tensors. Those that do not lie as the kernels want them are replaced by copies.
class TensorRows {
 public:
  FlatTensors flat;
  RowLists lists;

  TensorRows(const OptimizerInfo& info, const std::vector<Tensor>& params,
             const std::vector<Tensor>& grads, const std::vector<Tensor>& masters,
             const std::vector<Tensor>& states, const std::vector<Tensor>& steps,
             const std::vector<int64_t>& spec, const std::vector<int64_t>& offsets,
             bool counts_lost)
      : info_(info), next_master_(masters.data()), next_state_(states.data()) {
    const size_t count = params.size();
    STD_TORCH_CHECK(grads.size() == count && steps.size() == count && spec.size() == count &&
                        offsets.size() == count,
                    "lists of one length expected");
    last_master_ = next_master_ + masters.size();
    last_state_ = next_state_ + states.size();
    for (size_t i = 0; i < count; ++i) {
      OptimizerRow row = row_of(params[i], grads[i], spec[i]);
      row.offset = offsets[i];
      STD_TORCH_CHECK(steps[i].scalar_type() == ScalarType::Double, "steps must be fp64");
      row.step = doubles(steps[i]);
      lists.add(row, counts_lost);
    }
  }

 private:
  OptimizerRow row_of(const Tensor& p, const Tensor& g, int64_t spec) {
    OptimizerRow row = {};
    set_spec(row, spec);
    // The order in memory that the elements are taken in: the parameter's own if it has no gaps, or the
    // logical one, which blocks of codes and random numbers go by.
    const bool logical = row.state_format == StateFormat::block8 || row.stochastic;
    order_ = is_dense(p) && !logical ? strides_of(p) : row_major_strides(p);
    row.n = p.numel();
    row.dtype = dtype_of(p);
    row.grad_dtype = dtype_of(g);
    row.param = operand(row, p, p.scalar_type(), true);
    row.grad = operand(row, g, g.scalar_type(), false);
    if (row.master_format != MasterFormat::none)
      row.master = operand(
          row, next(next_master_, last_master_),
          row.master_format == MasterFormat::f32 ? ScalarType::Float : ScalarType::Short, true);
    for (int s = 0; s < info_.states; ++s)
      if (info_.has(s, row.flags)) add_state(row, s, acc_dtype(p));
    return row;
  }
  void add_state(OptimizerRow& row, int s, ScalarType full) {
    const Tensor& state = next(next_state_, last_state_);
    if (row.state_format != StateFormat::block8) {
      row.state[s] = operand(
          row, state, row.state_format == StateFormat::bf16 ? ScalarType::BFloat16 : full, true);
      return;
    }
    row.state[s] =
        operand(row, state, info_.state[s].is_signed ? ScalarType::Char : ScalarType::Byte, true);
    const Tensor& scales = next(next_state_, last_state_);
    STD_TORCH_CHECK(state.is_contiguous() && scales.is_contiguous() &&
                        scales.scalar_type() == ScalarType::Float &&
                        scales.numel() == divide_up(row.n, kStateBlock),
                    "codes must be contiguous, with one fp32 scale for each 256");
    row.scale[s] = static_cast<float*>(device_data(scales));
  }
  // t as flat memory in the row's order, checked.
  void* operand(const OptimizerRow& row, const Tensor& t, ScalarType type, bool written) {
    STD_TORCH_CHECK(
        t.numel() == row.n && t.scalar_type() == type,
        "gradients, masters and states must have the size of the parameter and the dtype "
        "that spec says");
    return row.n == 0 ? nullptr : flat.strided(t, order_, written);
  }
  static const Tensor& next(const Tensor*& from, const Tensor* last) {
    STD_TORCH_CHECK(from != last, "spec says that there are more masters or states");
    return *from++;
  }

  const OptimizerInfo& info_;
  const Tensor *next_master_, *last_master_, *next_state_, *last_state_;
  std::vector<int64_t> order_;  // of the tensor being added
};

// From a table on the host (ops/_optimizer.py, TABLE_COLUMNS): contiguous tensors by address.
inline RowLists rows_of_table(const Tensor& table, bool counts_lost) {
  constexpr int64_t kColumns = 15;
  STD_TORCH_CHECK(table.dim() == 2 && table.size(1) == kColumns && table.is_contiguous() &&
                      table.scalar_type() == ScalarType::Long,
                  "table: (params, 15) int64 expected");
  RowLists lists;
  const auto* t = static_cast<const int64_t*>(table.const_data_ptr());
  for (int64_t i = 0; i < table.size(0); ++i, t += kColumns) {
    OptimizerRow row = {};
    row.n = t[10];
    row.offset = t[11];
    row.dtype = static_cast<DType>(t[12]);
    row.grad_dtype = static_cast<DType>(t[13]);
    set_spec(row, t[14]);
    const auto operand = [&](int64_t address, int64_t bytes) {
      return row.n == 0 || address == 0 ? nullptr : device_memory(address, row.n * bytes);
    };
    row.param = operand(t[0], dtype_bytes(row.dtype));
    row.grad = operand(t[1], dtype_bytes(row.grad_dtype));
    row.master = operand(t[2], row.master_format == MasterFormat::f32 ? 4 : 2);
    for (int s = 0; s < kMaxStates; ++s) {
      row.state[s] = operand(t[3 + s], row.state_format == StateFormat::block8 ? 1
                                       : row.state_format == StateFormat::bf16 ? 2
                                       : row.dtype == DType::f64               ? 8
                                                                               : 4);
      if (row.n > 0 && t[6 + s] != 0)
        row.scale[s] =
            static_cast<float*>(device_memory(t[6 + s], 4 * divide_up(row.n, kStateBlock)));
    }
    row.step = static_cast<double*>(device_memory(t[9], 8));
    lists.add(row, counts_lost);
  }
  return lists;
}

// ---- a step -------------------------------------------------------------------------------------
// The device memory of a step's tables, int64 (rows + 1, kRowWords): one counter of blocks for each kind
// of rows, then the rows, kind by kind.
constexpr int64_t kRowWords = sizeof(OptimizerRow) / 8;

// Update::launch<A, kExtra>(table, step, like, stream) launches the kernels of one kind of rows.
// fill: put the rows into memory first.
template<class Update>
void run_step(const OptimizerCall& call, const RowLists& lists, const Tensor& memory, bool fill) {
  using Rule = typename Update::Rule;
  const cudaStream_t stream = stream_of(memory);
  auto* words = static_cast<int64_t*>(device_data(memory));
  auto* rows = reinterpret_cast<OptimizerRow*>(words + kRowWords);
  const auto* control = static_cast<const double*>(device_data(call.control));
  OptimizerTable tables[kRowKinds] = {};
  int64_t warps = 0;
  for (int k = 0; k < kRowKinds; ++k) {
    OptimizerTable& t = tables[k];
    t.rows = rows;
    t.finished = reinterpret_cast<unsigned*>(words) + k;
    t.count = static_cast<int>(lists.rows[k].size());
    t.units = lists.units[k];
    t.hyper = doubles(call.hyper);
    if (fill) launch_optimizer_rows(lists.rows[k].data(), t.count, rows, t.finished, stream);
    rows += t.count;
    with_row_kind(k, [&](auto acc, auto extra) {
      if (t.count > 0)
        warps += kWarps * optimizer_blocks<Rule, decltype(acc), decltype(extra)::value>(t.units);
    });
  }
  if (fill) check_launch("optimizer_rows_kernel");
  const Tensor partials = empty({call.lost ? warps : 0, 2}, memory, ScalarType::Double);
  double* partial = call.lost ? doubles(partials) : nullptr;
  OptimizerStep step = {control, static_cast<uint64_t>(call.seed), partial};
  for (int k = 0; k < kRowKinds; ++k) {
    if (tables[k].count == 0) continue;
    with_row_kind(k, [&](auto acc, auto extra) {
      using A = decltype(acc);
      constexpr bool kExtra = decltype(extra)::value;
      Update::template launch<A, kExtra>(tables[k], step, memory, stream);
      if (step.lost) step.lost += 2 * kWarps * optimizer_blocks<Rule, A, kExtra>(tables[k].units);
    });
  }
  if (call.lost && warps > 0) launch_add_lost(partial, warps, doubles(*call.lost), control, stream);
  check_launch("optimizer_kernel");
}

// The update of an op whose elements are independent of each other.
template<class R>
struct ElementUpdate {
  using Rule = R;
  template<class A, bool kExtra>
  static void launch(const OptimizerTable& table, const OptimizerStep& step, const Tensor&,
                     cudaStream_t stream) {
    launch_optimizer<Rule, A, kExtra>(table, step, stream);
  }
};

template<class Update>
void optimizer_cuda(std::vector<Tensor> params, std::vector<Tensor> grads,
                    std::vector<Tensor> masters, std::vector<Tensor> states,
                    std::vector<Tensor> steps, std::vector<int64_t> spec,
                    std::vector<int64_t> offsets, Tensor hyper, std::optional<Tensor> control,
                    int64_t seed, std::optional<Tensor> lost) {
  if (params.empty()) return;
  const OnDevice here(hyper);
  TensorRows rows(Update::Rule::info, params, grads, masters, states, steps, spec, offsets,
                  lost.has_value());
  const auto count = static_cast<int64_t>(params.size());
  const Tensor memory = empty({count + 1, kRowWords}, hyper, ScalarType::Long);
  run_step<Update>({hyper, control, seed, lost}, rows.lists, memory, true);
  rows.flat.finish();
}

template<class Update>
void optimizer_table_cuda(Tensor table, std::optional<Tensor> memory, bool moved, Tensor hyper,
                          std::optional<Tensor> control, int64_t seed, std::optional<Tensor> lost) {
  const OnDevice here(hyper);
  STD_TORCH_CHECK(memory && memory->numel() == (table.size(0) + 1) * kRowWords &&
                      memory->scalar_type() == ScalarType::Long && memory->is_contiguous(),
                  "memory: (params + 1, ", kRowWords, ") int64 on the device expected");
  run_step<Update>({hyper, control, seed, lost}, rows_of_table(table, lost.has_value()), *memory,
                   moved);
}

}  // namespace tw

// The bindings of op `name`, whose step an Update is.
#define TW_CUDA_OPTIMIZER(name, Update)                                   \
  TW_CUDA_LIBRARY(m) {                                                    \
    m.impl(#name "_", TORCH_BOX(&tw::optimizer_cuda<Update>));            \
    m.impl(#name "_table", TORCH_BOX(&tw::optimizer_table_cuda<Update>)); \
  }
