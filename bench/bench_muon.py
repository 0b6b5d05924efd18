"""tw.optim.Muon against torch.optim.Muon on the matrices of transformer blocks: one step.

Ours orthogonalises in fp32 on the CPU, torch's always in bf16; on a GPU both do in bf16. "of bound" counts the
operations of the half products, see bench_newton_schulz.py.
"""

import pytest
import torch
import trainwright as tw

from bench.bench_newton_schulz import SLOW_S, eager, flops_of, seconds_in_torch


def block(C):
    return [(3 * C, C), (C, C), (4 * C, C), (C, 4 * C)]


SHAPES = {
    "gpt2-124m block": block(768),
    "6 blocks of 256": block(256) * 6,
    "1 block of 128": block(128),
    "8 experts": [(8, 512, 192), (8, 192, 512)],
}


class FormulaMuon:
    """What a user writes for fp32: torch's foreach operations and plain products, matrix by matrix."""

    def __init__(self, params):
        self.params = params
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self):
        grads = [p.grad for p in self.params]
        torch._foreach_lerp_(self.buffers, grads, 0.05)
        updates = torch._foreach_lerp(grads, self.buffers, 0.95)
        torch._foreach_mul_(self.params, 1 - 1e-3 * 0.1)
        for p, u in zip(self.params, updates):
            ratio = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
            p.sub_(eager(u), alpha=1e-3 * ratio)


def parameters(shapes, device):
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.randn(s, generator=generator, device=device) * 0.02 for s in shapes]
    for p in params:
        p.requires_grad_().grad = torch.randn(p.shape, generator=generator, device=device)
    return params


def stepping(params, step, start):
    """A call that does one step from the start and returns how far the parameters moved, over the learning rate."""

    def call():
        step()
        return [(p.detach() - s) / 1e-3 for p, s in zip(params, start)]

    return call


def split(params):
    """3-D parameters as matrices: torch's Muon takes no others."""
    matrices = []
    for p in params:
        for m in p.detach().reshape(-1, *p.shape[-2:]):
            matrices.append(m.clone().requires_grad_())
    for m, g in zip(matrices, (g for p in params for g in p.grad.reshape(-1, *p.shape[-2:]))):
        m.grad = g.clone()
    return matrices


@pytest.mark.parametrize("name", SHAPES)
def test_muon(compare, device, name):
    a = parameters(SHAPES[name], device)
    b, c = (split(parameters(SHAPES[name], device)) for _ in range(2))
    start = [p.detach().clone() for p in a]
    whole = [m.detach().clone() for m in b]
    ours, formula, theirs = tw.optim.Muon(a), FormulaMuon(b), torch.optim.Muon(c)

    def restore():
        """Every call is the first step: the results are compared."""
        with torch.no_grad():
            for params, values in ((a, start), (b, whole), (c, whole)):
                torch._foreach_copy_(params, values)
        ours.state.clear()
        theirs.state.clear()
        torch._foreach_zero_(formula.buffers)

    def joined(call):
        """The matrices of each parameter put together again."""

        def run():
            results, counts = call(), [torch.Size(s[:-2]).numel() for s in SHAPES[name]]
            parts = [torch.stack(list(part)) for part in _groups(results, counts)]
            return [p.view(s) for p, s in zip(parts, SHAPES[name])]

        return run

    def exact():
        wide = split(parameters(SHAPES[name], device))
        wide = [m.detach().double().requires_grad_() for m in wide]
        for w, m in zip(wide, split(parameters(SHAPES[name], device))):
            w.grad = m.grad.double()
        return joined(stepping(wide, FormulaMuon(wide).step, [w.detach().clone() for w in wide]))()

    flops = sum(flops_of(s) for s in SHAPES[name])
    calls = {
        "trainwright": stepping(a, ours.step, start),
        "torch eager": joined(stepping(b, formula.step, whole)),
        "torch muon": joined(stepping(c, theirs.step, whole)),
    }
    if seconds_in_torch(flops, device) > SLOW_S:
        del calls["torch muon"]
    compare("muon", "step", name, torch.float32, calls, exact, flops=flops, before=restore)


def _groups(items, counts):
    begin = 0
    for n in counts:
        yield items[begin : begin + n]
        begin += n
