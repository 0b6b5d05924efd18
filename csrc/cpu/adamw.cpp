// AdamW over a list of tensors on the CPU (formula in trainwright/adamw.h).
//
// All tensors together are cut into blocks (trainwright/blocks.h) that the threads share, so a
// thousand small parameters parallelise as well as a few large ones. Operands that lie in the memory
// order of the parameter are read and written in place; any other layout is matched by logical index
// through a buffer of kRun elements, so nothing outside a view is ever touched.
// Bytes per parameter: fp32 28 (p, m, v read and written, g read); bf16 parameter and gradient with an
// fp32 master 30 (the master too; the parameter is only written, but its line is fetched first).
// Bound: memory bandwidth.
//
// build: no fused multiply-add
#include "cpu/kernel.h"
#include "trainwright/blocks.h"
#include "trainwright/strided.h"

namespace tw {

struct AdamWRow {
  void *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *master;  // the last two may be null
  const void* grad;
  Strided param_layout, exp_avg_layout, exp_avg_sq_layout, max_layout, master_layout, grad_layout;
  DType dtype, grad_dtype;
  double lr, beta1, beta2, eps, weight_decay, step, multiplier;
};
struct AdamWArgs {
  const AdamWRow* rows;
  BlockTable blocks;
};

}  // namespace tw

TW_DECLARE_KERNEL(adamw, AdamWArgs)

#ifdef TW_CPU_ISA

#include "trainwright/adamw.h"

TW_BEGIN
namespace {

constexpr int64_t kRun = 1024;  // elements of a strided tensor that are copied at a time: 4 KiB

// param is only written if there is a master.
template<bool kMaster, bool kAmsgrad, class P, class G, class A>
void adamw_run(P* param, const G* grad, A* exp_avg, A* exp_avg_sq, A* max_sq, A* master, int64_t n,
               const AdamWScalars<A>& s) {
  for_lanes<A>(n, [&](int64_t i, auto k) {
    vec<A> m = vload<A>(exp_avg + i, k), v = vload<A>(exp_avg_sq + i, k), p;
    if constexpr (kMaster)
      p = vload<A>(master + i, k);
    else
      p = vload<A>(param + i, k);
    p = adamw_update(p, vload<A>(grad + i, k), m, v, s, [&](vec<A> x) {
      if constexpr (kAmsgrad) {
        x = vmax<A>(vload<A>(max_sq + i, k), x);
        vstore<A>(max_sq + i, x, k);
      }
      return x;
    });
    vstore<A>(exp_avg + i, m, k);
    vstore<A>(exp_avg_sq + i, v, k);
    if constexpr (kMaster) vstore<A>(master + i, p, k);
    vstore<A>(param + i, p, k);
  });
}

template<bool kMaster, bool kAmsgrad, class P, class G>
void adamw_block(const AdamWRow& r, int64_t begin, int64_t end) {
  using A = acc_t<P>;
  const auto s =
      adamw_scalars<A>(r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, r.step, r.multiplier);
  P* param = static_cast<P*>(r.param);
  const G* grad = static_cast<const G*>(r.grad);
  A* exp_avg = static_cast<A*>(r.exp_avg);
  A* exp_avg_sq = static_cast<A*>(r.exp_avg_sq);
  A* max_sq = static_cast<A*>(r.max_exp_avg_sq);
  A* master = static_cast<A*>(r.master);
  const bool strided = r.param_layout.ndim | r.exp_avg_layout.ndim | r.exp_avg_sq_layout.ndim |
                       r.grad_layout.ndim | (kAmsgrad ? r.max_layout.ndim : 0) |
                       (kMaster ? r.master_layout.ndim : 0);
  if (!strided) {
    adamw_run<kMaster, kAmsgrad>(param + begin, grad + begin, exp_avg + begin, exp_avg_sq + begin,
                                 kAmsgrad ? max_sq + begin : nullptr,
                                 kMaster ? master + begin : nullptr, end - begin, s);
    return;
  }
  P pb[kRun];
  G gb[kRun];
  A mb[kRun], vb[kRun], hb[kAmsgrad ? kRun : 1], wb[kMaster ? kRun : 1];
  for (int64_t i = begin; i < end; i += kRun) {
    const int64_t n = kRun < end - i ? kRun : end - i;
    // A contiguous operand is updated in place, another in its buffer, which is then written back.
    auto open = [&](auto* base, Strided layout, auto* buffer) {
      return const_cast<decltype(base)>(read_range(base, layout, i, n, buffer));
    };
    P* p = open(param, r.param_layout, pb);
    A* m = open(exp_avg, r.exp_avg_layout, mb);
    A* v = open(exp_avg_sq, r.exp_avg_sq_layout, vb);
    A* h = kAmsgrad ? open(max_sq, r.max_layout, hb) : nullptr;
    A* w = kMaster ? open(master, r.master_layout, wb) : nullptr;
    adamw_run<kMaster, kAmsgrad>(p, read_range(grad, r.grad_layout, i, n, gb), m, v, h, w, n, s);
    write_range(param, r.param_layout, i, n, pb);
    write_range(exp_avg, r.exp_avg_layout, i, n, mb);
    write_range(exp_avg_sq, r.exp_avg_sq_layout, i, n, vb);
    if (kAmsgrad) write_range(max_sq, r.max_layout, i, n, hb);
    if (kMaster) write_range(master, r.master_layout, i, n, wb);
  }
}

template<class P, class G>
void adamw_block(const AdamWRow& r, int64_t begin, int64_t end) {
  if constexpr (sizeof(P) == 2) {
    if (r.master) {
      r.max_exp_avg_sq ? adamw_block<true, true, P, G>(r, begin, end)
                       : adamw_block<true, false, P, G>(r, begin, end);
      return;
    }
  }
  r.max_exp_avg_sq ? adamw_block<false, true, P, G>(r, begin, end)
                   : adamw_block<false, false, P, G>(r, begin, end);
}

}  // namespace

void adamw(const AdamWArgs& a) {
  for_blocks(a.blocks, [&](int64_t row, int64_t begin, int64_t end, int64_t) {
    const AdamWRow& r = a.rows[row];
    with_float_type(r.dtype, [&](auto param) {
      with_float_type(r.grad_dtype, [&](auto grad) {
        adamw_block<decltype(param), decltype(grad)>(r, begin, end);
      });
    });
  });
}

TW_END

#else  // ---- torch bindings

#include "cpu/tensor_list.h"
#include "trainwright/state_format.h"

namespace tw {
namespace {

void set_hyper(AdamWRow& row, const double* h, double multiplier, double step) {
  row.lr = h[0];
  row.beta1 = h[1];
  row.beta2 = h[2];
  row.eps = h[3];
  row.weight_decay = h[4];
  row.multiplier = h[5] != 0.0 ? -multiplier : multiplier;
  row.step = step;
}

// See python/trainwright/ops/_optimizer.py for the arguments.
void adamw_cpu(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> masters,
               std::vector<Tensor> states, std::vector<Tensor> steps, std::vector<int64_t> spec,
               std::vector<int64_t>, Tensor hyper, std::optional<Tensor> control, int64_t,
               std::optional<Tensor> lost) {
  const size_t count = params.size();
  STD_TORCH_CHECK(grads.size() == count && steps.size() == count && spec.size() == count,
                  "lists of one length expected");
  double multiplier = 1.0;
  if (control) {
    const double* c = static_cast<const double*>(data(*control));
    if (c[1] != 0.0) return;
    multiplier = c[0];
  }
  Layouts layouts(6 * count);
  Blocks blocks(count);
  std::vector<AdamWRow> rows;
  rows.reserve(count);
  size_t next_state = 0, next_master = 0;
  for (size_t i = 0; i < count; ++i) {
    const Tensor& p = params[i];
    const Tensor& g = grads[i];
    const TensorSpec kind = tensor_spec(spec[i]);
    STD_TORCH_CHECK(kind.master != MasterFormat::split16 && kind.state == StateFormat::full &&
                        !kind.stochastic && !lost,
                    "adamw_: not implemented on the CPU");
    const Tensor& exp_avg = states.at(next_state++);
    const Tensor& exp_avg_sq = states.at(next_state++);
    const Tensor* max = kind.flags & 1 ? &states.at(next_state++) : nullptr;
    const Tensor* master = kind.master == MasterFormat::f32 ? &masters.at(next_master++) : nullptr;
    const ScalarType acc = acc_dtype(p);
    bool contiguous = p.is_contiguous() && g.is_contiguous();
    STD_TORCH_CHECK(g.numel() == p.numel(), "gradient and parameter must have one size");
    const Tensor* own[] = {&exp_avg, &exp_avg_sq, max, master};
    for (const Tensor* s : own) {
      if (!s) continue;
      STD_TORCH_CHECK(s->scalar_type() == acc && s->numel() == p.numel(),
                      "state must have the size of the parameter and be fp32 (fp64 for fp64)");
      contiguous = contiguous && s->is_contiguous();
    }
    const double* h = static_cast<const double*>(data(hyper)) + 6 * kind.group;
    double* step = static_cast<double*>(mutable_data(steps[i]));
    *step += 1.0;
    AdamWRow row = {};
    row.param = mutable_data(p);
    row.exp_avg = mutable_data(exp_avg);
    row.exp_avg_sq = mutable_data(exp_avg_sq);
    row.max_exp_avg_sq = max ? mutable_data(*max) : nullptr;
    row.master = master ? mutable_data(*master) : nullptr;
    row.grad = data(g);
    row.dtype = dtype_of(p);
    row.grad_dtype = dtype_of(g);
    set_hyper(row, h, multiplier, *step);
    if (!contiguous) {
      const std::vector<int64_t> order = memory_order(p);
      row.param_layout = layouts.of(p, order);
      row.grad_layout = layouts.of(g, order);
      row.exp_avg_layout = layouts.of(exp_avg, order);
      row.exp_avg_sq_layout = layouts.of(exp_avg_sq, order);
      if (max) row.max_layout = layouts.of(*max, order);
      if (master) row.master_layout = layouts.of(*master, order);
    }
    rows.push_back(row);
    blocks.add_row(p.numel());
  }
  adamw({rows.data(), blocks.table()});
}

// The same for contiguous tensors that are given by address: table (params, 11) int64 holds param,
// grad, exp_avg, exp_avg_sq, max_exp_avg_sq or 0, master or 0, step, elements, dtype, dtype of the
// gradient, group. The optimizer makes it once and knows when it is no longer true; passing the five
// lists of tensors of a thousand small parameters would take longer than updating them.
void adamw_table_cpu(Tensor table, Tensor hyper, std::optional<Tensor> control) {
  double multiplier = 1.0;
  if (control) {
    const double* c = static_cast<const double*>(data(*control));
    if (c[1] != 0.0) return;
    multiplier = c[0];
  }
  STD_TORCH_CHECK(table.dim() == 2 && table.size(1) == 11 && table.is_contiguous() &&
                      table.scalar_type() == ScalarType::Long,
                  "table: (params, 11) int64 expected");
  const int64_t count = table.size(0);
  Blocks blocks(static_cast<size_t>(count));
  std::vector<AdamWRow> rows(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* t = static_cast<const int64_t*>(data(table)) + 11 * i;
    const double* h = static_cast<const double*>(data(hyper)) + 6 * t[10];
    double* step = reinterpret_cast<double*>(t[6]);
    *step += 1.0;
    AdamWRow& row = rows[static_cast<size_t>(i)];
    row = {};
    row.param = reinterpret_cast<void*>(t[0]);
    row.grad = reinterpret_cast<const void*>(t[1]);
    row.exp_avg = reinterpret_cast<void*>(t[2]);
    row.exp_avg_sq = reinterpret_cast<void*>(t[3]);
    row.max_exp_avg_sq = reinterpret_cast<void*>(t[4]);
    row.master = reinterpret_cast<void*>(t[5]);
    row.dtype = static_cast<DType>(t[8]);
    row.grad_dtype = static_cast<DType>(t[9]);
    set_hyper(row, h, multiplier, *step);
    blocks.add_row(t[7]);
  }
  adamw({rows.data(), blocks.table()});
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("adamw_", TORCH_BOX(&tw::adamw_cpu));
  m.impl("adamw_table", TORCH_BOX(&tw::adamw_table_cpu));
}

#endif
