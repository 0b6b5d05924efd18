// Which keys a query sees, for every attention kernel. Query i stands at key position p = i +
// offset (offset 0: top-left, Tk - Tq: bottom-right) and sees the keys p - left .. p + right that
// exist. Causal is right = 0; kNoLimit means no limit. begin and end never decrease with i, so the
// keys of a block of queries are one range, and so are the queries of a block of keys.
//
// With s = scale * q.k and t = s * log2(e):  p = 2^(t - max t),  out = sum p v / sum p,
// lse = (max t + log2(sum p)) * ln 2. Backward, with delta = sum dout * out - dlse of a query:
// dv = sum p dout,  ds = p (dout.v - delta),  dq = scale * sum ds k,  dk = scale * sum ds q.
#pragma once
#include "trainwright/types.h"

TW_BEGIN

constexpr int64_t kNoLimit = int64_t(1) << 40;

struct Band {
  int64_t Tq, Tk, offset, left, right;

  static TW_HD int64_t clamp(int64_t x, int64_t high) { return x < 0 ? 0 : x < high ? x : high; }
  // Keys of query i: [begin, end), empty where end <= begin.
  TW_HD int64_t begin(int64_t i) const { return clamp(i + offset - left, Tk); }
  TW_HD int64_t end(int64_t i) const { return clamp(i + offset + right + 1, Tk); }
  // Queries that see some key of [n0, n1): [first_row, end_row).
  TW_HD int64_t first_row(int64_t n0) const { return clamp(n0 - offset - right, Tq); }
  TW_HD int64_t end_row(int64_t n1) const { return clamp(n1 - offset + left, Tq); }
  TW_HD bool sees(int64_t i, int64_t n) const { return begin(i) <= n && n < end(i); }
};

// Few queries leave a GPU idle unless their keys are divided among more blocks of threads. Queries of the heads that
// share keys then make one tile of at most kSplitRows rows, and the keys they see are cut at multiples of
// kSplitKeys; merge_attention.h puts the parts together. Whether a sequence is split depends on its shape and band
// alone, and where it is cut on nothing: neither the batch nor the device changes a bit of a result.
constexpr int kSplitRows = 64, kSplitKeys = 512;

struct Pieces {
  int64_t first, last;  // number n holds the keys from n * kSplitKeys on

  static TW_HD Pieces of(const Band& band) {
    if (band.Tq <= 0) return {0, 0};
    return {band.begin(0) / kSplitKeys, (band.end(band.Tq - 1) + kSplitKeys - 1) / kSplitKeys};
  }
  static TW_HD bool split(const Band& band, int group) {
    if (band.Tq * group > kSplitRows) return false;
    const Pieces p = of(band);
    return p.last - p.first > 1;
  }
};

TW_END
