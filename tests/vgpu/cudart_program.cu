// A program for the CUDA runtime replacement: what test_cudart.py calls by name.
#include <cuda.h>
#include <cuda_runtime.h>

__device__ int counter = 5;
__constant__ float factors[3] = {1.f, 2.f, 3.f};

struct Pair {
  float* out;
  int n;
};

__global__ void scale(Pair p, float by) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) p.out[i] = by * factors[i % 3] + counter;
}
__global__ void reverse(int* x, int n) {
  extern __shared__ int buffer[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) buffer[n - 1 - i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = buffer[i];
}

#define TRY(call) \
  if (const cudaError_t e = call) return e

// Allocation, copies, streams, events, a struct by value, a device variable.
extern "C" int run_scale(float* out, int n, float by, int new_counter) {
  cudaStream_t stream;
  cudaEvent_t event;
  TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  TRY(cudaEventCreate(&event));
  float* device = nullptr;
  TRY(cudaMalloc(&device, n * sizeof(float)));
  TRY(cudaMemcpyToSymbol(counter, &new_counter, sizeof(int)));
  scale<<<(n + 63) / 64, 64, 0, stream>>>({device, n}, by);
  TRY(cudaGetLastError());
  TRY(cudaEventRecord(event, stream));
  TRY(cudaStreamWaitEvent(nullptr, event));
  TRY(cudaMemcpyAsync(out, device, n * sizeof(float), cudaMemcpyDeviceToHost, stream));
  TRY(cudaStreamSynchronize(stream));
  TRY(cudaFree(device));
  TRY(cudaEventDestroy(event));
  return cudaStreamDestroy(stream);
}
// One element too few is allocated.
extern "C" int run_past_the_end(int n) {
  float* device = nullptr;
  TRY(cudaMalloc(&device, (n - 1) * sizeof(float)));
  scale<<<1, 64>>>({device, n}, 1.f);
  const cudaError_t error = cudaGetLastError();
  cudaFree(device);
  return error;
}
extern "C" int run_reverse(int* x, int n, bool ask) {
  int* device = nullptr;
  TRY(cudaMalloc(&device, n * sizeof(int)));
  TRY(cudaMemcpy(device, x, n * sizeof(int), cudaMemcpyHostToDevice));
  const int bytes = n * static_cast<int>(sizeof(int));
  if (ask) TRY(cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(128);
  config.dynamicSmemBytes = bytes;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  config.attrs = &attribute;
  config.numAttrs = 1;
  TRY(cudaLaunchKernelEx(&config, reverse, device, n));
  TRY(cudaMemcpy(x, device, n * sizeof(int), cudaMemcpyDeviceToHost));
  return cudaFree(device);
}
extern "C" int run_with(unsigned grid, unsigned threads) {
  scale<<<grid, threads>>>({nullptr, 0}, 1.f);
  return cudaGetLastError();
}
extern "C" int properties(int* out) {
  cudaDeviceProp p;
  TRY(cudaGetDeviceProperties(&p, 0));
  out[0] = p.major * 10 + p.minor;
  out[1] = p.multiProcessorCount;
  TRY(cudaDeviceGetAttribute(&out[2], cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  return cudaDeviceGetAttribute(&out[3], cudaDevAttrMultiProcessorCount, 0);
}
extern "C" int elapsed_time() {
  float ms;
  cudaEvent_t a, b;
  TRY(cudaEventCreate(&a));
  TRY(cudaEventCreate(&b));
  return cudaEventElapsedTime(&ms, a, b);
}
// Free of what was never allocated; the size of a symbol; what kind of memory a pointer is.
extern "C" int memory(int* out) {
  out[0] = cudaFree(out);
  size_t bytes;
  TRY(cudaGetSymbolSize(&bytes, factors));
  out[1] = static_cast<int>(bytes);
  void* pinned;
  TRY(cudaMallocHost(&pinned, 8));
  cudaPointerAttributes attributes;
  TRY(cudaPointerGetAttributes(&attributes, static_cast<char*>(pinned) + 7));
  out[2] = attributes.type == cudaMemoryTypeHost;
  TRY(cudaPointerGetAttributes(&attributes, static_cast<char*>(pinned) + 8));
  out[3] = attributes.type == cudaMemoryTypeUnregistered;
  return cudaFreeHost(pinned);
}
extern "C" int entry_point(const char* name, bool* found) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
  *found = function != nullptr && result == cudaDriverEntryPointSuccess;
  return error;
}
// Encodes a map of a rows x 64 matrix of floats in boxes of box x 32; the driver's result.
extern "C" int tensor_map(void* address, int rows, int box) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &result));
  CUtensorMap map;
  const cuuint64_t dims[2] = {64, static_cast<cuuint64_t>(rows)}, strides[1] = {256};
  const cuuint32_t shape[2] = {32, static_cast<cuuint32_t>(box)}, steps[2] = {1, 1};
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, address, dims, strides, shape, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
extern "C" const char* message(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
