"""tw.linear against torch: the plain product, and the product with bias, activation and residual.

bf16 is also compared with torch in fp32 ("torch fp32"): the rate to reach on a CPU without bf16 instructions. torch's
own bf16 product is left out where it would take more than SLOW_S a call, which it does on such a CPU from 1024^3 on.
"""

import time

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw
from numerics import cast

from bench.harness import call, calls_of, compiled, exact

SLOW_S = 5.0


def plain(x, weight):
    return F.linear(x, weight)


def eager(x, weight, bias, residual):
    return F.gelu(F.linear(x, weight, bias)) + residual


def ours_fused(x, weight, bias, residual):
    return tw.linear(x, weight, bias, activation="gelu", residual=residual)


def ours_always(x, weight):
    return tw.linear(x, weight, backend=None if x.is_cuda else "cpu")


def seconds_in_torch(dtype, device, flops):
    """How long torch takes for so many operations in this dtype, from a small product."""
    if device.type != "cpu":
        return 0.0
    x = torch.randn(96, 96).to(dtype)
    F.linear(x, x)
    begin = time.perf_counter()
    F.linear(x, x)
    return (time.perf_counter() - begin) * flops / (2 * 96**3)


def cases(names, functions, shape, mode, dtype, device):
    M, N, K = shape
    make = {"x": (M, K), "weight": (N, K), "bias": (N,), "residual": (M, N)}
    inputs = {n: torch.randn(make[n], device=device) for n in names}
    inputs["weight"] /= K**0.5
    inputs = cast(inputs, dtype)
    flops = 2.0 * M * N * K * (1 if mode == "fwd" else 3)
    functions = dict(functions)
    if dtype != torch.float32 and seconds_in_torch(dtype, device, flops) > SLOW_S:
        functions = {k: f for k, f in functions.items() if k.startswith("trainwright")}
    calls = calls_of(functions, inputs, mode)
    if dtype != torch.float32:
        reference = plain if len(names) == 2 else eager
        calls["torch fp32"] = call(reference, cast(inputs, torch.float32), mode)
    return inputs, calls, flops


SHAPES = [
    (256, 768, 768),
    (1024, 1024, 1024),
    pytest.param((4096, 768, 3072), marks=pytest.mark.full),
    pytest.param((4096, 3072, 768), marks=pytest.mark.full),
    pytest.param((1, 4096, 4096), marks=pytest.mark.full),
    pytest.param((16, 4096, 4096), marks=pytest.mark.full),
    pytest.param((64, 4096, 4096), marks=pytest.mark.full),
    pytest.param((512, 512, 512), marks=pytest.mark.full),
    pytest.param((2048, 2048, 2048), marks=pytest.mark.full),
]
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(compare, device, shape, mode, dtype):
    functions = {"trainwright": tw.linear, "trainwright cpu": ours_always, "torch eager": plain}
    if device.type != "cpu":
        del functions["trainwright cpu"]
    inputs, calls, flops = cases(("x", "weight"), functions, shape, mode, dtype, device)
    compare("linear", mode, shape, dtype, calls, exact(plain, inputs, mode), flops=flops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_linear_gelu_residual(compare, device, shape, mode, dtype):
    functions = {
        "trainwright": ours_fused,
        "torch eager": eager,
        "torch.compile": compiled(eager),
    }
    names = ("x", "weight", "bias", "residual")
    inputs, calls, flops = cases(names, functions, shape, mode, dtype, device)
    compare(
        "linear_gelu_residual", mode, shape, dtype, calls, exact(eager, inputs, mode), flops=flops
    )
