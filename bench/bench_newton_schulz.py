"""tw.newton_schulz against torch: the iteration of torch.optim.Muon, which is in bf16, and the same formula in fp32.

The operations counted are those of the half products (15 m^2 n + 5 m^3), so "of bound" says how near to a matrix
product's rate they run; plain products do a third to a half more. torch's bf16 is left out where a call would take more
than SLOW_S, which it does from m of a few hundred on on a CPU without bf16 instructions.
"""

import time

import pytest
import torch
import trainwright as tw
from torch.optim._muon import _zeropower_via_newtonschulz
from trainwright.ops.newton_schulz import COEFFICIENTS, EPS

SLOW_S = 5.0
SHAPES = [(768, 768), (2304, 768), (768, 3072), (512, 1408), (12, 384, 384), (48, 64, 768), (64, 64, 64)]  # fmt: skip


def flops_of(shape):
    m, n = sorted(shape[-2:])
    count = torch.Size(shape[:-2]).numel()
    return count * (15.0 * m * m * n + 5.0 * m**3)


def torch_muon(x):
    matrices = x.reshape(-1, *x.shape[-2:])
    each = [_zeropower_via_newtonschulz(m, COEFFICIENTS, 5, EPS) for m in matrices]
    return torch.stack(each).view(x.shape)


def eager(x):
    """The formula in x's dtype, batched."""
    y = x.mT if x.shape[-2] > x.shape[-1] else x
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if x.shape[-2] > x.shape[-1] else y


def seconds_in_torch(flops, device):
    """How long torch's bf16 iteration takes for so many operations, from a small one."""
    if device.type != "cpu":
        return 0.0
    x = torch.randn(128, 128)
    torch_muon(x)
    begin = time.perf_counter()
    torch_muon(x)
    return (time.perf_counter() - begin) * flops / flops_of(x.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz(compare, device, shape):
    x = torch.randn(shape, device=device)
    if device.type == "cuda":
        x = x.bfloat16()
    calls = {
        "trainwright": lambda: [tw.newton_schulz(x)],
        "torch eager": lambda: [eager(x)],
        "torch muon": lambda: [torch_muon(x)],
    }
    flops = flops_of(shape)
    if seconds_in_torch(flops, device) > SLOW_S:
        del calls["torch muon"]
    compare("newton_schulz", "fwd", shape, x.dtype, calls, lambda: [eager(x.double())], flops=flops)
