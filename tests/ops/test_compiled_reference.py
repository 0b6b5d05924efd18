"""The torch reference of every op under `torch.compile`: the outputs and gradients of eager.

torch 2.11 gives zero gradients, without a word, where the forward of an autograd function returns a cast that changes
nothing, as most references do for fp32.
"""

import pytest
import torch
from trainwright import dispatch
from trainwright.ops import _library


def compare(function, backend, device, options=None, **inputs):
    leaves = {k: v.requires_grad_(v.is_floating_point()) for k, v in inputs.items()}
    wanted = [v for v in leaves.values() if v.requires_grad]

    def call(**tensors):
        result = function(**tensors, **(options or {}), backend=backend)
        return [result] if isinstance(result, torch.Tensor) else list(result)

    torch._dynamo.reset()
    eager, compiled = (
        call(**leaves),
        torch.compile(call, fullgraph=True, backend="aot_eager")(**leaves),
    )
    upstream = [torch.randn(o.shape).to(o) for o in eager]
    expected = [*eager, *torch.autograd.grad(eager, wanted, upstream)]
    found = [*compiled, *torch.autograd.grad(compiled, wanted, upstream)]
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=f"output or gradient {i}")
    return found


def gradient_checks():
    """The ops whose self-check compares gradients."""
    checks = dispatch.self_checks()
    return sorted(op for op, f in checks.items() if "outputs_and_gradients" in f.__code__.co_names)


def test_the_ops_are_there():
    assert len(gradient_checks()) >= 10


@pytest.mark.parametrize("op", gradient_checks())
def test_compiled_reference(op, monkeypatch):
    calls = []
    monkeypatch.setattr(
        _library, "outputs_and_gradients", lambda *a, **k: calls.append(1) or compare(*a, **k)
    )
    torch.manual_seed(0)
    dispatch.self_checks()[op]("torch", torch.device("cpu"))
    assert calls
