// What the replacement of the CUDA runtime knows: binaries, kernels, variables and memory. cudart.cpp has the functions
// that programs call.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "vgpu/cudart/cudart.h"
#include "vgpu/cudart/fatbin.h"

#define API extern "C" __attribute__((visibility("default")))

namespace tw::vgpu {

struct Kernel;

struct Binary {
  std::vector<FatbinPtx> entries;
  std::string problem;
  std::vector<std::unique_ptr<Kernel>> kernels;
};

struct Kernel {
  Binary* binary;
  std::string name;
  int max_dynamic_shared = 48 * 1024;
};

struct Variable {
  Binary* binary;
  std::string name;
  size_t bytes;
};

struct Allocation {
  uint64_t bytes;
  enum class Kind { device, host, managed, registered } kind;
};

struct Call {  // between <<< >>> and the launch
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

struct Runtime {
  std::mutex mutex;
  tw_vgpu_executor executor{};
  std::string name = "virtual GPU";
  tw_vgpu_properties properties = {"", 8, 0, 0, 108, 167936, 40 << 20, 5120, 0, 0};
  std::unordered_map<const void*, Kernel*> kernels;     // by the address of the host stub
  std::unordered_map<const void*, Variable> variables;  // by the address of the host shadow
  std::map<uint64_t, Allocation> memory;                // by address
  uint64_t next_handle = 1;
};

Runtime& runtime();

extern thread_local cudaError_t last_error;
extern thread_local std::string last_message;
extern thread_local std::vector<Call> calls;

cudaError_t fail(cudaError_t error, const std::string& message = {});
cudaError_t missing(const char* function, const std::string& what = {});

Kernel* kernel_of(const void* stub);
cudaError_t launch(const Kernel* kernel, dim3 grid, dim3 block, const dim3* cluster, void** args,
                   size_t shared);
cudaError_t variable_of(const void* symbol, tw_vgpu_range& result);
cudaError_t allocate(void** out, size_t bytes, Allocation::Kind kind);
cudaError_t release(void* p);
int shared_optin();
// Of a driver function, by name.
cudaError_t entry_point(const char* symbol, void** out, cudaDriverEntryPointQueryResult* result);

// Streams and events have nothing to do: a handle is a number.
template<class Handle>
cudaError_t new_handle(Handle* out) {
  if (!out) return fail(cudaErrorInvalidValue);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  *out = reinterpret_cast<Handle>(16 * runtime().next_handle++);
  return cudaSuccess;
}

}  // namespace tw::vgpu
