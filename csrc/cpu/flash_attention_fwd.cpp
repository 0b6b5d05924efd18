// Attention, forward, on the CPU, without the (Tq, Tk) matrix. Any strides; 16-bit inputs are widened
// when rows are copied, all sums are float (double for double).
//
// A task is up to kForwardRows queries of one head. Queries are lanes: a panel holds NR of them,
// transposed once, so that the softmax of NR queries runs without horizontal operations and K and V
// are read as they lie. Per block of kForwardKeys keys and panel:  S' = K Q' (keys x lanes), online
// softmax, O' = O' * alpha + V' P'. A panel only visits keys that one of its lanes can see, so causal
// does half the work to within a panel, and a window costs Tq times its width.
//
// K and V are read in place if their rows lie together in the accumulator's type. Else they are
// copied to such rows once for all tasks (in (B, T, H, D) rows are H D apart, which the caches' sets
// do not take well): tasks too, before the others, which wait for the keys they need. A single block
// each thread copies for itself, rather than fetch it from another core. The tasks of a head follow
// each other, longest first. Every sum of a query runs over the same keys in the same order wherever blocks and threads
// begin: blocks of keys are counted from key 0 and panels from query 0.
//
// The options that change a score (softcap, bias, alibi, dropout) are one more pass over S', compiled
// apart: TERMS.
//
// 2 Tq Tk (D + Dv) FLOPs per head, half if causal. Bound: FMA.
#include "cpu/flash_attention.h"

#ifdef TW_CPU_ISA

#include <sched.h>

#include "cpu/flash_attention_tiles.h"

TW_BEGIN
namespace {

constexpr int64_t BN = kForwardKeys;
constexpr int64_t kCopyKeys = 32;  // keys of a task that copies: a short call has several
constexpr int32_t kOdd = 1 << 16;  // beside the number of copies made of a block: V is not finite

template<class A>
struct ForwardTile {
  A *q_t, *o_t;    // panels of (D, NR) and (Dv, NR)
  A *s, *m, *l;    // (BN, NR); (rows): running maximum and sum
  A* lines;        // (NR, the widest of D, Dv, BN): rows on their way
  A *k, *v;        // (BN, D), (BN, Dv), unless all tasks share a copy
  A *bias, *keep;  // (BN, NR)

  static int64_t line(const FlashAttentionArgs& a) {
    return round_up(max_of(max_of(a.D, a.Dv), BN), NR<A>);
  }
  static size_t size(const FlashAttentionArgs& a) {
    const int64_t keys = a.k_rows || a.keys_in_place ? 0 : BN * (a.D + a.Dv),
                  terms = has_terms(a) ? 2 * BN * NR<A> : 0;
    return static_cast<size_t>(a.task_rows * (a.D + a.Dv + 2) + BN * NR<A> + NR<A> * line(a) +
                               keys + terms);
  }
  ForwardTile(void* memory, const FlashAttentionArgs& a) {
    q_t = static_cast<A*>(memory);
    o_t = q_t + a.task_rows * a.D;
    s = o_t + a.task_rows * a.Dv;
    m = s + BN * NR<A>;
    l = m + a.task_rows;
    lines = l + a.task_rows;
    bias = lines + NR<A> * line(a);
    keep = bias + (has_terms(a) ? BN * NR<A> : 0);
    k = keep + (has_terms(a) ? BN * NR<A> : 0);
    v = k + BN * a.D;
  }
};

// Lane i of a panel of queries may use rows [low[i], high[i]) of a tile of keys.
template<class A>
struct LaneRange {
  A low[NR<A>], high[NR<A>];

  LaneRange(const Band& band, int64_t query, int64_t key, int64_t keys) {
    for (int i = 0; i < NR<A>; ++i) {
      low[i] = static_cast<A>(Band::clamp(band.begin(query + i) - key, keys));
      high[i] = static_cast<A>(Band::clamp(band.end(query + i) - key, keys));
    }
  }
  // i: which half of the lanes
  vec<A> select(int64_t n, int i, vec<A> x, vec<A> otherwise) const {
    const vec<A> at = splat(static_cast<A>(n));
    const auto seen = (at >= vload<A>(low + i * lanes<A>)) & (at < vload<A>(high + i * lanes<A>));
    return seen ? x : otherwise;
  }
};

template<class A>
void top_of_lanes(const A* s, int64_t keys, A* top) {
  constexpr int L = lanes<A>;
  vec<A> most[2] = {vload<A>(top), vload<A>(top + L)};
  for (int64_t n = 0; n < keys; ++n)
    for (int i = 0; i < 2; ++i) most[i] = max_number<A>(vload<A>(s + n * NR<A> + i * L), most[i]);
  for (int i = 0; i < 2; ++i) vstore<A>(top + i * L, most[i]);
}

// s (keys x lanes) becomes p = exp(s - top); the running maximum m becomes `top`, the running sum l
// of the lanes is brought up to date, and alpha is the factor for what was summed before.
template<class A, bool TERMS>
void online_softmax(A* s, int64_t keys, const A* top, A* m, A* l, A* alpha) {
  constexpr int L = lanes<A>;
  const A to_base = TERMS ? kToBase<A> : A(1);  // after the subtraction: finfo.min stays finite
  vec<A> base[2], sum[2];
  for (int i = 0; i < 2; ++i) {
    const vec<A> most = vload<A>(top + i * L);
    base[i] = most == splat(A(-INFINITY)) ? vec<A>{} : most;  // nothing seen yet: p = 0, not NaN
    const vec<A> f = exp_base((vload<A>(m + i * L) - base[i]) * to_base);
    vstore<A>(alpha + i * L, f);
    vstore<A>(m + i * L, most);
    sum[i] = vload<A>(l + i * L) * f;
  }
  vec<A> part[2] = {};
  for (int64_t n = 0; n < keys; ++n)
    for (int i = 0; i < 2; ++i) {
      A* p = s + n * NR<A> + i * L;
      vec<A> x = vload<A>(p) - base[i];
      if constexpr (TERMS) x *= to_base;
      const vec<A> e = exp_base(x);
      vstore<A>(p, e);
      part[i] += e;
    }
  for (int i = 0; i < 2; ++i) vstore<A>(l + i * L, sum[i] + part[i]);
}

// The block of keys in this thread's tile, which often is that of its next task too.
struct Loaded {
  int64_t call, block;  // the call's number, from 1
  bool v_finite;
};
thread_local Loaded loaded{};
int64_t calls = 0;

template<class A, bool TERMS>
struct ForwardTask {
  static constexpr int L = lanes<A>;
  const FlashAttentionArgs& a;
  const Sequence s;
  const int64_t h, g, i0, rows, panels;
  const Terms<A> terms;
  ForwardTile<A> t;
  bool started[kForwardRows / 4] = {};  // panels have 4 queries at least

  ForwardTask(const FlashAttentionArgs& args, int64_t b, int64_t head, int64_t first, int64_t count,
              void* memory)
      : a(args),
        s(sequence_of(args, b)),
        h(head),
        g(head / (args.H / args.G)),
        i0(first),
        rows(count),
        panels(blocks_of(count, NR<A>)),
        terms(args, s.band, b, head),
        t(memory, args) {}

  void load_queries() {
    const A factor = q_factor<A>(a);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = p * NR<A>, count = min_of(NR<A>, rows - first);
      load_rows(t.lines, a.D, a.q, a.q.at(s.batch, s.q_row + i0 + first, h), count, a.D);
      transpose_to_lanes<A>(t.q_t + first * a.D, NR<A>, t.lines, a.D, count, a.D, factor);
    }
    for (int64_t i = 0; i < panels * NR<A>; ++i) t.m[i] = A(-INFINITY), t.l[i] = A(0);
  }

  // Rows of K and V, D and Dv apart, and whether V is finite, if some query does not see all of them.
  struct Keys {
    const A *k, *v;
    bool v_finite;
  };
  Keys keys_of(const BlockTable* table, int64_t j0, int64_t j1, bool statistics) {
    if (a.keys_in_place) {
      const Band& band = s.band;
      const A* v = static_cast<const A*>(a.v.at(s.batch, s.k_row + j0, g));
      const bool cut = terms.biased || band.begin(i0 + rows - 1) > j0 || band.end(i0) < j1;
      return {static_cast<const A*>(a.k.at(s.batch, s.k_row + j0, g)), v,
              !cut || statistics || all_finite(v, (j1 - j0) * a.Dv)};
    }
    if (a.k_rows && !statistics) {
      const int64_t row = s.k_first * a.G + g * s.band.Tk + j0;
      const int32_t* state = a.copied + table->number(s.index, a.G, g, j0 / BN);
      const int64_t whole = min_of(j0 + BN, s.band.Tk) - j0;
      int32_t copies;
      while ((copies = __atomic_load_n(state, __ATOMIC_ACQUIRE)) % kOdd !=
             blocks_of(whole, kCopyKeys))
        sched_yield();
      return {static_cast<const A*>(a.k_rows) + row * a.D,
              static_cast<const A*>(a.v_rows) + row * a.Dv, copies < kOdd};
    }
    if (statistics) {
      load_rows(t.k, a.D, a.k, a.k.at(s.batch, s.k_row + j0, g), j1 - j0, a.D);
      return {t.k, nullptr, true};
    }
    const int64_t block = table->number(s.index, a.G, g, j0 / BN);
    if (loaded.call != a.call || loaded.block != block) {
      const int64_t keys = min_of(j0 + BN, s.band.Tk) - j0;
      load_rows(t.k, a.D, a.k, a.k.at(s.batch, s.k_row + j0, g), keys, a.D);
      const bool finite = load_rows(t.v, a.Dv, a.v, a.v.at(s.batch, s.k_row + j0, g), keys, a.Dv);
      loaded = {a.call, block, finite};
    }
    return {t.k, t.v, loaded.v_finite};
  }

  // All blocks of keys that a query of the task sees. statistics: only m and l, not O.
  void run(const BlockTable* table, bool statistics) {
    load_queries();
    const Band& band = s.band;
    const int64_t keys_end = band.end(i0 + rows - 1);
    for (int64_t j0 = band.begin(i0) / BN * BN; j0 < keys_end; j0 += BN) {
      const int64_t j1 = min_of(j0 + BN, keys_end);
      const auto [k, v, v_finite] = keys_of(table, j0, j1, statistics);
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t q0 = i0 + p * NR<A>, q1 = min_of(q0 + NR<A>, i0 + rows) - 1;
        const int64_t n0 = max_of(band.begin(q0), j0), n1 = min_of(band.end(q1), j1);
        if (n0 >= n1) continue;
        visit(p, q0, q1, n0, n1 - n0, k + (n0 - j0) * a.D, v + (n0 - j0) * a.Dv, v_finite,
              statistics);
      }
    }
  }

  // Panel p, queries q0 ... q1, and the keys from n0 on.
  void visit(int64_t p, int64_t q0, int64_t q1, int64_t n0, int64_t keys, const A* k, const A* v,
             bool v_finite, bool statistics) {
    A top[NR<A>], alpha[NR<A>];
    A *m = t.m + p * NR<A>, *l = t.l + p * NR<A>, *o_t = t.o_t + p * NR<A> * a.Dv;
    memcpy(top, m, sizeof top);
    const bool masked = s.band.begin(q1) > n0 || s.band.end(q0) < n0 + keys,
               later = masked || TERMS;
    const A* q_t = t.q_t + p * NR<A> * a.D;
    for_row_tiles(0, keys, [&](int64_t n, int count) {
      tile_gemm<A, false, Start::zero>(count, a.D, k + n * a.D, a.D, q_t, NR<A>, t.s + n * NR<A>,
                                       NR<A>, nullptr, later ? nullptr : top);
    });
    const LaneRange<A> range(s.band, q0, n0, masked ? keys : 0);
    if constexpr (TERMS) apply_terms(q0, q1, n0, keys);
    if (masked)
      for (int64_t n = 0; n < keys; ++n)
        for (int i = 0; i < 2; ++i) {
          A* x = t.s + n * NR<A> + i * L;
          vstore<A>(x, range.select(n, i, vload<A>(x), splat(A(-INFINITY))));
        }
    if (later) top_of_lanes(t.s, keys, top);
    online_softmax<A, TERMS>(t.s, keys, top, m, l, alpha);
    if (statistics) return;
    if constexpr (TERMS)
      if (a.dropout)
        for (int64_t n = 0; n < keys * NR<A>; n += L)
          vstore<A>(t.s + n, vload<A>(t.s + n) * vload<A>(t.keep + n));

    const bool first = !started[p];
    started[p] = true;
    if (v_finite || !(masked || terms.biased))
      for_row_tiles(0, a.Dv, [&](int64_t d, int count) {
        if (first)
          tile_gemm<A, true, Start::zero>(count, keys, v + d, a.Dv, t.s, NR<A>, o_t + d * NR<A>,
                                          NR<A>);
        else
          tile_gemm<A, true, Start::scale>(count, keys, v + d, a.Dv, t.s, NR<A>, o_t + d * NR<A>,
                                           NR<A>, alpha);
      });
    else
      add_seen(keys, v, o_t, first ? nullptr : alpha, masked ? &range : nullptr);
  }

  // The scores of q_t and k become those of the options; bias -inf masks a pair whatever its score.
  void apply_terms(int64_t q0, int64_t q1, int64_t n0, int64_t keys) {
    const int64_t count = q1 - q0 + 1;
    if (terms.biased) {
      terms.load_bias(t.lines, BN, q0, n0, count, keys);
      transpose_to_lanes<A>(t.bias, NR<A>, t.lines, BN, count, keys, A(1));
    }
    if (a.dropout) {
      terms.load_keep(t.lines, BN, q0, n0, count, keys);
      transpose_to_lanes<A>(t.keep, NR<A>, t.lines, BN, count, keys, A(1));
    }
    for (int i = 0; i < 2; ++i) {
      const vec<A> ahead = iota<A>() + static_cast<A>(q0 + i * L + terms.shift - n0);
      for (int64_t n = 0; n < keys; ++n) {
        A* s_n = t.s + n * NR<A> + i * L;
        vec<A> x = vload<A>(s_n);
        if (terms.capped) x = vtanh(x) * terms.cap;
        vec<A> bias{};
        if (terms.biased) {
          bias = vload<A>(t.bias + n * NR<A> + i * L);
          x += bias;
        }
        if (terms.sloped) x -= terms.slope * Terms<A>::distance(ahead - static_cast<A>(n));
        if (terms.biased) x = bias == splat(A(-INFINITY)) ? bias : x;
        vstore<A>(s_n, x);
      }
    }
  }

  // O' = O' * alpha + V' P' over the pairs that are seen: 0 * inf and 0 * NaN must not reach the
  // queries that do not see a key.
  void add_seen(int64_t keys, const A* v, A* o_t, const A* alpha, const LaneRange<A>* range) {
    for (int64_t d = 0; d < a.Dv; ++d)
      for (int i = 0; i < 2; ++i) {
        A* o = o_t + d * NR<A> + i * L;
        vec<A> sum = alpha ? vload<A>(o) * vload<A>(alpha + i * L) : vec<A>{};
        for (int64_t n = 0; n < keys; ++n) {
          vec<A> x = v[n * a.Dv + d] * vload<A>(t.s + n * NR<A> + i * L);
          if (range) x = range->select(n, i, x, vec<A>{});
          if (terms.biased)
            x = vload<A>(t.bias + n * NR<A> + i * L) == splat(A(-INFINITY)) ? vec<A>{} : x;
          sum += x;
        }
        vstore<A>(o, sum);
      }
  }

  void store() {
    A* lse = static_cast<A*>(a.lse) + lse_rows(a, s, h) + i0;
    const A kept = keep_factor<A>(a);
    const int64_t ld = ForwardTile<A>::line(a);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = p * NR<A>, count = min_of(NR<A>, rows - first);
      transpose_to_lanes<A>(t.lines, ld, t.o_t + first * a.Dv, NR<A>, a.Dv, count, A(1));
      for (int64_t r = 0; r < count; ++r) {
        const A sum = t.l[first + r];
        A* o = t.lines + r * ld;
        if (sum == A(0)) {  // not NaN: a NaN score is a key too
          lse[first + r] = A(-INFINITY);
          memset(o, 0, static_cast<size_t>(a.Dv) * sizeof(A));
          continue;
        }
        const double natural = TERMS ? kToBase<double, A> : 1.0, base = kToBase<double, A>;
        lse[first + r] =
            static_cast<A>((static_cast<double>(t.m[first + r]) * natural + log_base(sum)) / base);
        multiply(o, a.Dv, kept * sink_share(a, h, lse[first + r]) / sum);
      }
      const int64_t row = s.q_first + i0 + first;
      store_rows<A>(a.out, a.dtype, (row * a.H + h) * a.Dv, a.H * a.Dv, t.lines, ld, count, a.Dv);
    }
  }
};

// One compact copy of K and V: piece `piece` of the keys of (b, g).
template<class A>
void copy_keys(const FlashAttentionArgs& a, const BlockTable& pieces, const BlockTable& blocks,
               int64_t task) {
  const auto [b, g, piece] = pieces.place(task, a.G);
  const Sequence s = sequence_of(a, b);
  const int64_t j = piece * kCopyKeys, keys = min_of(kCopyKeys, s.band.Tk - j);
  const int64_t row = s.k_first * a.G + g * s.band.Tk + j;
  load_rows(static_cast<A*>(a.k_rows) + row * a.D, a.D, a.k, a.k.at(s.batch, s.k_row + j, g), keys,
            a.D);
  const bool finite = load_rows(static_cast<A*>(a.v_rows) + row * a.Dv, a.Dv, a.v,
                                a.v.at(s.batch, s.k_row + j, g), keys, a.Dv);
  __atomic_fetch_add(a.copied + blocks.number(b, a.G, g, j / BN), finite ? 1 : 1 + kOdd,
                     __ATOMIC_RELEASE);
}

// Queries of packed tensors that belong to no sequence.
void clear_outside(const FlashAttentionArgs& a) {
  const bool wide = a.dtype == DType::f64;
  const int64_t row_bytes = a.H * a.Dv * dtype_bytes(a.dtype);
  auto clear = [&](int64_t begin, int64_t end) {
    if (begin >= end) return;
    memset(static_cast<char*>(a.out) + begin * row_bytes, 0,
           static_cast<size_t>((end - begin) * row_bytes));
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t i = h * a.Tq + begin; i < h * a.Tq + end; ++i)
        if (wide)
          static_cast<double*>(a.lse)[i] = -INFINITY;
        else
          static_cast<float*>(a.lse)[i] = -INFINITY;
  };
  clear(0, Band::clamp(a.cu_q[0], a.Tq));
  clear(Band::clamp(a.cu_q[a.B], a.Tq), a.Tq);
}

template<class A, bool TERMS>
void forward(const FlashAttentionArgs& args) {
  FlashAttentionArgs a = args;
  a.task_rows = forward_task_rows(a, max_of(kForwardLeastRows, NR<A>));
  const int64_t blocks = a.k_rows ? count_blocks(a, BN, true) * a.G : 0;
  auto* memory = static_cast<int64_t*>(
      scratch(Scratch::attention_tables,
              static_cast<size_t>(3 * (a.B + 1) + (blocks + 1) / 2) * sizeof(int64_t)));
  const BlockTable q_table(a, a.task_rows, false, memory);
  const BlockTable k_table(a, BN, true, memory + a.B + 1);
  const BlockTable pieces(a, kCopyKeys, true, memory + 2 * (a.B + 1));
  a.copied = reinterpret_cast<int32_t*>(memory + 3 * (a.B + 1));
  memset(a.copied, 0, static_cast<size_t>(blocks) * sizeof(int32_t));
  const int64_t copies = a.k_rows ? pieces.total() * a.G : 0;
  a.call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
  const size_t bytes = ForwardTile<A>::size(a) * sizeof(A);
  parallel_unless(is_small(a, 2), copies + q_table.total() * a.H, [&](int64_t task) {
    if (task < copies) return copy_keys<A>(a, pieces, k_table, task);
    const auto [b, h, block] = q_table.place(task - copies, a.H);
    // The last block of queries first: under a causal mask it has the most work.
    const int64_t first = (q_table.count(b) - 1 - block) * a.task_rows;
    const int64_t rows = min_of(a.task_rows, sequence_of(a, b).band.Tq - first);
    ForwardTask<A, TERMS> t(a, b, h, first, rows, scratch(Scratch::attention_task, bytes));
    t.run(&k_table, false);
    t.store();
  });
  if (a.cu_q) clear_outside(a);
}

template<class A, bool TERMS>
void row_sums(const FlashAttentionArgs& args, int64_t b, int64_t h, int64_t i0, int64_t rows,
              A* max, A* log_sum) {
  FlashAttentionArgs a = args;
  a.k_rows = nullptr, a.task_rows = round_up(rows, NR<A>);
  const size_t bytes = ForwardTile<A>::size(a) * sizeof(A);
  ForwardTask<A, TERMS> t(a, b, h, i0, rows, scratch(Scratch::attention_task, bytes));
  t.run(nullptr, true);
  for (int64_t r = 0; r < rows; ++r) max[r] = t.t.m[r], log_sum[r] = log_base(t.t.l[r]);
}

}  // namespace

void flash_attention_fwd(const FlashAttentionArgs& a) {
  with_variant(a, [&](auto tag, auto terms) { forward<decltype(tag), decltype(terms)::value>(a); });
}

void flash_attention_row_sums(const FlashAttentionArgs& a, int64_t b, int64_t h, int64_t i0,
                              int64_t rows, void* max, void* log_sum) {
  with_variant(a, [&](auto tag, auto terms) {
    using A = decltype(tag);
    row_sums<A, decltype(terms)::value>(a, b, h, i0, rows, static_cast<A*>(max),
                                        static_cast<A*>(log_sum));
  });
}

TW_END

#endif
