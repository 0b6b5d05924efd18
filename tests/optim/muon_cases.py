"""Shared by Muon's tests: a plain fp64 Muon to compare with, parameters and training."""

import math

import torch
from numerics import same_bits
from trainwright.ops.newton_schulz import COEFFICIENTS, EPS


def leaf(x):
    return x.detach().requires_grad_()


def set_grad(p, g):
    p.grad_dtype = None  # any gradient dtype
    p.grad = g


def train(optimizer, params, steps, dtype=None, scale=1.0):
    """Steps with random gradients that depend on the step number alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
            set_grad(p, g.to(dtype or p.dtype))
        optimizer.step()


def bits_of(optimizer):
    return [(k, v.clone()) for state in optimizer.state.values() for k, v in state.items()]


def assert_same_state(a, b):
    a, b = bits_of(a), bits_of(b)
    assert [k for k, _ in a] == [k for k, _ in b]
    assert all(same_bits(x, y) for (_, x), (_, y) in zip(a, b))


class Oracle:
    """Muon in fp64, from the definition (and torch's documentation), one matrix at a time."""

    def __init__(
        self, p, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn=None, ns_steps=5
    ):  # fmt: skip
        self.p = p.detach().double().clone()
        self.b = torch.zeros_like(self.p)
        self.lr, self.wd, self.mu, self.nesterov = lr, weight_decay, momentum, nesterov
        self.adjust, self.steps = adjust_lr_fn, ns_steps

    def step(self, grad):
        g = grad.detach().double()
        self.b = self.mu * self.b + (1 - self.mu) * g
        u = self.mu * self.b + (1 - self.mu) * g if self.nesterov else self.b
        matrices = u if u.dim() == 3 else u.reshape(1, len(u), -1)
        a, b, c = COEFFICIENTS
        x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=EPS)
        for _ in range(self.steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        rows, columns = matrices.shape[1:]
        ratio = math.sqrt(max(1, rows / columns))
        if self.adjust == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        self.p = (1 - self.lr * self.wd) * self.p - self.lr * ratio * x.reshape(self.p.shape)


def both_ways(dtype=torch.float32, shapes=((5, 7), (9, 4))):
    params = [leaf(torch.randn(s).to(dtype)) for s in shapes]
    return params, [leaf(p.detach().clone()) for p in params]
