// The two passes of Muon over a list of tensors on the CPU (formulas in trainwright/muon.h); its
// matrix products are newton_schulz.cpp.
//
// Blocks as in trainwright/blocks.h. A run of kRun elements of each operand, whatever its dtype and
// layout, passes through a buffer in the type of the arithmetic, which stays in L1: one loop serves
// every mix. Nothing outside a view is touched. Bytes per parameter, fp32: momentum 16 (gradient,
// buffer read and written, update written), update 12. Bound: memory bandwidth; both together are
// a few per cent of a step, whose products take 15 m FLOPs and more per parameter.
//
// build: no fused multiply-add
#include "cpu/kernel.h"
#include "trainwright/blocks.h"
#include "trainwright/strided.h"

namespace tw {

struct MuonOperand {
  void* data;
  Strided layout;
  DType dtype;
};
struct MuonMomentumRow {
  MuonOperand grad, buffer, update;
  double multiplier, momentum;
  bool nesterov;
};
struct MuonMomentumArgs {
  const MuonMomentumRow* rows;
  BlockTable blocks;
};
struct MuonUpdateRow {
  MuonOperand param, master, update;  // master.data may be null
  double keep, rate;
};
struct MuonUpdateArgs {
  const MuonUpdateRow* rows;
  BlockTable blocks;
};

}  // namespace tw

TW_DECLARE_KERNEL(muon_momentum_pass, MuonMomentumArgs)
TW_DECLARE_KERNEL(muon_update_pass, MuonUpdateArgs)

#ifdef TW_CPU_ISA

#include "trainwright/muon.h"

TW_BEGIN
namespace {

constexpr int64_t kRun = 1024;  // elements: three runs of doubles fit in L1

template<class A>
void load_run(A* to, const MuonOperand& o, int64_t begin, int64_t n) {
  with_float_type(o.dtype, [&](auto tag) {
    using T = decltype(tag);
    T copy[kRun];
    const T* from = read_range(static_cast<const T*>(o.data), o.layout, begin, n, copy);
    for_lanes<A>(n, [&](int64_t i, auto k) { vstore<A>(to + i, vload<A>(from + i, k), k); });
  });
}
template<class A>
void store_run(const MuonOperand& o, int64_t begin, int64_t n, const A* from) {
  with_float_type(o.dtype, [&](auto tag) {
    using T = decltype(tag);
    T copy[kRun];
    T* base = static_cast<T*>(o.data);
    T* to = o.layout.ndim == 0 ? base + begin : copy;
    for_lanes<A>(n, [&](int64_t i, auto k) { vstore<A>(to + i, vload<A>(from + i, k), k); });
    write_range(base, o.layout, begin, n, copy);
  });
}

// Calls body(begin, count) for the runs of [begin, end).
template<class F>
void for_pieces(int64_t begin, int64_t end, F&& body) {
  for (int64_t i = begin; i < end; i += kRun) body(i, kRun < end - i ? kRun : end - i);
}

template<class A>
void momentum_block(const MuonMomentumRow& r, int64_t begin, int64_t end) {
  const MuonMomentum<A> s{static_cast<A>(r.multiplier), static_cast<A>(r.momentum),
                          static_cast<A>(1.0 - r.momentum), r.nesterov};
  A grad[kRun], buffer[kRun], update[kRun];
  for_pieces(begin, end, [&](int64_t at, int64_t n) {
    load_run(grad, r.grad, at, n);
    load_run(buffer, r.buffer, at, n);
    for_lanes<A>(n, [&](int64_t i, auto k) {
      vec<A> b = vload<A>(buffer + i, k);
      const vec<A> u = muon_momentum(vload<A>(grad + i, k), b, s);
      vstore<A>(buffer + i, b, k);
      vstore<A>(update + i, u, k);
    });
    store_run(r.buffer, at, n, buffer);
    store_run(r.update, at, n, update);
  });
}

template<class A>
void update_block(const MuonUpdateRow& r, int64_t begin, int64_t end) {
  const MuonRate<A> s{static_cast<A>(r.keep), static_cast<A>(r.rate)};
  const MuonOperand& exact = r.master.data ? r.master : r.param;
  A p[kRun], update[kRun];
  for_pieces(begin, end, [&](int64_t at, int64_t n) {
    load_run(p, exact, at, n);
    load_run(update, r.update, at, n);
    for_lanes<A>(n, [&](int64_t i, auto k) {
      vstore<A>(p + i, muon_update(vload<A>(p + i, k), vload<A>(update + i, k), s), k);
    });
    store_run(r.param, at, n, p);
    if (r.master.data) store_run(r.master, at, n, p);
  });
}

}  // namespace

void muon_momentum_pass(const MuonMomentumArgs& a) {
  for_blocks(a.blocks, [&](int64_t row, int64_t begin, int64_t end, int64_t) {
    const MuonMomentumRow& r = a.rows[row];
    r.buffer.dtype == DType::f64 ? momentum_block<double>(r, begin, end)
                                 : momentum_block<float>(r, begin, end);
  });
}

void muon_update_pass(const MuonUpdateArgs& a) {
  for_blocks(a.blocks, [&](int64_t row, int64_t begin, int64_t end, int64_t) {
    const MuonUpdateRow& r = a.rows[row];
    r.param.dtype == DType::f64 ? update_block<double>(r, begin, end)
                                : update_block<float>(r, begin, end);
  });
}

TW_END

#else  // ---- torch bindings

#include "cpu/tensor_list.h"

namespace tw {
namespace {

// An operand of the elements of `like`, in the order in which those lie in memory.
MuonOperand operand(const Tensor& t, const Tensor& like, const std::vector<int64_t>& order,
                    Layouts& layouts, bool written) {
  STD_TORCH_CHECK(shape_of(t) == shape_of(like), "muon: tensors of one shape expected");
  void* address = written ? mutable_data(t) : const_cast<void*>(data(t));
  return {address, layouts.of(t, order), dtype_of(t)};
}

// hyper (groups, 4) fp64: lr, weight decay, momentum, nesterov.
const double* hyper_row(const Tensor& hyper, int64_t group) {
  STD_TORCH_CHECK(hyper.dim() == 2 && hyper.size(1) == 4 && hyper.is_contiguous() &&
                      hyper.scalar_type() == ScalarType::Double && group >= 0 &&
                      group < hyper.size(0),
                  "muon: hyper: (groups, 4) fp64 expected");
  return static_cast<const double*>(data(hyper)) + 4 * group;
}

// Whether the step is to be skipped; sets the gradients' multiplier.
bool skipped(const std::optional<Tensor>& control, double& multiplier) {
  if (!control) return false;
  const double* c = static_cast<const double*>(data(*control));
  multiplier = c[0];
  return c[1] != 0.0;
}

void muon_momentum_cpu(std::vector<Tensor> grads, std::vector<Tensor> buffers,
                       std::vector<Tensor> updates, std::vector<int64_t> groups, Tensor hyper,
                       std::optional<Tensor> control) {
  const size_t count = buffers.size();
  STD_TORCH_CHECK(grads.size() == count && updates.size() == count && groups.size() == count,
                  "muon: lists of one length expected");
  double multiplier = 1.0;
  if (skipped(control, multiplier)) {
    for (Tensor& u : updates) torch::stable::zero_(u);
    return;
  }
  Layouts layouts(3 * count);
  Blocks blocks(count);
  std::vector<MuonMomentumRow> rows;
  for (size_t i = 0; i < count; ++i) {
    const std::vector<int64_t> order = memory_order(buffers[i]);
    const double* h = hyper_row(hyper, groups[i]);
    rows.push_back({operand(grads[i], buffers[i], order, layouts, false),
                    operand(buffers[i], buffers[i], order, layouts, true),
                    operand(updates[i], buffers[i], order, layouts, true), multiplier, h[2],
                    h[3] != 0.0});
    blocks.add_row(buffers[i].numel());
  }
  muon_momentum_pass({rows.data(), blocks.table()});
}

// spec[i] = group << 1 | has master; masters holds only those that exist.
void muon_update_cpu(std::vector<Tensor> params, std::vector<Tensor> masters,
                     std::vector<Tensor> updates, std::vector<int64_t> spec,
                     std::vector<double> ratios, Tensor hyper, std::optional<Tensor> control) {
  const size_t count = params.size();
  STD_TORCH_CHECK(updates.size() == count && spec.size() == count && ratios.size() == count,
                  "muon: lists of one length expected");
  double multiplier = 1.0;
  if (skipped(control, multiplier)) return;
  Layouts layouts(3 * count);
  Blocks blocks(count);
  std::vector<MuonUpdateRow> rows;
  size_t next_master = 0;
  for (size_t i = 0; i < count; ++i) {
    const std::vector<int64_t> order = memory_order(params[i]);
    const double* h = hyper_row(hyper, spec[i] >> 1);
    MuonUpdateRow row{operand(params[i], params[i], order, layouts, true),
                      {},
                      operand(updates[i], params[i], order, layouts, false),
                      1.0 - h[0] * h[1],
                      h[0] * ratios[i]};
    if (spec[i] & 1)
      row.master = operand(masters.at(next_master++), params[i], order, layouts, true);
    rows.push_back(row);
    blocks.add_row(params[i].numel());
  }
  muon_update_pass({rows.data(), blocks.table()});
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("muon_momentum_", TORCH_BOX(&tw::muon_momentum_cpu));
  m.impl("muon_update_", TORCH_BOX(&tw::muon_update_cpu));
}

#endif
