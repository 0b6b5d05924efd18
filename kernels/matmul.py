"""Batches of matrix products in Triton, with K split on request:  out (B, M, N) = a (B, M, K) b (B, K, N), any strides.

Kernels, schedule and workspaces: _product.py. Sums in fp32, parts of K added in order, rounded once, without atomics:
repeats are bit-equal. 2 B M N K FLOPs; parts add 4 (splits + 1) B M N bytes. Bound: tensor cores or memory.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py); bytes and
bank conflicts are counted on the virtual GPU (tests/vgpu/compiled_products.py).
"""

from ._product import configuration, multiply, sum_configurations


def matmul(a, b, dtype, splits):
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=dtype)
    if out.numel():
        multiply(a, b, out, splits)
    return out


AOT = [
    configuration("bf16", "NN", "large"),
    configuration("bf16", "NN", "large", boxes=True, batched=True),
    configuration("bf16", "NT", "small", stream=True),
    configuration("bf16", "TN", "small", stream=True, boxes=True),
    *sum_configurations(),
]
