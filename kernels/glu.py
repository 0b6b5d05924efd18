"""Gated activations in Triton:  y = act(gate) * up;  dgate = dy * up * act'(gate),  dup = dy * act(gate).

One program per block of a row; rows may lie any stride apart, so the halves of one (N, 2C) tensor are read in place.
Contiguous inputs are one long row. Backward recomputes act(gate) from the inputs, and is compiled without fusing
multiplications and additions: the compiler would fuse others when only one gradient is wanted, and its bits differ.
Bytes per element: forward 3s, backward 5s (s = element size). Bound: memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import triton
import triton.language as tl
from trainwright.kernels._tl import acc_type

BLOCK = 1024  # 8 elements for each of 128 threads: two 16-byte loads for 16-bit types


@triton.jit
def _sigmoid_pair(x):
    """sigmoid(x) and 1 - sigmoid(x), the latter without cancellation."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(x > 0.0, large, small), tl.where(x > 0.0, small, large)


@triton.jit
def _value_and_slope(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        s, complement = _sigmoid_pair(x)
        value = x * s
        slope = s + value * complement
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        # (1 + tanh u) / 2 = sigmoid(2u); twice = 2 sqrt(2 / pi). Past |x| = 30 the second term of the slope is 0.
        twice: tl.constexpr = 1.5957691216057308
        cubic: tl.constexpr = 1.5957691216057308 * 0.044715
        s, complement = _sigmoid_pair(x * (twice + cubic * x * x))
        value = x * s
        slope = s + value * complement * (twice + 3.0 * cubic * x * x)
        slope = tl.where(tl.abs(x) > 30.0, tl.where(x > 0.0, 1.0, 0.0), slope)
    return value, slope


@triton.jit
def _glu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, C, blocks_per_row,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    c = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    gate = tl.load(gate_ptr + row * gate_stride + c, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_stride + c, mask=mask, other=0.0).to(ACC)
    value, _slope = _value_and_slope(gate.to(ACC), ACTIVATION)
    tl.store(y_ptr + row * C + c, (value * up).to(gate.dtype), mask=mask)


@triton.jit
def _glu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_stride, gate_stride, up_stride, C, blocks_per_row,
    ACTIVATION: tl.constexpr, NEED_GATE: tl.constexpr, NEED_UP: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    c = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    gate = tl.load(gate_ptr + row * gate_stride + c, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * dy_stride + c, mask=mask, other=0.0).to(ACC)
    value, slope = _value_and_slope(gate.to(ACC), ACTIVATION)
    if NEED_GATE:
        up = tl.load(up_ptr + row * up_stride + c, mask=mask, other=0.0).to(ACC)
        tl.store(dgate_ptr + row * C + c, (dy * up * slope).to(gate.dtype), mask=mask)
    if NEED_UP:
        tl.store(dup_ptr + row * C + c, (dy * value).to(gate.dtype), mask=mask)


def _row_stride(x):
    """Elements from a row to the next if x is rows of one spacing, each contiguous inside; else None."""
    if x.dim() == 0:
        return 1
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    leading = [(n, s) for n, s in zip(x.shape[:-1], x.stride()[:-1]) if n != 1]
    for i in range(1, len(leading)):
        if leading[i - 1][1] != leading[i][0] * leading[i][1]:
            return None
    return leading[-1][1] if leading else x.shape[-1]


def _rows(*tensors):
    """The tensors, copied only where their strides ask for it, their row strides, and (N, C)."""
    tensors = [t if _row_stride(t) is not None else t.contiguous() for t in tensors]
    strides = [_row_stride(t) for t in tensors]
    C = tensors[0].shape[-1] if tensors[0].dim() else 1
    N = tensors[0].numel() // C if C else 0
    if all(s == C for s in strides):
        N, C = min(N, 1), N * C
    return tensors, strides, N, C


def glu_fwd(gate, up, activation):
    y = gate.new_empty(gate.shape)
    (gate, up), strides, N, C = _rows(gate, up)
    blocks = triton.cdiv(C, BLOCK)
    if N:
        _glu_fwd_kernel[(N * blocks,)](
            gate, up, y, *strides, C, blocks, ACTIVATION=activation, ACC=acc_type(gate.dtype), BLOCK=BLOCK
        )  # fmt: skip
    return y


def glu_bwd(dy, gate, up, activation, need_gate, need_up):
    dgate = gate.new_empty(gate.shape if need_gate else 0)
    dup = gate.new_empty(gate.shape if need_up else 0)
    (dy, gate, up), strides, N, C = _rows(dy, gate, up)
    blocks = triton.cdiv(C, BLOCK)
    if N:
        _glu_bwd_kernel[(N * blocks,)](
            dy, gate, up, dgate, dup, *strides, C, blocks, ACTIVATION=activation, NEED_GATE=need_gate, NEED_UP=need_up,
            ACC=acc_type(gate.dtype), BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return dgate, dup


# Configurations that the tests compile ahead of time for every architecture: (kernel, argument types, constants, warps,
# instructions that the PTX must contain).
AOT = [
    (
        _glu_fwd_kernel,
        {"gate_ptr": "*bf16", "up_ptr": "*bf16", "y_ptr": "*bf16", "gate_stride": "i32", "up_stride": "i32", "C": "i32",
         "blocks_per_row": "i32"},
        {"ACTIVATION": "silu", "ACC": tl.float32, "BLOCK": BLOCK},
        4,
        ["ex2"],
    ),
    *(
        (
            _glu_bwd_kernel,
            {"dy_ptr": "*bf16", "gate_ptr": "*bf16", "up_ptr": "*bf16", "dgate_ptr": "*bf16", "dup_ptr": "*bf16",
             "dy_stride": "i32", "gate_stride": "i32", "up_stride": "i32", "C": "i32", "blocks_per_row": "i32"},
            {"ACTIVATION": activation, "NEED_GATE": True, "NEED_UP": True, "ACC": tl.float32, "BLOCK": BLOCK},
            4,
            ["ex2"],
        )
        for activation in ("silu", "gelu", "gelu_tanh")
    ),
]  # fmt: skip
