// The torch side of ops on rows of C elements.
#pragma once
#include "cuda/binding.cuh"
#include "cuda/rows.cuh"

namespace tw {

// K: column sums of the op's backward.
template<int K>
void check_rows(const char* op, const Tensor& x, int64_t C) {
  TW_CHECK_CONTIGUOUS(x);
  const int64_t most = dtype_of(x) == DType::f64 ? kLongestRow<double, K> : kLongestRow<float, K>;
  STD_TORCH_CHECK(C <= most, op, ": C must be at most ", most, ", got ", C);
}

// (slots, C) -> (C), in a fixed order.
inline Tensor sum_slots(const Tensor& partial) {
  const std::vector<int64_t> rows = {0};
  return torch::stable::sum(partial, rows, false, std::nullopt);
}

}  // namespace tw
