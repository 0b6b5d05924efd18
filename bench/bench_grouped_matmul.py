"""tw.grouped_matmul on the experts of a mixture, with even and with skewed groups, against a loop of torch products."""

import pytest
import torch
import trainwright as tw
from numerics import cast

from bench.bench_linear import SLOW_S, seconds_in_torch
from bench.harness import call, calls_of, exact

N, K, C, E = 2048, 512, 1024, 16


def loop(x, weights, offsets):
    begins = [0, *offsets.tolist()]
    return torch.cat([x[i:j] @ w for i, j, w in zip(begins, begins[1:], weights, strict=False)])


def ends(kind):
    if kind == "even":
        return torch.arange(1, E + 1) * (N // E)
    rows = torch.tensor([2.0 ** -(e / 2) for e in range(E)])
    result = (rows / rows.sum() * N).cumsum(0).round()
    result[-1] = N
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("kind", ["even", "skewed"])
def test_grouped_matmul(compare, device, kind, mode, dtype):
    inputs = {
        "x": torch.randn(N, K, device=device),
        "weights": torch.randn(E, K, C, device=device) / K**0.5,
        "offsets": ends(kind).to(device, torch.int32),
    }
    inputs = cast(inputs, dtype)
    flops = 2.0 * N * K * C * (1 if mode == "fwd" else 3)
    functions = {"trainwright": tw.grouped_matmul, "torch loop": loop}
    if dtype != torch.float32 and seconds_in_torch(dtype, device, flops) > SLOW_S:
        del functions["torch loop"]
    calls = calls_of(functions, inputs, mode)
    if dtype != torch.float32:
        calls["torch fp32"] = call(loop, cast(inputs, torch.float32), mode)
    shape = (f"{kind} groups", N, K, C, E)
    compare("grouped_matmul", mode, shape, dtype, calls, exact(loop, inputs, mode), flops=flops)
