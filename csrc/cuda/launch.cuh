// What launchers share: facts about pointers and the device, and the choice of template arguments.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "trainwright/types.h"

namespace tw {

template<int N>
using Int = std::integral_constant<int, N>;

// Whether all are multiples of 16 bytes; null is.
template<class... P>
bool aligned16(const P*... p) {
  return ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

// Calls f(condition as a type).
template<class F>
void with_bool(bool condition, F&& f) {
  if (condition)
    f(std::true_type{});
  else
    f(std::false_type{});
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of the current device.
inline int multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Above 48 KiB of dynamic shared memory the device wants to be asked.
template<class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  if (bytes > 48 * 1024)
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace tw
