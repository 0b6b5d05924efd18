"""tw.layer_norm against torch's fused op, eager torch and Inductor."""

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw

from bench.harness import calls_of, compiled, exact


def eager(x, weight, bias):
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    d = h - h.mean(-1, keepdim=True)
    return (d * torch.rsqrt(d.square().mean(-1, keepdim=True) + 1e-5) * weight + bias).to(x.dtype)


def fused(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize(
    "shape", [(8192, 768), pytest.param((1024, 8192), marks=pytest.mark.full)], ids=str
)
def test_layer_norm(compare, device, shape, mode, dtype):
    inputs = {
        "x": torch.randn(shape, device=device, dtype=dtype),
        "weight": torch.randn(shape[-1], device=device, dtype=dtype),
        "bias": torch.randn(shape[-1], device=device, dtype=dtype),
    }
    functions = {
        "trainwright": tw.layer_norm,
        "torch eager": eager,
        "torch fused": fused,
        "torch.compile": compiled(eager),
    }
    passes = 2 if mode == "fwd" else 5  # x, y; then dy, x, dx
    compare(
        "layer_norm", mode, shape, dtype,
        calls_of(functions, inputs, mode), exact(eager, inputs, mode),
        bytes_moved=passes * inputs["x"].nbytes,
    )  # fmt: skip
