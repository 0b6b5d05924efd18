// Memory that a kernel needs only while it runs. Each thread keeps one block per slot and grows it
// on demand, so that a training step does not map and fault in the same megabytes at every call.
// The contents are undefined at each call; a block lives until the thread asks for more in its
// slot, or ends. Defined in csrc/module.cpp.
#pragma once
#include "trainwright/config.h"

namespace tw {

enum class Scratch : int {
  gemm_packed = 0,
  gemm_task = 1,
  gemm_bias = 2,
  attention_task = 3,    // tiles of one task
  attention_tables = 4,  // tables of tasks
  attention_rows = 5,    // rows and statistics that tasks share, of short calls
  count = 6
};

// At least `bytes`, aligned to 64 bytes (2 MiB for blocks of that size).
void* scratch(Scratch slot, size_t bytes);

}  // namespace tw
