// The torch side of ops on lists of tensors: flat memory for tensors of any strides.
#pragma once
#include <algorithm>
#include <numeric>
#include <utility>

#include "cuda/binding.cuh"
#include "cuda/tensor_list.cuh"

namespace tw {

inline std::vector<int64_t> strides_of(const Tensor& t) {
  std::vector<int64_t> strides(static_cast<size_t>(t.dim()));
  for (int64_t i = 0; i < t.dim(); ++i) strides[static_cast<size_t>(i)] = t.stride(i);
  return strides;
}

// Whether the elements lie in memory without gaps or overlap, in whatever order.
inline bool is_dense(const Tensor& t) {
  std::vector<int64_t> order(static_cast<size_t>(t.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return t.stride(a) < t.stride(b); });
  int64_t next = 1;
  for (const int64_t d : order) {
    if (t.size(d) == 1) continue;
    if (t.stride(d) != next) return false;
    next *= t.size(d);
  }
  return true;
}
inline std::vector<int64_t> row_major_strides(const Tensor& t) {
  std::vector<int64_t> strides(static_cast<size_t>(t.dim()));
  int64_t next = 1;
  for (int64_t d = t.dim() - 1; d >= 0; --d) {
    strides[static_cast<size_t>(d)] = next;
    next *= std::max<int64_t>(t.size(d), 1);
  }
  return strides;
}
inline bool has_strides(const Tensor& t, const std::vector<int64_t>& strides) {
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) != 1 && t.stride(d) != strides[static_cast<size_t>(d)]) return false;
  return true;
}

inline Tensor empty_strided(const Tensor& like, const std::vector<int64_t>& strides) {
  const std::vector<int64_t> shape = shape_of(like);
  int32_t type = 0, dtype = 0;
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(like.dim(), shape.data(), strides.data(), dtype,
                                                  type, like.get_device_index(), &result));
  return Tensor(result);
}

// Tensors as flat memory. One that does not lie as asked is replaced by a copy, which lives as long
// as this object; those that are written are copied back by finish().
class FlatTensors {
 public:
  // With the strides of a dense tensor of the same shape.
  void* strided(const Tensor& t, const std::vector<int64_t>& strides, bool written) {
    return has_strides(t, strides) ? device_data(t) : copy(t, strides, true, written);
  }
  // In row-major order.
  void* row_major(const Tensor& t, bool read, bool written) {
    return t.is_contiguous() ? device_data(t) : copy(t, row_major_strides(t), read, written);
  }
  // In any order.
  void* any_order(const Tensor& t, bool written) {
    return is_dense(t) ? device_data(t) : copy(t, row_major_strides(t), true, written);
  }
  void finish() {
    for (auto& [original, copied] : written_) torch::stable::copy_(original, copied);
  }

 private:
  void* copy(const Tensor& t, const std::vector<int64_t>& strides, bool read, bool written) {
    Tensor flat = empty_strided(t, strides);
    if (read) torch::stable::copy_(flat, t);
    copies_.push_back(flat);
    if (written) written_.emplace_back(t, flat);
    return device_data(flat);
  }
  std::vector<Tensor> copies_;
  std::vector<std::pair<Tensor, Tensor>> written_;
};

}  // namespace tw
