"""What the CUDA kernels move, counted on the virtual GPU (sm_80), against what their data alone would. For each case

    global bytes <= 1.02 ideal      sector efficiency >= 0.98      shared-memory bank conflicts = 0

where `ideal` is the bytes of the pass if every operand were read or written exactly once. That no kernel spills
registers is in tests/build/test_cuda.py.

The device says it has four multiprocessors, so that a few hundred rows are as many for each as tens of thousands are on
a large GPU. torch's own kernels are not counted; the one that ends a pass of ours, the sum over the norms' partial
weight gradients, is added by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import trainwright as tw
import vgpu_backend
from torch import Tensor
from trainwright import vgpu

MOST_BYTES, LEAST_EFFICIENCY = 1.02, 0.98
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass
class Case:
    """`run` is one pass of `op`; in `ideal`, s is the size of an element of `dtype`, and N, C and so on are sizes."""

    op: str
    dtype: torch.dtype
    run: Callable[[], Any]
    ideal: int
    beside: int = 0  # bytes that torch's kernels move for it


def random(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape).to(dtype)


def norm_cases(dtype: torch.dtype, N: int = 768, C: int = 1024) -> list[Case]:
    s, x, residual, dy = dtype.itemsize, *(random(N, C, dtype=dtype) for _ in range(3))
    w, b = random(C, dtype=dtype), random(C, dtype=dtype)
    cases = []
    for name, numbers, vectors, bias, offset in (
        ("rms_norm", 1, 1, (), (0.0,)),
        ("layer_norm", 3, 2, (b,), ()),
    ):
        forward, backward = vgpu_backend.op(f"{name}_fwd"), vgpu_backend.op(f"{name}_bwd")
        stats = random(N, numbers) if numbers > 1 else random(N)
        for label, more, rows in (("", None, 0), (", residual", residual, 1)):
            cases += [
                Case(f"{name} forward{label}", dtype, partial(forward, x, more, w, *bias, 1e-5, *offset),
                     (2 + 2 * rows) * N * C * s + vectors * C * s + 4 * numbers * N),
                Case(f"{name} backward{label}", dtype, partial(backward, dy, more, x, w, stats, *offset, True, True),
                     (3 + rows) * N * C * s + C * s + 4 * numbers * N + 4 * vectors * C,
                     beside=4 * vectors * C * vgpu_backend.MULTIPROCESSORS),
            ]  # fmt: skip
    return cases


def cross_entropy_cases(dtype: torch.dtype, N: int = 16) -> list[Case]:
    s, dloss, scale = dtype.itemsize, torch.ones(()), torch.ones(2, dtype=torch.float64)
    forward, backward = vgpu_backend.op("cross_entropy_fwd"), vgpu_backend.op("cross_entropy_bwd")
    cases = []
    for V in (32000, 50257):  # rows of the second begin anywhere
        x, target = random(N, V, dtype=dtype), torch.randint(V, (N,))
        lse = x.double().logsumexp(-1)
        for label, options in (
            ("", (-100, 0.0, 0.0, 0.0)),
            (", smooth, z-loss, softcap", (-100, 0.1, 1e-4, 30.0)),
        ):
            cases += [
                Case(f"cross_entropy forward, V = {V}{label}", dtype, partial(forward, x, target, None, *options, 1),
                     N * V * s + 8 * N),
                Case(f"cross_entropy backward, V = {V}{label}", dtype,
                     partial(backward, dloss, x, target, None, lse, scale, *options), 2 * N * V * s + 16 * N),
            ]  # fmt: skip
    return cases


def rope_cases(
    dtype: torch.dtype, B: int = 4, T: int = 128, H: int = 12, G: int = 4, D: int = 64
) -> list[Case]:
    s, q, k = dtype.itemsize, random(B, T, H, D, dtype=dtype), random(B, T, G, D, dtype=dtype)
    cos, sin = random(T, D // 2), random(T, D // 2)
    op, moved = vgpu_backend.op("rope"), 2 * B * T * (H + G) * D * s
    cases = []
    for label, interleaved in (("", False), (", interleaved", True)):
        cases += [
            Case(f"rope {'backward' if inverse else 'forward'}{label}", dtype,
                 partial(op, q, k, cos, sin, interleaved, inverse), moved + 4 * 2 * T * D // 2)
            for inverse in (False, True)
        ]  # fmt: skip
    batched = random(B, T, D // 2), random(B, T, D // 2)
    cases.append(Case("rope forward, positions of each sequence", dtype, partial(op, q, k, *batched, False, False),
                      moved + 4 * B * T * D))  # fmt: skip
    return cases


def glu_cases(dtype: torch.dtype, N: int = 256, C: int = 768) -> list[Case]:
    s, gate, up, dy = dtype.itemsize, *(random(N, C, dtype=dtype) for _ in range(3))
    halves = random(N, 2 * C, dtype=dtype).chunk(2, -1)
    fwd, bwd = vgpu_backend.op("glu_fwd"), vgpu_backend.op("glu_bwd")
    cases = []
    for act in ("silu", "gelu", "gelu_tanh"):
        cases += [
            Case(f"glu {act} forward", dtype, partial(fwd, gate, up, act), 3 * N * C * s),
            Case(f"glu {act} backward", dtype, partial(bwd, dy, gate, up, act, True, True), 5 * N * C * s),
        ]  # fmt: skip
    return [
        *cases,
        Case(
            "glu silu forward, of two halves", dtype, partial(fwd, *halves, "silu"), 3 * N * C * s
        ),
    ]


def adamw_case(label: str, param: torch.dtype, grad: torch.dtype, *, master: bool = False, amsgrad: bool = False,
               n: int = 1 << 17) -> Case:  # fmt: skip
    p, g = random(n, dtype=param), random(n, dtype=grad)
    m, v, h, full = random(n), random(n).square(), random(n).square(), random(n)
    step = torch.zeros((), dtype=torch.float64)
    per_element = (
        16 + grad.itemsize + (8 + param.itemsize if master else 2 * param.itemsize) + 8 * amsgrad
    )
    return Case(f"adamw {label}", param, lambda: tw.adamw_(
        [p], [g], [m], [v], [step], lr=1e-3, backend="vgpu", masters=[full] if master else None,
        max_exp_avg_sqs=[h] if amsgrad else None), n * per_element)  # fmt: skip


def list_cases(dtype: torch.dtype, n: int = 1 << 17) -> list[Case]:
    s, a, b, flat = (
        dtype.itemsize,
        random(n, dtype=dtype),
        random(n, dtype=dtype),
        torch.zeros(2 * n, dtype=dtype),
    )
    wide = [random(n), random(n)]
    half = torch.tensor(0.5)
    stats, scale = vgpu_backend.op("grad_stats"), vgpu_backend.op("grad_scale_")
    pack, unpack, add = (
        vgpu_backend.op(f"{name}_") for name in ("bucket_pack", "bucket_unpack", "ordered_sum")
    )
    out, chunks = torch.zeros(n, dtype=dtype), [random(n, dtype=dtype) for _ in range(4)]
    slots = [0, n, 2 * n]
    return [
        Case("grad_norm", dtype, partial(stats, [a, b], 2.0), 2 * n * s),
        Case("grad_norm, p = inf", dtype, partial(stats, [a, b], float("inf")), 2 * n * s),
        Case("clip_grad_norm: scaling", dtype, partial(scale, [a, b], half), 4 * n * s),
        Case("bucket_pack", dtype, partial(pack, flat, [a, b], slots, 0.5, None, False), 4 * n * s),
        Case("bucket_pack, accumulate", dtype, partial(pack, flat, [a, b], slots, 0.5, None, True), 6 * n * s),
        Case("bucket_pack, fp32 gradients", dtype, partial(pack, flat, wide, slots, 0.5, None, False), 2 * n * (s + 4)),
        Case("bucket_unpack", dtype, partial(unpack, flat, [a, b], slots[:2], 0.5, None), 4 * n * s),
        Case("bucket_unpack, fp32 gradients", dtype, partial(unpack, flat, wide, slots[:2], 1.0, None),
             2 * n * (s + 4)),
        Case("ordered_sum", dtype, partial(add, out, chunks, 1.0, None), 5 * n * s),
        Case("ordered_sum to fp32", dtype, partial(add, wide[0], chunks, 1.0, None), n * (4 * s + 4)),
    ]  # fmt: skip


def adamw_cases(dtype: torch.dtype) -> list[Case]:
    if dtype == FP32:
        return [adamw_case("", FP32, FP32), adamw_case(", amsgrad", FP32, FP32, amsgrad=True)]
    return [
        adamw_case("", BF16, BF16),
        adamw_case(", fp32 master", BF16, BF16, master=True),
        adamw_case(", fp32 master and gradient", BF16, FP32, master=True),
    ]


def int8_cases(dtype: torch.dtype, n: int = 1 << 17) -> list[Case]:
    if dtype != FP32:
        return []
    encode, add = vgpu_backend.op("int8_encode_"), vgpu_backend.op("int8_sum_")
    x, error, out = random(n), random(n), random(n)
    rows = [torch.zeros(n + n // 16, dtype=torch.uint8) for _ in range(4)]
    return [
        Case("int8_encode", dtype, partial(encode, rows[0], error, x, 0.5), n * 13 + n // 16),
        Case("int8_sum", dtype, partial(add, out, rows, 0.5), 4 * (n + n // 16) + 4 * n),
    ]


GROUPS = {
    "norms": norm_cases,
    "cross_entropy": cross_entropy_cases,
    "rope": rope_cases,
    "glu": glu_cases,
    "adamw": adamw_cases,
    "lists": list_cases,
    "int8 wire": int8_cases,
}


@pytest.fixture
def counters(backend):
    """What the kernels of a test do."""
    runtime = vgpu_backend.runtime()
    usual, counting = runtime.device, vgpu.Device("sm_80", count=True)
    runtime.attach(counting, vgpu_backend.properties())
    yield counting.counters
    runtime.attach(usual, vgpu_backend.properties())


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("backend", ["vgpu"])
def test_kernels_move_their_data_once(group, dtype, counters):
    over = []
    for case in GROUPS[group](dtype):
        counters.clear()
        case.run()
        total = counters.total
        ratio = (total.global_bytes + case.beside) / case.ideal
        touched = sum(k.footprint_bytes for k in counters) / case.ideal
        print(f"{case.op} {dtype}: {ratio:.4f} of ideal, sectors {total.sector_efficiency:.4f}")
        assert touched >= 0.999, f"{case.op}: ideal counts {1 / touched:.3f} of what is there"
        if ratio > MOST_BYTES or total.sector_efficiency < LEAST_EFFICIENCY or total.bank_conflicts:
            over.append(
                f"{case.op}: {ratio:.4f} x ideal, {total.sector_efficiency:.4f} of sectors, "
                f"{total.bank_conflicts} bank conflicts"
            )
    assert not over, "\n".join(over)
