"""Triton attention through tensor descriptors, in the interpreter; compiled: tests/vgpu/compiled_attention.py."""

import pytest
import torch
import trainwright as tw
from numerics import backends_for_tests, interpreted, same_bits

BACKENDS = [b for b in backends_for_tests(tw.flash_attention) if interpreted(b)]


def results(q, k, v, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = []

    def call():
        out = tw.flash_attention(*leaves, causal=True, backend="triton", **options)
        dout = (
            torch.linspace(-1, 1, 24).to(out.dtype).expand(out.shape)
        )  # no bytes between its rows
        found.extend([out, *torch.autograd.grad(out, leaves, dout)])

    return found, tw.explain(call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_descriptors_change_no_bit(backend, monkeypatch):
    from trainwright.kernels import flash_attention as kernels

    q, k, v = (torch.randn(1, 90, heads, 24).bfloat16() for heads in (2, 1, 1))
    expected, text = results(q, k, v)
    assert "fwd reads by pointers: sm_80 has no tensor descriptors" in text
    monkeypatch.setattr(kernels, "architecture", lambda: 100)
    found, text = results(q, k, v)
    for kernel in ("fwd", "dq"):
        assert f"{kernel} reads through descriptors" in text
    assert "dkv reads by pointers: 0 bytes between rows of dout" in text
    assert all(same_bits(a, b) for a, b in zip(found, expected))
    _, text = results(q, k, v, bias=torch.zeros(90, 90))
    assert "fwd reads by pointers: a bias may hide any pair" in text
    _, text = results(q.float(), k.float(), v.float())
    assert "fwd reads by pointers: its dtype is fp32" in text
