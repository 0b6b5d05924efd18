// Attention over the union of disjoint sets of keys, from out and lse over each: with m the largest
// lse,
//   total = sum exp(lse_s - m),  w_s = exp(lse_s - m) / total,  out = sum w_s out_s,  lse = m + log(total).
// A part with lse -inf counts for nothing, whatever its out; without any other, out is 0 and lse -inf.
//
// Backward of two parts, with x = dout . (out_a - out_b):  dout_a = w_a dout,
// dlse_a = w_a (dlse + w_b x),  and with -x the same for b.
#pragma once
#include "trainwright/vec_math.h"

TW_BEGIN

// A sum of exponentials, held as exp(top) * total. V is float, double or a vector of them.
template<class V>
struct LseSum {
  V top = V{} - INFINITY, total = V{};

  TW_HD void add(const LseSum& x) {
    const V high = x.top > top ? x.top : top;  // a NaN reaches the total
    const V shift = high == -INFINITY ? V{} : high;
    total = total * vexp(top - shift) + x.total * vexp(x.top - shift);
    top = high;
  }
  TW_HD void add(V lse) { add(LseSum{lse, V{} + 1}); }
  TW_HD V lse() const { return top == -INFINITY ? top : top + vlog(total); }
  TW_HD V weight(V lse) const { return lse == -INFINITY ? V{} : vexp(lse - top) / total; }
};

// An element of a part with this weight, or a vector of them; they may be undefined in a part that counts for nothing.
template<class V, class A>
TW_HD V merged_part(V out, A lse, A weight) {
  return lse == -INFINITY ? V{} : weight * out;
}

TW_END
