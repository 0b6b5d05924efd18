"""tw.merge_attention: partial results over disjoint keys."""

import pytest
import torch
import trainwright as tw
from attention_cases import INF, NAN, qkv, with_lse
from numerics import assert_within_rule


def test_merge_of_split_keys_is_the_whole():
    q, k, v = qkv(2, 9, 20, 2, 1, 8, 8, torch.float64).values()
    whole = with_lse(q=q, k=k, v=v)
    a = with_lse(q=q, k=k[:, :7], v=v[:, :7])
    b = with_lse(q=q, k=k[:, 7:], v=v[:, 7:])
    torch.testing.assert_close(tw.merge_attention(*a, *b), whole)


def test_merge_with_nothing():
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    none, never = torch.full_like(out, NAN), torch.full_like(lse, -INF)
    merged, merged_lse = tw.merge_attention(out, lse, none, never)
    torch.testing.assert_close((merged, merged_lse), (out, lse))
    leaves = [x.clone().requires_grad_() for x in (none, never, none, never)]
    merged, merged_lse = tw.merge_attention(*leaves)
    assert (merged == 0).all() and (merged_lse == -INF).all()
    grads = torch.autograd.grad(merged.sum(), leaves)
    assert all((g == 0).all() for g in grads)


def test_merge_gradcheck():
    shapes = ((1, 3, 2, 4), (1, 2, 3)) * 2
    values = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(tw.merge_attention, values)
    assert torch.autograd.gradgradcheck(tw.merge_attention, values, fast_mode=True)


def test_merge_gradients_beside_a_part_with_nothing():
    out_a, out_b = (
        torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    lse_a = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    lse_b = torch.randn(1, 2, 3, dtype=torch.float64)
    lse_b[..., 1] = -INF
    lse_b.requires_grad_()
    leaves = (out_a, lse_a, out_b, lse_b)
    out, lse = tw.merge_attention(*leaves)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad((out, lse), leaves, (upstream, torch.ones_like(lse)))
    assert all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(grads[0][:, 1], upstream[:, 1])  # all of row 1 is part a
    assert (grads[2][:, 1] == 0).all() and (grads[3][..., 1] == 0).all()
    torch.testing.assert_close(grads[1][..., 1], torch.ones(1, 2, dtype=torch.float64))


@pytest.mark.parametrize("parts", [2, 32])
def test_a_ring_of_bf16_partial_results_is_as_exact_as_one_call(parts):
    inputs = qkv(1, 16, 96, 2, 1, 16, 16, torch.bfloat16)
    exact, _ = with_lse(**{n: x.double() for n, x in inputs.items()})
    whole, _ = with_lse(**inputs)
    out = torch.zeros(1, 16, 2, 16)
    lse = torch.full((1, 2, 16), -INF)
    for k, v in zip(inputs["k"].chunk(parts, 1), inputs["v"].chunk(parts, 1)):
        out, lse = tw.merge_attention(out, lse, *with_lse(q=inputs["q"], k=k, v=v))
    assert out.dtype == torch.float32 and lse.dtype == torch.float32
    assert_within_rule("ring", out.bfloat16(), whole, exact)


X, LSE = torch.ones(2, 3, 4, 5), torch.ones(2, 4, 3)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"out_a": X[0]}, ValueError, r"out_a: expected shape \(any, any, any, any\)"),
        ({"out_b": X[:1]}, ValueError, r"out_b: expected shape \(2, 3, 4, 5\), got \(1, 3, 4, 5\)"),
        ({"out_b": X.int()}, TypeError, "out_b: expected dtype"),
        ({"lse_a": LSE[:, :2]}, ValueError, r"lse_a: expected shape \(2, 4, 3\)"),
        ({"lse_b": 1.0}, TypeError, "lse_b: expected a torch.Tensor"),
        ({"backend": "cpu"}, tw.BackendError, "cpu: not implemented for this op"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_bad_arguments(changed, error, text):
    with pytest.raises(error, match=text):
        tw.merge_attention(**{"out_a": X, "lse_a": LSE, "out_b": X, "lse_b": LSE, **changed})
