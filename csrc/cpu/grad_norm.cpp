// Norm of a list of tensors, and their scaling, on the CPU.
//
// grad_stats    one read: the sum of |x|^p (p = inf: the largest, -inf: the smallest |x|) in double,
//               and whether anything is not finite. Kept per block and added in block order: the same
//               bits for any thread count. p = 2 is vectorised.
// grad_scale    x *= factor, in place; with factor 1 nothing is written.
// Bytes per element: s for the norm, 2s for the scaling. Bound: memory bandwidth.
#include "cpu/kernel.h"
#include "trainwright/blocks.h"
#include "trainwright/strided.h"

namespace tw {

struct NormRow {
  void* x;
  Strided layout;
  DType dtype;
};
struct GradStatsArgs {
  const NormRow* rows;
  BlockTable blocks;
  double* partial;  // (blocks, 2)
  double p;
};
struct GradScaleArgs {
  const NormRow* rows;
  BlockTable blocks;
  double factor;
};

}  // namespace tw

TW_DECLARE_KERNEL(grad_stats, GradStatsArgs)
TW_DECLARE_KERNEL(grad_scale, GradScaleArgs)

#ifdef TW_CPU_ISA

#include "trainwright/bucket_pack.h"

TW_BEGIN
namespace {

constexpr int64_t kRun = 1024;  // elements of a strided tensor that are copied at a time: 4 KiB

// Calls body(x, n) for the elements [begin, end) of the row, in pieces that lie together.
template<class T, class F>
void for_pieces(const NormRow& row, int64_t begin, int64_t end, F&& body) {
  const T* x = static_cast<const T*>(row.x);
  if (row.layout.ndim == 0) {
    body(x + begin, end - begin);
    return;
  }
  T buffer[kRun];
  for (int64_t i = begin; i < end; i += kRun) {
    const int64_t n = kRun < end - i ? kRun : end - i;
    body(read_range(x, row.layout, i, n, buffer), n);
  }
}

template<class T>
void squares_of(const NormRow& row, int64_t begin, int64_t end, double* partial) {
  using A = acc_t<T>;
  // Four parts are read side by side: a core keeps more lines in flight for four streams than for
  // one, and the latency of one addition does not limit the read.
  GradStats<A> stats[4];
  for_pieces<T>(row, begin, end, [&](const T* x, int64_t n) {
    constexpr int64_t L = lanes<A>;
    const int64_t part = n / (4 * L) * L;
    for (int64_t i = 0; i < part; i += L)
      for (int64_t j = 0; j < 4; ++j) stats[j].add(vload<A>(x + j * part + i));
    x += 4 * part;
    for_lanes<A>(n - 4 * part, [&](int64_t i, auto k) { stats[0].add(vload<A>(x + i, k)); });
  });
  partial[0] = partial[1] = 0.0;
  for (const GradStats<A>& s : stats) {
    partial[0] += s.sum();
    partial[1] += s.not_finite();
  }
}

template<class T>
void powers_of(const NormRow& row, int64_t begin, int64_t end, double p, double* partial) {
  double total = p == -INFINITY ? INFINITY : 0.0, odd = 0.0;
  for_pieces<T>(row, begin, end, [&](const T* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const double a = fabs(load_as<double>(x[i]));
      odd += a - a;
      if (p == INFINITY)
        total = a > total || a != a ? a : total;
      else if (p == -INFINITY)
        total = a < total || a != a ? a : total;
      else if (p == 1.0)
        total += a;
      else if (p == 0.0)
        total += a != 0.0;
      else
        total += pow(a, p);
    }
  });
  partial[0] = total;
  partial[1] = odd == 0.0 ? 0.0 : 1.0;
}

template<class T>
void scale_block(const NormRow& row, int64_t begin, int64_t end, double factor) {
  using A = acc_t<T>;
  const A scale = static_cast<A>(factor);
  T* base = static_cast<T*>(row.x);
  T buffer[kRun];
  for (int64_t first = begin; first < end; first += kRun) {
    const int64_t n = kRun < end - first ? kRun : end - first;
    T* x = const_cast<T*>(read_range<T>(base, row.layout, first, n, buffer));
    for_lanes<A>(n, [&](int64_t i, auto k) { vstore<A>(x + i, vload<A>(x + i, k) * scale, k); });
    write_range(base, row.layout, first, n, buffer);
  }
}

}  // namespace

void grad_stats(const GradStatsArgs& a) {
  for_blocks(a.blocks, [&](int64_t r, int64_t begin, int64_t end, int64_t block) {
    with_float_type(a.rows[r].dtype, [&](auto tag) {
      using T = decltype(tag);
      double* partial = a.partial + 2 * block;
      if (a.p == 2.0)
        squares_of<T>(a.rows[r], begin, end, partial);
      else
        powers_of<T>(a.rows[r], begin, end, a.p, partial);
    });
  });
}

void grad_scale(const GradScaleArgs& a) {
  for_blocks(a.blocks, [&](int64_t r, int64_t begin, int64_t end, int64_t) {
    with_float_type(a.rows[r].dtype,
                    [&](auto tag) { scale_block<decltype(tag)>(a.rows[r], begin, end, a.factor); });
  });
}

TW_END

#else  // ---- torch bindings

#include <cmath>

#include "cpu/tensor_list.h"

namespace tw {
namespace {

// The elements in memory order: neither a sum nor a scaling needs the logical one.
struct NormRows {
  Layouts layouts;
  Blocks blocks;
  std::vector<NormRow> rows;

  explicit NormRows(const std::vector<Tensor>& tensors)
      : layouts(tensors.size()), blocks(tensors.size()) {
    rows.reserve(tensors.size());
    for (const Tensor& t : tensors) {
      const Strided layout =
          t.is_contiguous() ? Strided{nullptr, 0} : layouts.of(t, memory_order(t));
      rows.push_back({const_cast<void*>(data(t)), layout, dtype_of(t)});
      blocks.add_row(t.numel());
    }
  }
};

Tensor grad_stats_cpu(std::vector<Tensor> tensors, double p) {
  STD_TORCH_CHECK(!tensors.empty(), "at least one tensor expected");
  NormRows n(tensors);
  std::vector<double> partial(static_cast<size_t>(2 * n.blocks.count()));
  grad_stats({n.rows.data(), n.blocks.table(), partial.data(), p});
  Tensor stats = sum_block_stats(partial, tensors[0]);
  if (std::isinf(p)) {
    double extreme = p > 0 ? 0.0 : INFINITY;
    for (size_t i = 0; i < partial.size(); i += 2)
      if (std::isnan(partial[i]) || (p > 0 ? partial[i] > extreme : partial[i] < extreme))
        extreme = partial[i];
    *static_cast<double*>(mutable_data(stats)) = extreme;
  }
  return stats;
}

void grad_scale_cpu(std::vector<Tensor> tensors, Tensor factor) {
  double value = 1.0;
  with_float_type(dtype_of(factor), [&](auto tag) {
    value = load_as<double>(*static_cast<const decltype(tag)*>(data(factor)));
  });
  if (value == 1.0) return;
  for (const Tensor& t : tensors) mutable_data(t);
  NormRows n(tensors);
  grad_scale({n.rows.data(), n.blocks.table(), value});
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("grad_stats", TORCH_BOX(&tw::grad_stats_cpu));
  m.impl("grad_scale_", TORCH_BOX(&tw::grad_scale_cpu));
}

#endif
