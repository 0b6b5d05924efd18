// Threads for the CPU kernels, without torch in sight: csrc/module.cpp provides parallel_for_raw on
// torch's thread pool.
#pragma once
#include <stdlib.h>

#include "trainwright/config.h"

namespace tw {
using RangeFn = void (*)(int64_t begin, int64_t end, void* context);
// Splits [begin, end) into one contiguous piece per thread, none smaller than `grain`.
void parallel_for_raw(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* context);
int64_t num_threads();
}  // namespace tw

TW_BEGIN

template<class F>
inline void parallel_for(int64_t begin, int64_t end, int64_t grain, F&& f) {
  if (begin >= end) return;
  parallel_for_raw(
      begin, end, grain, [](int64_t b, int64_t e, void* c) { (*static_cast<F*>(c))(b, e); }, &f);
}

// Runs f(task) for every task in [0, tasks), handed out one at a time: for tasks of uneven size.
// Any task may run on any thread, so f must write only to places that belong to its task.
template<class F>
inline void parallel_dynamic(int64_t tasks, F&& f) {
  if (tasks <= 0) return;
  int64_t next = 0;
  const int64_t workers = num_threads() < tasks ? num_threads() : tasks;
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t t; (t = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;) f(t);
  });
}

// The same, by this thread alone if all of it is sooner done than another thread has begun.
template<class F>
inline void parallel_unless(bool small, int64_t tasks, F&& f) {
  if (!small) return parallel_dynamic(tasks, f);
  for (int64_t t = 0; t < tasks; ++t) f(t);
}

// The same with memory of its own for each worker, aligned to a cache line: f(task, scratch). Tasks
// start in increasing order, so a task may wait for one with a smaller number.
template<class F>
inline void parallel_dynamic(int64_t tasks, size_t scratch_bytes, F&& f) {
  if (tasks <= 0) return;
  int64_t next = 0;
  const int64_t workers = num_threads() < tasks ? num_threads() : tasks;
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    void* scratch = aligned_alloc(64, (scratch_bytes + 63) / 64 * 64);
    if (!scratch) abort();
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t t; (t = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;) f(t, scratch);
    free(scratch);
  });
}

TW_END
