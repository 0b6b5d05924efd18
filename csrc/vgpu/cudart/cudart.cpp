// A CUDA runtime for the virtual GPU: objects compiled by nvcc run unmodified when they are linked
// with (or find) this library in place of libcudart.
//
// There is one device. Its memory is host memory, so copies are memcpy; streams execute at once, so
// everything is complete when a call returns. Kernels run on the executor that tw_vgpu_set_executor
// gave (cudart.h), which needs their PTX: compile with -gencode arch=compute_80,code=compute_80
// --no-compress. A kernel may touch memory of cudaMalloc and its like, module variables, and what
// tw_vgpu_name named. What is missing fails with cudaErrorNotSupported and says so in
// cudaGetErrorString; time is never measured.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "vgpu/cudart/runtime.h"

using namespace tw::vgpu;

// ---- registration, called by the code that nvcc generates

API void** __cudaRegisterFatBinary(void* wrapper) {
  auto* binary = new Binary;
  binary->entries = read_fatbin(wrapper, binary->problem);
  return reinterpret_cast<void**>(binary);
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void** handle) {
  auto* binary = reinterpret_cast<Binary*>(handle);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  for (auto it = runtime().kernels.begin(); it != runtime().kernels.end();)
    it = it->second->binary == binary ? runtime().kernels.erase(it) : std::next(it);
  for (auto it = runtime().variables.begin(); it != runtime().variables.end();)
    it = it->second.binary == binary ? runtime().variables.erase(it) : std::next(it);
  delete binary;
}
API void __cudaRegisterFunction(void** handle, const char* stub, char*, const char* name, int,
                                uint3*, uint3*, dim3*, dim3*, int*) {
  auto* binary = reinterpret_cast<Binary*>(handle);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  binary->kernels.push_back(std::make_unique<Kernel>(Kernel{binary, name}));
  runtime().kernels[stub] = binary->kernels.back().get();
}
API void __cudaRegisterVar(void** handle, char* shadow, char*, const char* name, int, size_t bytes,
                           int, int) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  runtime().variables[shadow] = {reinterpret_cast<Binary*>(handle), name, bytes};
}
API void __cudaRegisterManagedVar(void** handle, void** shadow, char*, const char* name, int,
                                  size_t, int, int) {
  reinterpret_cast<Binary*>(handle)->entries.clear();
  reinterpret_cast<Binary*>(handle)->problem =
      std::string("__managed__ variables are not supported: ") + name;
  *shadow = nullptr;
}
API char __cudaInitModule(void**) { return 1; }

// ---- launches

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                         CUstream_st* stream) {
  calls.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (calls.empty()) return fail(cudaErrorMissingConfiguration);
  *grid = calls.back().grid;
  *block = calls.back().block;
  *shared = calls.back().shared;
  *static_cast<cudaStream_t*>(stream) = calls.back().stream;
  calls.pop_back();
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* stub) {
  *out = reinterpret_cast<cudaKernel_t>(kernel_of(stub));
  return *out ? cudaSuccess : fail(cudaErrorInvalidDeviceFunction);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                   size_t shared, cudaStream_t) {
  return launch(reinterpret_cast<Kernel*>(kernel), grid, block, nullptr, args, shared);
}
API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                        size_t shared, cudaStream_t) {
  return launch(reinterpret_cast<Kernel*>(kernel), grid, block, nullptr, args, shared);
}
API cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** args,
                                 size_t shared, cudaStream_t) {
  return launch(kernel_of(stub), grid, block, nullptr, args, shared);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub,
                                    void** args) {
  const dim3* cluster = nullptr;
  dim3 shape;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& a = config->attrs[i];
    switch (a.id) {
      case cudaLaunchAttributeClusterDimension:
        shape = dim3(a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z);
        cluster = &shape;
        break;
      case cudaLaunchAttributeProgrammaticStreamSerialization:  // launches follow each other anyway
      case cudaLaunchAttributePriority:
      case cudaLaunchAttributeClusterSchedulingPolicyPreference:
      case cudaLaunchAttributeAccessPolicyWindow:
      case cudaLaunchAttributePreferredSharedMemoryCarveout:
      case cudaLaunchAttributeIgnore:
        break;
      case cudaLaunchAttributeCooperative:
        if (a.val.cooperative) return missing("cudaLaunchKernelExC", "a cooperative launch");
        break;
      default:
        return missing("cudaLaunchKernelExC", "launch attribute " + std::to_string(a.id));
    }
  }
  // A stub's address, or a handle of cudaGetKernel or __cudaGetKernel.
  const Kernel* kernel = kernel_of(stub);
  if (!kernel) kernel = static_cast<const Kernel*>(stub);
  return launch(kernel, config->gridDim, config->blockDim, cluster, args, config->dynamicSmemBytes);
}
API cudaError_t cudaGetKernel(cudaKernel_t* out, const void* stub) {
  return __cudaGetKernel(out, stub);
}
API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return missing("cudaLaunchCooperativeKernel");
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

// ---- functions

API cudaError_t cudaFuncSetAttribute(const void* stub, cudaFuncAttribute attribute, int value) {
  Kernel* kernel = kernel_of(stub);
  if (!kernel) return fail(cudaErrorInvalidDeviceFunction);
  switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize:
      if (value < 0 || value > shared_optin())
        return fail(cudaErrorInvalidValue, kernel->name + ": " + std::to_string(value) +
                                               " bytes of dynamic shared memory, this device has " +
                                               std::to_string(shared_optin()));
      kernel->max_dynamic_shared = value;
      return cudaSuccess;
    case cudaFuncAttributePreferredSharedMemoryCarveout:
    case cudaFuncAttributeNonPortableClusterSizeAllowed:
      return cudaSuccess;
    default:
      return missing("cudaFuncSetAttribute", "attribute " + std::to_string(attribute));
  }
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
  return missing("cudaFuncGetAttributes");  // registers are ptxas's to know
}
API cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int*, const void*, int,
                                                                       size_t, unsigned) {
  return missing("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int*, const void*, int, size_t) {
  return missing("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
}

// ---- device

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
API cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
API cudaError_t cudaDeviceReset() { return cudaSuccess; }
API cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device != 0) return fail(cudaErrorInvalidDevice);
  const Runtime& r = runtime();
  *p = {};
  std::strncpy(p->name, r.name.c_str(), sizeof(p->name) - 1);
  p->totalGlobalMem = size_t{64} << 30;
  p->sharedMemPerBlock = 48 * 1024;
  p->sharedMemPerBlockOptin = static_cast<size_t>(shared_optin());
  p->sharedMemPerMultiprocessor = static_cast<size_t>(r.properties.shared_per_multiprocessor);
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 0x7fffffff;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->totalConstMem = 65536;
  p->major = r.properties.major;
  p->minor = r.properties.minor;
  p->multiProcessorCount = r.properties.multiprocessors;
  p->l2CacheSize = r.properties.l2_bytes;
  p->memoryBusWidth = r.properties.memory_bus_bits;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->canMapHostMemory = 1;
  p->streamPrioritiesSupported = p->memoryPoolsSupported = p->hostRegisterSupported = 1;
  p->clusterLaunch = r.properties.major >= 9;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return fail(cudaErrorInvalidDevice);
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  const tw_vgpu_properties& ours = runtime().properties;
  switch (attribute) {
#define TW_IS(name, number)            \
  case cudaDevAttr##name:              \
    *value = static_cast<int>(number); \
    return cudaSuccess;
    TW_IS(MultiProcessorCount, p.multiProcessorCount)
    TW_IS(ComputeCapabilityMajor, p.major)
    TW_IS(ComputeCapabilityMinor, p.minor)
    TW_IS(WarpSize, 32)
    TW_IS(MaxThreadsPerBlock, p.maxThreadsPerBlock)
    TW_IS(MaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor)
    TW_IS(MaxBlocksPerMultiprocessor, p.maxBlocksPerMultiProcessor)
    TW_IS(MaxBlockDimX, p.maxThreadsDim[0])
    TW_IS(MaxBlockDimY, p.maxThreadsDim[1])
    TW_IS(MaxBlockDimZ, p.maxThreadsDim[2])
    TW_IS(MaxGridDimX, p.maxGridSize[0])
    TW_IS(MaxGridDimY, p.maxGridSize[1])
    TW_IS(MaxGridDimZ, p.maxGridSize[2])
    TW_IS(MaxSharedMemoryPerBlock, p.sharedMemPerBlock)
    TW_IS(MaxSharedMemoryPerBlockOptin, p.sharedMemPerBlockOptin)
    TW_IS(MaxSharedMemoryPerMultiprocessor, p.sharedMemPerMultiprocessor)
    TW_IS(ReservedSharedMemoryPerBlock, p.reservedSharedMemPerBlock)
    TW_IS(MaxRegistersPerBlock, p.regsPerBlock)
    TW_IS(MaxRegistersPerMultiprocessor, p.regsPerMultiprocessor)
    TW_IS(TotalConstantMemory, p.totalConstMem)
    TW_IS(L2CacheSize, p.l2CacheSize)
    TW_IS(GlobalMemoryBusWidth, p.memoryBusWidth)
    TW_IS(ClockRate, ours.clock_khz)
    TW_IS(MemoryClockRate, ours.memory_clock_khz)
    TW_IS(ConcurrentKernels, 1)
    TW_IS(UnifiedAddressing, 1)
    TW_IS(ManagedMemory, 1)
    TW_IS(CooperativeLaunch, 0)
    TW_IS(ClusterLaunch, p.clusterLaunch)
    TW_IS(MemoryPoolsSupported, 1)
    TW_IS(Integrated, 0)
#undef TW_IS
    default:
      return missing("cudaDeviceGetAttribute", "attribute " + std::to_string(attribute));
  }
}

// ---- streams and events: everything has happened already

API cudaError_t cudaStreamCreate(cudaStream_t* s) { return new_handle(s); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return new_handle(s); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  return new_handle(s);
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return missing("cudaStreamBeginCapture");
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return new_handle(e); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return new_handle(e); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) {
  return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) {
  return missing("cudaEventElapsedTime");  // time here says nothing about a GPU
}

// ---- memory

API cudaError_t cudaMalloc(void** p, size_t n) { return allocate(p, n, Allocation::Kind::device); }
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) {
  return allocate(p, n, Allocation::Kind::device);
}
API cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) {
  return allocate(p, n, Allocation::Kind::managed);
}
API cudaError_t cudaMallocHost(void** p, size_t n) {
  return allocate(p, n, Allocation::Kind::host);
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  return allocate(p, n, Allocation::Kind::host);
}
API cudaError_t cudaMallocPitch(void** p, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return allocate(p, *pitch * height, Allocation::Kind::device);
}
API cudaError_t cudaFree(void* p) { return release(p); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return release(p); }
API cudaError_t cudaFreeHost(void* p) { return release(p); }
API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  runtime().memory[reinterpret_cast<uint64_t>(p)] = {n, Allocation::Kind::registered};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const auto found = runtime().memory.find(reinterpret_cast<uint64_t>(p));
  if (found == runtime().memory.end() || found->second.kind != Allocation::Kind::registered)
    return fail(cudaErrorHostMemoryNotRegistered);
  runtime().memory.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{64} << 30;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  *out = {};
  out->type = cudaMemoryTypeUnregistered;
  out->hostPointer = const_cast<void*>(p);
  const auto address = reinterpret_cast<uint64_t>(p);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  auto found = runtime().memory.upper_bound(address);
  if (found == runtime().memory.begin()) return cudaSuccess;
  --found;
  if (address - found->first >= found->second.bytes) return cudaSuccess;
  const auto kind = found->second.kind;
  out->type = kind == Allocation::Kind::device    ? cudaMemoryTypeDevice
              : kind == Allocation::Kind::managed ? cudaMemoryTypeManaged
                                                  : cudaMemoryTypeHost;
  out->devicePointer = const_cast<void*>(p);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  if (n) std::memmove(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind,
                                cudaStream_t) {
  return cudaMemcpy(to, from, n, kind);
}
API cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                             size_t width, size_t height, cudaMemcpyKind) {
  if (width > to_pitch || width > from_pitch) return fail(cudaErrorInvalidPitchValue);
  for (size_t y = 0; y < height; ++y)
    std::memmove(static_cast<char*>(to) + y * to_pitch,
                 static_cast<const char*>(from) + y * from_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}
API cudaError_t cudaMemset(void* p, int value, size_t n) {
  if (n) std::memset(p, value, n);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t) {
  return cudaMemset(p, value, n);
}
API cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  tw_vgpu_range range;
  const cudaError_t error = variable_of(symbol, range);
  if (error == cudaSuccess) *p = reinterpret_cast<void*>(range.address);
  return error;
}
API cudaError_t cudaGetSymbolSize(size_t* bytes, const void* symbol) {
  tw_vgpu_range range;
  const cudaError_t error = variable_of(symbol, range);
  if (error == cudaSuccess) *bytes = range.bytes;
  return error;
}
API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t n, size_t offset,
                                   cudaMemcpyKind) {
  tw_vgpu_range range;
  if (const cudaError_t error = variable_of(symbol, range)) return error;
  if (offset > range.bytes || n > range.bytes - offset) return fail(cudaErrorInvalidValue);
  std::memcpy(reinterpret_cast<char*>(range.address) + offset, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbolAsync(const void* symbol, const void* from, size_t n,
                                        size_t offset, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpyToSymbol(symbol, from, n, offset, kind);
}
API cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, size_t n, size_t offset,
                                     cudaMemcpyKind) {
  tw_vgpu_range range;
  if (const cudaError_t error = variable_of(symbol, range)) return error;
  if (offset > range.bytes || n > range.bytes - offset) return fail(cudaErrorInvalidValue);
  std::memcpy(to, reinterpret_cast<const char*>(range.address) + offset, n);
  return cudaSuccess;
}

// ---- driver entry points

API cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** out, unsigned long long,
                                        cudaDriverEntryPointQueryResult* result) {
  return entry_point(symbol, out, result);
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  return entry_point(symbol, out, result);
}

// ---- errors

API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidPitchValue:
      return "cudaErrorInvalidPitchValue";
    case cudaErrorInvalidSymbol:
      return "cudaErrorInvalidSymbol";
    case cudaErrorMissingConfiguration:
      return "cudaErrorMissingConfiguration";
    case cudaErrorInvalidDeviceFunction:
      return "cudaErrorInvalidDeviceFunction";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorNoKernelImageForDevice:
      return "cudaErrorNoKernelImageForDevice";
    case cudaErrorHostMemoryNotRegistered:
      return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    default:
      return "cudaErrorUnknown";
  }
}
// What went wrong in this thread, in words; valid until its next error.
API const char* cudaGetErrorString(cudaError_t error) {
  return error != cudaSuccess && !last_message.empty() ? last_message.c_str()
                                                       : cudaGetErrorName(error);
}
