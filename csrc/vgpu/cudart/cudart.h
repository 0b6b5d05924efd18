// The side of the CUDA runtime replacement (cudart.cpp) that faces the virtual GPU, in plain C.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Memory that a kernel may touch.
typedef struct {
  uint64_t address, bytes;
} tw_vgpu_range;

typedef struct {
  const char* ptx;  // of the whole module; the same pointer for every launch from it
  uint64_t ptx_bytes;
  const char* kernel;
  uint32_t grid[3], block[3];
  uint32_t cluster[3];  // all 0: what the kernel was compiled for
  uint32_t dynamic_shared;
  void* const* arguments;  // one address per parameter of the kernel
  const tw_vgpu_range* memory;
  uint64_t ranges;
} tw_vgpu_launch;

typedef struct {
  // Runs a launch to its end. 0, or -1 with a message.
  int (*launch)(const tw_vgpu_launch* launch, char* message, uint64_t message_bytes);
  // Address and size of a variable of a module.
  int (*variable)(const char* ptx, uint64_t ptx_bytes, const char* name, tw_vgpu_range* result,
                  char* message, uint64_t message_bytes);
} tw_vgpu_executor;

typedef struct {
  const char* name;
  int major, minor;
  int specific;  // runs code of architecture-specific targets (sm_90a) too
  int multiprocessors;
  int shared_per_multiprocessor, l2_bytes;
  int memory_bus_bits;
  int clock_khz, memory_clock_khz;
} tw_vgpu_properties;

// Both must be called before the first launch, and may be called again.
void tw_vgpu_set_executor(const tw_vgpu_executor* executor);
void tw_vgpu_set_properties(const tw_vgpu_properties* properties);

// Names memory of the caller that kernels may touch, until tw_vgpu_forget() by the same thread.
void tw_vgpu_name(const void* address, uint64_t bytes);
void tw_vgpu_forget(void);

#ifdef __cplusplus
}
#endif
