// What the torch side of a CPU op file needs: the stable ABI, and short helpers around it.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <optional>
#include <tuple>
#include <vector>

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

// Asks for huge pages where memory is large. A large output is new memory, which the system hands out
// and clears page by page as it is first written; in pages of 4 KiB that takes longer than a norm.
inline void prefer_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t page = uintptr_t(2) << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / page * page;
  // A hint: where it is refused nothing is lost.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

inline Tensor empty(std::vector<int64_t> shape, const Tensor& like, ScalarType dtype) {
  Tensor t = torch::stable::new_empty(like, shape, dtype);
  if (t.is_cpu()) prefer_huge_pages(t.mutable_data_ptr(), t.numel() * dtype_bytes(dtype_of(t)));
  return t;
}
inline Tensor empty(std::vector<int64_t> shape, const Tensor& like) {
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
