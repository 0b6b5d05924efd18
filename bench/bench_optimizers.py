"""AdamW in every storage format on 124M parameters, its launches of many small tensors, and the other optimizers: one
step against its bound in bytes, and against torch's fused step where torch has one.
"""

import pytest
import torch
import trainwright as tw

from bench.bench_adamw import GPT2, OTHERS, deepspeed_calls, exact, parameters, stepping

B = torch.bfloat16
# name: parameter dtype, options, bytes per parameter
FORMATS = {
    "bf16, split16, bf16 state": (B, {"master_weights": "split16", "state_dtype": B}, 18.0),
    "all bf16": (B, {"master_weights": "none", "state_dtype": B}, 14.0),
    "all bf16, stochastic": (B, {"master_weights": "none", "state_dtype": B, "stochastic_rounding": True}, 14.0),
    "fp32, int8 state": (torch.float32, {"state_dtype": "int8"}, 16.1),
    "bf16, int8 state": (B, {"master_weights": "none", "state_dtype": "int8"}, 10.1),
    "bf16, int8 state, stochastic": (
        B, {"master_weights": "none", "state_dtype": "int8", "stochastic_rounding": True}, 10.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_adamw_formats(compare, device, name):
    dtype, options, per_parameter = FORMATS[name]
    a, b = (parameters(GPT2, device, dtype) for _ in range(2))
    calls = {"trainwright": stepping(a, tw.optim.AdamW(a, **options).step)}
    if name == "all bf16":
        calls["torch fused"] = stepping(b, torch.optim.AdamW(b, fused=True).step)
        calls |= deepspeed_calls(GPT2, device, dtype, fp32_optimizer_states=False)
    n = sum(p.numel() for p in a)
    reference = exact(GPT2, device, dtype)
    size = int(per_parameter * n)
    compare(
        "adamw",
        f"step, {name}",
        "gpt2-124m",
        dtype,
        calls,
        reference,
        bytes_moved=size,
        in_place=True,
    )


def test_adamw_2000_groups(compare, device):
    """One group for each tensor costs as much as one for all."""
    shapes = [(1024,)] * 2000
    a, b = (parameters(shapes, device) for _ in range(2))
    calls = {
        "2000 groups": stepping(a, tw.optim.AdamW([{"params": [p]} for p in a]).step),
        "one group": stepping(b, tw.optim.AdamW(b).step),
    }
    n = sum(p.numel() for p in a)
    reference, size = exact(shapes, device), 28 * n
    compare(
        "adamw",
        "groups",
        "2000 x 1024",
        torch.float32,
        calls,
        reference,
        bytes_moved=size,
        in_place=True,
    )


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers(compare, device, name):
    options, per_parameter, fused = OTHERS[name]
    a, b = (parameters(GPT2, device) for _ in range(2))
    ours = getattr(tw.optim, name)(a, **options)
    calls = {"trainwright": stepping(a, ours.step)}
    if fused is not None:
        flag = {"fused": True} if fused else {"foreach": True}
        theirs = getattr(torch.optim, name)(b, **options, **flag)
        calls["torch fused" if fused else "torch eager"] = stepping(b, theirs.step)
    n = sum(p.numel() for p in a)

    def reference():
        wide = [p.detach().double().requires_grad_() for p in parameters(GPT2, device)[:3]]
        for w, p in zip(wide, parameters(GPT2, device)):
            w.grad = p.grad.double()
        getattr(tw.optim, name)(wide, backend="torch", **options).step()
        return [w.detach() for w in wide]

    op, size = name.lower(), per_parameter * n
    compare(
        op, "step", "gpt2-124m", torch.float32, calls, reference, bytes_moved=size, in_place=True
    )
