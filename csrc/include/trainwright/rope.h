// Rotary position embedding of one head: of D elements the first R are rotated in pairs by the angle
// of their position, the rest passes through. With (a, b) the pair p of R / 2:
//   a' = a cos[p] - b sin[p],  b' = b cos[p] + a sin[p]
// Pairs are (p, p + R/2), or (2p, 2p + 1) if interleaved. The inverse, which is also the gradient,
// turns the other way: sin with the sign changed.
#pragma once
#include "trainwright/types.h"

TW_BEGIN

// V is float, double or a vector of them.
template<class V>
struct Pair {
  V a, b;
};
template<class V>
TW_HD Pair<V> rope_rotate(V a, V b, V cos, V sin) {
  return {a * cos - b * sin, b * cos + a * sin};
}

TW_END
