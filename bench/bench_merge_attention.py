"""tw.merge_attention against its formula in eager torch and Inductor: one step of a ring, a running fp32 result and
a part in bf16."""

import pytest
import torch
import trainwright as tw

from bench.harness import calls_of, compiled, exact


def eager(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = ((x - lse).exp().transpose(1, 2)[..., None] for x in (lse_a, lse_b))
    return a * out_a + b * out_b, lse


@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
def test_merge_attention(compare, device, mode):
    B, T, H, D = 1, 4096, 16, 128
    lse_a, lse_b = torch.randn(2, B, H, T, device=device)
    out_a, out_b = torch.randn(2, B, T, H, D, device=device)
    inputs = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b.bfloat16(), "lse_b": lse_b}
    functions = {
        "trainwright": tw.merge_attention,
        "torch eager": eager,
        "torch.compile": compiled(eager),
    }
    # Forward: parts in, result out. Backward: the upstream gradient and the parts in, their gradients out.
    row = 10 * D + 12 if mode == "fwd" else 26 * D + 32
    compare(
        "merge_attention", mode, (B, T, H, D), torch.float32,
        calls_of(functions, inputs, mode), exact(eager, inputs, mode), bytes_moved=B * T * H * row,
    )  # fmt: skip
