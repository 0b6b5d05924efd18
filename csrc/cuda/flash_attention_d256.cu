// Attention with head dims up to 256 that the next smaller file does not take.
#include "cuda/flash_attention_bwd.cuh"
#include "cuda/flash_attention_dbias.cuh"
#include "cuda/flash_attention_fwd.cuh"

TW_BEGIN

template void launch_attention_forward<bf16, 256>(AttentionForward, cudaStream_t);
template void launch_attention_forward<f16, 256>(AttentionForward, cudaStream_t);
template void launch_attention_backward<bf16, 256>(AttentionBackward, cudaStream_t);
template void launch_attention_backward<f16, 256>(AttentionBackward, cudaStream_t);
template void launch_attention_bias_gradient<bf16, 256>(BiasGradient, cudaStream_t);
template void launch_attention_bias_gradient<f16, 256>(BiasGradient, cudaStream_t);

TW_END
