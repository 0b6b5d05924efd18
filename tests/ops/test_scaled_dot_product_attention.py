"""tw.scaled_dot_product_attention against torch's."""

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw

SDPA = {
    "plain": ((2, 3, 9, 8), (2, 3, 11, 8), {}),
    "causal is top-left": ((2, 3, 9, 8), (2, 3, 11, 8), {"is_causal": True}),
    "causal, more queries": ((2, 3, 11, 8), (2, 3, 9, 8), {"is_causal": True}),
    "grouped": ((2, 6, 9, 8), (2, 3, 9, 8), {"is_causal": True, "enable_gqa": True}),
    "scale": ((2, 3, 9, 8), (2, 3, 9, 8), {"scale": 0.7}),
    "three dimensions": ((3, 9, 8), (3, 11, 8), {}),
    "two dimensions": ((9, 8), (11, 8), {}),
    "five dimensions": ((2, 2, 3, 9, 8), (2, 2, 3, 11, 8), {"is_causal": True}),
    "bool mask": ((2, 3, 9, 8), (2, 3, 11, 8), {"mask": (2, 1, 9, 11), "bool": True}),
    "float mask": ((2, 3, 9, 8), (2, 3, 11, 8), {"mask": (9, 11)}),
    "five dimensions and a mask": ((2, 2, 3, 9, 8), (2, 2, 3, 11, 8), {"mask": (2, 1, 9, 11)}),
}


@pytest.mark.parametrize("case", SDPA)
def test_scaled_dot_product_attention_is_torch_s(case):
    q_shape, k_shape, options = SDPA[case]
    options = dict(options)
    if case == "five dimensions and a mask":
        options["mask"] = (2, 2, 1, 9, 11)
    if "mask" in options:
        mask = torch.randn(options.pop("mask"), dtype=torch.float64)
        options["attn_mask"] = mask > -0.5 if options.pop("bool", False) else mask
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (q_shape, k_shape, k_shape)]  # fmt: skip
    ours = tw.scaled_dot_product_attention(*leaves, **options)
    theirs = F.scaled_dot_product_attention(*leaves, **options)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(theirs, leaves, upstream)
    )


def test_scaled_dot_product_attention_refuses_a_mask_with_is_causal():
    x = torch.ones(1, 1, 2, 4)
    with pytest.raises(ValueError, match="attn_mask: expected None together with is_causal=True"):
        tw.scaled_dot_product_attention(x, x, x, torch.ones(2, 2, dtype=torch.bool), is_causal=True)
