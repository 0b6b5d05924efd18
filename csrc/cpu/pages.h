// Page faults of large fresh outputs. malloc maps anything above 32 MiB anew, and the first write to each of its 4 KiB pages
// traps; for a kernel that writes once that costs more than the writing. Measured for cross_entropy on 823 MB, CPU seconds
// in the kernel after other allocations had come and gone (virtual machine, Linux 6.18): plain 0.38, populate() 0.30, 2 MiB
// pages by MADV_HUGEPAGE 0.9, as the host had to back them again; alone in a loop 2 MiB pages take 0.1.
#pragma once
#include "trainwright/config.h"

#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels refuse it, which does no harm
#endif
#endif

TW_BEGIN

constexpr int64_t POPULATE_MIN_BYTES =
    int64_t{32} << 20;  // of the whole tensor: smaller ones are mostly memory used before

// Maps the pages of [p, p + bytes), part of one allocation, without a trap for each. Contents stay. To be called by the
// thread that writes them next, some hundred KiB at a time, so that the zeros are still in its cache.
inline void populate(void* p, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t page = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(p) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes)) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
#else
  (void)p;
  (void)bytes;
#endif
}

TW_END
