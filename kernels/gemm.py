"""Matrix product in Triton:  C (M, N) = activation(A (M, K) B (K, N) + bias) + residual, any strides of A and B.

Kernels and schedule: _product.py. Sums, bias, activation and residual in fp32; rounded once; repeats are bit-equal.
fp32 operands are multiplied in fp32 (no TF32).
2 M N K FLOPs; bound: tensor cores from a few hundred FLOPs per byte on, else memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

from ._product import configuration, multiply


def gemm(a, b, bias, residual, activation, dtype, save_pre):
    M, N = a.shape[0], b.shape[1]
    c = a.new_empty((M, N), dtype=dtype)
    pre = a.new_empty((M, N) if save_pre else (0,), dtype=dtype)
    if M and N:
        multiply(
            a[None], b[None], c[None], 0, bias=bias, residual=residual, activation=activation,
            pre=pre if save_pre else None,
        )  # fmt: skip
    return c, pre


# NT, NN, TN: forward, dgrad, wgrad. On sm_80 128 x 256 tiles have no registers to spare for the choice of boxes.
AOT = [
    *(configuration("bf16", layout, "large", bias=True) for layout in ("NT", "NN", "TN")),
    *(configuration("bf16", layout, "large", bias=True, boxes=True) for layout in ("NT", "NN", "TN")),
    configuration("bf16", "NT", "fused", bias=True, activation=2),
    configuration("bf16", "NT", "fused", bias=True, activation=2, boxes=True),
    configuration("bf16", "NT", "small", bias=True, activation=3, stream=True),
    configuration("bf16", "NT", "anywhere", bias=True, activation=2),
    configuration("fp32", "NT", "fp32", bias=True, activation=2),
]  # fmt: skip
