// Gradients in and out of a flat buffer on the CPU.
//
// bucket_pack    flat[slot of i] = (or +=) scale * grads[i], cast, in one pass that also keeps the
//                sum of squares and a finite check of what it wrote; the rest of a slot is zeroed.
// bucket_unpack  outs[i] = scale * flat[slot of i], cast.
// ordered_sum    out = scale * (c0 + c1 + ...), added in rank order in fp32 (fp64 for fp64): the
//                same bits at every position, whatever the bucket or chunk size.
//
// The tensors together are cut into blocks (trainwright/blocks.h) that the threads share. A strided
// tensor goes through a buffer of kRun elements, so that one vector loop serves every layout.
// Bytes per element: pack s_grad + s_flat (+ s_flat when adding), sum W s_chunk + s_out. Bound:
// memory bandwidth.
#include "cpu/kernel.h"
#include "trainwright/blocks.h"
#include "trainwright/strided.h"

namespace tw {

struct PackRow {
  const void* grad;
  Strided layout;
  DType dtype;
  int64_t n, slot;  // elements of the gradient, first element of its slot in flat
};
struct BucketPackArgs {
  const PackRow* rows;
  BlockTable blocks;  // over the slots, padding included
  void* flat;
  double* partial;  // (blocks, 2)
  double scale;
  DType dtype;
  bool accumulate;
};
struct UnpackRow {
  void* out;
  Strided layout;
  DType dtype;
  int64_t slot;
};
struct BucketUnpackArgs {
  const UnpackRow* rows;
  BlockTable blocks;
  const void* flat;
  double scale;
  DType dtype;
};
struct OrderedSumArgs {
  const void* const* chunks;  // (W)
  void* out;
  BlockTable blocks;  // one row
  double* partial;    // (blocks, 2)
  double scale;
  int64_t W;
  DType chunk_dtype, dtype;
};

}  // namespace tw

TW_DECLARE_KERNEL(bucket_pack, BucketPackArgs)
TW_DECLARE_KERNEL(bucket_unpack, BucketUnpackArgs)
TW_DECLARE_KERNEL(ordered_sum, OrderedSumArgs)

#ifdef TW_CPU_ISA

#include "trainwright/bucket_pack.h"

TW_BEGIN
namespace {

constexpr int64_t kRun = 1024;  // elements of a strided tensor that are copied at a time: 4 KiB

template<class F, class G>
struct WiderOf {
  using type = float;
};
template<class G>
struct WiderOf<double, G> {
  using type = double;
};
template<class F>
struct WiderOf<F, double> {
  using type = double;
};
template<>
struct WiderOf<double, double> {
  using type = double;
};
template<class F, class G>
using wider_t = typename WiderOf<F, G>::type;

// x as it was stored at p, rounded.
template<class A, class F, class X, class K>
X stored(const F* p, X x, K k) {
  if constexpr (std::is_same_v<F, A>)
    return x;
  else
    return vload<A>(p, k);
}
template<class A, class X>
void add_to(GradStats<A>& stats, X x, Full) {
  stats.add(x);
}
template<class A, class X>
void add_to(GradStats<A>& stats, X x, Pairs) {
  each([&](vec<A> half) { stats.add(half); }, x);
}
template<class A, class X>
void add_to(GradStats<A>& stats, X x, int64_t n) {
  stats.add(keep<A>(x, n, A(0)));
}

// The sums are the caller's only at the end: in memory, each would wait for the one before.
template<class A, class F, class G>
void pack_run(F* flat, const G* grad, int64_t n, A scale, bool accumulate, GradStats<A>& stats) {
  GradStats<A> sums = stats;
  auto write = [&](int64_t i, auto x, auto k) {
    vstore<A>(flat + i, x, k);
    add_to<A>(sums, stored<A>(flat + i, x, k), k);
  };
  if (accumulate)
    for_operands<A, F*, const G*>(n, [&](int64_t i, auto k) {
      auto sum = vload<A>(flat + i, k), x = vload<A>(grad + i, k);
      each([&](vec<A>& s, vec<A> g) { s += g * scale; }, sum, x);
      write(i, sum, k);
    });
  else
    for_operands<A, F*, const G*>(n, [&](int64_t i, auto k) {
      auto x = vload<A>(grad + i, k);
      each([&](vec<A>& g) { g *= scale; }, x);
      write(i, x, k);
    });
  stats = sums;
}

template<class F, class G>
void pack_block(const BucketPackArgs& a, const PackRow& row, int64_t begin, int64_t end,
                double* partial) {
  using A = wider_t<F, G>;
  F* flat = static_cast<F*>(a.flat) + row.slot;
  const G* grad = static_cast<const G*>(row.grad);
  const A scale = static_cast<A>(a.scale);
  GradStats<A> stats;
  const int64_t filled = end < row.n ? end : row.n;
  if (row.layout.ndim == 0) {
    if (begin < filled)
      pack_run<A>(flat + begin, grad + begin, filled - begin, scale, a.accumulate, stats);
  } else {
    G buffer[kRun];
    for (int64_t i = begin; i < filled; i += kRun) {
      const int64_t n = kRun < filled - i ? kRun : filled - i;
      const G* run = read_range(grad, row.layout, i, n, buffer);
      pack_run<A>(flat + i, run, n, scale, a.accumulate, stats);
    }
  }
  const int64_t padding = begin > row.n ? begin : row.n;
  if (!a.accumulate && padding < end)
    memset(static_cast<void*>(flat + padding), 0, static_cast<size_t>(end - padding) * sizeof(F));
  partial[0] = stats.sum();
  partial[1] = stats.not_finite();
}

template<class F, class G>
void unpack_block(const BucketUnpackArgs& a, const UnpackRow& row, int64_t begin, int64_t end) {
  using A = wider_t<F, G>;
  const F* flat = static_cast<const F*>(a.flat) + row.slot;
  const A scale = static_cast<A>(a.scale);
  G buffer[kRun];
  for (int64_t first = begin; first < end; first += kRun) {
    const int64_t n = kRun < end - first ? kRun : end - first;
    G* out = row.layout.ndim ? buffer : static_cast<G*>(row.out) + first;
    for_lanes<A>(n, [&](int64_t i, auto k) {
      vstore<A>(out + i, vload<A>(flat + first + i, k) * scale, k);
    });
    write_range(static_cast<G*>(row.out), row.layout, first, n, buffer);
  }
}

template<class C, class F>
void sum_block(const OrderedSumArgs& a, int64_t begin, int64_t end, double* partial) {
  using A = acc_t<C>;
  const C* const* chunks = reinterpret_cast<const C* const*>(a.chunks);
  F* out = static_cast<F*>(a.out);
  const A scale = static_cast<A>(a.scale);
  GradStats<A> stats;
  for_operands<A, const C*, F*>(end - begin, [&](int64_t i, auto k) {
    auto sum = vload<A>(chunks[0] + begin + i, k);
    for (int64_t w = 1; w < a.W; ++w) {
      auto next = vload<A>(chunks[w] + begin + i, k);
      each([](vec<A>& s, vec<A> x) { s += x; }, sum, next);
    }
    each([&](vec<A>& s) { s *= scale; }, sum);
    vstore<A>(out + begin + i, sum, k);
    add_to<A>(stats, stored<A>(out + begin + i, sum, k), k);
  });
  partial[0] = stats.sum();
  partial[1] = stats.not_finite();
}

}  // namespace

void bucket_pack(const BucketPackArgs& a) {
  with_float_type(a.dtype, [&](auto flat) {
    for_blocks(a.blocks, [&](int64_t r, int64_t begin, int64_t end, int64_t block) {
      with_float_type(a.rows[r].dtype, [&](auto grad) {
        pack_block<decltype(flat), decltype(grad)>(a, a.rows[r], begin, end, a.partial + 2 * block);
      });
    });
  });
}

void bucket_unpack(const BucketUnpackArgs& a) {
  with_float_type(a.dtype, [&](auto flat) {
    for_blocks(a.blocks, [&](int64_t r, int64_t begin, int64_t end, int64_t) {
      with_float_type(a.rows[r].dtype, [&](auto out) {
        unpack_block<decltype(flat), decltype(out)>(a, a.rows[r], begin, end);
      });
    });
  });
}

void ordered_sum(const OrderedSumArgs& a) {
  with_float_type(a.chunk_dtype, [&](auto chunk) {
    with_float_type(a.dtype, [&](auto out) {
      for_blocks(a.blocks, [&](int64_t, int64_t begin, int64_t end, int64_t block) {
        sum_block<decltype(chunk), decltype(out)>(a, begin, end, a.partial + 2 * block);
      });
    });
  });
}

TW_END

#else  // ---- torch bindings

#include "cpu/tensor_list.h"

namespace tw {
namespace {

double scalar_of(double scale, const std::optional<Tensor>& tensor) {
  if (!tensor) return scale;
  double value = 1.0;
  with_float_type(dtype_of(*tensor), [&](auto tag) {
    value = load_as<double>(*static_cast<const decltype(tag)*>(data(*tensor)));
  });
  return scale * value;
}

void check_slot(const Tensor& flat, int64_t begin, int64_t end, int64_t n) {
  STD_TORCH_CHECK(0 <= begin && begin + n <= end && end <= flat.numel(), "slot ", begin, "..", end,
                  " does not hold ", n, " elements of a buffer of ", flat.numel());
}

Tensor bucket_pack_cpu(Tensor flat, std::vector<Tensor> grads, std::vector<int64_t> offsets,
                       double scale, std::optional<Tensor> scale_tensor, bool accumulate) {
  TW_CHECK_CONTIGUOUS(flat);
  STD_TORCH_CHECK(offsets.size() == grads.size() + 1, "one offset more than gradients expected");
  Layouts layouts(grads.size());
  Blocks blocks(grads.size());
  std::vector<PackRow> rows;
  rows.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const Tensor& g = grads[i];
    check_slot(flat, offsets[i], offsets[i + 1], g.numel());
    rows.push_back({data(g), layouts.of(g), dtype_of(g), g.numel(), offsets[i]});
    blocks.add_row(accumulate ? g.numel() : offsets[i + 1] - offsets[i]);
  }
  std::vector<double> partial(static_cast<size_t>(2 * blocks.count()));
  bucket_pack({rows.data(), blocks.table(), mutable_data(flat), partial.data(),
               scalar_of(scale, scale_tensor), dtype_of(flat), accumulate});
  return sum_block_stats(partial, flat);
}

void bucket_unpack_cpu(Tensor flat, std::vector<Tensor> outs, std::vector<int64_t> offsets,
                       double scale, std::optional<Tensor> scale_tensor) {
  TW_CHECK_CONTIGUOUS(flat);
  STD_TORCH_CHECK(offsets.size() == outs.size(), "one offset per output expected");
  Layouts layouts(outs.size());
  Blocks blocks(outs.size());
  std::vector<UnpackRow> rows;
  rows.reserve(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    const Tensor& o = outs[i];
    check_slot(flat, offsets[i], flat.numel(), o.numel());
    rows.push_back({mutable_data(o), layouts.of(o), dtype_of(o), offsets[i]});
    blocks.add_row(o.numel());
  }
  bucket_unpack(
      {rows.data(), blocks.table(), data(flat), scalar_of(scale, scale_tensor), dtype_of(flat)});
}

Tensor ordered_sum_cpu(Tensor out, std::vector<Tensor> chunks, double scale,
                       std::optional<Tensor> scale_tensor) {
  TW_CHECK_CONTIGUOUS(out);
  STD_TORCH_CHECK(!chunks.empty(), "at least one chunk expected");
  std::vector<const void*> pointers;
  pointers.reserve(chunks.size());
  for (const Tensor& c : chunks) {
    TW_CHECK_CONTIGUOUS(c);
    STD_TORCH_CHECK(c.numel() == out.numel() && c.scalar_type() == chunks[0].scalar_type(),
                    "chunks must have one dtype and the size of out");
    pointers.push_back(data(c));
  }
  Blocks blocks(1);
  blocks.add_row(out.numel());
  std::vector<double> partial(static_cast<size_t>(2 * blocks.count()));
  ordered_sum({pointers.data(), mutable_data(out), blocks.table(), partial.data(),
               scalar_of(scale, scale_tensor), static_cast<int64_t>(chunks.size()),
               dtype_of(chunks[0]), dtype_of(out)});
  return sum_block_stats(partial, out);
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("bucket_pack_", TORCH_BOX(&tw::bucket_pack_cpu));
  m.impl("bucket_unpack_", TORCH_BOX(&tw::bucket_unpack_cpu));
  m.impl("ordered_sum_", TORCH_BOX(&tw::ordered_sum_cpu));
}

#endif
