// The torch side that the CPU and CUDA files of the gated activations share.
#pragma once
#include <string>

#include "cpu/binding.h"
#include "trainwright/activation.h"

namespace tw {

// A tensor as N rows of C elements, `stride` apart, each contiguous; copied only if it is not.
struct Rows {
  Tensor tensor;
  int64_t stride;
};

inline Rows rows_of(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  int64_t stride = -1, next = -1;
  bool fits = last < 0 || t.size(last) <= 1 || t.stride(last) == 1;
  for (int64_t i = last - 1; i >= 0 && fits; --i) {
    if (t.size(i) == 1) continue;
    if (stride < 0) {
      stride = t.stride(i);
    } else if (t.stride(i) != next) {
      fits = false;
    }
    next = t.stride(i) * t.size(i);
  }
  const int64_t C = last < 0 ? 1 : t.size(last);
  if (fits) return {t, stride < 0 ? C : stride};
  return {torch::stable::contiguous(t), C};
}

inline Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  STD_TORCH_CHECK(name == "gelu_tanh", "glu: unknown activation");
  return Activation::gelu_tanh;
}

// (N, C) of a tensor; where all rows follow each other, one row is enough.
struct Sizes {
  int64_t N, C;
};
inline Sizes sizes_of(const Tensor& t, bool dense) {
  const int64_t C = t.dim() ? t.size(t.dim() - 1) : 1, numel = t.numel();
  if (numel == 0) return {0, 0};
  return dense ? Sizes{1, numel} : Sizes{numel / C, C};
}

}  // namespace tw
