// What the CPU kernels that walk rows share: weights widened once per call, loops with several
// accumulators, stores that bypass the cache, and sums over rows with the same bits for any number
// of threads.
#pragma once
#include "cpu/kernel.h"

namespace tw {

// A sum over N rows is cut into slots by N alone; each is summed in row order and the slots in slot
// order. 64 rows keep the cost of the slots small, 64 slots are enough for 64 threads.
inline int64_t slots_for_rows(int64_t N) { return N < 128 ? 1 : N > 64 * 64 ? 64 : N / 64; }

}  // namespace tw

#ifdef TW_CPU_ISA
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

TW_BEGIN

// A row of C weights as A plus `offset`; `missing` everywhere where there is none.
template<class A>
void widen_row(A* out, const void* row, DType dtype, int64_t C, A missing, A offset = A(0)) {
  if (!row) {
    for (int64_t c = 0; c < C; ++c) out[c] = missing;
    return;
  }
  with_float_type(dtype, [&](auto tag) {
    const auto* p = static_cast<const decltype(tag)*>(row);
    for (int64_t c = 0; c < C; ++c) out[c] = load_as<A>(p[c]) + offset;
  });
}

// As for_lanes, with body(i, n, u): u = 0 .. U-1 in turn, for U independent accumulators, so that
// the loop is not bound by the latency of one addition.
template<class A, int U, class F>
TW_HD void for_lanes_unrolled(int64_t size, F&& body) {
  int64_t i = 0;
  for (; i + U * lanes<A> <= size; i += U * lanes<A>) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) body(i + u * lanes<A>, Full{}, u);
  }
  for (; i + lanes<A> <= size; i += lanes<A>) body(i, Full{}, 0);
  if (i < size) body(i, size - i, 0);
}
// body(r) for r = 0 .. R-1, unrolled.
template<int R, class F>
TW_HD void for_rows(F&& body) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) body(r);
}
// What a backward kernel writes and reads: known when the kernel is compiled for the usual case, so
// that its inner loop has no branches; a run-time choice for the rest.
template<bool kSum, bool kStream>
struct WantAll {
  static constexpr bool dx = true, dw = true, dsum = kSum, stream = kStream;
};
struct Want {
  bool dx, dw, dsum, stream;
};
// Calls f with `want` as a value of the narrowest of these types.
template<class F>
void with_want(const Want& want, F&& f) {
  if (!want.dx || !want.dw)
    f(want);
  else if (want.dsum)
    want.stream ? f(WantAll<true, true>{}) : f(WantAll<true, false>{});
  else
    want.stream ? f(WantAll<false, true>{}) : f(WantAll<false, false>{});
}

// Called with the column i of a loop over R rows of T that follow each other in memory: asks for as
// much of the R rows at `next` as the loop has read. The hardware's prefetcher stops at a page, and
// idles while a later pass works on rows in L1.
template<class A, int R, class T>
TW_HD void prefetch_rows(const T* next, int64_t i) {
  constexpr int step = R * lanes<A> * static_cast<int>(sizeof(T));  // bytes per call
  const char* p = reinterpret_cast<const char*>(next) + i * R * static_cast<int64_t>(sizeof(T));
#pragma GCC unroll 8
  for (int at = 0; at < step; at += 64) __builtin_prefetch(p + at, 0, 2);
}
template<class A, int U>
TW_HD A hsum_all(const vec<A> (&x)[U]) {
  vec<A> s = x[0];
  for (int u = 1; u < U; ++u) s += x[u];
  return hsum<A>(s);
}

// Whether the page at p is in memory already. A new one is cleared by the system when it is first
// written, and lies in the cache then.
inline bool resident(const void* p) {
#if defined(__linux__)
  unsigned char here = 0;
  const uintptr_t page = reinterpret_cast<uintptr_t>(p) / 4096 * 4096;
  return mincore(reinterpret_cast<void*>(page), 1, &here) == 0 && (here & 1);
#else
  (void)p;
  return true;
#endif
}

// Stores past the cache: a large output that nobody reads before it would be evicted anyway is
// written without first being read, a quarter to a third of the traffic of a norm. Only for outputs
// that are aligned, larger than a core's share of the cache, and not new memory.
constexpr int64_t kStreamBytes = int64_t(8) << 20;
template<class A, class T>
bool can_stream(const T* p, int64_t row_elements, int64_t rows) {
  constexpr int64_t align = lanes<A> * static_cast<int64_t>(sizeof(T));
  return row_elements * rows * static_cast<int64_t>(sizeof(T)) >= kStreamBytes &&
         reinterpret_cast<uintptr_t>(p) % align == 0 && row_elements % lanes<A> == 0 &&
         resident(p + row_elements * rows / 2);
}
template<class A, class T>
TW_HD void vstream(T* p, vec<A> x) {
#if defined(__SSE2__)
  if constexpr (sizeof(T) == sizeof(A)) {
#if TW_VEC_BYTES == 64
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)x);
#elif TW_VEC_BYTES == 32
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)x);
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)x);
#endif
    return;
  }
#if TW_VEC_BYTES >= 32
  if constexpr (sizeof(T) == 2 && sizeof(A) == 4) {
    const vh h = narrow(T{}, x);
#if TW_VEC_BYTES == 64
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)h);
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)h);
#endif
    return;
  }
#endif
#endif
  vstore<A>(p, x);
}
template<class A, class T, class K>
TW_HD void put(T* p, vec<A> x, K k, bool stream) {
  if constexpr (sizeof(K) == sizeof(Full)) {
    if (stream) return vstream<A>(p, x);
  }
  vstore<A>(p, x, k);
}
// for_lanes with its whole registers where p is aligned for vstream: the first call may be a short one.
template<class A, class T, class F>
TW_HD void for_lanes_aligned(const T* p, int64_t size, F&& body) {
  constexpr int64_t bytes = lanes<A> * static_cast<int64_t>(sizeof(T));
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % bytes);
  int64_t i = past ? (bytes - past) / static_cast<int64_t>(sizeof(T)) : 0;
  if (i > size) i = size;
  if (i > 0) body(int64_t{0}, i);
  for (; i + lanes<A> <= size; i += lanes<A>) body(i, Full{});
  if (i < size) body(i, size - i);
}
// Makes streamed stores visible to the other threads: at the end of a thread's share.
TW_HD void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// out[c] = sum over slots, in order, of partial[s * C + c].
template<class A>
void add_slots(A* out, const A* partial, int64_t slots, int64_t C) {
  for_lanes<A>(C, [&](int64_t i, auto k) {
    vec<A> s = vload<A>(partial + i, k);
    for (int64_t t = 1; t < slots; ++t) s += vload<A>(partial + t * C + i, k);
    vstore<A>(out + i, s, k);
  });
}

TW_END
#endif
