// Attention on the CPU without the (Tq, Tk) matrix (formulas in trainwright/flash_attention.h). Any
// strides; 16-bit inputs are widened when a block is copied into a tile, all sums are float (double
// for double).
//
// forward   one task per (b, h, block of BM queries). Queries are lanes: a panel holds NR of them,
//           transposed once, so that the softmax of NR queries runs without horizontal operations
//           and K and V are read as they lie. Per key block and panel:  S' = K Q' (keys x lanes),
//           online softmax in base 2, O' = O' * alpha + V' P'. The scale and log2(e) are folded
//           into Q'.
// backward  one task per (block of BN keys, b, g), keys as lanes: S = Q K', P, dP = dO V', dS, then
//           dV += P' dO, dK += dS' Q, dQ += dS K: five products per pair of blocks. dK and dV
//           belong to the task; dQ is added block by block in key order, which a ticket per block
//           of queries enforces, so the bits are those of one thread. The scale is folded into V'
//           and delta.
// A panel only visits the keys (queries) that one of its lanes can see, so causal does half the
// work to within a panel.
//
// FLOPs: forward 2 Tq Tk (D + Dv) per head, backward 2.5 times that, halved if causal. Bound: FMA.
#include "trainwright/flash_attention.h"

#include "cpu/kernel.h"

namespace tw {

// A (B, T, heads, channels) tensor of any strides.
struct Strided {
  const void* data;
  int64_t batch, row, head, element;
};

struct FlashAttentionArgs {
  Strided q, k, v;
  void *out, *lse;     // (B, Tq, H, Dv); (B, H, Tq) in acc type
  Strided dout;        // backward only, from here
  const void* dlse;    // (B, H, Tq) in acc type, or null
  void *dq, *dk, *dv;  // contiguous; null if not needed
  void *delta, *dq_sum,
      *tickets;  // (B, H, Tq) acc; (B, H, blocks, BM, Dp) acc; int64 (B, H, blocks)
  int64_t B, Tq, Tk, H, G, D, Dv, offset, left, right;
  double scale;
  DType dtype;
};

constexpr int64_t kAttentionBM = 64, kAttentionBN = 64;  // queries and keys per block
constexpr int64_t kAttentionPad = 32;  // lanes that rows of dq_sum are padded to: NR of AVX-512

}  // namespace tw

TW_DECLARE_KERNEL(flash_attention_fwd, FlashAttentionArgs)
TW_DECLARE_KERNEL(flash_attention_bwd, FlashAttentionArgs)

#ifdef TW_CPU_ISA

#include <sched.h>

#include "cpu/tile_gemm.h"

TW_BEGIN
namespace {

constexpr int64_t BM = kAttentionBM, BN = kAttentionBN;

// The exponential of the softmax: base 2 for float, where it is cheapest, base e for double, where
// it rounds least. kToBase takes a natural logarithm to that base.
template<class R, class A = R>
inline constexpr R kToBase = sizeof(A) == 4 ? R(1.4426950408889634074) : R(1);
TW_HD vf exp_base(vf x) { return exp2_fast(x); }
TW_HD vec<double> exp_base(vec<double> x) { return vexp(x); }
TW_HD float log_base(float x) { return log2f(x); }
TW_HD double log_base(double x) { return log(x); }

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

template<class T>
const T* row_of(const Strided& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<const T*>(x.data) + b * x.batch + t * x.row + h * x.head;
}

Band band_of(const FlashAttentionArgs& a) { return {a.Tq, a.Tk, a.offset, a.left, a.right}; }

template<class A>
TW_HD vec<A> iota() {
  vec<A> x;
  for (int i = 0; i < lanes<A>; ++i) x[i] = static_cast<A>(i);
  return x;
}

// --------------------------------------------------------------------------------------------
// forward

template<class A>
struct ForwardTile {
  A *q, *q_t, *o_t, *s, *k,
      *v;    // (NR, D); panels of (D, NR); panels of (Dv, NR); (BN, NR); (BN, D); (BN, Dv)
  A *m, *l;  // (BM): running maximum and sum

  static size_t size(int64_t D, int64_t Dv) {
    return static_cast<size_t>(NR<A> * D + BM * D + BM * Dv + BN * NR<A> + BN * D + BN * Dv +
                               2 * BM);
  }
  ForwardTile(void* p, int64_t D, int64_t Dv) {
    q_t = static_cast<A*>(p);
    o_t = q_t + BM * D;
    s = o_t + BM * Dv;
    m = s + BN * NR<A>;
    l = m + BM;
    k = l + BM;
    v = k + BN * D;
    q = v + BN * Dv;
  }
};

// s (keys [n0, n1) x lanes) becomes p = 2^(s - max); updates the running maximum m and sum l of the
// lanes and returns the factor alpha for what was summed before.
template<class A>
void online_softmax(A* s, int64_t keys, A* m, A* l, A* alpha) {
  constexpr int L = lanes<A>;
  vec<A> top[2] = {vload<A>(m), vload<A>(m + L)};
  for (int64_t n = 0; n < keys; ++n)
    for (int i = 0; i < 2; ++i) top[i] = max_number<A>(vload<A>(s + n * NR<A> + i * L), top[i]);
  vec<A> base[2], sum[2];
  for (int i = 0; i < 2; ++i) {
    base[i] =
        top[i] == splat(A(-INFINITY)) ? vec<A>{} : top[i];  // nothing seen yet: p = 0, not NaN
    const vec<A> f = exp_base(vload<A>(m + i * L) - base[i]);
    vstore<A>(alpha + i * L, f);
    vstore<A>(m + i * L, top[i]);
    sum[i] = vload<A>(l + i * L) * f;
  }
  vec<A> part[2] = {};
  for (int64_t n = 0; n < keys; ++n)
    for (int i = 0; i < 2; ++i) {
      A* p = s + n * NR<A> + i * L;
      const vec<A> e = exp_base(vload<A>(p) - base[i]);
      vstore<A>(p, e);
      part[i] += e;
    }
  for (int i = 0; i < 2; ++i) vstore<A>(l + i * L, sum[i] + part[i]);
}

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
  vec<A> select(int64_t n, int i, vec<A> x, vec<A> otherwise) const {
    const vec<A> at = splat(static_cast<A>(n));
    const auto seen = (at >= vload<A>(low + i * lanes<A>)) & (at < vload<A>(high + i * lanes<A>));
    return seen ? x : otherwise;
  }
};

template<class T>
void forward_task(const FlashAttentionArgs& a, int64_t b, int64_t h, int64_t i0, void* scratch) {
  using A = acc_t<T>;
  constexpr int L = lanes<A>;
  const int64_t D = a.D, Dv = a.Dv, g = h / (a.H / a.G), rows = min_of(BM, a.Tq - i0);
  const int64_t panels = (rows + NR<A> - 1) / NR<A>;
  const Band band = band_of(a);
  ForwardTile<A> t(scratch, D, Dv);
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t first = p * NR<A>, count = min_of(NR<A>, rows - first);
    copy_rows(t.q, D, row_of<T>(a.q, b, i0 + first, h), count, D, a.q.row, a.q.element);
    transpose_to_lanes<A>(t.q_t + first * D, NR<A>, t.q, D, count, D,
                          static_cast<A>(a.scale * kToBase<A>));
  }
  for (int64_t i = 0; i < BM; ++i) t.m[i] = A(-INFINITY), t.l[i] = A(0);
  bool started[BM / NR<A>] = {};

  const int64_t keys_end = band.end(i0 + rows - 1);
  for (int64_t j0 = band.begin(i0); j0 < keys_end; j0 += BN) {
    const int64_t j1 = min_of(j0 + BN, keys_end);
    copy_rows(t.k, D, row_of<T>(a.k, b, j0, g), j1 - j0, D, a.k.row, a.k.element);
    const bool v_finite =
        copy_rows(t.v, Dv, row_of<T>(a.v, b, j0, g), j1 - j0, Dv, a.v.row, a.v.element);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t q0 = i0 + p * NR<A>,
                    q1 = min_of(q0 + NR<A>, i0 + rows) - 1;  // first, last query
      const int64_t n0 = max_of(band.begin(q0), j0), n1 = min_of(band.end(q1), j1);
      if (n0 >= n1) continue;
      const int64_t keys = n1 - n0;
      A* o_t = t.o_t + p * NR<A> * Dv;
      for_row_tiles(0, keys, [&](int64_t n, int count) {
        tile_gemm<A, false, Start::zero>(count, D, t.k + (n0 - j0 + n) * D, D,
                                         t.q_t + p * NR<A> * D, NR<A>, t.s + n * NR<A>, NR<A>);
      });
      const bool masked = band.begin(q1) > n0 || band.end(q0) < n1;
      const LaneRange<A> range(band, q0, n0, masked ? keys : 0);
      if (masked)
        for (int64_t n = 0; n < keys; ++n)
          for (int i = 0; i < 2; ++i) {
            A* s = t.s + n * NR<A> + i * L;
            vstore<A>(s, range.select(n, i, vload<A>(s), splat(A(-INFINITY))));
          }
      A alpha[NR<A>];
      online_softmax<A>(t.s, keys, t.m + p * NR<A>, t.l + p * NR<A>, alpha);
      const A* v = t.v + (n0 - j0) * Dv;
      if (!masked || v_finite) {
        for_row_tiles(0, Dv, [&](int64_t d, int count) {
          if (started[p])
            tile_gemm<A, true, Start::scale>(count, keys, v + d, Dv, t.s, NR<A>, o_t + d * NR<A>,
                                             NR<A>, alpha);
          else
            tile_gemm<A, true, Start::zero>(count, keys, v + d, Dv, t.s, NR<A>, o_t + d * NR<A>,
                                            NR<A>);
        });
      } else {  // 0 * inf and 0 * NaN must not reach the queries that do not see this key
        for (int64_t d = 0; d < Dv; ++d)
          for (int i = 0; i < 2; ++i) {
            A* o = o_t + d * NR<A> + i * L;
            vec<A> sum = started[p] ? vload<A>(o) * vload<A>(alpha + i * L) : vec<A>{};
            for (int64_t n = 0; n < keys; ++n)
              sum +=
                  range.select(n, i, v[n * Dv + d] * vload<A>(t.s + n * NR<A> + i * L), vec<A>{});
            vstore<A>(o, sum);
          }
      }
      started[p] = true;
    }
  }

  for (int64_t p = 0; p < panels; ++p) {
    const int64_t first = p * NR<A>, count = min_of(NR<A>, rows - first);
    for (int64_t r = first; r < first + count; ++r) {
      const bool empty = t.l[r] == A(0);  // not NaN: a NaN score is a key too
      static_cast<A*>(a.lse)[(b * a.H + h) * a.Tq + i0 + r] =
          empty ? A(-INFINITY)
                : static_cast<A>((static_cast<double>(t.m[r]) + log_base(t.l[r])) /
                                 kToBase<double, A>);
      const A inverse = A(1) / t.l[r];
      const A* o = t.o_t + first * Dv + (r - first);
      T* out = static_cast<T*>(a.out) + ((b * a.Tq + i0 + r) * a.H + h) * Dv;
      for (int64_t d = 0; d < Dv; ++d) out[d] = store_as<T>(empty ? A(0) : o[d * NR<A>] * inverse);
    }
  }
}

// -------------------------------------------------------------------------------------------
// backward

template<class A>
struct BackwardTile {
  A *q, *dout, *s, *ds;      // (BM, Dp), (BM, Dvp), (BM, BN), (BM, BN)
  A* lse_low;                // (BM)
  A* q_scaled;               // (BM, Dp): the very numbers of the forward, so that S has its bits
  A *k, *v, *k_t, *v_t;      // (BN, Dp), (BN, Dvp), panels of (D, NR) and (Dv, NR)
  A *dk, *dv, *lse, *delta;  // (BN, Dp), (BN, Dvp), (BM), (BM)

  static size_t size(int64_t Dp, int64_t Dvp) {
    return static_cast<size_t>((BM + 3 * BN) * (Dp + Dvp) + BM * Dp + 2 * BM * BN + 3 * BM);
  }
  BackwardTile(void* p, int64_t Dp, int64_t Dvp) {
    A* next = static_cast<A*>(p);
    auto take = [&](int64_t n) {
      A* here = next;
      next += n;
      return here;
    };
    q = take(BM * Dp), dout = take(BM * Dvp), s = take(BM * BN), ds = take(BM * BN);
    k = take(BN * Dp), v = take(BN * Dvp), k_t = take(BN * Dp), v_t = take(BN * Dvp);
    dk = take(BN * Dp), dv = take(BN * Dvp), lse = take(BM), delta = take(BM);
    q_scaled = take(BM * Dp), lse_low = take(BM);
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

template<class T>
void write_rows(T* dst, int64_t row_stride, const acc_t<T>* src, int64_t ld, int64_t rows,
                int64_t D) {
  using A = acc_t<T>;
  for (int64_t r = 0; r < rows; ++r)
    for_lanes<A>(D, [&](int64_t d, auto n) {
      vstore<A>(dst + r * row_stride + d, vload<A>(src + r * ld + d, n), n);
    });
}

// P and dS of one pair of blocks, tile rows [ra, rb), into t.s and t.ds; 0 where masked or past the
// end.
template<class A>
void probabilities(const BackwardTile<A>& t, const Band& band, int64_t i0, int64_t j0, int64_t ra,
                   int64_t rb, int64_t keys, int64_t D, int64_t Dp, int64_t Dv, int64_t Dvp,
                   bool need_ds) {
  constexpr int L = lanes<A>;
  for (int64_t p = 0; p * NR<A> < keys; ++p) {
    const int64_t n0 = j0 + p * NR<A>, n1 = min_of(n0 + NR<A>, j0 + keys);
    const int64_t r0 = Band::clamp(band.first_row(n0) - i0, rb),
                  r1 = Band::clamp(band.end_row(n1) - i0, rb);
    const int64_t first = max_of(r0, ra), last = max_of(r1, first);
    A *s = t.s + p * NR<A>, *ds = t.ds + p * NR<A>;
    for_row_tiles(first, last, [&](int64_t m, int count) {
      tile_gemm<A, false, Start::zero>(count, D, t.q_scaled + m * Dp, Dp, t.k_t + p * NR<A> * D,
                                       NR<A>, s + m * BN, BN);
      if (need_ds)
        tile_gemm<A, false, Start::zero>(count, Dv, t.dout + m * Dvp, Dvp, t.v_t + p * NR<A> * Dv,
                                         NR<A>, ds + m * BN, BN);
    });
    const bool masked =
        last > first && (band.begin(i0 + last - 1) > n0 || band.end(i0 + first) < n0 + NR<A>);
    for (int64_t m = ra; m < rb; ++m) {
      const bool inside = m >= first && m < last;
      const vec<A> low = splat(static_cast<A>(band.begin(i0 + m) - n0));
      const vec<A> high = splat(static_cast<A>(inside ? band.end(i0 + m) - n0 : 0));
      for (int i = 0; i < 2; ++i) {
        vec<A> e{}, d{};
        if (inside) {
          e = exp_base(vload<A>(s + m * BN + i * L) - t.lse[m] - t.lse_low[m]);
          if (need_ds) d = e * (vload<A>(ds + m * BN + i * L) - t.delta[m]);
        }
        if (masked && inside) {
          const vec<A> lane = iota<A>() + static_cast<A>(i * L);
          const auto seen = (lane >= low) & (lane < high);
          e = seen ? e : vec<A>{};
          d = seen ? d : vec<A>{};
        }
        vstore<A>(s + m * BN + i * L, e);
        if (need_ds) vstore<A>(ds + m * BN + i * L, d);
      }
    }
  }
}

template<class T>
void backward_task(const FlashAttentionArgs& a, int64_t b, int64_t g, int64_t j0, void* scratch) {
  using A = acc_t<T>;
  const int64_t D = a.D, Dv = a.Dv, Dp = round_up(D, NR<A>), Dvp = round_up(Dv, NR<A>);
  const int64_t keys = min_of(BN, a.Tk - j0), group = a.H / a.G, blocks = (a.Tq + BM - 1) / BM;
  const int64_t sum_width = round_up(D, kAttentionPad);
  const bool need_ds = a.dq || a.dk;
  const Band band = band_of(a);
  BackwardTile<A> t(scratch, Dp, Dvp);
  const bool k_finite = copy_rows(t.k, Dp, row_of<T>(a.k, b, j0, g), keys, D, a.k.row, a.k.element);
  copy_rows(t.v, Dvp, row_of<T>(a.v, b, j0, g), keys, Dv, a.v.row, a.v.element);
  for (int64_t p = 0; p * NR<A> < keys; ++p) {
    const int64_t n = p * NR<A>, count = min_of(NR<A>, keys - n);
    transpose_to_lanes<A>(t.k_t + n * D, NR<A>, t.k + n * Dp, Dp, count, D, A(1));
    transpose_to_lanes<A>(t.v_t + n * Dv, NR<A>, t.v + n * Dvp, Dvp, count, Dv,
                          static_cast<A>(a.scale));
  }
  memset(t.dk, 0, static_cast<size_t>(BN * Dp) * sizeof(A));
  memset(t.dv, 0, static_cast<size_t>(BN * Dvp) * sizeof(A));

  const int64_t row_begin = band.first_row(j0), row_end = band.end_row(j0 + keys);
  for (int64_t h = g * group; h < (g + 1) * group; ++h)
    for (int64_t block = blocks - 1; block >= 0; --block) {  // last first: see the ticket below
      const int64_t i0 = block * BM, rows = min_of(BM, a.Tq - i0);
      const int64_t ra = max_of(row_begin - i0, 0), rb = min_of(row_end - i0, rows);
      if (ra >= rb) continue;
      const int64_t at = (b * a.H + h) * a.Tq + i0;
      const bool q_finite =
          copy_rows(t.q, Dp, row_of<T>(a.q, b, i0, h), rows, D, a.q.row, a.q.element);
      const A scale = static_cast<A>(a.scale * kToBase<A>);
      for (int64_t n = 0; n < rows * Dp; n += lanes<A>)  // Dp is a multiple of the lanes
        vstore<A>(t.q_scaled + n, vload<A>(t.q + n) * scale);
      const bool do_finite =
          copy_rows(t.dout, Dvp, row_of<T>(a.dout, b, i0, h), rows, Dv, a.dout.row, a.dout.element);
      for (int64_t m = 0; m < rows; ++m) {
        const A lse = static_cast<const A*>(a.lse)[at + m];
        // In two parts: one rounding of a large lse would be an error of every p of the row.
        const double exact = static_cast<double>(lse) * kToBase<double, A>;
        t.lse[m] = lse == A(-INFINITY) ? A(INFINITY) : static_cast<A>(exact);
        t.lse_low[m] = isfinite(lse) ? static_cast<A>(exact - t.lse[m]) : A(0);
        if (need_ds) t.delta[m] = static_cast<const A*>(a.delta)[at + m];
      }
      probabilities<A>(t, band, i0, j0, ra, rb, keys, D, Dp, Dv, Dvp, need_ds);

      const bool masked = band.begin(i0 + rb - 1) > j0 || band.end(i0 + ra) < j0 + keys;
      auto key_row_seen = [&](int64_t n, int64_t m) { return band.sees(i0 + m, j0 + n); };
      auto row_key_seen = [&](int64_t m, int64_t n) { return band.sees(i0 + m, j0 + n); };
      // Queries that see one of the keys n .. n + count - 1.
      auto with_rows = [&](int64_t n, int count, auto&& body) {
        const int64_t r0 = max_of(band.first_row(j0 + n) - i0, ra);
        const int64_t r1 = min_of(band.end_row(j0 + n + count) - i0, rb);
        if (r0 < r1) body(r0, r1 - r0);
      };
      if (a.dv && masked && !do_finite)
        masked_product(0, keys, ra, rb, t.s, 1, BN, t.dout, Dvp, Dv, t.dv, Dvp, key_row_seen);
      else if (a.dv)
        for_row_tiles(0, keys, [&](int64_t n, int count) {
          with_rows(n, count, [&](int64_t r, int64_t K) {
            add_product<A, true>(count, K, t.s + r * BN + n, BN, t.dout + r * Dvp, Dvp,
                                 t.dv + n * Dvp, Dvp, Dvp);
          });
        });
      if (a.dk && masked && !q_finite)
        masked_product(0, keys, ra, rb, t.ds, 1, BN, t.q, Dp, D, t.dk, Dp, key_row_seen);
      else if (a.dk)
        for_row_tiles(0, keys, [&](int64_t n, int count) {
          with_rows(n, count, [&](int64_t r, int64_t K) {
            add_product<A, true>(count, K, t.ds + r * BN + n, BN, t.q + r * Dp, Dp, t.dk + n * Dp,
                                 Dp, Dp);
          });
        });
      if (!a.dq) continue;

      // dQ of this block of queries is summed in key order: wait for the block of keys before ours.
      // It is a task that started earlier, and it visits the blocks of queries in the same order.
      const int64_t slot = (b * a.H + h) * blocks + block;
      A* dq = static_cast<A*>(a.dq_sum) + slot * BM * sum_width;
      int64_t* ticket = static_cast<int64_t*>(a.tickets) + slot;
      const int64_t turn = j0 / BN - band.begin(i0) / BN;
      while (__atomic_load_n(ticket, __ATOMIC_ACQUIRE) != turn) sched_yield();
      if (turn == 0) memset(dq, 0, static_cast<size_t>(BM * sum_width) * sizeof(A));
      if (masked && !k_finite)
        masked_product(ra, rb, 0, keys, t.ds, BN, 1, t.k, Dp, D, dq, sum_width, row_key_seen);
      else
        for_row_tiles(ra, rb, [&](int64_t m, int count) {
          const int64_t n0 = max_of(band.begin(i0 + m) - j0, 0);
          const int64_t n1 = min_of(band.end(i0 + m + count - 1) - j0, keys);
          if (n0 < n1)
            add_product<A, false>(count, n1 - n0, t.ds + m * BN + n0, BN, t.k + n0 * Dp, Dp,
                                  dq + m * sum_width, sum_width, Dp);
        });
      if (j0 + BN >= band.end(i0 + rows - 1))
        write_rows<T>(static_cast<T*>(a.dq) + ((b * a.Tq + i0) * a.H + h) * D, a.H * D, dq,
                      sum_width, rows, D);
      __atomic_store_n(ticket, turn + 1, __ATOMIC_RELEASE);
    }
  const int64_t first = (b * a.Tk + j0) * a.G + g;
  if (a.dk) write_rows<T>(static_cast<T*>(a.dk) + first * D, a.G * D, t.dk, Dp, keys, D);
  if (a.dv) write_rows<T>(static_cast<T*>(a.dv) + first * Dv, a.G * Dv, t.dv, Dvp, keys, Dv);
}

// delta = scale * (sum dout * out - dlse) of each query; dq = 0 where no key of a block is visible.
template<class T>
void backward_prepare(const FlashAttentionArgs& a, int64_t b, int64_t h, int64_t block) {
  using A = acc_t<T>;
  const Band band = band_of(a);
  const int64_t i0 = block * BM, rows = min_of(BM, a.Tq - i0);
  for (int64_t i = i0; i < i0 + rows; ++i) {
    const T* dout = row_of<T>(a.dout, b, i, h);
    const T* out = static_cast<const T*>(a.out) + ((b * a.Tq + i) * a.H + h) * a.Dv;
    vec<A> sum{};
    if (a.dout.element == 1)
      for_lanes<A>(a.Dv,
                   [&](int64_t d, auto n) { sum += vload<A>(dout + d, n) * vload<A>(out + d, n); });
    else
      for_lanes<A>(a.Dv, [&](int64_t d, auto n) {
        T line[lanes<A>] = {};
        for (int64_t e = 0; e < min_of(lanes<A>, a.Dv - d); ++e)
          line[e] = dout[(d + e) * a.dout.element];
        sum += vload<A>(line) * vload<A>(out + d, n);
      });
    const int64_t at = (b * a.H + h) * a.Tq + i;
    const A dlse = a.dlse ? static_cast<const A*>(a.dlse)[at] : A(0);
    static_cast<A*>(a.delta)[at] = static_cast<A>(a.scale) * (hsum<A>(sum) - dlse);
  }
  static_cast<int64_t*>(a.tickets)[(b * a.H + h) * ((a.Tq + BM - 1) / BM) + block] = 0;
  if (a.dq && band.begin(i0) >= band.end(i0 + rows - 1))
    for (int64_t i = i0; i < i0 + rows; ++i)
      memset(static_cast<T*>(a.dq) + ((b * a.Tq + i) * a.H + h) * a.D, 0,
             static_cast<size_t>(a.D) * sizeof(T));
}

}  // namespace

void flash_attention_fwd(const FlashAttentionArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    const int64_t blocks = (a.Tq + BM - 1) / BM, heads = a.B * a.H;
    const size_t bytes = ForwardTile<acc_t<T>>::size(a.D, a.Dv) * sizeof(acc_t<T>);
    // The last block of queries first: under a causal mask it has the most work.
    parallel_dynamic(blocks * heads, bytes, [&](int64_t task, void* scratch) {
      const int64_t block = blocks - 1 - task / heads, bh = task % heads;
      forward_task<T>(a, bh / a.H, bh % a.H, block * BM, scratch);
    });
  });
}

void flash_attention_bwd(const FlashAttentionArgs& a) {
  with_float_type(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const int64_t q_blocks = (a.Tq + BM - 1) / BM, k_blocks = (a.Tk + BN - 1) / BN;
    parallel_for(0, a.B * a.H * q_blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        backward_prepare<T>(a, i / q_blocks / a.H, i / q_blocks % a.H, i % q_blocks);
    });
    const size_t bytes =
        BackwardTile<A>::size(round_up(a.D, NR<A>), round_up(a.Dv, NR<A>)) * sizeof(A);
    const int64_t heads = a.B * a.G;
    parallel_dynamic(k_blocks * heads, bytes, [&](int64_t task, void* scratch) {
      const int64_t bg = task % heads;
      backward_task<T>(a, bg / a.G, bg % a.G, task / heads * BN, scratch);
    });
  });
}

TW_END

#else  // ---------------------------------------------------------------------------- torch
       // bindings

namespace tw {
namespace {

Strided strided(const Tensor& x) {
  return {data(x), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

using MaybeTensor = std::optional<Tensor>;

// Everything of the schema after the tensors q, k, v (python/trainwright/ops/_attention.py).
struct Options {
  const MaybeTensor &cu_seqlens_q, &cu_seqlens_k, &alibi_slopes, &bias, &sinks, &seed;
  int64_t max_seqlen_q, max_seqlen_k;
  double scale;
  int64_t left, right;
  bool top_left;
  double softcap, dropout_p;
};

FlashAttentionArgs arguments(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o) {
  TW_CHECK_SHAPE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
                 "flash_attention: q, k, v must be 4-d");
  TW_CHECK_SHAPE(q.size(0) == k.size(0) && k.size(0) == v.size(0) && k.size(1) == v.size(1) &&
                     k.size(2) == v.size(2) && q.size(3) == k.size(3),
                 "flash_attention: shapes of q, k, v do not fit");
  TW_CHECK_SHAPE(k.size(2) == 0 ? q.size(2) == 0 : q.size(2) % k.size(2) == 0,
                 "flash_attention: heads of q must be a multiple of those of k");
  STD_TORCH_CHECK(!o.cu_seqlens_q && !o.cu_seqlens_k && !o.alibi_slopes && !o.bias && !o.sinks &&
                      o.softcap == 0 && o.dropout_p == 0,
                  "flash_attention: the CPU kernel has no cu_seqlens, alibi_slopes, bias, sinks, "
                  "softcap, dropout_p");
  FlashAttentionArgs a{};
  a.q = strided(q), a.k = strided(k), a.v = strided(v);
  a.B = q.size(0), a.Tq = q.size(1), a.H = q.size(2), a.D = q.size(3);
  a.Tk = k.size(1), a.G = k.size(2), a.Dv = v.size(3);
  a.offset = o.top_left ? 0 : a.Tk - a.Tq;
  a.left = o.left < 0 ? kNoLimit : o.left;
  a.right = o.right < 0 ? kNoLimit : o.right;
  a.scale = o.scale;
  a.dtype = dtype_of(q);
  return a;
}

std::tuple<Tensor, Tensor> flash_attention_fwd_cpu(
    const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens_q,
    const MaybeTensor& cu_seqlens_k, const MaybeTensor& alibi_slopes, const MaybeTensor& bias,
    const MaybeTensor& sinks, const MaybeTensor& seed, int64_t max_seqlen_q, int64_t max_seqlen_k,
    double scale, int64_t left, int64_t right, bool top_left, double softcap, double dropout_p) {
  FlashAttentionArgs a =
      arguments(q, k, v,
                {cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sinks, seed, max_seqlen_q,
                 max_seqlen_k, scale, left, right, top_left, softcap, dropout_p});
  Tensor out = empty({a.B, a.Tq, a.H, a.Dv}, q);
  Tensor lse = empty({a.B, a.H, a.Tq}, q, acc_dtype(q));
  a.out = mutable_data(out), a.lse = mutable_data(lse);
  flash_attention_fwd(a);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> flash_attention_bwd_cpu(
    const Tensor& dout, const MaybeTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, const MaybeTensor& cu_seqlens_q,
    const MaybeTensor& cu_seqlens_k, const MaybeTensor& alibi_slopes, const MaybeTensor& bias,
    const MaybeTensor& sinks, const MaybeTensor& seed, int64_t max_seqlen_q, int64_t max_seqlen_k,
    double scale, int64_t left, int64_t right, bool top_left, double softcap, double dropout_p,
    std::vector<bool> need) {
  TW_CHECK_CONTIGUOUS(out);
  TW_CHECK_CONTIGUOUS(lse);
  STD_TORCH_CHECK(!dlse || dlse->is_contiguous(), "dlse must be contiguous");
  STD_TORCH_CHECK(need.size() == 6, "need must have 6 entries");
  FlashAttentionArgs a =
      arguments(q, k, v,
                {cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sinks, seed, max_seqlen_q,
                 max_seqlen_k, scale, left, right, top_left, softcap, dropout_p});
  const int64_t blocks = (a.Tq + kAttentionBM - 1) / kAttentionBM;
  const int64_t width = (a.D + kAttentionPad - 1) / kAttentionPad * kAttentionPad;
  Tensor dq = empty(need[0] ? shape_of(q) : std::vector<int64_t>{0}, q);
  Tensor dk = empty(need[1] ? shape_of(k) : std::vector<int64_t>{0}, q);
  Tensor dv = empty(need[2] ? shape_of(v) : std::vector<int64_t>{0}, q);
  Tensor delta = empty({a.B, a.H, a.Tq}, q, acc_dtype(q));
  Tensor dq_sum = empty({need[0] ? a.B * a.H * blocks : 0, kAttentionBM, width}, q, acc_dtype(q));
  Tensor tickets = empty({a.B, a.H, blocks}, q, ScalarType::Long);
  a.out = const_cast<void*>(data(out)), a.lse = const_cast<void*>(data(lse));
  a.dout = strided(dout), a.dlse = data(dlse);
  a.dq = need[0] ? mutable_data(dq) : nullptr;
  a.dk = need[1] ? mutable_data(dk) : nullptr;
  a.dv = need[2] ? mutable_data(dv) : nullptr;
  a.delta = mutable_data(delta), a.dq_sum = mutable_data(dq_sum), a.tickets = mutable_data(tickets);
  flash_attention_bwd(a);
  Tensor none[3] = {empty({0}, q, acc_dtype(q)), empty({0}, q, acc_dtype(q)),
                    empty({0}, q, acc_dtype(q))};
  return {dq, dk, dv, none[0], none[1], none[2]};
}

}  // namespace
}  // namespace tw

STABLE_TORCH_LIBRARY_IMPL(trainwright, CPU, m) {
  m.impl("flash_attention_fwd", TORCH_BOX(&tw::flash_attention_fwd_cpu));
  m.impl("flash_attention_bwd", TORCH_BOX(&tw::flash_attention_bwd_cpu));
}

#endif
