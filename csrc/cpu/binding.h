// What the torch side of a CPU op file needs: the stable ABI, and short helpers around it.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <tuple>
#include <vector>

#include "cpu/large_blocks.h"
#include "trainwright/types.h"

namespace tw {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& t) { return static_cast<DType>(t.scalar_type()); }
inline const void* data(const Tensor& t) { return t.const_data_ptr(); }
inline const void* data(const std::optional<Tensor>& t) {
  return t ? t->const_data_ptr() : nullptr;
}
inline void* mutable_data(const Tensor& t) { return t.mutable_data_ptr(); }

// By the shim that takes strides: new_empty goes through torch's dispatcher several times.
inline Tensor empty(const std::vector<int64_t>& shape, const Tensor& like, ScalarType dtype) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;)
    strides[i - 1] = strides[i] * (shape[i] > 1 ? shape[i] : 1);
#if defined(__linux__)
  size_t bytes = static_cast<size_t>(dtype_bytes(static_cast<DType>(dtype)));
  for (int64_t size : shape) bytes *= static_cast<size_t>(size);
  if (like.is_cpu() && bytes >= LargeBlocks::kMinBytes) {
    if (void* memory = LargeBlocks::instance().take(bytes))
      return torch::stable::from_blob(
          memory, shape, strides, like.device(), dtype,
          [bytes](void* freed) { LargeBlocks::instance().give_back(freed, bytes); });
  }
#endif
  int32_t device_type, device_index;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device_type,
      device_index, &handle));
  return Tensor(handle);
}
inline Tensor empty(const std::vector<int64_t>& shape, const Tensor& like) {
  return empty(shape, like, like.scalar_type());
}
inline std::vector<int64_t> shape_of(const Tensor& t) {
  std::vector<int64_t> shape(static_cast<size_t>(t.dim()));
  for (int64_t i = 0; i < t.dim(); ++i) shape[static_cast<size_t>(i)] = t.size(i);
  return shape;
}
// The type that sums over t are kept in.
inline ScalarType acc_dtype(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

}  // namespace tw

// The Python wrapper has made its checks already; these are the second line, for callers of the raw
// op.
#define TW_CHECK_CONTIGUOUS(t) STD_TORCH_CHECK((t).is_contiguous(), #t " must be contiguous")
#define TW_CHECK_SHAPE(condition, ...) STD_TORCH_CHECK(condition, __VA_ARGS__)
