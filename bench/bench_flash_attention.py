"""tw.flash_attention against torch's scaled_dot_product_attention (fused), eager torch and Inductor."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw

from bench.harness import calls_of, compiled, exact


def eager(q, k, v, causal):
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if causal:
        T = q.shape[1]
        s = s.masked_fill(torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1), v)


def fused(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def ours(q, k, v, causal):
    return tw.flash_attention(q, k, v, causal=causal)


FULL = pytest.mark.full
SHAPES = [  # (T, D) with B = 1, H = 8
    (1024, 64),
    pytest.param((128, 64), marks=FULL),
    pytest.param((512, 64), marks=FULL),
    pytest.param((2048, 64), marks=FULL),
    pytest.param((512, 128), marks=FULL),
    pytest.param((1024, 128), marks=FULL),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=FULL)], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flash_attention(compare, device, shape, causal, mode, dtype):
    (T, D), H = shape, 8
    inputs = {n: torch.randn(1, T, H, D, device=device, dtype=dtype) for n in "qkv"}

    def bound(function):
        return lambda q, k, v: function(q, k, v, causal)

    functions = {
        "trainwright": bound(ours),
        "torch eager": bound(eager),
        "torch fused": bound(fused),
        "torch.compile": compiled(bound(eager)),
    }
    pairs = T * (T + 1) // 2 if causal else T * T
    flops = 4 * H * pairs * D * (1.0 if mode == "fwd" else 3.5)
    tensors = 4 if mode == "fwd" else 12  # q, k, v, out; then those again, dout, dq, dk, dv
    compare(
        "flash_attention", mode, (1, T, H, D, "causal" if causal else "full"), dtype,
        calls_of(functions, inputs, mode), exact(bound(eager), inputs, mode),
        bytes_moved=tensors * inputs["q"].nbytes, flops=flops,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
def test_flash_attention_fills_a_gpu(compare, device, mode):
    if device.type != "cuda":
        pytest.skip("enough work for a GPU")
    B, T, H, D = 1, 4096, 16, 128
    inputs = {n: torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16) for n in "qkv"}
    functions = {
        "trainwright": functools.partial(tw.flash_attention, causal=True),
        "trainwright triton": functools.partial(tw.flash_attention, causal=True, backend="triton"),
        "torch fused": functools.partial(fused, causal=True),
    }
    flops = 2 * B * H * T * (T + 1) * D * (1.0 if mode == "fwd" else 3.5)
    tensors = 4 if mode == "fwd" else 12
    compare(
        "flash_attention", mode, (B, T, H, D, "causal"), torch.bfloat16, calls_of(functions, inputs, mode),
        exact(functools.partial(eager, causal=True), inputs, mode),
        bytes_moved=tensors * inputs["q"].nbytes, flops=flops,
    )  # fmt: skip


def test_flash_attention_decodes(compare, device):
    """One query against a cache of grouped heads: the bytes of k and v."""
    B, T, H, G, D = 1, 8192, 32, 8, 128
    shapes = {"q": (B, 1, H, D), "k": (B, T, G, D), "v": (B, T, G, D)}
    inputs = {n: torch.randn(s, device=device, dtype=torch.bfloat16) for n, s in shapes.items()}

    def grouped(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    def plain(q, k, v):
        return eager(q, *(x.repeat_interleave(H // G, 2) for x in (k, v)), False)

    functions = {"trainwright": tw.flash_attention, "torch fused": grouped, "torch eager": plain}
    compare(
        "flash_attention", "fwd", (B, 1, T, H, G, D, "decode"), torch.bfloat16,
        calls_of(functions, inputs, "fwd"), exact(plain, inputs, "fwd"),
        bytes_moved=sum(x.nbytes for x in inputs.values()), flops=4 * B * H * T * D,
    )  # fmt: skip
