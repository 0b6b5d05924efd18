"""tw.swiglu and tw.geglu against eager torch and Inductor, on the halves of one projection."""

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw

from bench.harness import calls_of, compiled, exact


def swiglu(gate, up):
    return F.silu(gate) * up


def geglu(gate, up):
    return F.gelu(gate) * up


OPS = {"swiglu": (tw.swiglu, swiglu), "geglu": (tw.geglu, geglu)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("op", OPS)
def test_glu(compare, device, op, mode, dtype):
    shape = (4096, 2048)
    ours, eager = OPS[op]
    both = torch.randn(shape[0], 2 * shape[1], device=device, dtype=dtype)
    gate, up = both.chunk(2, -1)
    inputs = {"gate": gate, "up": up}
    functions = {"trainwright": ours, "torch eager": eager, "torch.compile": compiled(eager)}
    passes = 3 if mode == "fwd" else 8  # gate, up, y; then dy, gate, up, dgate, dup
    compare(
        op, mode, shape, dtype, calls_of(functions, inputs, mode), exact(eager, inputs, mode),
        bytes_moved=passes * gate.numel() * gate.element_size(),
    )  # fmt: skip
