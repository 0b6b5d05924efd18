// Arguments of the CPU attention kernels (formulas in trainwright/flash_attention.h), and how a call
// is cut into sequences and blocks. For the bindings and for every instruction set.
#pragma once
#include "cpu/kernel.h"
#include "trainwright/flash_attention.h"
#include "trainwright/parallel.h"

namespace tw {

// A (batch, T, heads, channels) tensor of any strides and floating dtype.
struct Strided {
  const void* data;
  int64_t batch, row, head, element;
  DType dtype;

  // Element `e` of the row at (b, t, h).
  TW_HD const void* at(int64_t b, int64_t t, int64_t h, int64_t e = 0) const {
    return static_cast<const char*>(data) +
           (b * batch + t * row + h * head + e * element) * dtype_bytes(dtype);
  }
};

struct FlashAttentionArgs {
  Strided q, k, v;
  int64_t B, H, G, D, Dv;      // B: sequences
  int64_t Tq, Tk;              // of each sequence; packed: of all of them together
  const int32_t *cu_q, *cu_k;  // packed: (B + 1), else null
  int64_t left, right;
  bool top_left;
  double scale;
  DType dtype;

  // Options: off where the pointer is null, the number 0.
  double softcap;
  const void* alibi;  // (B, H) in acc type
  int64_t alibi_b, alibi_h;
  Strided bias;       // (B, Tq, H, Tk), stride 0 where it broadcasts
  const void* sinks;  // (H) in acc type
  bool dropout;
  uint64_t seed, drop;  // a pair is dropped if its 32-bit number is below `drop`
  int64_t first_head;   // by which the random numbers of head 0 go

  void *out, *lse;  // contiguous (B, Tq, H, Dv); (B, H, Tq) in acc type. Packed: B is 1 here

  // Forward only. k and v in acc type with the rows of a head together: as they are, or one compact
  // copy, null if no two tasks use the same keys; copied: what is there of it (flash_attention_fwd.cpp)
  bool keys_in_place;
  void *k_rows, *v_rows;
  int32_t* copied;
  int64_t call;       // number of the call
  int64_t task_rows;  // queries of a task; the kernel chooses

  // Backward only, from here. A gradient that is not needed is null; dq, dk, dv in q's dtype, the
  // others in acc type, all contiguous.
  Strided dout;
  const void* dlse;  // as lse, or null
  void *dq, *dk, *dv, *dalibi, *dbias, *dsinks;
  int64_t bias_sizes[4];  // of the bias: b, h, i, j
  int64_t task_keys;      // keys of a task
  // Workspaces, in acc type but for the last two; rows: all of a head together. kAttentionPad.
  void *q_rows, *dout_rows, *dq_rows;   // (rows, D or Dv padded)
  void *row_max, *row_log_sum, *delta;  // (rows)
  void *dsinks_parts, *dalibi_parts, *dbias_parts;
  int64_t* tickets;     // one for each block of queries of a head
  uint8_t* row_finite;  // the same: bit 0 for q, bit 1 for dout
};

constexpr int64_t kAttentionRows = 64;     // queries of a block of the backward pass
constexpr int64_t kAttentionKeys = 128;    // keys of a block of the backward pass, at most
constexpr int64_t kShortKeys = 256;        // a sequence of so many keys is short
constexpr int64_t kForwardKeys = 128;      // keys of a block of the forward pass
constexpr int64_t kForwardRows = 128;      // queries of a task of the forward pass, at most
constexpr int64_t kForwardLeastRows = 16;  // at least; not less than a panel
constexpr int64_t kAttentionPad = 32;      // channels that rows of workspaces are padded to

}  // namespace tw

TW_BEGIN

TW_HD int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }
TW_HD int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
TW_HD int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
TW_HD int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// One sequence of a call.
struct Sequence {
  int64_t index;
  int64_t batch, q_row, k_row;  // where it begins in q, k, v, dout
  int64_t q_first, k_first;     // and counted over all sequences
  Band band;
};

// Inconsistent cu_seqlens, which the caller may have left unchecked, stay within the tensors.
TW_HD Sequence sequence_of(const FlashAttentionArgs& a, int64_t b) {
  Sequence s{b, b, 0, 0, b * a.Tq, b * a.Tk, {a.Tq, a.Tk, 0, a.left, a.right}};
  if (a.cu_q) {
    s.batch = 0;
    s.q_first = s.q_row = Band::clamp(a.cu_q[b], a.Tq);
    s.k_first = s.k_row = Band::clamp(a.cu_k[b], a.Tk);
    s.band.Tq = Band::clamp(a.cu_q[b + 1] - s.q_row, a.Tq - s.q_row);
    s.band.Tk = Band::clamp(a.cu_k[b + 1] - s.k_row, a.Tk - s.k_row);
  }
  s.band.offset = a.top_left ? 0 : s.band.Tk - s.band.Tq;
  return s;
}

// First number of row 0 of a head in workspaces that hold a number (or so many) per row and head.
TW_HD int64_t head_rows(const FlashAttentionArgs& a, const Sequence& s, int64_t h) {
  return s.q_first * a.H + h * s.band.Tq;
}
// The same in lse.
TW_HD int64_t lse_rows(const FlashAttentionArgs& a, const Sequence& s, int64_t h) {
  return a.cu_q ? h * a.Tq + s.q_first : head_rows(a, s, h);
}

// Blocks of `size` queries (or keys) of all sequences of one head.
TW_HD int64_t count_blocks(const FlashAttentionArgs& a, int64_t size, bool keys) {
  if (!a.cu_q) return a.B * blocks_of(keys ? a.Tk : a.Tq, size);
  int64_t n = 0;
  for (int64_t b = 0; b < a.B; ++b) {
    const Band band = sequence_of(a, b).band;
    n += blocks_of(keys ? band.Tk : band.Tq, size);
  }
  return n;
}

// Products below this many FLOPs are done sooner than a second thread has begun.
constexpr double kForkFlops = 1e6;

// Whether a call is too small for more than one thread. passes: products of (Tq, Tk, D).
TW_HD bool is_small(const FlashAttentionArgs& a, int passes) {
  const double pairs = static_cast<double>(a.H * a.Tq) * static_cast<double>(a.Tk) *
                       static_cast<double>(a.cu_q ? 1 : a.B);
  return pairs * static_cast<double>(a.D + a.Dv) * passes < kForkFlops;
}

// Queries of a task of the forward pass, `least` or more: enough tasks to keep the threads busy to
// the end. No result depends on it.
TW_HD int64_t forward_task_rows(const FlashAttentionArgs& a, int64_t least) {
  int64_t rows = kForwardRows;
  if (is_small(a, 2)) return rows;
  while (rows > least && a.H * count_blocks(a, rows, false) < 4 * num_threads()) rows /= 2;
  return rows;
}

// Keys that one partial sum of dQ runs over, from the length of the sequence alone: its bits are those
// of the sequence by itself.
TW_HD int64_t sum_keys(int64_t Tk) { return Tk <= kShortKeys ? 32 : 64; }

// Keys of a task of the backward pass: large blocks read q and dout less often, small ones give a
// short call of few heads more than one task. Not by the threads: sums that run over blocks have the
// same bits for any number of them.
TW_HD int64_t backward_task_keys(const FlashAttentionArgs& a) {
  if (a.G * count_blocks(a, kAttentionKeys, true) >= 8) return kAttentionKeys;
  return sum_keys(a.cu_k ? kNoLimit : a.Tk);
}

TW_END

TW_DECLARE_KERNEL(flash_attention_fwd, FlashAttentionArgs)
TW_DECLARE_KERNEL(flash_attention_bwd, FlashAttentionArgs)
