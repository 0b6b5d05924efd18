"""tw.rope against eager torch and Inductor, on the heads of one fused projection."""

import pytest
import torch
import trainwright as tw

from bench.harness import calls_of, compiled, exact


def turn(x, cos, sin):
    c, s = (torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1) * s


def eager(q, k, cos, sin):
    return turn(q, cos, sin), turn(k, cos, sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
def test_rope(compare, device, mode, dtype):
    B, T, H, G, D = 4, 2048, 16, 4, 64
    heads = torch.randn(B, T, H + 2 * G, D, device=device, dtype=dtype)
    angle = 6.3 * torch.rand(T, D // 2, device=device)
    inputs = {
        "q": heads[:, :, :H], "k": heads[:, :, H : H + G],
        "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype),
    }  # fmt: skip
    functions = {"trainwright": tw.rope, "torch eager": eager, "torch.compile": compiled(eager)}
    passes = 2 if mode == "fwd" else 4
    compare(
        "rope", mode, (B, T, H, G, D), dtype,
        calls_of(functions, inputs, mode, no_grad=("cos", "sin")),
        exact(eager, inputs, mode, no_grad=("cos", "sin")),
        bytes_moved=passes * B * T * (H + G) * D * heads.element_size(),
    )  # fmt: skip
