"""tw.linear_cross_entropy against a linear head and torch's loss, eager and compiled. Memory counts the gradients."""

import functools

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw

from bench.harness import calls_of, compiled, exact


def eager(hidden, weight, target, reduction="mean"):
    return F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction)


@pytest.mark.parametrize(
    ("dtype", "reduction", "mode"),
    [
        (torch.float32, "mean", "fwd"),
        (torch.float32, "mean", "fwd+bwd"),
        (torch.float32, "none", "fwd+bwd"),
        (torch.bfloat16, "mean", "fwd+bwd"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("N", "C", "V"),
    [(1024, 256, 16384), pytest.param(4096, 768, 50257, marks=pytest.mark.full)],
)
def test_linear_cross_entropy(compare, device, N, C, V, dtype, reduction, mode):
    inputs = {
        "hidden": torch.randn(N, C, device=device, dtype=dtype),
        "weight": (torch.randn(V, C, device=device) * C**-0.5).to(dtype),
        "target": torch.randint(0, V, (N,), device=device),
    }
    plain = functools.partial(eager, reduction=reduction)
    functions = {
        "trainwright": functools.partial(tw.linear_cross_entropy, reduction=reduction),
        "torch eager": plain,
        "torch.compile": compiled(plain),
    }
    products = 1 if mode == "fwd" else 3
    compare(
        "linear_cross_entropy", f"{mode}, {reduction}", (N, C, V), dtype,
        calls_of(functions, inputs, mode), exact(plain, inputs, mode),
        flops=products * 2.0 * N * C * V, memory=True,
    )  # fmt: skip
