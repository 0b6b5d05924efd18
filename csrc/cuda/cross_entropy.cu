// The torch side of cross entropy on CUDA; the kernels are in cross_entropy.cuh.
#include "cuda/cross_entropy.cuh"

#include "cpu/cross_entropy_binding.h"
#include "cuda/binding.cuh"

namespace tw {
namespace {

CrossEntropyTile tile_of(const Tensor& logits, const Tensor& target,
                         const std::optional<Tensor>& weight, int64_t first, int64_t classes,
                         const Options& o) {
  check_tile(logits, target, weight, first, classes);
  return {device_data(logits),
          static_cast<const int64_t*>(device_data(target)),
          device_data(weight),
          logits.size(0),
          logits.size(1),
          first,
          {classes, o.ignore_index, o.label_smoothing, o.z_loss, o.softcap, 0}};
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& logits, const CrossEntropyTile& tile,
                                           int64_t reduction) {
  const cudaStream_t stream = stream_of(logits);
  Tensor scale = empty({2}, logits, ScalarType::Double);
  const Tensor lse = empty({tile.N}, logits, ScalarType::Double);
  const Tensor rows = empty({tile.N}, logits, ScalarType::Double);
  const Tensor loss = empty_loss(logits, reduction);
  if (reduction != kMean) torch::stable::fill_(scale, 1.0);
  with_float_type(dtype_of(logits), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    if (reduction == kMean) launch_cross_entropy_scale<A>(tile, doubles(scale), stream);
    launch_cross_entropy_rows<T>({tile, nullptr, doubles(scale), doubles(lse), doubles(rows)},
                                 stream);
    launch_cross_entropy_losses(doubles(rows), tile.N, reduction == kNone,
                                static_cast<A*>(device_data(loss)), stream);
  });
  check_launch("cross_entropy_rows_kernel");
  return {loss, lse, scale};
}

// `upstream` holds 1 or N elements; without it the value counts.
void backward(const Tensor& out, const Tensor* upstream, double upstream_value,
              const CrossEntropyTile& tile, const Tensor& lse, const Tensor& scale) {
  if (upstream) check_upstream(*upstream, tile.N, out);
  check_saved(lse, scale, tile.N);
  const cudaStream_t stream = stream_of(out);
  const bool weighted = tile.weight && tile.options.label_smoothing != 0;
  const Tensor total = empty({weighted ? 1 : 0}, out, ScalarType::Double);
  with_float_type(dtype_of(out), [&](auto tag) {
    using T = decltype(tag);
    if (weighted)
      launch_cross_entropy_weight_total(static_cast<const acc_t<T>*>(tile.weight),
                                        tile.options.classes, doubles(total), stream);
    launch_cross_entropy_grad<T>(
        {tile, doubles(lse), doubles(scale), weighted ? doubles(total) : nullptr,
         upstream ? device_data(*upstream) : nullptr, upstream_value,
         upstream && upstream->numel() != 1 ? 1 : 0, device_data(out)},
        stream);
  });
  check_launch("cross_entropy_grad_kernel");
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_fwd_cuda(const Tensor& logits,
                                                          const Tensor& target,
                                                          const std::optional<Tensor>& weight,
                                                          int64_t ignore_index,
                                                          double label_smoothing, double z_loss,
                                                          double softcap, int64_t reduction) {
  const OnDevice here(logits);
  const auto tile = tile_of(logits, target, weight, 0, logits.size(1),
                            {ignore_index, label_smoothing, z_loss, softcap});
  return forward(logits, tile, reduction);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_fwd_bwd_cuda(
    const Tensor& logits, const Tensor& target, const std::optional<Tensor>& weight,
    int64_t ignore_index, double label_smoothing, double z_loss, double softcap, int64_t reduction,
    double upstream) {
  const OnDevice here(logits);
  const auto tile = tile_of(logits, target, weight, 0, logits.size(1),
                            {ignore_index, label_smoothing, z_loss, softcap});
  const Tensor grad = empty(shape_of(logits), logits);
  auto [loss, lse, scale] = forward(logits, tile, reduction);
  backward(grad, nullptr, upstream, tile, lse, scale);
  return {loss, lse, scale, grad};
}

Tensor cross_entropy_bwd_cuda(const Tensor& dloss, const Tensor& logits, const Tensor& target,
                              const std::optional<Tensor>& weight, const Tensor& lse,
                              const Tensor& scale, int64_t ignore_index, double label_smoothing,
                              double z_loss, double softcap) {
  const OnDevice here(logits);
  const auto tile = tile_of(logits, target, weight, 0, logits.size(1),
                            {ignore_index, label_smoothing, z_loss, softcap});
  const Tensor grad = empty(shape_of(logits), logits);
  backward(grad, &dloss, 0, tile, lse, scale);
  return grad;
}

void cross_entropy_tile_grad_cuda(const Tensor& out, const Tensor& dloss, const Tensor& logits,
                                  const Tensor& target, const std::optional<Tensor>& weight,
                                  const Tensor& lse, const Tensor& scale, int64_t first,
                                  int64_t classes, int64_t ignore_index, double label_smoothing,
                                  double z_loss, double softcap) {
  TW_CHECK_CONTIGUOUS(out);
  TW_CHECK_SHAPE(out.numel() == logits.numel() && out.scalar_type() == logits.scalar_type(),
                 "out must be like the logits");
  const OnDevice here(logits);
  const auto tile = tile_of(logits, target, weight, first, classes,
                            {ignore_index, label_smoothing, z_loss, softcap});
  backward(out, &dloss, 0, tile, lse, scale);
}

void cross_entropy_tile_state_cuda(const Tensor& state, const Tensor& logits, const Tensor& target,
                                   const std::optional<Tensor>& weight, int64_t first,
                                   int64_t classes, int64_t ignore_index, double label_smoothing,
                                   double softcap) {
  TW_CHECK_CONTIGUOUS(state);
  const OnDevice here(logits);
  const auto tile =
      tile_of(logits, target, weight, first, classes, {ignore_index, label_smoothing, 0, softcap});
  TW_CHECK_SHAPE(state.numel() == 4 * tile.N && state.scalar_type() == ScalarType::Double,
                 "state must be float64 of shape (N, 4)");
  with_float_type(dtype_of(logits), [&](auto tag) {
    launch_cross_entropy_rows<decltype(tag)>({tile, doubles(state), nullptr, nullptr, nullptr},
                                             stream_of(logits));
  });
  check_launch("cross_entropy_rows_kernel");
}

}  // namespace
}  // namespace tw

TW_CUDA_LIBRARY(m) {
  m.impl("cross_entropy_fwd", TORCH_BOX(&tw::cross_entropy_fwd_cuda));
  m.impl("cross_entropy_fwd_bwd", TORCH_BOX(&tw::cross_entropy_fwd_bwd_cuda));
  m.impl("cross_entropy_bwd", TORCH_BOX(&tw::cross_entropy_bwd_cuda));
  m.impl("cross_entropy_tile_grad_", TORCH_BOX(&tw::cross_entropy_tile_grad_cuda));
  m.impl("cross_entropy_tile_state_", TORCH_BOX(&tw::cross_entropy_tile_state_cuda));
}
