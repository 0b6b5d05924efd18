// Cross entropy on the CPU (formulas in trainwright/cross_entropy.h).
//
// forward   one online pass over a row, in blocks of 2048 columns that stay in L1: block maximum, then sum exp(z - m), the
//           running sum rescaled when the maximum grew. Memory sees one read of the logits.
// backward  one pass: exp(z - lse) again, combined with weights and target, written once.
// both      when the upstream gradient of a scalar loss can be foretold, each row goes through forward and backward while
//           it lies in L2, so memory sees one read and one write for the whole loss.
// Every row is independent and rows are summed in order, in double: the same bits for any thread count.
// Bound: memory bandwidth.
// fwd+bwd (4096, 50257) fp32, 2 cores, AVX2: see bench/results.
#include "cpu/cross_entropy.h"

#ifdef TW_CPU_ISA

TW_BEGIN
namespace {

constexpr int64_t TASK_ELEMENTS = 65536;  // per task handed to a thread: some 20 us

template<bool B>
struct Flag {
  static constexpr bool value = B;
};

// run(type tag, softcap tag, begin, end) over rows handed out in small tasks: ignored rows cost nothing, so an even split
// would not be even.
template<class F>
void for_rows(const CrossEntropyTile& tile, F&& run) {
  const int64_t rows = 1 + TASK_ELEMENTS / (tile.columns + 1);
  parallel_dynamic((tile.N + rows - 1) / rows, [&](int64_t task) {
    const int64_t begin = task * rows, end = begin + rows < tile.N ? begin + rows : tile.N;
    with_float_type(tile.dtype, [&](auto tag) {
      if (tile.softcap != 0)
        run(tag, Flag<true>{}, begin, end);
      else
        run(tag, Flag<false>{}, begin, end);
    });
  });
}

double weight_total_of(const CrossEntropyTile& tile) {
  return tile.dtype == DType::f64 ? weight_total<double>(tile) : weight_total<float>(tile);
}

}  // namespace

void cross_entropy_state(const CrossEntropyStateArgs& a) {
  for_rows(a.tile, [&](auto tag, auto softcap, int64_t begin, int64_t end) {
    run_state<softcap.value, decltype(tag)>(a, begin, end);
  });
}

void cross_entropy_grad(const CrossEntropyGradArgs& a) {
  const double total = weight_total_of(a.tile);
  for_rows(a.tile, [&](auto tag, auto softcap, int64_t begin, int64_t end) {
    run_grad<softcap.value, decltype(tag)>(a, total, begin, end);
  });
}

void cross_entropy_rows(const CrossEntropyRowsArgs& a) {
  const double total = weight_total_of(a.tile);
  for_rows(a.tile, [&](auto tag, auto softcap, int64_t begin, int64_t end) {
    run_rows<softcap.value, decltype(tag)>(a, total, begin, end);
  });
}

TW_END

#else  // ---- torch bindings -----------------------------------------------------------------------

#include <stdexcept>
#include <string>

#include "cpu/cross_entropy_binding.h"

namespace tw {
namespace {

CrossEntropyTile tile_of(const Tensor& logits, const Tensor& target,
                         const std::optional<Tensor>& weight, int64_t first, int64_t classes,
                         const Options& o) {
  check_tile(logits, target, weight, first, classes);
  return {data(logits),      static_cast<const int64_t*>(data(target)),
          data(weight),      logits.size(0),
          logits.size(1),    first,
          classes,           o.ignore_index,
          o.label_smoothing, o.z_loss,
          o.softcap,         dtype_of(logits)};
}

// std::out_of_range becomes Python's IndexError.
void check_targets(const CrossEntropyTile& tile) {
  for (int64_t n = 0; n < tile.N; ++n) {
    const int64_t t = tile.target[n];
    if (t != tile.ignore_index && (t < 0 || t >= tile.classes))
      throw std::out_of_range("cross_entropy: target: expected 0 <= target < " +
                              std::to_string(tile.classes) + " or ignore_index " +
                              std::to_string(tile.ignore_index) + ", got " + std::to_string(t) +
                              " at position " + std::to_string(n));
  }
}

struct Totals {
  double weight = 0, kept = 0;  // over the kept rows: sum of class weights, count
};

Totals totals_of(const CrossEntropyTile& tile) {
  Totals totals;
  for (int64_t n = 0; n < tile.N; ++n) {
    const int64_t t = tile.target[n];
    if (t == tile.ignore_index) continue;
    totals.kept += 1;
    totals.weight += !tile.weight ? 1
                     : tile.dtype == DType::f64
                         ? static_cast<const double*>(tile.weight)[t]
                         : static_cast<double>(static_cast<const float*>(tile.weight)[t]);
  }
  return totals;
}

void store(const Tensor& out, int64_t i, double value) {
  if (out.scalar_type() == ScalarType::Double)
    static_cast<double*>(mutable_data(out))[i] = value;
  else
    static_cast<float*>(mutable_data(out))[i] = static_cast<float>(value);
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& logits, const CrossEntropyTile& tile,
                                           int64_t reduction, const Tensor* grad = nullptr,
                                           double upstream = 1) {
  const int64_t N = tile.N;
  const Totals totals = totals_of(tile);
  const bool mean = reduction == kMean,
             none_kept = totals.kept == 0;  // then 0, where torch gives 0 / 0
  const Tensor scales = empty({2}, logits, ScalarType::Double);
  double* scale = static_cast<double*>(mutable_data(scales));
  scale[0] = !mean ? 1 : none_kept ? 0 : 1 / totals.weight;
  scale[1] = !mean ? 1 : none_kept ? 0 : 1 / totals.kept;
  const Tensor lses = empty({N}, logits, ScalarType::Double);
  const Tensor rows = empty({N}, logits, ScalarType::Double);
  double* lse = static_cast<double*>(mutable_data(lses));
  double* row = static_cast<double*>(mutable_data(rows));
  cross_entropy_rows({tile, lse, row, grad ? mutable_data(*grad) : nullptr, scale, upstream});
  const Tensor loss = empty_loss(logits, reduction);
  double sum = 0;
  for (int64_t n = 0; n < N; ++n) {
    double value = row[n] * scale[0];
    if (tile.z_loss != 0) value += tile.z_loss * lse[n] * lse[n] * scale[1];
    if (reduction == kNone) store(loss, n, value);
    sum += value;
  }
  if (reduction != kNone) store(loss, 0, sum);
  return {loss, lses, scales};
}

void backward(const Tensor& out, const Tensor& upstream, const CrossEntropyTile& tile,
              const Tensor& lse, const Tensor& scale) {
  check_upstream(upstream, tile.N, out);
  check_saved(lse, scale, tile.N);
  cross_entropy_grad({tile, static_cast<const double*>(data(lse)), data(upstream),
                      upstream.numel() == 1 ? 0 : 1, static_cast<const double*>(data(scale)),
                      mutable_data(out)});
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_fwd_cpu(const Tensor& logits, const Tensor& target,
                                                         const std::optional<Tensor>& weight,
                                                         int64_t ignore_index,
                                                         double label_smoothing, double z_loss,
                                                         double softcap, int64_t reduction) {
  const auto tile = tile_of(logits, target, weight, 0, logits.size(1),
                            {ignore_index, label_smoothing, z_loss, softcap});
  check_targets(tile);
  return forward(logits, tile, reduction);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_fwd_bwd_cpu(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& weight,
    int64_t ignore_index, double label_smoothing, double z_loss, double softcap, int64_t reduction,
    double upstream) {
  const auto tile = tile_of(logits, target, weight, 0, logits.size(1),
                            {ignore_index, label_smoothing, z_loss, softcap});
  check_targets(tile);
  const Tensor grad = empty(shape_of(logits), logits);
  auto [loss, lse, scale] = forward(logits, tile, reduction, &grad, upstream);
  return {loss, lse, scale, grad};
}

Tensor cross_entropy_bwd_cpu(const Tensor& dloss, const Tensor& logits, const Tensor& target,
                             const std::optional<Tensor>& weight, const Tensor& lse,
                             const Tensor& scale, int64_t ignore_index, double label_smoothing,
                             double z_loss, double softcap) {
  const auto tile = tile_of(logits, target, weight, 0, logits.size(1),
                            {ignore_index, label_smoothing, z_loss, softcap});
  const Tensor grad = empty(shape_of(logits), logits);
  backward(grad, dloss, tile, lse, scale);
  return grad;
}

void cross_entropy_tile_grad_cpu(const Tensor& out, const Tensor& dloss, const Tensor& logits,
                                 const Tensor& target, const std::optional<Tensor>& weight,
                                 const Tensor& lse, const Tensor& scale, int64_t first,
                                 int64_t classes, int64_t ignore_index, double label_smoothing,
                                 double z_loss, double softcap) {
  TW_CHECK_CONTIGUOUS(out);
  TW_CHECK_SHAPE(out.numel() == logits.numel() && out.scalar_type() == logits.scalar_type(),
                 "out must be like the logits");
  const auto tile = tile_of(logits, target, weight, first, classes,
                            {ignore_index, label_smoothing, z_loss, softcap});
  backward(out, dloss, tile, lse, scale);
}

void cross_entropy_tile_state_cpu(const Tensor& state, const Tensor& logits, const Tensor& target,
                                  const std::optional<Tensor>& weight, int64_t first,
                                  int64_t classes, int64_t ignore_index, double label_smoothing,
                                  double softcap) {
  TW_CHECK_CONTIGUOUS(state);
  const auto tile =
      tile_of(logits, target, weight, first, classes, {ignore_index, label_smoothing, 0, softcap});
  TW_CHECK_SHAPE(state.numel() == 4 * tile.N && state.scalar_type() == ScalarType::Double,
                 "state must be float64 of shape (N, 4)");
  cross_entropy_state({tile, static_cast<double*>(mutable_data(state))});
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("cross_entropy_fwd", TORCH_BOX(&tw::cross_entropy_fwd_cpu));
  m.impl("cross_entropy_fwd_bwd", TORCH_BOX(&tw::cross_entropy_fwd_bwd_cpu));
  m.impl("cross_entropy_bwd", TORCH_BOX(&tw::cross_entropy_bwd_cpu));
  m.impl("cross_entropy_tile_grad_", TORCH_BOX(&tw::cross_entropy_tile_grad_cpu));
  m.impl("cross_entropy_tile_state_", TORCH_BOX(&tw::cross_entropy_tile_state_cpu));
}

#endif
