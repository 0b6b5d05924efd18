// The torch side of attention on the CPU: the schema of ops/_attention.py to FlashAttentionArgs, and
// memory. Kernels: flash_attention_fwd.cpp, flash_attention_bwd.cpp.
#include "cpu/flash_attention.h"

#ifndef TW_CPU_ISA

#include <cmath>

#include "trainwright/scratch.h"

namespace tw {
namespace {

Strided strided(const Tensor& x) {
  return {data(x), x.stride(0), x.stride(1), x.stride(2), x.stride(3), dtype_of(x)};
}

bool rows_together(const Strided& x, int64_t columns, ScalarType dtype) {
  return x.dtype == static_cast<DType>(dtype) && x.row == columns && x.element == 1;
}

// Memory of one call. What is small stays with the thread for the next call: an allocation costs as much
// as the arithmetic of a few rows, and fresh pages more.
class Workspace {
  static constexpr int64_t kKeptBytes = int64_t{8} << 20, kLine = 64;
  std::vector<std::pair<void**, int64_t>> wanted_;
  std::optional<Tensor> large_;

 public:
  void want(void** at, int64_t bytes) { wanted_.push_back({at, bytes}); }

  // All that is wanted, each part from a new cache line on.
  void take(const Tensor& like) {
    int64_t bytes = 0;
    for (const auto& [at, size] : wanted_) bytes += (size + kLine - 1) / kLine * kLine;
    if (bytes > kKeptBytes) large_ = empty({bytes}, like, ScalarType::Byte);
    auto* next =
        static_cast<char*>(large_ ? mutable_data(*large_)
                                  : scratch(Scratch::attention_rows, static_cast<size_t>(bytes)));
    for (const auto& [at, size] : wanted_) {
      *at = next;
      next += (size + kLine - 1) / kLine * kLine;
    }
  }
};

// The arguments that both ops have in common.
struct Options {
  const std::optional<Tensor>&cu_q, &cu_k, &alibi, &bias, &sinks, &seed;
  double scale;
  int64_t left, right;
  bool top_left;
  double softcap, dropout_p;
};

void set_sequences(FlashAttentionArgs& a, const Options& o) {
  STD_TORCH_CHECK(o.cu_q.has_value() == o.cu_k.has_value(),
                  "flash_attention: cu_seqlens_q and cu_seqlens_k come together");
  if (!o.cu_q) return;
  const Tensor &cu_q = *o.cu_q, &cu_k = *o.cu_k;
  for (const Tensor* cu : {&cu_q, &cu_k})
    TW_CHECK_SHAPE(cu->dim() == 1 && cu->size(0) >= 1 && cu->size(0) == cu_q.size(0) &&
                       cu->scalar_type() == ScalarType::Int && cu->is_contiguous(),
                   "flash_attention: cu_seqlens: expected two of shape (S + 1), int32, contiguous");
  TW_CHECK_SHAPE(a.B == 1, "flash_attention: packed tensors have a batch of 1");
  a.B = cu_q.size(0) - 1;
  a.cu_q = static_cast<const int32_t*>(data(cu_q));
  a.cu_k = static_cast<const int32_t*>(data(cu_k));
}

void set_options(FlashAttentionArgs& a, const Options& o, ScalarType acc) {
  a.softcap = o.softcap;
  if (o.alibi) {
    TW_CHECK_SHAPE(
        o.alibi->dim() == 2 && o.alibi->size(0) == a.B && o.alibi->size(1) == a.H &&
            o.alibi->scalar_type() == acc,
        "flash_attention: alibi_slopes: expected shape (B, H) in the accumulator's dtype");
    a.alibi = data(o.alibi), a.alibi_b = o.alibi->stride(0), a.alibi_h = o.alibi->stride(1);
  }
  if (o.bias) {
    const int64_t full[4] = {a.B, a.H, a.Tq, a.Tk};
    TW_CHECK_SHAPE(o.bias->dim() == 4 && !o.cu_q, "flash_attention: bias: expected 4-d, dense");
    int64_t strides[4];
    for (int d = 0; d < 4; ++d) {
      a.bias_sizes[d] = o.bias->size(d);
      TW_CHECK_SHAPE(a.bias_sizes[d] == full[d] || a.bias_sizes[d] == 1,
                     "flash_attention: bias: does not broadcast to (B, H, Tq, Tk)");
      strides[d] = a.bias_sizes[d] == 1 ? 0 : o.bias->stride(d);
    }
    a.bias = {data(o.bias), strides[0], strides[2], strides[1], strides[3], dtype_of(*o.bias)};
  }
  if (o.sinks) {
    TW_CHECK_SHAPE(o.sinks->dim() == 1 && o.sinks->size(0) == a.H && o.sinks->is_contiguous() &&
                       o.sinks->scalar_type() == acc,
                   "flash_attention: sinks: expected shape (H) in the accumulator's dtype");
    a.sinks = data(o.sinks);
  }
  if (o.dropout_p > 0) {
    STD_TORCH_CHECK(o.seed && o.seed->scalar_type() == ScalarType::Long && o.seed->dim() == 1 &&
                        o.seed->size(0) == 2 && o.seed->is_contiguous(),
                    "flash_attention: dropout needs a seed and a first head (int64, shape (2))");
    const auto* seed = static_cast<const int64_t*>(data(o.seed));
    a.dropout = true;
    a.seed = static_cast<uint64_t>(seed[0]);
    a.first_head = seed[1];
    a.drop = static_cast<uint64_t>(std::nearbyint(o.dropout_p * 4294967296.0));
  }
}

FlashAttentionArgs arguments(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o) {
  TW_CHECK_SHAPE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
                 "flash_attention: q, k, v must be 4-d");
  TW_CHECK_SHAPE(q.size(0) == k.size(0) && k.size(0) == v.size(0) && k.size(1) == v.size(1) &&
                     k.size(2) == v.size(2) && q.size(3) == k.size(3),
                 "flash_attention: shapes of q, k, v do not fit");
  TW_CHECK_SHAPE(k.size(2) == 0 ? q.size(2) == 0 : q.size(2) % k.size(2) == 0,
                 "flash_attention: heads of q must be a multiple of those of k");
  FlashAttentionArgs a{};
  a.q = strided(q), a.k = strided(k), a.v = strided(v);
  a.B = q.size(0), a.Tq = q.size(1), a.H = q.size(2), a.D = q.size(3);
  a.Tk = k.size(1), a.G = k.size(2), a.Dv = v.size(3);
  a.left = o.left < 0 ? kNoLimit : o.left;
  a.right = o.right < 0 ? kNoLimit : o.right;
  a.top_left = o.top_left;
  a.scale = o.scale;
  a.dtype = dtype_of(q);
  set_sequences(a, o);
  set_options(a, o, acc_dtype(q));
  return a;
}

std::tuple<Tensor, Tensor> flash_attention_fwd_cpu(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_q,
    const std::optional<Tensor>& cu_k, const std::optional<Tensor>& alibi,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& seed, int64_t, int64_t, double scale, int64_t left, int64_t right,
    bool top_left, double softcap, double dropout_p) {
  FlashAttentionArgs a = arguments(
      q, k, v,
      {cu_q, cu_k, alibi, bias, sinks, seed, scale, left, right, top_left, softcap, dropout_p});
  const ScalarType acc = acc_dtype(q);
  Tensor out = empty({q.size(0), a.Tq, a.H, a.Dv}, q);
  Tensor lse = empty({q.size(0), a.H, a.Tq}, q, acc);
  a.out = mutable_data(out), a.lse = mutable_data(lse);

  // K and V are worth a copy if some head's keys, more than one block, are used by several tasks.
  a.keys_in_place = rows_together(a.k, a.D, acc) && rows_together(a.v, a.Dv, acc);
  Workspace space;
  if (!a.keys_in_place && a.Tk > kForwardKeys &&
      a.H * count_blocks(a, kForwardLeastRows, false) > a.G * a.B) {
    const int64_t rows = k.size(0) * a.Tk * a.G;
    const int64_t wide = dtype_bytes(static_cast<DType>(acc));
    space.want(&a.k_rows, rows * a.D * wide);
    space.want(&a.v_rows, rows * a.Dv * wide);
    space.take(q);
  }
  flash_attention_fwd(a);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> flash_attention_bwd_cpu(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out, const Tensor& lse, const std::optional<Tensor>& cu_q,
    const std::optional<Tensor>& cu_k, const std::optional<Tensor>& alibi,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& seed, int64_t, int64_t, double scale, int64_t left, int64_t right,
    bool top_left, double softcap, double dropout_p, std::vector<bool> need) {
  TW_CHECK_CONTIGUOUS(out);
  TW_CHECK_CONTIGUOUS(lse);
  STD_TORCH_CHECK(!dlse || dlse->is_contiguous(), "dlse must be contiguous");
  STD_TORCH_CHECK(need.size() == 6, "flash_attention: need: expected 6 flags");
  FlashAttentionArgs a = arguments(
      q, k, v,
      {cu_q, cu_k, alibi, bias, sinks, seed, scale, left, right, top_left, softcap, dropout_p});
  const ScalarType acc = acc_dtype(q);
  const int64_t rows = q.size(0) * a.Tq * a.H;
  const int64_t D = round_up(a.D, kAttentionPad), Dv = round_up(a.Dv, kAttentionPad);
  const int64_t q_blocks = count_blocks(a, kAttentionRows, false) * a.H;
  a.task_keys = backward_task_keys(a);
  const int64_t k_blocks = count_blocks(a, a.task_keys, true) * a.H;
  const std::vector<int64_t> none{0};
  auto gradient = [&](bool needed, const std::optional<Tensor>& like, ScalarType dtype,
                      void** memory) {
    needed = needed && like;
    Tensor grad = empty(needed ? shape_of(*like) : none, q, dtype);
    *memory = needed ? mutable_data(grad) : nullptr;
    return grad;
  };
  Tensor dq = gradient(need[0], q, q.scalar_type(), &a.dq);
  Tensor dk = gradient(need[1], k, q.scalar_type(), &a.dk);
  Tensor dv = gradient(need[2], v, q.scalar_type(), &a.dv);
  Tensor dalibi = gradient(need[3], alibi, acc, &a.dalibi);
  Tensor dbias = gradient(need[4], bias, acc, &a.dbias);
  Tensor dsinks = gradient(need[5], sinks, acc, &a.dsinks);

  const int64_t scalars = a.dbias ? a.bias_sizes[0] * a.bias_sizes[1] : 0;
  Workspace space;
  const int64_t wide = dtype_bytes(static_cast<DType>(acc));
  space.want(&a.q_rows, rows * D * wide);
  space.want(&a.dout_rows, rows * Dv * wide);
  space.want(&a.dq_rows, a.dq ? rows * D * wide : 0);
  space.want(&a.row_max, rows * wide);
  space.want(&a.row_log_sum, rows * wide);
  space.want(&a.delta, rows * wide);
  space.want(&a.dsinks_parts, q_blocks * wide);
  space.want(&a.dalibi_parts, k_blocks * wide);
  space.want(&a.dbias_parts, scalars * blocks_of(a.Tq, kAttentionRows) * wide);
  space.want(reinterpret_cast<void**>(&a.tickets), q_blocks * int64_t{sizeof *a.tickets});
  space.want(reinterpret_cast<void**>(&a.row_finite), q_blocks);
  space.take(q);
  a.out = const_cast<void*>(data(out)), a.lse = const_cast<void*>(data(lse));
  a.dout = strided(dout), a.dlse = data(dlse);
  flash_attention_bwd(a);
  return {dq, dk, dv, dalibi, dbias, dsinks};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("flash_attention_fwd", TORCH_BOX(&tw::flash_attention_fwd_cpu));
  m.impl("flash_attention_bwd", TORCH_BOX(&tw::flash_attention_bwd_cpu));
}

#endif
