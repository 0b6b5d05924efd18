// The state of the CUDA runtime's replacement, launches, and its side that faces the virtual GPU.
#include "vgpu/cudart/runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "vgpu/tma.h"

namespace tw::vgpu {

// Objects register themselves before main and leave after it: this one is never destroyed.
Runtime& runtime() {
  static Runtime* r = new Runtime;
  return *r;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_message;
thread_local std::vector<Call> calls;
static thread_local std::vector<tw_vgpu_range> named;

cudaError_t fail(cudaError_t error, const std::string& message) {
  last_error = error;
  last_message = message;
  return error;
}
cudaError_t missing(const char* function, const std::string& what) {
  return fail(cudaErrorNotSupported, std::string(function) + (what.empty() ? "" : ": " + what) +
                                         " is not supported by the virtual GPU's CUDA runtime");
}

static int arch() { return runtime().properties.major * 10 + runtime().properties.minor; }

// Locked by the caller.
static const FatbinPtx* ptx_of(const Binary& binary, std::string& problem) {
  const FatbinPtx* ptx = choose_ptx(binary.entries, arch(), runtime().properties.specific != 0);
  if (!ptx)
    problem =
        binary.entries.empty() ? binary.problem : "it has no PTX for sm_" + std::to_string(arch());
  return ptx;
}

cudaError_t launch(const Kernel* kernel, dim3 grid, dim3 block, const dim3* cluster, void** args,
                   size_t shared) {
  Runtime& r = runtime();
  if (!kernel) return fail(cudaErrorInvalidDeviceFunction, "no such kernel");
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 ||
      grid.z > 65535 || threads == 0 || threads > 1024 || block.x > 1024 || block.y > 1024 ||
      block.z > 64)
    return fail(cudaErrorInvalidConfiguration, kernel->name + ": grid or block of an invalid size");
  tw_vgpu_launch l{};
  std::vector<tw_vgpu_range> memory = named;
  {
    const std::lock_guard<std::mutex> lock(r.mutex);
    if (!r.executor.launch)
      return fail(cudaErrorNoDevice, kernel->name + ": no virtual GPU was attached");
    if (shared > static_cast<size_t>(kernel->max_dynamic_shared))
      return fail(cudaErrorInvalidValue, kernel->name + ": " + std::to_string(shared) +
                                             " bytes of dynamic shared memory, above "
                                             "cudaFuncAttributeMaxDynamicSharedMemorySize = " +
                                             std::to_string(kernel->max_dynamic_shared));
    std::string problem;
    const FatbinPtx* ptx = ptx_of(*kernel->binary, problem);
    if (!ptx) return fail(cudaErrorNoKernelImageForDevice, kernel->name + ": " + problem);
    l.ptx = ptx->text;
    l.ptx_bytes = ptx->bytes;
    for (const auto& [address, a] : r.memory) memory.push_back({address, a.bytes});
  }
  l.kernel = kernel->name.c_str();
  const uint32_t sizes[3][3] = {
      {grid.x, grid.y, grid.z},
      {block.x, block.y, block.z},
      {cluster ? cluster->x : 0, cluster ? cluster->y : 0, cluster ? cluster->z : 0}};
  for (int d = 0; d < 3; ++d) {
    l.grid[d] = sizes[0][d];
    l.block[d] = sizes[1][d];
    l.cluster[d] = sizes[2][d];
  }
  l.dynamic_shared = static_cast<uint32_t>(shared);
  l.arguments = args;
  l.memory = memory.data();
  l.ranges = memory.size();
  char message[4096] = "";
  if (r.executor.launch(&l, message, sizeof(message)) != 0)
    return fail(cudaErrorLaunchFailure, message);
  return cudaSuccess;
}

Kernel* kernel_of(const void* stub) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const auto found = runtime().kernels.find(stub);
  return found == runtime().kernels.end() ? nullptr : found->second;
}

cudaError_t variable_of(const void* symbol, tw_vgpu_range& result) {
  Runtime& r = runtime();
  const FatbinPtx* ptx = nullptr;
  std::string name, problem;
  {
    const std::lock_guard<std::mutex> lock(r.mutex);
    const auto found = r.variables.find(symbol);
    if (found == r.variables.end()) return fail(cudaErrorInvalidSymbol);
    name = found->second.name;
    ptx = ptx_of(*found->second.binary, problem);
  }
  if (!ptx) return fail(cudaErrorNoKernelImageForDevice, name + ": " + problem);
  if (!r.executor.variable) return fail(cudaErrorNoDevice, name + ": no virtual GPU was attached");
  char message[4096] = "";
  if (r.executor.variable(ptx->text, ptx->bytes, name.c_str(), &result, message, sizeof(message)))
    return fail(cudaErrorInvalidSymbol, message);
  return cudaSuccess;
}

cudaError_t allocate(void** out, size_t bytes, Allocation::Kind kind) {
  if (!out) return fail(cudaErrorInvalidValue);
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  // As on a device, aligned to 256 bytes; the rest of the last line belongs to nobody.
  void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!p) return fail(cudaErrorMemoryAllocation);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  runtime().memory[reinterpret_cast<uint64_t>(p)] = {bytes, kind};
  *out = p;
  return cudaSuccess;
}
cudaError_t release(void* p) {
  if (!p) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const auto found = runtime().memory.find(reinterpret_cast<uint64_t>(p));
  if (found == runtime().memory.end() || found->second.kind == Allocation::Kind::registered)
    return fail(cudaErrorInvalidValue, "free of memory that was not allocated");
  runtime().memory.erase(found);
  std::free(p);
  return cudaSuccess;
}

int shared_optin() { return runtime().properties.shared_per_multiprocessor - 1024; }

static CUresult tensor_map_encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                        void* address, const cuuint64_t* dims,
                                        const cuuint64_t* strides, const cuuint32_t* box,
                                        const cuuint32_t* element_strides,
                                        CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                        CUtensorMapFloatOOBfill fill) {
  static_assert(sizeof(CUtensorMap) == sizeof(TensorMap));
  TensorMap ours;
  uint64_t wide_dims[5] = {}, wide_strides[4] = {};
  for (uint32_t d = 0; d < std::min(rank, 5u); ++d) wide_dims[d] = dims[d];
  for (uint32_t d = 0; d + 1 < std::min(rank, 5u); ++d) wide_strides[d] = strides[d];
  const std::string problem =
      encode_tiled(ours, type, rank, reinterpret_cast<uint64_t>(address), wide_dims, wide_strides,
                   box, element_strides, interleave, swizzle, fill);
  if (!problem.empty()) {
    fail(cudaErrorInvalidValue, "cuTensorMapEncodeTiled: " + problem);
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(map, &ours, sizeof(ours));
  return CUDA_SUCCESS;
}

cudaError_t entry_point(const char* symbol, void** out, cudaDriverEntryPointQueryResult* result) {
  if (!symbol || !out) return fail(cudaErrorInvalidValue);
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *out = known ? reinterpret_cast<void*>(&tensor_map_encode_tiled) : nullptr;
  if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return known ? cudaSuccess : missing("cudaGetDriverEntryPoint", symbol);
}

}  // namespace tw::vgpu

using namespace tw::vgpu;

// ---- the side of the virtual GPU

API void tw_vgpu_set_executor(const tw_vgpu_executor* executor) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  runtime().executor = *executor;
}
API void tw_vgpu_set_properties(const tw_vgpu_properties* properties) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  runtime().properties = *properties;
  runtime().name = properties->name;
}
API void tw_vgpu_name(const void* address, uint64_t bytes) {
  named.push_back({reinterpret_cast<uint64_t>(address), bytes});
}
API void tw_vgpu_forget(void) { named.clear(); }
