// The torch side of stats.cuh.
#pragma once
#include "cuda/binding.cuh"
#include "cuda/stats.cuh"

namespace tw {

// What a pass of `blocks` blocks over gradients finds: they write two numbers each, sum() adds those up.
class BlockStats {
 public:
  BlockStats(const Tensor& like, int64_t blocks)
      : blocks_(blocks),
        partials_(empty({blocks, 2}, like, ScalarType::Double)),
        partial_(doubles(partials_)) {}

  double* partial() const { return partial_; }  // of the first block

  Tensor sum(Extreme extreme, cudaStream_t stream) const {
    const Tensor stats = empty({2}, partials_);
    launch_sum_stats(partial_, blocks_, doubles(stats), extreme, stream);
    check_launch("sum_stats_kernel");
    return stats;
  }

 private:
  int64_t blocks_;
  Tensor partials_;
  double* partial_;
};

}  // namespace tw
