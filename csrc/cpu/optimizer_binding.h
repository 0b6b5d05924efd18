// The torch side of the optimizers on the CPU: lists of tensors, or a table of addresses, to rows
// (cpu/optimizer.h). The arguments are those of python/trainwright/ops/_optimizer.py.
#pragma once
#include <algorithm>

#include "cpu/optimizer.h"
#include "cpu/tensor_list.h"

namespace tw {

using OptimizerKernel = void (*)(const OptimizerArgs&);

// What is the same for all tensors of a call. Numbers that are NaN become the NaN that has no other bits
// set: what comes of it in fp32 is exact in bf16 (OnlyBf16).
class OptimizerCall {
 public:
  const OptimizerInfo& info;

  OptimizerCall(const OptimizerInfo& info, OptimizerKernel kernel, const Tensor& hyper,
                const std::optional<Tensor>& control, const std::optional<Tensor>& lost,
                int64_t seed)
      : info(info), kernel_(kernel), lost_(lost), seed_(static_cast<uint64_t>(seed)) {
    const auto plain = [](double x) { return x == x ? x : static_cast<double>(NAN); };
    const double* h = static_cast<const double*>(data(hyper));
    hyper_.resize(static_cast<size_t>(hyper.numel()));
    std::transform(h, h + hyper.numel(), hyper_.begin(), plain);
    if (!control) return;
    const double* c = static_cast<const double*>(data(*control));
    multiplier_ = plain(c[0]);
    skipped_ = c[1] != 0.0;
  }
  bool skipped() const { return skipped_; }

  // Group, step count and multiplier of a row; raises the count.
  void begin_step(OptimizerRow& row, int64_t spec, double* step) const {
    row.spec = tensor_spec(spec);
    row.hyper = hyper_.data() + info.hyper * row.spec.group;
    row.multiplier = multiplier_;
    row.step = *step += 1.0;
  }
  void run(const std::vector<OptimizerRow>& rows, const Blocks& blocks) const {
    int64_t counts[2] = {0, 0};
    std::vector<double> partial(2 * static_cast<size_t>(blocks.count()));
    kernel_({rows.data(), blocks.table(), seed_, lost_ ? counts : nullptr, partial.data()});
    if (!lost_) return;
    double* total = static_cast<double*>(mutable_data(*lost_));
    total[0] += static_cast<double>(counts[0]);
    total[1] += static_cast<double>(counts[1]);
  }

 private:
  const OptimizerKernel kernel_;
  const std::optional<Tensor> lost_;
  const uint64_t seed_;
  std::vector<double> hyper_;
  double multiplier_ = 1.0;
  bool skipped_ = false;
};

inline void optimizer_step(const OptimizerCall& call, const std::vector<Tensor>& params,
                           const std::vector<Tensor>& grads, const std::vector<Tensor>& masters,
                           const std::vector<Tensor>& states, const std::vector<Tensor>& steps,
                           const std::vector<int64_t>& spec, const std::vector<int64_t>& offsets) {
  const size_t count = params.size();
  STD_TORCH_CHECK(grads.size() == count && steps.size() == count && spec.size() == count &&
                      offsets.size() == count,
                  "lists of one length expected");
  if (call.skipped()) return;
  Layouts layouts((3 + kMaxStates) * count);
  Blocks blocks(count);
  std::vector<OptimizerRow> rows(count);
  size_t next_state = 0, next_master = 0;
  for (size_t i = 0; i < count; ++i) {
    const Tensor &p = params[i], &g = grads[i];
    const ScalarType full = acc_dtype(p);
    OptimizerRow& row = rows[i];
    call.begin_step(row, spec[i], static_cast<double*>(mutable_data(steps[i])));
    row.n = p.numel();
    row.offset = offsets[i];
    row.dtype = dtype_of(p);
    row.grad_dtype = dtype_of(g);
    row.param = mutable_data(p);
    row.grad = data(g);
    std::vector<std::pair<const Tensor*, Strided*>> operands = {{&p, &row.param_layout},
                                                                {&g, &row.grad_layout}};
    const auto add = [&](const Tensor& t, ScalarType type, Strided* layout) {
      STD_TORCH_CHECK(t.numel() == row.n && t.scalar_type() == type,
                      "masters and states must have the size of the parameter and the dtype that "
                      "spec says");
      operands.emplace_back(&t, layout);
      return mutable_data(t);
    };
    STD_TORCH_CHECK(g.numel() == row.n, "gradient and parameter must have one size");
    if (row.spec.master != MasterFormat::none)
      row.master = add(masters.at(next_master++),
                       row.spec.master == MasterFormat::f32 ? ScalarType::Float : ScalarType::Short,
                       &row.master_layout);
    const bool block8 = row.spec.state == StateFormat::block8;
    for (int s = 0; s < call.info.states; ++s) {
      if (!call.info.has(s, row.spec.flags)) continue;
      const Tensor& state = states.at(next_state++);
      const ScalarType code = call.info.state[s].is_signed ? ScalarType::Char : ScalarType::Byte;
      row.state[s] = add(state,
                         block8                                ? code
                         : row.spec.state == StateFormat::bf16 ? ScalarType::BFloat16
                                                               : full,
                         &row.state_layout[s]);
      if (!block8) continue;
      const Tensor& scales = states.at(next_state++);
      STD_TORCH_CHECK(state.is_contiguous() && scales.is_contiguous() &&
                          scales.scalar_type() == ScalarType::Float &&
                          scales.numel() == (row.n + kStateBlock - 1) / kStateBlock,
                      "codes must be contiguous, with one fp32 scale for each 256");
      row.scale[s] = static_cast<float*>(mutable_data(scales));
    }
    bool contiguous = true;
    for (const auto& [t, layout] : operands) contiguous = contiguous && t->is_contiguous();
    if (!contiguous) {
      // The order of the loop: the parameter's memory, or the logical one that blocks and random
      // numbers go by.
      const bool logical = block8 || row.spec.stochastic;
      const std::vector<int64_t> order = memory_order(p);
      for (const auto& [t, layout] : operands)
        *layout = logical ? layouts.of(*t) : layouts.of(*t, order);
    }
    blocks.add_row(row.n);
  }
  call.run(rows, blocks);
}

// The same for contiguous tensors that are given by address: table (params, 15) int64 holds param,
// grad, master or 0, three states and three lists of scales or 0, step, elements, offset, dtype, dtype
// of the gradient, spec. The optimizer makes it once and knows when it is no longer true; passing the
// lists of tensors of a thousand small parameters would take longer than updating them.
inline void optimizer_step_by_table(const OptimizerCall& call, const Tensor& table) {
  constexpr int64_t kColumns = 15;
  STD_TORCH_CHECK(table.dim() == 2 && table.size(1) == kColumns && table.is_contiguous() &&
                      table.scalar_type() == ScalarType::Long,
                  "table: (params, 15) int64 expected");
  if (call.skipped()) return;
  const size_t count = static_cast<size_t>(table.size(0));
  Blocks blocks(count);
  std::vector<OptimizerRow> rows(count);
  const int64_t* t = static_cast<const int64_t*>(data(table));
  for (OptimizerRow& row : rows) {
    call.begin_step(row, t[14], reinterpret_cast<double*>(t[9]));
    row.param = reinterpret_cast<void*>(t[0]);
    row.grad = reinterpret_cast<const void*>(t[1]);
    row.master = reinterpret_cast<void*>(t[2]);
    for (int s = 0; s < kMaxStates; ++s) {
      row.state[s] = reinterpret_cast<void*>(t[3 + s]);
      row.scale[s] = reinterpret_cast<float*>(t[6 + s]);
    }
    row.n = t[10];
    row.offset = t[11];
    row.dtype = static_cast<DType>(t[12]);
    row.grad_dtype = static_cast<DType>(t[13]);
    blocks.add_row(row.n);
    t += kColumns;
  }
  call.run(rows, blocks);
}

}  // namespace tw

// The bindings of op `name`, whose description is `info`.
#define TW_OPTIMIZER_BINDINGS(name, info)                                                          \
  namespace tw {                                                                                   \
  namespace {                                                                                      \
  void name##_cpu(std::vector<Tensor> params, std::vector<Tensor> grads,                           \
                  std::vector<Tensor> masters, std::vector<Tensor> states,                         \
                  std::vector<Tensor> steps, std::vector<int64_t> spec,                            \
                  std::vector<int64_t> offsets, Tensor hyper, std::optional<Tensor> control,       \
                  int64_t seed, std::optional<Tensor> lost) {                                      \
    optimizer_step({info, &name, hyper, control, lost, seed}, params, grads, masters, states,      \
                   steps, spec, offsets);                                                          \
  }                                                                                                \
  void name##_table_cpu(Tensor table, std::optional<Tensor>, bool, Tensor hyper,                   \
                        std::optional<Tensor> control, int64_t seed, std::optional<Tensor> lost) { \
    optimizer_step_by_table({info, &name, hyper, control, lost, seed}, table);                     \
  }                                                                                                \
  }                                                                                                \
  }                                                                                                \
  STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {                                                 \
    m.impl(#name "_", TORCH_BOX(&tw::name##_cpu));                                                 \
    m.impl(#name "_table", TORCH_BOX(&tw::name##_table_cpu));                                      \
  }
