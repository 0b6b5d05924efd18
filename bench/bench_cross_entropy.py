"""tw.cross_entropy against torch's function, eager and compiled."""

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw

from bench.harness import calls_of, compiled, exact


def eager(logits, target):
    return F.cross_entropy(logits, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize(
    "shape",
    [(4096, 50257), pytest.param((2048, 128256), marks=pytest.mark.full)],
    ids=str,
)
def test_cross_entropy(compare, device, shape, mode, dtype):
    inputs = {
        "logits": torch.randn(shape, device=device, dtype=dtype),
        "target": torch.randint(0, shape[1], shape[:1], device=device),
    }
    functions = {
        "trainwright": tw.cross_entropy,
        "torch eager": eager,
        "torch.compile": compiled(eager),
    }
    passes = 1 if mode == "fwd" else 2  # the logits; and their gradient
    compare(
        "cross_entropy", mode, shape, dtype,
        calls_of(functions, inputs, mode), exact(eager, inputs, mode),
        bytes_moved=passes * inputs["logits"].nbytes, memory=True,
    )  # fmt: skip
