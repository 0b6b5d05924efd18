"""tw.matmul against torch.matmul: square, batched, and few rows with a long K; bf16 also against torch in fp32."""

import pytest
import torch
import trainwright as tw
from numerics import cast

from bench.bench_linear import SLOW_S, seconds_in_torch
from bench.harness import call, calls_of, exact


def eager(a, b):
    return torch.matmul(a, b)


def ours_always(a, b):
    return tw.matmul(a, b, backend=None if a.is_cuda else "cpu")


SHAPES = [  # a, b
    ((512, 512), (512, 512)),
    ((1024, 1024), (1024, 1024)),
    ((96, 128, 64), (96, 64, 128)),
    ((32, 65536), (65536, 32)),
    pytest.param(((2048, 2048), (2048, 2048)), marks=pytest.mark.full),
    pytest.param(((64, 4096), (4096, 4096)), marks=pytest.mark.full),
    pytest.param(((4096, 3072), (3072, 768)), marks=pytest.mark.full),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul(compare, device, shape, mode, dtype):
    a, b = shape
    inputs = cast(
        {"a": torch.randn(a, device=device), "b": torch.randn(b, device=device) / b[-2] ** 0.5},
        dtype,
    )
    flops = 2.0 * inputs["a"].numel() * b[-1] * (1 if mode == "fwd" else 3)
    functions = {"trainwright cpu": ours_always, "torch eager": eager}
    if device.type != "cpu":
        functions = {"trainwright": tw.matmul, "torch eager": eager}
    if dtype != torch.float32 and seconds_in_torch(dtype, device, flops) > SLOW_S:
        del functions["torch eager"]
    calls = calls_of(functions, inputs, mode)
    if dtype != torch.float32:
        calls["torch fp32"] = call(eager, cast(inputs, torch.float32), mode)
    compare("matmul", mode, shape, dtype, calls, exact(eager, inputs, mode), flops=flops)
