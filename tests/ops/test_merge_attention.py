"""tw.merge_attention: partial results over disjoint keys."""

import torch
import trainwright as tw
from attention_cases import INF, NAN, qkv, with_lse


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
