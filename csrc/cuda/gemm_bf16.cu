// Matrix products of bf16 operands: a file of its own, so that they compile beside the others.
#include "cuda/gemm_mma.cuh"

TW_BEGIN

template void launch_gemm_mma<bf16>(GemmCall, cudaStream_t);

TW_END
