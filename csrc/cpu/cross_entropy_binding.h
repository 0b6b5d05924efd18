// The torch side that the CPU and CUDA files of cross entropy share: options, and what a raw call must get.
#pragma once
#include "cpu/binding.h"

namespace tw {

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };  // torch's numbers

struct Options {
  int64_t ignore_index;
  double label_smoothing, z_loss, softcap;
};

inline void check_tile(const Tensor& logits, const Tensor& target,
                       const std::optional<Tensor>& weight, int64_t first, int64_t classes) {
  TW_CHECK_CONTIGUOUS(logits);
  TW_CHECK_CONTIGUOUS(target);
  TW_CHECK_SHAPE(target.numel() == logits.size(0) && target.scalar_type() == ScalarType::Long,
                 "target must be int64 of shape (N)");
  TW_CHECK_SHAPE(first >= 0 && first + logits.size(1) <= classes,
                 "first + columns must not exceed classes");
  if (weight) {
    TW_CHECK_CONTIGUOUS(*weight);
    TW_CHECK_SHAPE(weight->numel() == classes && weight->scalar_type() == acc_dtype(logits),
                   "weight must be (classes) in the accumulator dtype");
  }
}

inline void check_upstream(const Tensor& upstream, int64_t N, const Tensor& grad) {
  TW_CHECK_SHAPE(upstream.numel() == 1 || (upstream.numel() == N && upstream.is_contiguous()),
                 "upstream must hold 1 or N contiguous elements");
  TW_CHECK_SHAPE(upstream.scalar_type() == acc_dtype(grad),
                 "upstream must be in the accumulator dtype");
}

inline void check_saved(const Tensor& lse, const Tensor& scale, int64_t N) {
  TW_CHECK_SHAPE(lse.scalar_type() == ScalarType::Double && lse.numel() == N &&
                     scale.scalar_type() == ScalarType::Double && scale.numel() == 2,
                 "lse and scale must be float64 of shapes (N) and (2)");
}

inline Tensor empty_loss(const Tensor& logits, int64_t reduction) {
  return empty(reduction == kNone ? std::vector<int64_t>{logits.size(0)} : std::vector<int64_t>{},
               logits, acc_dtype(logits));
}

}  // namespace tw
