// Attention, backward, on the CPU (formulas in trainwright/flash_attention.h). All sums are float
// (double for double).
//
// prepare  one task per block of queries of a head: rows of q (times q_factor: the very numbers of the
//          forward, so that S has its bits) and of dout (times what the sink and dropout leave) are
//          widened and copied together once, delta = dout.out - dlse, what the row's softmax needs.
// main     after them, each as soon as the blocks it needs are there:
//          one task per (block of keys, b, g), keys as lanes: S = Q K', P, dP = dO V', dS, then
//          dV += P' dO, dK += dS' Q, dQ += dS K: five products per pair of blocks. dK and dV belong
//          to the task; dQ is added block by block in key order, which a ticket per block of queries
//          enforces, so the bits are those of one thread.
// bias     only for the gradient of a bias: S, P, dP, dS again, one task per block of the bias, which
//          sums over what broadcasts into it in a fixed order.
// sums     the partial sums of the gradients of alibi_slopes, sinks and a bias without keys.
//
// 2.5 times the FLOPs of the forward. Bound: FMA.
#include "cpu/flash_attention.h"

#ifdef TW_CPU_ISA

#include <sched.h>

#include "cpu/flash_attention_tiles.h"

TW_BEGIN
namespace {

constexpr int64_t BM = kAttentionRows, BN = kAttentionKeys;

template<class A>
struct BackwardTile {
  A *k, *v, *k_t, *v_t;     // (BN, Dp), (BN, Dvp), panels of (D, NR) and (Dv, NR)
  A *dk, *dv;               // (BN, Dp), (BN, Dvp)
  A *s, *ds, *bias, *keep;  // (BM, BN)

  static size_t size(const FlashAttentionArgs& a) {
    const int64_t width = round_up(a.D, NR<A>) + round_up(a.Dv, NR<A>);
    return static_cast<size_t>(3 * BN * width + (has_terms(a) ? 4 : 2) * BM * BN);
  }
  BackwardTile(void* memory, const FlashAttentionArgs& a) {
    const int64_t Dp = round_up(a.D, NR<A>), Dvp = round_up(a.Dv, NR<A>);
    A* next = static_cast<A*>(memory);
    auto take = [&](int64_t n) {
      A* here = next;
      next += n;
      return here;
    };
    k = take(BN * Dp), v = take(BN * Dvp), k_t = take(BN * Dp), v_t = take(BN * Dvp);
    dk = take(BN * Dp), dv = take(BN * Dvp), s = take(BM * BN), ds = take(BM * BN);
    bias = keep = nullptr;
    if (has_terms(a)) bias = take(BM * BN), keep = take(BM * BN);
  }
};

// One block of queries of a head, as `prepare` left it.
template<class A>
struct QueryBlock {
  int64_t i0, rows;
  const A *q, *dout;                   // (rows, Dp), (rows, Dvp)
  const A *row_max, *log_sum, *delta;  // (rows)
  bool q_finite, dout_finite;

  QueryBlock(const FlashAttentionArgs& a, const Sequence& s, int64_t b, int64_t h, int64_t block,
             const BlockTable& table)
      : i0(block * BM), rows(min_of(BM, s.band.Tq - block * BM)) {
    const int64_t row = head_rows(a, s, h) + i0;
    q = static_cast<const A*>(a.q_rows) + row * round_up(a.D, kAttentionPad);
    dout = static_cast<const A*>(a.dout_rows) + row * round_up(a.Dv, kAttentionPad);
    row_max = static_cast<const A*>(a.row_max) + row;
    log_sum = static_cast<const A*>(a.row_log_sum) + row;
    delta = static_cast<const A*>(a.delta) + row;
    const int64_t number = table.number(b, a.H, h, block);
    while (__atomic_load_n(a.tickets + number, __ATOMIC_ACQUIRE) < 0) sched_yield();  // prepared
    const uint8_t finite = a.row_finite[number];
    q_finite = finite & 1, dout_finite = finite & 2;
  }
};

// The rows of C = A B whose K index a mask cuts, element by element: 0 * NaN of a masked-out pair
// must not enter a sum. Only for operands that hold inf or NaN. seen(m, k) tells which terms count.
template<class A, class Seen>
void masked_product(int64_t m0, int64_t m1, int64_t k0, int64_t k1, const A* a, int64_t a_m,
                    int64_t a_k, const A* b, int64_t ldb, int64_t columns, A* c, int64_t ldc,
                    Seen&& seen) {
  for (int64_t m = m0; m < m1; ++m)
    for (int64_t k = k0; k < k1; ++k)
      if (seen(m, k))
        for (int64_t d = 0; d < columns; ++d)
          c[m * ldc + d] += a[m * a_m + k * a_k] * b[k * ldb + d];
}

template<class A, bool TRANSPOSED>
void add_product(int count, int64_t K, const A* a, int64_t lda, const A* b, int64_t ldb, A* c,
                 int64_t ldc, int64_t width) {
  for (int64_t d = 0; d < width; d += NR<A>)
    tile_gemm<A, TRANSPOSED, Start::add>(count, K, a, lda, b + d, ldb, c + d, ldc);
}

// Pairs of one block of keys with blocks of queries.
template<class A, bool TERMS>
struct KeyBlock {
  static constexpr int L = lanes<A>;
  const FlashAttentionArgs& a;
  const Sequence s;
  const int64_t b, g, j0, keys;
  const int64_t Dp = round_up(a.D, NR<A>), Dvp = round_up(a.Dv, NR<A>);  // in tiles
  const int64_t q_ld = round_up(a.D, kAttentionPad), dout_ld = round_up(a.Dv, kAttentionPad);
  const bool need_ds;
  BackwardTile<A> t;
  bool k_finite;

  KeyBlock(const FlashAttentionArgs& args, int64_t batch, int64_t kv_head, int64_t block,
           bool with_ds, void* memory)
      : a(args),
        s(sequence_of(args, batch)),
        b(batch),
        g(kv_head),
        j0(block * args.task_keys),
        keys(min_of(args.task_keys, s.band.Tk - block * args.task_keys)),
        need_ds(with_ds),
        t(memory, args) {
    const int64_t row = s.k_row + j0;
    k_finite = load_rows(t.k, Dp, a.k, a.k.at(s.batch, row, g), keys, a.D);
    load_rows(t.v, Dvp, a.v, a.v.at(s.batch, row, g), keys, a.Dv);
    for (int64_t n = 0; n < keys; n += NR<A>) {
      const int64_t count = min_of(NR<A>, keys - n);
      transpose_to_lanes<A>(t.k_t + n * a.D, NR<A>, t.k + n * Dp, Dp, count, a.D, A(1));
      if (need_ds)
        transpose_to_lanes<A>(t.v_t + n * a.Dv, NR<A>, t.v + n * Dvp, Dvp, count, a.Dv, A(1));
    }
  }

  // P (what of it dropout keeps) and dS of rows [ra, rb) of a block of queries into t.s and t.ds; 0
  // where masked or past the end. `slope` leaves the derivative of softcap in dS, which then is for
  // q and k; without it dS is that of the score. Returns the sum of dS * distance.
  A probabilities(const QueryBlock<A>& x, const Terms<A>& terms, int64_t ra, int64_t rb,
                  bool slope) {
    const Band& band = s.band;
    vec<A> sloped_sum{};
    if constexpr (TERMS) {
      if (terms.biased) terms.load_bias(t.bias + ra * BN, BN, x.i0 + ra, j0, rb - ra, keys);
      if (a.dropout) terms.load_keep(t.keep + ra * BN, BN, x.i0 + ra, j0, rb - ra, keys);
    }
    for (int64_t p = 0; p < keys; p += NR<A>) {
      const int64_t n0 = j0 + p, n1 = min_of(n0 + NR<A>, j0 + keys);
      const int64_t r0 = Band::clamp(band.first_row(n0) - x.i0, rb);
      const int64_t r1 = Band::clamp(band.end_row(n1) - x.i0, rb);
      const int64_t first = max_of(r0, ra), last = max_of(r1, first);
      A *s_p = t.s + p, *ds_p = t.ds + p;
      for_row_tiles(first, last, [&](int64_t m, int count) {
        tile_gemm<A, false, Start::zero>(count, a.D, x.q + m * q_ld, q_ld, t.k_t + p * a.D, NR<A>,
                                         s_p + m * BN, BN);
        if (need_ds)
          tile_gemm<A, false, Start::zero>(count, a.Dv, x.dout + m * dout_ld, dout_ld,
                                           t.v_t + p * a.Dv, NR<A>, ds_p + m * BN, BN);
      });
      const bool masked =
          last > first && (band.begin(x.i0 + last - 1) > n0 || band.end(x.i0 + first) < n0 + NR<A>);
      for (int64_t m = ra; m < rb; ++m) {
        const bool inside = m >= first && m < last;
        const vec<A> low = splat(static_cast<A>(band.begin(x.i0 + m) - n0));
        const vec<A> high = splat(static_cast<A>(inside ? band.end(x.i0 + m) - n0 : 0));
        for (int i = 0; i < 2; ++i) {
          vec<A> e{}, d{};
          if (inside) {
            const vec<A> score = vload<A>(s_p + m * BN + i * L);
            const vec<A> dp = need_ds ? vload<A>(ds_p + m * BN + i * L) : vec<A>{};
            const vec<A> lane = iota<A>() + static_cast<A>(i * L);
            if constexpr (TERMS) {
              Pair pair = with_terms(score, dp, x, terms, m, p + i * L, slope);
              e = pair.p, d = pair.ds;
              if (masked) {
                const auto seen = (lane >= low) & (lane < high);
                e = seen ? e : vec<A>{};
                d = seen ? d : vec<A>{};
                pair.score_ds = seen ? pair.score_ds : vec<A>{};
              }
              if (a.dalibi) {
                const A ahead = static_cast<A>(x.i0 + m + terms.shift - n0);
                sloped_sum += pair.score_ds * Terms<A>::distance(ahead - lane);
              }
            } else {
              e = exp_base(score - x.row_max[m] - x.log_sum[m]);
              d = e * (dp - x.delta[m]);
              if (masked) {
                const auto seen = (lane >= low) & (lane < high);
                e = seen ? e : vec<A>{};
                d = seen ? d : vec<A>{};
              }
            }
          }
          vstore<A>(s_p + m * BN + i * L, e);
          if (need_ds) vstore<A>(ds_p + m * BN + i * L, d);
        }
      }
    }
    return hsum<A>(sloped_sum);
  }

  struct Pair {
    vec<A> p, ds, score_ds;
  };
  // Row m of the block, keys from n on, of which `score` holds q.k * q_factor and dp dout.v.
  Pair with_terms(vec<A> score, vec<A> dp, const QueryBlock<A>& x, const Terms<A>& terms, int64_t m,
                  int64_t n, bool slope) const {
    vec<A> derivative = splat(A(1)), bias{};
    if (terms.capped) {
      const vec<A> capped = vtanh(score);
      derivative -= capped * capped;
      score = capped * terms.cap;
    }
    if (terms.biased) {
      bias = vload<A>(t.bias + m * BN + n);
      score += bias;
    }
    if (terms.sloped) {
      const A ahead = static_cast<A>(x.i0 + m + terms.shift - (j0 + n));
      score -= terms.slope * Terms<A>::distance(ahead - iota<A>());
    }
    vec<A> p = exp_base((score - x.row_max[m]) * kToBase<A> - x.log_sum[m]);
    if (terms.biased) p = bias == splat(A(-INFINITY)) ? vec<A>{} : p;
    const vec<A> keep = a.dropout ? vload<A>(t.keep + m * BN + n) : splat(A(1));
    vec<A> score_ds = p * (keep * dp - x.delta[m]);
    if (terms.biased) score_ds = bias == splat(A(-INFINITY)) ? vec<A>{} : score_ds;
    return {p * keep, slope ? score_ds * derivative : score_ds, score_ds};
  }

  // Rows of a block that see one of the keys: [begin, end).
  struct Rows {
    int64_t begin, end;
  };
  Rows rows_of(const QueryBlock<A>& x) const {
    return {max_of(s.band.first_row(j0) - x.i0, 0),
            min_of(s.band.end_row(j0 + keys) - x.i0, x.rows)};
  }
};

// ---- the main pass

template<class A, bool TERMS>
struct BackwardTask : KeyBlock<A, TERMS> {
  using Base = KeyBlock<A, TERMS>;
  using Base::a, Base::s, Base::b, Base::g, Base::j0, Base::keys, Base::t, Base::Dp, Base::Dvp,
      Base::q_ld, Base::dout_ld;
  const BlockTable& q_table;

  BackwardTask(const FlashAttentionArgs& args, int64_t batch, int64_t kv_head, int64_t block,
               const BlockTable& table, void* memory)
      : Base(args, batch, kv_head, block, args.dq || args.dk || args.dalibi, memory),
        q_table(table) {}

  void run(const BlockTable& k_table) {
    memset(t.dk, 0, static_cast<size_t>(BN * Dp) * sizeof(A));
    memset(t.dv, 0, static_cast<size_t>(BN * Dvp) * sizeof(A));
    const int64_t group = a.H / a.G;
    for (int64_t h = g * group; h < (g + 1) * group; ++h) {
      const Terms<A> terms(a, s.band, b, h);
      A sloped_sum = 0;
      for (int64_t block = q_table.count(b) - 1; block >= 0; --block) {  // last first: see add_dq
        const QueryBlock<A> x(a, s, b, h, block, q_table);
        const auto [ra, rb] = Base::rows_of(x);
        if (ra >= rb) continue;
        sloped_sum += Base::probabilities(x, terms, ra, rb, true);
        const bool masked = TERMS && terms.biased;
        const bool cut =
            masked || s.band.begin(x.i0 + rb - 1) > j0 || s.band.end(x.i0 + ra) < j0 + keys;
        auto seen = [&, i0 = x.i0](int64_t m, int64_t n) {
          return s.band.sees(i0 + m, j0 + n) && !(masked && t.bias[m * BN + n] == A(-INFINITY));
        };
        if (a.dv)
          add_keys(x, ra, rb, t.s, x.dout, dout_ld, t.dv, Dvp, a.Dv, cut && !x.dout_finite, seen);
        if (a.dk) add_keys(x, ra, rb, t.ds, x.q, q_ld, t.dk, Dp, a.D, cut && !x.q_finite, seen);
        if (a.dq) add_dq(x, h, block, ra, rb, cut && !Base::k_finite, seen);
      }
      if (a.dalibi)
        static_cast<A*>(a.dalibi_parts)[k_table.number(b, a.H, h, j0 / a.task_keys)] = -sloped_sum;
    }
    const int64_t first = (s.k_first + j0) * a.G + g;
    if (a.dk) {
      multiply(t.dk, keys * Dp, dk_factor<A>(a));
      store_rows<A>(a.dk, a.dtype, first * a.D, a.G * a.D, t.dk, Dp, keys, a.D);
    }
    if (a.dv) store_rows<A>(a.dv, a.dtype, first * a.Dv, a.G * a.Dv, t.dv, Dvp, keys, a.Dv);
  }

  // to (keys, width) += weights' (rows, keys) rows
  template<class Seen>
  void add_keys(const QueryBlock<A>& x, int64_t ra, int64_t rb, const A* weights, const A* rows,
                int64_t ld, A* to, int64_t width, int64_t columns, bool one_by_one, Seen&& seen) {
    if (one_by_one) {
      masked_product(0, keys, ra, rb, weights, 1, BN, rows, ld, columns, to, width,
                     [&](int64_t n, int64_t m) { return seen(m, n); });
      return;
    }
    for_row_tiles(0, keys, [&](int64_t n, int count) {  // queries that see one of these keys
      const int64_t r0 = max_of(s.band.first_row(j0 + n) - x.i0, ra);
      const int64_t r1 = min_of(s.band.end_row(j0 + n + count) - x.i0, rb);
      if (r0 < r1)
        add_product<A, true>(count, r1 - r0, weights + r0 * BN + n, BN, rows + r0 * ld, ld,
                             to + n * width, width, width);
    });
  }

  // dQ of a block of queries is summed in key order: wait for the block of keys before ours. It is a
  // task that started earlier, and it visits the blocks of queries in the same order.
  template<class Seen>
  void add_dq(const QueryBlock<A>& x, int64_t h, int64_t block, int64_t ra, int64_t rb,
              bool one_by_one, Seen&& seen) {
    const Band& band = s.band;
    const int64_t row = head_rows(a, s, h) + x.i0, step = sum_keys(band.Tk);
    A* dq = static_cast<A*>(a.dq_rows) + row * q_ld;
    int64_t* ticket = a.tickets + q_table.number(b, a.H, h, block);
    const int64_t turn = j0 / a.task_keys - band.begin(x.i0) / a.task_keys;
    while (__atomic_load_n(ticket, __ATOMIC_ACQUIRE) != turn) sched_yield();
    if (turn == 0) memset(dq, 0, static_cast<size_t>(x.rows * q_ld) * sizeof(A));
    if (one_by_one)
      masked_product(ra, rb, 0, keys, t.ds, BN, 1, t.k, Dp, a.D, dq, q_ld, seen);
    else
      for_row_tiles(ra, rb, [&](int64_t m, int count) {
        const int64_t n0 = max_of(band.begin(x.i0 + m) - j0, 0);
        const int64_t n1 = min_of(band.end(x.i0 + m + count - 1) - j0, keys);
        for (int64_t n = n0; n < n1;) {  // in steps that do not depend on the size of the task
          const int64_t end = min_of((n / step + 1) * step, n1);
          add_product<A, false>(count, end - n, t.ds + m * BN + n, BN, t.k + n * Dp, Dp,
                                dq + m * q_ld, q_ld, Dp);
          n = end;
        }
      });
    if (j0 + a.task_keys >= band.end(x.i0 + x.rows - 1)) {
      multiply(dq, x.rows * q_ld, static_cast<A>(a.scale));
      const int64_t first = (s.q_first + x.i0) * a.H + h;
      store_rows<A>(a.dq, a.dtype, first * a.D, a.H * a.D, dq, q_ld, x.rows, a.D);
    }
    __atomic_store_n(ticket, turn + 1, __ATOMIC_RELEASE);
  }
};

// ---- prepare

// exp(s - lse) has the error of rounding lse; the maximum and the sum of the row apart do not. Up to
// here, a millionth of p in fp32, that is not worth the scores of the forward again.
constexpr double kLargeLse = 32;

template<class A>
void prepare(const FlashAttentionArgs& a, int64_t b, int64_t h, int64_t block, int64_t number) {
  const Sequence s = sequence_of(a, b);
  const int64_t i0 = block * BM, rows = min_of(BM, s.band.Tq - i0);
  const int64_t at = head_rows(a, s, h) + i0, lse_at = lse_rows(a, s, h) + i0;
  const int64_t q_ld = round_up(a.D, kAttentionPad), dout_ld = round_up(a.Dv, kAttentionPad);
  A* q = static_cast<A*>(a.q_rows) + at * q_ld;
  A* dout = static_cast<A*>(a.dout_rows) + at * dout_ld;
  A* row_max = static_cast<A*>(a.row_max) + at;
  A* log_sum = static_cast<A*>(a.row_log_sum) + at;
  const A* lse = static_cast<const A*>(a.lse) + lse_at;
  const A* dlse = a.dlse ? static_cast<const A*>(a.dlse) + lse_at : nullptr;

  bool q_finite = load_rows(q, q_ld, a.q, a.q.at(s.batch, s.q_row + i0, h), rows, a.D);
  multiply(q, rows * q_ld, q_factor<A>(a));
  bool dout_finite =
      load_rows(dout, dout_ld, a.dout, a.dout.at(s.batch, s.q_row + i0, h), rows, a.Dv);
  const A kept = keep_factor<A>(a);
  A dsink = 0;
  bool large = false;
  const double base = kToBase<double, A>;
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (sizeof(acc_t<T>) == sizeof(A)) {
      const T* out = static_cast<const T*>(a.out) + ((s.q_first + i0) * a.H + h) * a.Dv;
      for (int64_t i = 0; i < rows; ++i) {
        A* g = dout + i * dout_ld;
        A* delta = static_cast<A*>(a.delta) + at + i;
        if (lse[i] == A(-INFINITY)) {  // no key: nothing came from there, so nothing goes back
          memset(g, 0, static_cast<size_t>(a.Dv) * sizeof(A));
          *delta = A(0), row_max[i] = A(INFINITY), log_sum[i] = A(0);
          continue;
        }
        vec<A> sum{};
        for_lanes<A>(a.Dv, [&](int64_t d, auto n) {
          sum += vload<A>(g + d, n) * vload<A>(out + i * a.H * a.Dv + d, n);
        });
        const A share = sink_share(a, h, lse[i]), whole = hsum<A>(sum);
        *delta = share * whole - (dlse ? dlse[i] : A(0));
        dsink -= (A(1) - share) * whole;
        if (share * kept != A(1)) multiply(g, a.Dv, share * kept);
        dout_finite = dout_finite && isfinite(share);  // NaN with lse or the sink
        // In two parts: one rounding of a large lse would be an error of every p of the row.
        const double exact = static_cast<double>(lse[i]) * (has_terms(a) ? 1.0 : base);
        row_max[i] = static_cast<A>(exact);
        log_sum[i] = isfinite(lse[i]) ? static_cast<A>(exact - row_max[i]) : A(0);
        large = large || (isfinite(lse[i]) && fabs(lse[i]) > kLargeLse);
      }
    }
  });
  if (large) {
    A fresh_max[BM], fresh_sum[BM];
    flash_attention_row_sums(a, b, h, i0, rows, fresh_max, fresh_sum);
    for (int64_t i = 0; i < rows; ++i)
      if (isfinite(lse[i])) row_max[i] = fresh_max[i], log_sum[i] = fresh_sum[i];
  }
  a.row_finite[number] = static_cast<uint8_t>(q_finite | dout_finite << 1);
  if (a.dsinks) static_cast<A*>(a.dsinks_parts)[number] = dsink;
  if (a.dq && s.band.begin(i0) >= s.band.end(i0 + rows - 1))
    for (int64_t i = i0; i < i0 + rows; ++i)
      memset(static_cast<char*>(a.dq) + ((s.q_first + i) * a.H + h) * a.D * dtype_bytes(a.dtype), 0,
             static_cast<size_t>(a.D * dtype_bytes(a.dtype)));
}

// ---- the gradient of a bias

// The task of (x, y, z): bias element (x, y) of batch and head, block z of its keys, or of queries if
// it has one column. Sums over all it is broadcast to: batches, heads, blocks of the other side.
template<class A>
void bias_task(const FlashAttentionArgs& a, const BlockTable& q_table, int64_t x, int64_t y,
               int64_t z, void* memory) {
  const auto [bb, bh, bi, bj] = a.bias_sizes;
  const bool by_key = bj > 1;
  const int64_t q_blocks = blocks_of(a.Tq, BM), k_blocks = blocks_of(a.Tk, a.task_keys);
  A* parts = static_cast<A*>(bi == 1 && bj == 1 ? a.dbias_parts : a.dbias);
  parts += (x * bh + y) * (bi == 1 && bj == 1 ? q_blocks : bi * bj);
  const int64_t group = a.H / a.G;
  for (int64_t b = bb == 1 ? 0 : x; b < (bb == 1 ? a.B : x + 1); ++b)
    for (int64_t h = bh == 1 ? 0 : y; h < (bh == 1 ? a.H : y + 1); ++h)
      for (int64_t kb = by_key ? z : 0; kb < (by_key ? z + 1 : k_blocks); ++kb) {
        KeyBlock<A, true> block(a, b, h / group, kb, true, memory);
        const Terms<A> terms(a, block.s.band, b, h);
        for (int64_t qb = by_key ? 0 : z; qb < (by_key ? q_blocks : z + 1); ++qb) {
          const QueryBlock<A> rows(a, block.s, b, h, qb, q_table);
          const auto [ra, rb] = block.rows_of(rows);
          if (ra >= rb) continue;
          block.probabilities(rows, terms, ra, rb, false);
          for (int64_t m = ra; m < rb; ++m) {
            const A* ds = block.t.ds + m * BN;
            const int64_t i = bi == 1 ? 0 : rows.i0 + m;
            if (by_key) {
              A* to = parts + i * bj + block.j0;
              for (int64_t n = 0; n < block.keys; ++n) to[n] += ds[n];
            } else {
              A sum = 0;
              for (int64_t n = 0; n < block.keys; ++n) sum += ds[n];
              parts[bi == 1 ? z : i] += sum;
            }
          }
        }
      }
}

template<class A>
void bias_gradient(const FlashAttentionArgs& a, const BlockTable& q_table) {
  const auto [bb, bh, bi, bj] = a.bias_sizes;
  const int64_t q_blocks = blocks_of(a.Tq, BM), k_blocks = blocks_of(a.Tk, a.task_keys);
  const int64_t blocks = bj > 1 ? k_blocks : q_blocks;
  const int64_t size = bb * bh * bi * bj;
  A* dbias = static_cast<A*>(a.dbias);
  memset(dbias, 0, static_cast<size_t>(size) * sizeof(A));
  const bool parted = bi == 1 && bj == 1;
  A* parts = static_cast<A*>(a.dbias_parts);
  if (parted) memset(parts, 0, static_cast<size_t>(size * q_blocks) * sizeof(A));
  const size_t bytes = BackwardTile<A>::size(a) * sizeof(A);
  parallel_dynamic(bb * bh * blocks, [&](int64_t task) {
    const int64_t xy = task / blocks;
    bias_task<A>(a, q_table, xy / bh, xy % bh, task % blocks,
                 scratch(Scratch::attention_task, bytes));
  });
  if (parted)
    for (int64_t x = 0; x < size; ++x)
      for (int64_t block = 0; block < q_blocks; ++block) dbias[x] += parts[x * q_blocks + block];
}

// ---- the whole

// Rows of packed tensors that belong to no sequence.
void clear_outside(void* grad, const FlashAttentionArgs& a, const int32_t* cu, int64_t rows,
                   int64_t width) {
  if (!grad) return;
  const int64_t bytes = width * dtype_bytes(a.dtype);
  const int64_t begin = Band::clamp(cu[0], rows), end = Band::clamp(cu[a.B], rows);
  memset(grad, 0, static_cast<size_t>(begin * bytes));
  memset(static_cast<char*>(grad) + end * bytes, 0, static_cast<size_t>((rows - end) * bytes));
}

// Blocks of keys in the order of their tasks. Heads take turns, as many as keep every thread on one
// of its own: two threads on one head would wait for each other's part of dQ; with many more heads
// at a time q and dout would leave the cache between two blocks of keys.
struct KeyTask {
  int64_t unit, block;  // unit: b * G + g
};
int64_t list_key_tasks(const FlashAttentionArgs& a, const BlockTable& table, KeyTask* list) {
  const int64_t units = a.B * a.G, at_once = 2 * num_threads();
  int64_t count = 0;
  for (int64_t first = 0; first < units; first += at_once) {
    const int64_t end = min_of(first + at_once, units);
    bool any = true;
    for (int64_t block = 0; any; ++block) {
      any = false;
      for (int64_t unit = first; unit < end; ++unit)
        if (block < table.count(unit / a.G)) list[count++] = {unit, block}, any = true;
    }
  }
  return count;
}

template<class A, bool TERMS>
void backward(const FlashAttentionArgs& a) {
  const int64_t key_tasks = count_blocks(a, a.task_keys, true) * a.G;
  auto* memory = static_cast<int64_t*>(
      scratch(Scratch::attention_tables,
              static_cast<size_t>(2 * (a.B + 1) + 2 * key_tasks) * sizeof(int64_t)));
  const BlockTable q_table(a, BM, false, memory), k_table(a, a.task_keys, true, memory + a.B + 1);
  const int64_t blocks = q_table.total() * a.H;
  memset(a.tickets, -1, static_cast<size_t>(blocks) * sizeof(int64_t));
  const size_t bytes = BackwardTile<A>::size(a) * sizeof(A);
  auto* list = reinterpret_cast<KeyTask*>(memory + 2 * (a.B + 1));
  list_key_tasks(a, k_table, list);
  const bool main = a.dq || a.dk || a.dv || a.dalibi;
  parallel_unless(is_small(a, 5), blocks + (main ? key_tasks : 0), [&](int64_t task) {
    if (task < blocks) {
      const auto [b, h, block] = q_table.place(task, a.H);
      prepare<A>(a, b, h, block, task);
      __atomic_store_n(a.tickets + task, int64_t(0), __ATOMIC_RELEASE);
      return;
    }
    const auto [unit, block] = list[task - blocks];
    BackwardTask<A, TERMS> t(a, unit / a.G, unit % a.G, block, q_table,
                             scratch(Scratch::attention_task, bytes));
    t.run(k_table);
  });
  if constexpr (TERMS)
    if (a.dbias) bias_gradient<A>(a, q_table);
  if (a.dalibi)
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t h = 0; h < a.H; ++h) {
        A sum = 0;
        for (int64_t block = 0; block < k_table.count(b); ++block)
          sum += static_cast<const A*>(a.dalibi_parts)[k_table.number(b, a.H, h, block)];
        static_cast<A*>(a.dalibi)[b * a.H + h] = sum;
      }
  if (a.dsinks)
    for (int64_t h = 0; h < a.H; ++h) {
      A sum = 0;
      for (int64_t b = 0; b < a.B; ++b)
        for (int64_t block = 0; block < q_table.count(b); ++block)
          sum += static_cast<const A*>(a.dsinks_parts)[q_table.number(b, a.H, h, block)];
      static_cast<A*>(a.dsinks)[h] = sum;
    }
  if (a.cu_q) {
    clear_outside(a.dq, a, a.cu_q, a.Tq, a.H * a.D);
    clear_outside(a.dk, a, a.cu_k, a.Tk, a.G * a.D);
    clear_outside(a.dv, a, a.cu_k, a.Tk, a.G * a.Dv);
  }
}

}  // namespace

void flash_attention_bwd(const FlashAttentionArgs& a) {
  with_variant(a,
               [&](auto tag, auto terms) { backward<decltype(tag), decltype(terms)::value>(a); });
}

TW_END

#endif
