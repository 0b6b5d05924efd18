// A strided tensor as nested loops, outermost first: dims = {size0, stride0, size1, stride1, ...}
// in elements. ndim = 0 means contiguous. An element is named by its position in the loop order;
// ranges of positions are copied to and from a small contiguous buffer, so that one vector loop
// serves every layout.
#pragma once
#include "trainwright/types.h"

namespace tw {
struct Strided {
  const int64_t* dims;
  int64_t ndim;
};
}  // namespace tw

TW_BEGIN

// Calls run(offset, stride, first, count) for the maximal runs along the innermost dim that make up
// positions [begin, begin + count); `first` counts from begin.
template<class F>
inline void for_runs(Strided s, int64_t begin, int64_t count, F&& run) {
  const int64_t inner = s.dims[2 * s.ndim - 2], stride = s.dims[2 * s.ndim - 1];
  int64_t done = 0;
  while (done < count) {
    int64_t rest = begin + done;
    const int64_t column = rest % inner;
    rest /= inner;
    int64_t offset = column * stride;
    for (int64_t d = s.ndim - 2; d >= 0; --d) {
      offset += rest % s.dims[2 * d] * s.dims[2 * d + 1];
      rest /= s.dims[2 * d];
    }
    const int64_t n = inner - column < count - done ? inner - column : count - done;
    run(offset, stride, done, n);
    done += n;
  }
}

// Positions [begin, begin + count) of the tensor at `base`: in place if it is contiguous, else
// copied into `buffer`.
template<class T>
inline const T* read_range(const T* base, Strided s, int64_t begin, int64_t count, T* buffer) {
  if (s.ndim == 0) return base + begin;
  for_runs(s, begin, count, [&](int64_t offset, int64_t stride, int64_t first, int64_t n) {
    const T* in = base + offset;
    for (int64_t i = 0; i < n; ++i) buffer[first + i] = in[i * stride];
  });
  return buffer;
}
// The reverse. Touches nothing but those positions; does nothing for a contiguous tensor, which was
// written in place.
template<class T>
inline void write_range(T* base, Strided s, int64_t begin, int64_t count, const T* buffer) {
  if (s.ndim == 0) return;
  for_runs(s, begin, count, [&](int64_t offset, int64_t stride, int64_t first, int64_t n) {
    T* out = base + offset;
    for (int64_t i = 0; i < n; ++i) out[i * stride] = buffer[first + i];
  });
}

TW_END
