"""tw.scaled_dot_product_attention against torch's."""

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw

# id: shapes of query, of key and value, options; "mask": shape of attn_mask, "bool": of bools
CASES = {
    "plain": ((2, 3, 9, 8), (2, 3, 11, 8), {}),
    "causal is top-left": ((2, 3, 9, 8), (2, 3, 11, 8), {"is_causal": True}),
    "causal, more queries": ((2, 3, 11, 8), (2, 3, 9, 8), {"is_causal": True}),
    "grouped": ((2, 6, 9, 8), (2, 3, 9, 8), {"is_causal": True, "enable_gqa": True}),
    "grouped and a mask": ((2, 6, 9, 8), (2, 3, 9, 8), {"mask": (6, 9, 9), "enable_gqa": True}),
    "scale": ((2, 3, 9, 8), (2, 3, 9, 8), {"scale": 0.7}),
    "three dimensions": ((3, 9, 8), (3, 11, 8), {}),
    "three dimensions and a mask": ((3, 9, 8), (3, 11, 8), {"mask": (3, 9, 11)}),
    "two dimensions": ((9, 8), (11, 8), {}),
    "two dimensions and a mask": ((9, 8), (11, 8), {"mask": (9, 1)}),
    "five dimensions": ((2, 2, 3, 9, 8), (2, 2, 3, 11, 8), {"is_causal": True}),
    "five dimensions and a mask": ((2, 2, 3, 9, 8), (2, 2, 3, 11, 8), {"mask": (2, 2, 1, 9, 11)}),
    "five dimensions, one mask": ((2, 2, 3, 9, 8), (2, 2, 3, 11, 8), {"mask": (1, 1, 3, 9, 11)}),
    "five dimensions, a mask for some": ((2, 2, 3, 9, 8), (2, 2, 3, 11, 8), {"mask": (2, 3, 1, 11)}),
    "broadcast batch": ((2, 3, 9, 8), (1, 3, 11, 8), {}),
    "broadcast heads": ((2, 3, 9, 8), (2, 1, 11, 8), {"is_causal": True}),
    "bool mask": ((2, 3, 9, 8), (2, 3, 11, 8), {"mask": (2, 1, 9, 11), "bool": True}),
    "mask for keys": ((2, 3, 9, 8), (2, 3, 11, 8), {"mask": (2, 1, 1, 11), "bool": True}),
    "float mask": ((2, 3, 9, 8), (2, 3, 11, 8), {"mask": (9, 11)}),
    "no queries": ((2, 3, 0, 8), (2, 3, 11, 8), {}),
    "no batch": ((0, 3, 4, 8), (0, 3, 11, 8), {"is_causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_is_torch_s(case):
    q_shape, k_shape, options = CASES[case]
    options = dict(options)
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (q_shape, k_shape, k_shape)]  # fmt: skip
    if "mask" in options:
        mask = torch.randn(options.pop("mask"), dtype=torch.float64)
        if options.pop("bool", False):
            options["attn_mask"] = mask > -0.5
        else:
            options["attn_mask"] = mask.requires_grad_()
            leaves.append(mask)
    tensors = leaves[:3]
    ours = tw.scaled_dot_product_attention(*tensors, **options)
    theirs = F.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(theirs, leaves, upstream)
    )


def test_rows_with_nothing_to_attend_to_are_zero_as_torch_s():
    leaves = [torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    ours = tw.scaled_dot_product_attention(*leaves, mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*leaves, mask))
    assert (ours[:, :, 2] == 0).all()
    grads = torch.autograd.grad(ours.square().sum(), leaves)
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, 2] == 0).all()


def test_an_fp32_mask_with_bf16_inputs_as_torch_s():
    q = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    mask = torch.randn(5, 5)
    ours = tw.scaled_dot_product_attention(q, q, q, mask)
    theirs = F.scaled_dot_product_attention(q, q, q, mask)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_dropout_draws_from_torch_s_generator():
    q = torch.randn(1, 2, 50, 8)
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        results.append(tw.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert torch.equal(*results)
    assert not torch.equal(results[0], tw.scaled_dot_product_attention(q, q, q, dropout_p=0.5))


def test_refuses_a_mask_with_is_causal():
    x = torch.ones(1, 1, 2, 4)
    with pytest.raises(ValueError, match="attn_mask: expected None together with is_causal=True"):
        tw.scaled_dot_product_attention(x, x, x, torch.ones(2, 2, dtype=torch.bool), is_causal=True)


X = torch.ones(2, 4, 3, 8)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"key": X.double()}, TypeError, "key: expected dtype float32, got float64"),
        ({"key": X[0]}, ValueError, "key: expected 4 dimensions, as query"),
        ({"key": X[..., :4]}, ValueError, "key: expected a last dimension of 8"),
        ({"value": X[:, :, :2]}, ValueError, "value: expected 3 tokens, as key"),
        ({"key": X[:, :3], "value": X[:, :3]}, ValueError, "query, key, value: expected .* that broadcast"),
        ({"key": X[:, :3], "value": X[:, :3], "enable_gqa": True}, ValueError, "key: expected a number of heads that"),
        ({"attn_mask": torch.ones(3, 4)}, ValueError, "attn_mask: expected a shape that broadcasts"),
        ({"attn_mask": torch.ones(3, 3, dtype=torch.int64)}, TypeError, "attn_mask: expected None, bool"),
        ({"is_causal": 1}, TypeError, "is_causal: expected a bool"),
        ({"enable_gqa": 1}, TypeError, "enable_gqa: expected a bool"),
        ({"dropout_p": 2.0}, ValueError, "dropout_p: expected a probability"),
        ({"scale": "1"}, TypeError, "scale: expected a number"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_bad_arguments(changed, error, text):
    with pytest.raises(error, match=text):
        tw.scaled_dot_product_attention(**{"query": X, "key": X, "value": X, **changed})
