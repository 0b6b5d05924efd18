// torch bindings of attention on CUDA: what the kernels in flash_attention_fwd.cuh and flash_attention_bwd.cuh
// want of their operands, and the small kernels around them.
#include "cuda/flash_attention_split.cuh"
#include "cuda/flash_attention_terms.cuh"

#include "cuda/binding.cuh"

namespace tw {

constexpr int kSmallThreads = 256;

inline unsigned small_blocks(int64_t threads) {
  return static_cast<unsigned>(divide_up(threads, kSmallThreads));
}

// ---- rows that the tiles can read ---------------------------------------------------------------
// Rows whose elements are not next to each other, or that do not begin at multiples of 16 bytes, are copied,
// padded with zeros to a multiple of 8 elements. A thread writes 8.

struct PadRows {
  const uint16_t* in;                    // (B, T, heads, D)
  uint16_t* out;                         // contiguous, padded
  int64_t threads, T, heads, D, chunks;  // chunks: of a row of out
  int64_t stride[4];
};

__global__ void __launch_bounds__(kSmallThreads) flash_attention_pad_kernel(PadRows a) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kSmallThreads + threadIdx.x;
  if (at >= a.threads) return;
  const int64_t row = at / a.chunks, first = at % a.chunks * 8;
  const int64_t head = row % a.heads, t = row / a.heads % a.T, b = row / a.heads / a.T;
  const uint16_t* in = a.in + b * a.stride[0] + t * a.stride[1] + head * a.stride[2];
  Pack<uint16_t, 8> x;
#pragma unroll
  for (int i = 0; i < 8; ++i) x.v[i] = first + i < a.D ? in[(first + i) * a.stride[3]] : 0;
  store_pack(a.out + at * 8, x);
}

// ---- rows of a packed batch that belong to no sequence ------------------------------------------
// out is 0 there, lse -inf. A block of threads takes a row.

struct Outside {
  const int32_t* first;
  int64_t sequences, rows, width;  // width: elements of a row of out
  uint16_t* out;
  float* lse;  // (H, rows), or null
  int64_t H;
};

__global__ void __launch_bounds__(kSmallThreads) flash_attention_outside_kernel(Outside a) {
  const int64_t row = blockIdx.x;
  if (row >= a.first[0] && row < a.first[a.sequences]) return;
  for (int64_t i = threadIdx.x; i < a.width; i += kSmallThreads) a.out[row * a.width + i] = 0;
  if (a.lse)
    for (int64_t h = threadIdx.x; h < a.H; h += kSmallThreads) a.lse[h * a.rows + row] = -INFINITY;
}

// ---- what the backward knows of each query ------------------------------------------------------
// lse in base 2 and delta = sum dout * out - dlse. With terms lse is natural and includes the sink: exp(score - lse)
// is then what weighs v, share = sigmoid(lse - sink) times the probability among the keys, and dlse joins delta
// divided by share. The sink's own gradient is -(1 - share) sum dout * out, summed over queries. A block of threads has kStatsRows queries of a head, a group of
// lanes a row at a time. 4 Dv bytes are read of a query.

// Sinks further above lse count as this far: a share of 1e-30 is nothing beside what it is added to, but one below
// the least float would take dlse with it.
constexpr float kMostAbove = 69.0f;

struct PrepareStats {
  AttentionShape shape;
  HeadRows out, dout;
  const float *lse, *dlse;
  AttentionBackward to;
  float* sinks;           // of each query, like stats: its part of the sink's gradient; or null
  int row_blocks, lanes;  // lanes: of a row, a power of two
};

template<class T>
__global__ void __launch_bounds__(kSmallThreads)
    flash_attention_stats_kernel(const __grid_constant__ PrepareStats a) {
  const int head = blockIdx.x / a.row_blocks, b = head / a.shape.H, h = head % a.shape.H;
  const int i0 = static_cast<int>(blockIdx.x % a.row_blocks) * kStatsRows;
  const Sequence seq(a.shape, b);
  if (i0 >= seq.Tq) return;
  const T* out = head_of<T>(a.out, a.shape, b, seq.q_row, h);
  const T* dout = head_of<T>(a.dout, a.shape, b, seq.q_row, h);
  const int64_t in = lse_of(a.shape, seq, b, h), to = stats_of(a.to, seq, b, h);
  const int lane = threadIdx.x % a.lanes;
  for (int i = i0 + threadIdx.x / a.lanes; i < i0 + kStatsRows; i += kSmallThreads / a.lanes) {
    float delta = 0.0f, lse = INFINITY;
    if (i < seq.Tq)
      for (int c = lane * 8; c < a.shape.Dv; c += a.lanes * 8) {
        float x[8], y[8];
        unpack(load_pack<8>(out + i * a.out.row + c), x);
        unpack(load_pack<8>(dout + i * a.dout.row + c), y);
#pragma unroll
        for (int k = 0; k < 8; ++k) delta += x[k] * y[k];
      }
    delta = warp_sum(delta, a.lanes);
    float share = 1.0f, sum = 0.0f;
    if (i < seq.Tq && a.lse[in + i] != -INFINITY) {
      lse = a.lse[in + i];
      sum = delta;
      if (a.to.terms.sinks) {
        float sink = a.to.terms.sinks[h];
        if (sink - lse > kMostAbove) sink = lse + kMostAbove;
        share = 1.0f / (1.0f + expf(sink - lse));
        const float top = fmaxf(sink, lse), other = fminf(sink, lse);
        lse = top + log1pf(expf(other - top));
      }
      if (!a.to.terms.any) lse *= kLog2e;
      if (a.dlse) delta -= a.dlse[in + i] / share;
    } else {
      delta = 0.0f;
    }
    if (a.sinks && lane == 0) a.sinks[to + i] = (share - 1.0f) * sum;
    if (lane == 0) {
      a.to.stats[to + i] = lse;
      a.to.stats[to + a.to.stats_delta + i] = delta;
    }
  }
}

// ---- sums over queries --------------------------------------------------------------------------
// A block of threads sums what each query of a head has in a buffer like stats: of one sequence, or of all.

struct SumQueries {
  AttentionBackward a;
  const float* parts;
  float* out;
  bool by_sequence;  // out is (B, H), else (H,)
};

__global__ void __launch_bounds__(kSmallThreads)
    flash_attention_sum_kernel(const __grid_constant__ SumQueries s) {
  __shared__ float shared[1][32];
  const AttentionShape& shape = s.a.shape;
  const int h = blockIdx.x % shape.H, first = s.by_sequence ? blockIdx.x / shape.H : 0;
  float sum[1] = {};
  for (int b = first; b < (s.by_sequence ? first + 1 : shape.B); ++b) {
    const Sequence seq(shape, b);
    const float* parts = s.parts + stats_of(s.a, seq, b, h);
    for (int i = threadIdx.x; i < seq.Tq; i += kSmallThreads) sum[0] += parts[i];
  }
  row_sum(sum, shared);
  if (threadIdx.x == 0) s.out[blockIdx.x] = sum[0];
}

// ---- torch bindings -----------------------------------------------------------------------------

namespace {

// The tensors that a call made lie here until its kernels are launched.
class Operands {
 public:
  explicit Operands(cudaStream_t stream) : stream_(stream) {}

  HeadRows rows_of(const Tensor& x) {
    const int64_t D = x.size(3);
    const auto whole = [&](int dim) { return x.size(dim) <= 1 || x.stride(dim) % 8 == 0; };
    const bool fits = D % 8 == 0 && (D == 1 || x.stride(3) == 1) && whole(0) && whole(1) &&
                      whole(2) && aligned16(x.const_data_ptr());
    if (fits || x.numel() == 0) return {device_data(x), x.stride(0), x.stride(1), x.stride(2)};
    const int64_t padded = divide_up(D, 8) * 8;
    Tensor copy = empty({x.size(0), x.size(1), x.size(2), padded}, x);
    const PadRows a = {static_cast<const uint16_t*>(device_data(x)),
                       static_cast<uint16_t*>(device_data(copy)),
                       copy.numel() / 8,
                       x.size(1),
                       x.size(2),
                       D,
                       padded / 8,
                       {x.stride(0), x.stride(1), x.stride(2), x.stride(3)}};
    flash_attention_pad_kernel<<<small_blocks(a.threads), kSmallThreads, 0, stream_>>>(a);
    copies_.push_back(copy);
    return {device_data(copy), copy.stride(0), copy.stride(1), copy.stride(2)};
  }

 private:
  cudaStream_t stream_;
  std::vector<Tensor> copies_;
};

HeadRows contiguous_rows(const Tensor& x) {
  return {device_data(x), x.stride(0), x.stride(1), x.stride(2)};
}

AttentionShape shape_for(const Tensor& q, const Tensor& k, const Tensor& v,
                         const std::optional<Tensor>& cu_q, const std::optional<Tensor>& cu_k,
                         int64_t max_q, int64_t max_k, int64_t left, int64_t right, bool top_left) {
  constexpr int64_t most = int64_t{1} << 30;
  TW_CHECK_SHAPE(q.size(1) < most && k.size(1) < most, "flash_attention: more than 2^30 rows");
  TW_CHECK_SHAPE(cu_q.has_value() == cu_k.has_value(), "flash_attention: one of two cu_seqlens");
  const auto whole = [](int64_t x) { return static_cast<int>(x); };
  return {static_cast<const int32_t*>(device_data(cu_q)),
          static_cast<const int32_t*>(device_data(cu_k)),
          whole(cu_q ? cu_q->size(0) - 1 : q.size(0)),
          whole(q.size(2)),
          whole(k.size(2)),
          whole(q.size(3)),
          whole(v.size(3)),
          whole(cu_q ? std::min(max_q, q.size(1)) : q.size(1)),
          whole(cu_q ? std::min(max_k, k.size(1)) : k.size(1)),
          q.size(1),
          left < 0 ? kNoLimit : left,
          right < 0 ? kNoLimit : right,
          top_left};
}

// Calls f(T, HD) with the element type and the head dim that tiles have, as tags.
template<class F>
void with_attention_types(const Tensor& q, const AttentionShape& shape, F&& f) {
  const int D = std::max(shape.D, shape.Dv);
  TW_CHECK_SHAPE(D <= 256, "flash_attention: head dims must be at most 256, got ", D);
  const auto with_head_dim = [&](auto t) {
    if (D <= 64)
      f(t, Int<64>{});
    else if (D <= 96)
      f(t, Int<96>{});
    else if (D <= 128)
      f(t, Int<128>{});
    else
      f(t, Int<256>{});
  };
  const DType type = dtype_of(q);
  STD_TORCH_CHECK(type == DType::bf16 || type == DType::f16, "flash_attention: bf16 or fp16 only");
  type == DType::bf16 ? with_head_dim(bf16{}) : with_head_dim(f16{});
}

AttentionTerms terms_for(const std::optional<Tensor>& alibi, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& sinks, const std::optional<Tensor>& seed,
                         double scale, double softcap, double dropout_p) {
  const auto floats = [](const std::optional<Tensor>& x) {
    return static_cast<const float*>(device_data(x));
  };
  AttentionTerms a = {};
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap);
  a.keep = 1.0f;
  if (alibi) {
    a.alibi = floats(alibi);
    a.alibi_batch = alibi->stride(0);
    a.alibi_head = alibi->stride(1);
  }
  if (bias && bias->numel() > 0) {
    a.bias = device_data(*bias);
    a.bias_type = dtype_of(*bias);
    for (int i = 0; i < 4; ++i) a.bias_stride[i] = bias->size(i) == 1 ? 0 : bias->stride(i);
  }
  a.sinks = floats(sinks);
  // Python's round(), and so the same pairs as every backend.
  const auto drop = static_cast<uint64_t>(std::nearbyint(dropout_p * 4294967296.0));
  if (drop > 0) {
    TW_CHECK_SHAPE(seed.has_value(), "flash_attention: dropout wants a seed");
    a.seed = static_cast<const int64_t*>(device_data(*seed));
    a.last_dropped = static_cast<uint32_t>(drop - 1);
    const double kept = 4294967296.0 - static_cast<double>(drop);
    a.keep = kept > 0.0 ? static_cast<float>(4294967296.0 / kept) : 0.0f;
  }
  a.any = a.softcap > 0.0f || a.alibi || a.bias || a.sinks || a.seed;
  return a;
}

void clear_outside(const AttentionShape& shape, const Tensor& rows, const Tensor* lse,
                   const int32_t* first, cudaStream_t stream) {
  if (!first || rows.numel() == 0) return;
  const Outside a = {first,
                     shape.B,
                     rows.size(1),
                     rows.size(2) * rows.size(3),
                     static_cast<uint16_t*>(device_data(rows)),
                     lse ? static_cast<float*>(device_data(*lse)) : nullptr,
                     shape.H};
  flash_attention_outside_kernel<<<static_cast<unsigned>(a.rows), kSmallThreads, 0, stream>>>(a);
  check_launch("flash_attention_outside_kernel");
}

// Pieces that a sequence is split into at most, 0 if none is. Of a packed batch the host knows bounds of lengths only.
int most_pieces(const AttentionShape& a) {
  const int group = a.H / a.G;
  if (!a.first_q) {
    const Band band = {a.Tq, a.Tk, a.top_left ? 0 : int64_t{a.Tk} - a.Tq, a.left, a.right};
    const Pieces of = Pieces::of(band);
    return Pieces::split(band, group) ? static_cast<int>(of.last - of.first) : 0;
  }
  const int64_t Tq = std::min(a.Tq, kSplitRows / group);
  // A sequence with as many keys as queries is not split.
  if (Tq == 0 || a.first_q == a.first_k) return 0;
  const int64_t seen = Tq + a.left + a.right;
  const int64_t pieces = std::min(divide_up(a.Tk, kSplitKeys), seen / kSplitKeys + 2);
  return pieces > 1 ? static_cast<int>(pieces) : 0;
}

// The workspace of a split forward lies in `memory` until the kernels are launched.
AttentionSplit split_for(const AttentionShape& a, int64_t total_k, const Tensor& like,
                         Tensor& memory) {
  AttentionSplit s = {};
  s.pieces = most_pieces(a);
  if (s.pieces == 0) return s;
  const int64_t by_keys = total_k / kSplitKeys + a.B;
  s.compact = a.first_q && by_keys < int64_t{a.B} * s.pieces;
  const int64_t slots = s.compact ? by_keys : int64_t{a.B} * s.pieces;
  s.rows = static_cast<int>(std::min<int64_t>(int64_t{a.Tq} * (a.H / a.G), kSplitRows));
  s.width = static_cast<int>(divide_up(a.Dv, 8) * 8);
  const int64_t rows = slots * a.G * s.rows;
  memory = empty({rows * (s.width + 1)}, like, ScalarType::Float);
  s.out = static_cast<float*>(device_data(memory));
  s.lse = s.out + rows * s.width;
  return s;
}

std::tuple<Tensor, Tensor> flash_attention_fwd_cuda(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_q,
    const std::optional<Tensor>& cu_k, const std::optional<Tensor>& alibi,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& seed, int64_t max_q, int64_t max_k, double scale, int64_t left,
    int64_t right, bool top_left, double softcap, double dropout_p) {
  const OnDevice here(q);
  const cudaStream_t stream = stream_of(q);
  Tensor out = empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q);
  Tensor lse = empty({q.size(0), q.size(2), q.size(1)}, q, ScalarType::Float);
  if (lse.numel() == 0) return {out, lse};
  const AttentionShape shape = shape_for(q, k, v, cu_q, cu_k, max_q, max_k, left, right, top_left);
  Operands operands(stream);
  const AttentionTerms terms = terms_for(alibi, bias, sinks, seed, scale, softcap, dropout_p);
  const float c = static_cast<float>(std::abs(scale)) * kLog2e;
  AttentionForward a = {shape,
                        operands.rows_of(q),
                        operands.rows_of(k),
                        operands.rows_of(v),
                        contiguous_rows(out),
                        static_cast<float*>(device_data(lse)),
                        0,
                        terms,
                        std::max(c, FLT_MIN),  // 0 would turn the -inf of what is not seen to NaN
                        scale < 0.0 && !terms.any,
                        v.size(3) % 8 == 0,
                        {}};
  Tensor workspace = empty({0}, q, ScalarType::Float);
  if (shape.B > 0 && shape.Tq > 0) {
    a.split = split_for(shape, k.size(1), q, workspace);
    with_attention_types(q, shape, [&](auto t, auto head_dim) {
      launch_attention_forward<decltype(t), decltype(head_dim)::value>(a, stream);
      if (a.split.pieces) launch_attention_merge<decltype(t)>(a, stream);
    });
  }
  check_launch("flash_attention_fwd_kernel");
  clear_outside(shape, out, &lse, shape.first_q, stream);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> flash_attention_bwd_cuda(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out, const Tensor& lse, const std::optional<Tensor>& cu_q,
    const std::optional<Tensor>& cu_k, const std::optional<Tensor>& alibi,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& seed, int64_t max_q, int64_t max_k, double scale, int64_t left,
    int64_t right, bool top_left, double softcap, double dropout_p, std::vector<bool> need) {
  STD_TORCH_CHECK(need.size() == 6, "need must have 6 entries");
  TW_CHECK_CONTIGUOUS(lse);
  if (dlse) TW_CHECK_CONTIGUOUS(*dlse);
  const OnDevice here(q);
  const cudaStream_t stream = stream_of(q);
  const auto gradient = [&](bool needed, const Tensor& of) {
    return empty(needed ? shape_of(of) : std::vector<int64_t>{0}, q);
  };
  Tensor dq = gradient(need[0], q), dk = gradient(need[1], k), dv = gradient(need[2], v);
  const auto sum_for = [&](bool needed, const std::optional<Tensor>& of) {
    return empty(needed && of ? shape_of(*of) : std::vector<int64_t>{0}, q, ScalarType::Float);
  };
  Tensor dalibi = sum_for(need[3], alibi), dbias = sum_for(need[4], bias);
  Tensor dsinks = sum_for(need[5], sinks);
  const AttentionShape shape = shape_for(q, k, v, cu_q, cu_k, max_q, max_k, left, right, top_left);
  Operands operands(stream);
  // Rows of the statistics of a head: whole blocks for each sequence, wherever it begins.
  const int64_t sequences = cu_q ? shape.B : 1;
  const int64_t padded =
      (shape.total_q / kStatsRows + sequences) * kStatsRows * (shape.H > 0 ? 1 : 0);
  const int64_t all = (cu_q ? 1 : shape.B) * shape.H * padded;
  Tensor stats = empty({2, all}, q, ScalarType::Float);
  const auto parts_for = [&](const Tensor& sum) {
    return empty({sum.numel() > 0 ? all : 0}, q, ScalarType::Float);
  };
  Tensor alibi_parts = parts_for(dalibi), sink_parts = parts_for(dsinks);
  const auto floats = [](const Tensor& x) {
    return x.numel() > 0 ? static_cast<float*>(device_data(x)) : nullptr;
  };
  const auto written = [](const Tensor& x) {
    return x.numel() > 0 ? contiguous_rows(x) : HeadRows{};
  };
  AttentionBackward a = {shape,
                         operands.rows_of(q),
                         operands.rows_of(k),
                         operands.rows_of(v),
                         operands.rows_of(dout),
                         written(dq),
                         written(dk),
                         written(dv),
                         floats(stats),
                         floats(alibi_parts),
                         padded,
                         all,
                         0,
                         terms_for(alibi, bias, sinks, seed, scale, softcap, dropout_p),
                         static_cast<float>(scale) * kLog2e,
                         static_cast<float>(scale),
                         q.size(3) % 8 == 0,
                         v.size(3) % 8 == 0};
  with_attention_types(q, shape, [&](auto t, auto head_dim) {
    using T = decltype(t);
    if (shape.B > 0 && shape.H > 0 && shape.Tq > 0) {
      int lanes = 1;
      while (lanes < 32 && lanes * 8 < shape.Dv) lanes *= 2;
      const int row_blocks = static_cast<int>(divide_up(shape.Tq, kStatsRows));
      const PrepareStats prepare = {shape,
                                    operands.rows_of(out),
                                    a.dout,
                                    static_cast<const float*>(device_data(lse)),
                                    static_cast<const float*>(device_data(dlse)),
                                    a,
                                    floats(sink_parts),
                                    row_blocks,
                                    lanes};
      const int64_t blocks = int64_t{row_blocks} * shape.B * shape.H;
      flash_attention_stats_kernel<T>
          <<<static_cast<unsigned>(blocks), kSmallThreads, 0, stream>>>(prepare);
      check_launch("flash_attention_stats_kernel");
    }
    launch_attention_backward<T, decltype(head_dim)::value>(a, stream);
    if (dbias.numel() > 0) {
      BiasGradient s = {a, floats(dbias), {}, 0, 0};
      for (int i = 0; i < 4; ++i) s.size[i] = static_cast<int>(bias->size(i));
      launch_attention_bias_gradient<T, decltype(head_dim)::value>(s, stream);
    }
  });
  check_launch("flash_attention_bwd_kernel");
  const auto sum_queries = [&](const Tensor& parts, const Tensor& sum, bool by_sequence) {
    if (sum.numel() == 0) return;
    const SumQueries s = {a, floats(parts), floats(sum), by_sequence};
    flash_attention_sum_kernel<<<static_cast<unsigned>(sum.numel()), kSmallThreads, 0, stream>>>(s);
    check_launch("flash_attention_sum_kernel");
  };
  sum_queries(alibi_parts, dalibi, true);
  sum_queries(sink_parts, dsinks, false);
  if (need[0]) clear_outside(shape, dq, nullptr, shape.first_q, stream);
  if (need[1]) clear_outside(shape, dk, nullptr, shape.first_k, stream);
  if (need[2]) clear_outside(shape, dv, nullptr, shape.first_k, stream);
  return {dq, dk, dv, dalibi, dbias, dsinks};
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("flash_attention_fwd", TORCH_BOX(&tw::flash_attention_fwd_cuda));
  m.impl("flash_attention_bwd", TORCH_BOX(&tw::flash_attention_bwd_cuda));
}
