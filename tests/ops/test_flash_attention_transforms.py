"""Derivatives of attention beyond the first, forward mode and torch.func, for every option."""

import pytest
import torch
import trainwright as tw
from attention_cases import INF, OPTIONS, option_inputs, qkv
from numerics import same_bits
from torch.autograd import gradcheck, gradgradcheck

# id: options of flash_attention, its inputs
CASES = {
    case: (options, option_inputs(case, 1, 3, 4, 2, 1, 2, 2))
    for case, (options, _) in OPTIONS.items()
}
CASES["queries without keys"] = ({"causal": True}, qkv(1, 4, 2, 2, 1, 2, 2))
CASES["window"] = ({"window": (1, 0), "causal_align": "top-left"}, qkv(1, 3, 4, 2, 2, 2, 2))


def finite_lse(out, lse):
    return out, torch.where(lse == -INF, 0.0, lse)


def in_fp64(inputs):
    return {n: x.double().requires_grad_() for n, x in inputs.items()}


QUICK = ["all at once", "bias, broadcast over heads and keys", "queries without keys", "window"]


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_forward_mode_and_second_derivatives(case):
    options, inputs = CASES[case]
    leaves = in_fp64(inputs)

    def op(*values):
        named = dict(zip(leaves, values))
        return finite_lse(*tw.flash_attention(**named, **options, return_lse=True))

    assert gradcheck(
        op,
        tuple(leaves.values()),
        fast_mode=True,
        check_undefined_grad=False,
        check_forward_ad=True,
        check_backward_ad=False,
    )
    assert gradgradcheck(
        op,
        tuple(leaves.values()),
        fast_mode=True,
        check_undefined_grad=False,
        check_fwd_over_rev=True,
    )


def test_forward_mode_and_second_derivatives_of_packed_sequences():
    shapes = {"q": (5, 2, 2), "k": (5, 1, 2), "v": (5, 1, 2), "alibi_slopes": (3, 2), "sinks": (2,)}
    leaves = in_fp64({n: torch.rand(s) for n, s in shapes.items()})
    starts = {
        "cu_seqlens_q": torch.tensor([0, 1, 1, 4]),
        "cu_seqlens_k": torch.tensor([1, 3, 4, 5]),
    }

    def op(*values):
        return tw.flash_attention_varlen(
            **dict(zip(leaves, values)), **starts, softcap=2.0, causal=True
        )

    assert gradcheck(
        op,
        tuple(leaves.values()),
        fast_mode=True,
        check_undefined_grad=False,
        check_forward_ad=True,
        check_backward_ad=False,
    )
    assert gradgradcheck(
        op,
        tuple(leaves.values()),
        fast_mode=True,
        check_undefined_grad=False,
        check_fwd_over_rev=True,
    )


def energy(q, k, v, **options):
    out, lse = tw.flash_attention(q, k, v, return_lse=True, **options)
    return out.square().sum() + lse.sum()


def test_hessian_by_every_route():
    q, k, v = (x.double() for x in qkv(1, 3, 3, 1, 1, 2, 2).values())

    def loss(q):
        return energy(q, k, v, causal=True)

    expected = torch.autograd.functional.hessian(loss, q)
    for route in (
        torch.func.jacfwd(torch.func.jacrev(loss)),
        torch.func.jacrev(torch.func.jacfwd(loss)),
        torch.func.jacrev(torch.func.jacrev(loss)),
    ):
        torch.testing.assert_close(route(q), expected)


def test_gradient_penalty_in_bf16_is_that_of_fp32_to_its_precision():
    inputs = qkv(1, 20, 20, 2, 1, 16, 16, torch.bfloat16)
    penalties = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in inputs.values()]
        grads = torch.autograd.grad(energy(*leaves, causal=True).float(), leaves, create_graph=True)
        penalty = sum(g.float().square().sum() for g in grads)
        penalties.append([penalty, *torch.autograd.grad(penalty, leaves)])
        assert all(g.dtype == dtype for g in penalties[-1][1:])
    for low, full in zip(*penalties):
        assert (low.float() - full).norm() < 0.05 * full.norm()


def test_second_derivatives_ignore_nan_in_slots_that_nobody_sees():
    inputs = qkv(1, 4, 6, 1, 1, 2, 2)
    inputs["k"][:, 4:], inputs["v"][:, 4:] = float("nan"), INF
    leaves = in_fp64(inputs)
    loss = energy(*leaves.values(), causal=True, causal_align="top-left")
    grads = torch.autograd.grad(loss, leaves.values(), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves.values())
    assert all(g.isfinite().all() for g in second)


@pytest.mark.parametrize("dirty", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_second_derivatives_ignore_nan_that_only_others_see(dirty, bad):
    """Two groups of tokens that do not see each other: NaN or inf in one leaves the derivatives of the other."""
    group = torch.tensor([0, 0, 0, 1, 1])
    bias = torch.where(group[:, None] == group, 0.0, -INF).double()
    inputs, results = qkv(1, 5, 5, 2, 1, 2, 2), []
    for value in (1.0, bad):
        inputs[dirty][:, 4, :, 0] = value
        leaves = in_fp64(inputs)
        grads = torch.autograd.grad(
            energy(*leaves.values(), bias=bias), leaves.values(), create_graph=True
        )
        second = torch.autograd.grad(
            sum(g[:, :3].square().sum() for g in grads), leaves.values(), retain_graph=True
        )
        results.append([g[:, :3] for g in (*grads, *second)])
    for clean, beside_bad in zip(*results):
        torch.testing.assert_close(beside_bad, clean)


@pytest.mark.parametrize("case", ["bias", "all at once"])
def test_vmap_gives_the_bits_of_a_loop(case):
    options, _ = OPTIONS[case]
    inputs = option_inputs(case, 2, 5, 6, 4, 2, 8, 8)
    batched = {n: torch.stack([x, 2 * x, -x]) for n, x in inputs.items() if n != "k"}

    def call(**some):
        return tw.flash_attention(**{**inputs, **some}, return_lse=True, **options)

    def loss(some):
        out, lse = call(**some)
        return out.square().sum() + lse.sum()

    out, lse = torch.func.vmap(lambda some: call(**some))(batched)
    grads = torch.func.vmap(torch.func.grad(loss))(batched)
    for i in range(3):
        one = {n: x[i] for n, x in batched.items()}
        assert all(same_bits(a[i], b) for a, b in zip((out, lse), call(**one)))
        assert all(same_bits(grads[n][i], g) for n, g in torch.func.grad(loss)(one).items())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_autocast_does_not_reach_inside(backend):
    leaves = [x.requires_grad_() for x in qkv(1, 9, 9, 2, 1, 8, 8, torch.bfloat16).values()]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = tw.flash_attention(*leaves, causal=True, backend=backend)
            grads = torch.autograd.grad(out.float().square().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(g.float().square().sum() for g in grads), leaves)
            results.append([out, *grads, *second])
    assert all(same_bits(a, b) for a, b in zip(*results))
