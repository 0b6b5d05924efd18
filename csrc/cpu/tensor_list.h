// Lists of tensors for the multi-tensor kernels: their layouts as plain numbers
// (trainwright/strided.h) and their blocks (trainwright/blocks.h).
#pragma once
#include <algorithm>
#include <numeric>

#include "cpu/binding.h"
#include "trainwright/blocks.h"
#include "trainwright/strided.h"

namespace tw {

// The dims of t sorted from the largest stride to the smallest: a dense tensor is contiguous in
// this order.
inline std::vector<int64_t> memory_order(const Tensor& t) {
  std::vector<int64_t> order(static_cast<size_t>(t.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return t.stride(a) > t.stride(b); });
  return order;
}

// Owns the numbers that Strided points to.
class Layouts {
 public:
  explicit Layouts(size_t tensors) { pool_.reserve(tensors); }  // so that no entry ever moves

  // The dims of t from the outermost loop of `order` to the innermost, neighbours merged.
  Strided of(const Tensor& t, const std::vector<int64_t>& order) {
    std::vector<int64_t> dims;
    for (const int64_t d : order) {
      const int64_t size = t.size(d), stride = t.stride(d);
      if (size == 1) continue;
      if (!dims.empty() && dims.back() == size * stride) {
        dims[dims.size() - 2] *= size;
        dims.back() = stride;
      } else {
        dims.push_back(size);
        dims.push_back(stride);
      }
    }
    if (dims.empty() || (dims.size() == 2 && dims[1] == 1)) return {nullptr, 0};
    pool_.push_back(std::move(dims));
    return {pool_.back().data(), static_cast<int64_t>(pool_.back().size() / 2)};
  }
  // In logical (row-major) order.
  Strided of(const Tensor& t) {
    if (t.is_contiguous()) return {nullptr, 0};
    std::vector<int64_t> order(static_cast<size_t>(t.dim()));
    std::iota(order.begin(), order.end(), 0);
    return of(t, order);
  }

 private:
  std::vector<std::vector<int64_t>> pool_;
};

class Blocks {
 public:
  explicit Blocks(size_t rows) {
    start_.reserve(rows + 1);
    first_.reserve(rows + 1);
  }
  void add_row(int64_t elements) {
    start_.push_back(start_.back() + elements);
    first_.push_back(first_.back() + (elements + kBlock - 1) / kBlock);
  }
  int64_t count() const { return first_.back(); }
  BlockTable table() const {
    return {start_.data(), first_.data(), static_cast<int64_t>(start_.size()) - 1};
  }

 private:
  std::vector<int64_t> start_{0}, first_{0};
};

// What a pass over gradients found, block by block, added up in block order: {sum of squares, 1 if
// anything was not finite}, on the device of `like`.
inline Tensor sum_block_stats(const std::vector<double>& partial, const Tensor& like) {
  Tensor stats = empty({2}, like, ScalarType::Double);
  double* out = static_cast<double*>(mutable_data(stats));
  out[0] = out[1] = 0.0;
  for (size_t i = 0; i + 1 < partial.size(); i += 2) {
    out[0] += partial[i];
    out[1] = std::max(out[1], partial[i + 1]);
  }
  return stats;
}

}  // namespace tw
