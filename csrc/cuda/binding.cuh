// What the torch side of a CUDA op file needs: device guard, current stream, addresses, launch check.
//
// With TW_VIRTUAL_GPU the same file serves CPU tensors under the names trainwright_vgpu::<op>: the
// kernels then run on the virtual GPU, whose CUDA runtime learns here which memory a call may touch.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "cpu/binding.h"

#ifdef TW_VIRTUAL_GPU
#include "vgpu/cudart/cudart.h"
#define TW_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(trainwright_vgpu, CPU, m)
#else
#define TW_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(trainwright, CUDA, m)
#endif

namespace tw {

// Reads away the error that an earlier call of somebody else left, so that check_launch reports those of this call's
// launches alone. An error that broke the context cannot be read away: each launch returns it.
inline void forget_earlier_error() { static_cast<void>(cudaGetLastError()); }

#ifdef TW_VIRTUAL_GPU

// The span of a call: memory that was named in it is forgotten at its end.
class OnDevice {
 public:
  explicit OnDevice(const Tensor&) { forget_earlier_error(); }
  ~OnDevice() { tw_vgpu_forget(); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
};

inline cudaStream_t stream_of(const Tensor&) { return nullptr; }

inline void* device_data(const Tensor& t) {
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  void* begin = const_cast<void*>(t.const_data_ptr());
  if (t.numel() > 0) tw_vgpu_name(begin, (last + 1) * dtype_bytes(dtype_of(t)));
  return begin;
}
// Memory of a tensor that is known by its address alone.
inline void* device_memory(int64_t address, int64_t bytes) {
  void* begin = reinterpret_cast<void*>(address);
  tw_vgpu_name(begin, static_cast<uint64_t>(bytes));
  return begin;
}

#else

// The span of a call, whose kernels are launched on t's device.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& t) : guard_(t.get_device_index()) { forget_earlier_error(); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

// The stream that torch works on for t's device. Kernels never use the default stream.
inline cudaStream_t stream_of(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void* device_data(const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }
inline void* device_memory(int64_t address, int64_t) { return reinterpret_cast<void*>(address); }

#endif

// Null if there is no tensor.
inline void* device_data(const std::optional<Tensor>& t) { return t ? device_data(*t) : nullptr; }

inline double* doubles(const Tensor& t) { return static_cast<double*>(device_data(t)); }

// Whether the launches since OnDevice, or the last check, went well.
inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, kernel, ": launch failed: ", cudaGetErrorString(error));
}

}  // namespace tw
