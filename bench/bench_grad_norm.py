"""tw.grad_norm on the 148 gradients of GPT-2 124M against torch's multi-tensor norm."""

import pytest
import torch
import trainwright as tw

from bench.bench_adamw import GPT2


def foreach(grads):
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))


def one_by_one(grads):
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grad_norm(compare, device, dtype):
    grads = [torch.randn(s, device=device).to(dtype) for s in GPT2]
    calls = {
        "trainwright": lambda: tw.grad_norm(grads),
        "torch eager": lambda: one_by_one(grads),
        "torch fused": lambda: foreach(grads),
    }
    exact = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
    read = sum(g.nbytes for g in grads)
    compare("grad_norm", "fwd", "gpt2-124m", dtype, calls, lambda: exact.float(), bytes_moved=read)
