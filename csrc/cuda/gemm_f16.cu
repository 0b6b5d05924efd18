// Matrix products of fp16 operands: a file of its own, so that they compile beside the others.
#include "cuda/gemm_mma.cuh"

TW_BEGIN

template void launch_gemm_mma<f16>(GemmCall, cudaStream_t);

TW_END
