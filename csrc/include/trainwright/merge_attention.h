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

template<class A>
struct LseSum {
  A top = -INFINITY, total = 0;

  TW_HD void add(const LseSum& x) {
    if (x.top == -INFINITY) return;
    if (top == -INFINITY) {
      *this = x;
    } else if (x.top > top) {
      total = total * vexp(top - x.top) + x.total;
      top = x.top;
    } else {  // NaN too
      total += x.total * vexp(x.top - top);
    }
  }
  TW_HD void add(A lse) { add(LseSum{lse, A(1)}); }
  TW_HD A lse() const { return top == -INFINITY ? top : top + vlog(total); }
  TW_HD A weight(A lse) const { return lse == -INFINITY ? A(0) : vexp(lse - top) / total; }
};

// An element of a part with this weight, which may be undefined in a part that counts for nothing.
template<class A>
TW_HD A merged_part(A out, A lse, A weight) {
  return lse == -INFINITY ? A(0) : weight * out;
}

TW_END
