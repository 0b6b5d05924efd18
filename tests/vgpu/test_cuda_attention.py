"""The CUDA attention kernels on the virtual GPU where head dims and options meet: each head dim's tiles with every term
of the score, what a bias hides, scores as low as floats go. The tables of cases are in tests/ops."""

import pytest
import torch
import trainwright as tw
from attention_cases import reference as usual_reference
from attention_cases import with_lse
from numerics import assert_within_rule, check_reference

BACKENDS = ["vgpu"]  # for conftest.py, which loads the kernels or skips
INF, NAN = float("inf"), float("nan")
BF16 = torch.bfloat16
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def inputs(B, Tq, Tk, H, G, D, Dv, dtype=BF16):
    shapes = {"q": (B, Tq, H, D), "k": (B, Tk, G, D), "v": (B, Tk, G, Dv)}
    return {n: torch.randn(s).to(dtype) for n, s in shapes.items()}


def reference(q, k, v, alibi_slopes, bias, sinks, scale, softcap):
    Tq, Tk, H = q.shape[1], k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    s = softcap * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) * scale / softcap) + bias
    position = torch.arange(Tq)[:, None] + Tk - Tq
    s = s - alibi_slopes[:, None, None] * (position - torch.arange(Tk)).abs().to(s.dtype)
    s = s.masked_fill(torch.arange(Tk) > position, -INF)
    share = torch.sigmoid(torch.logsumexp(s, -1) - sinks[:, None])[..., None]
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1) * share, v)


@pytest.mark.parametrize("D", [96, 128, 256])
def test_every_term_at_every_head_dim(D, backend):
    H, Tq, Tk = 2, 40, 45
    tensors = inputs(1, Tq, Tk, H, 1, D, D - 8, torch.float16)
    for name, shape in {"alibi_slopes": (H,), "bias": (H, Tq, Tk), "sinks": (H,)}.items():
        tensors[name] = torch.rand(shape).half()

    def op(**arguments):
        return tw.flash_attention(causal=True, **arguments)

    check_reference(op, reference, tensors, {"scale": 0.2, "softcap": 2.0}, backend=backend)


@pytest.mark.parametrize(("Tq", "Tk"), [(70, 45), (45, 70)])
def test_top_left_with_alibi_and_sinks(Tq, Tk, backend):
    tensors = inputs(1, Tq, Tk, 2, 1, 64, 64)
    tensors |= {n: torch.rand(2).to(BF16) for n in ("alibi_slopes", "sinks")}
    options = {"causal": True, "causal_align": "top-left"}
    check_reference(with_lse, usual_reference, tensors, options, backend=backend)


def test_dlse_beside_a_sink_far_above(backend):
    """Which takes all of out, and nothing of lse."""
    tensors = inputs(1, 40, 40, 2, 1, 64, 64)
    tensors["sinks"] = torch.tensor([120.0, 1.0]).to(BF16)
    check_reference(with_lse, usual_reference, tensors, {"causal": True}, backend=backend)


def test_what_a_bias_hides_reaches_nothing(backend):
    """NaN of key 3, hidden from queries 0 .. 9, of key 40, from all; upstream of query 5, without keys 20 .. 29."""
    tensors = inputs(1, 70, 41, 1, 1, 64, 64)
    bias = torch.zeros(70, 41)
    bias[:10, 3], bias[:, 40], bias[5, 20:30] = -INF, -INF, -INF
    results = []
    for bad in (1.0, NAN):
        dirty = {n: x.clone() for n, x in tensors.items()}
        for n in "kv":
            dirty[n][0, [3, 40], 0, 7] = bad
        leaves = [x.requires_grad_() for x in dirty.values()]
        out = tw.flash_attention(*leaves, bias=bias, backend=backend)
        grads = torch.autograd.grad(out[:, :10].sum(), leaves)
        results.append((out[0, :10], grads[0][0, :10]))
        assert out[0, 10:, 0, 7].isnan().all() == (bad != 1.0)
    for clean, other in zip(*results):
        assert torch.equal(clean, other)
    leaves = [x.requires_grad_() for x in tensors.values()]
    out = tw.flash_attention(*leaves, bias=bias, backend=backend)
    upstream = torch.ones_like(out)
    upstream[0, 5, 0, 2] = NAN
    dq, dk, dv = torch.autograd.grad(out, leaves, upstream)
    hidden = torch.zeros(41, dtype=torch.bool)
    hidden[[3, 40, *range(20, 30)]] = True
    assert dq[0, 5].isnan().all() and int(dq.isnan().sum()) == 64
    assert torch.equal(dk[0, :, 0].isnan().all(-1), ~hidden) and dk[0, hidden].isfinite().all()
    assert torch.equal(dv[0, :, 0, 2].isnan(), ~hidden) and int(dv.isnan().sum()) == 29


def test_a_row_of_the_least_float_is_uniform(backend):
    q, k, v = inputs(1, 3, 70, 1, 1, 16, 16).values()
    bias = torch.zeros(3, 70)
    bias[1] = torch.finfo(torch.float32).min
    out, lse = tw.flash_attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    exact = v[0, :, 0].double().mean(0)
    assert_within_rule("mean", out[0, 1, 0], exact.to(BF16), exact)
    assert lse[0, 0, 1] == torch.finfo(torch.float32).min
