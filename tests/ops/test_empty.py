"""Every op on tensors without elements, in every layout: torch calls them contiguous whatever their strides are."""

import pytest
import torch
import trainwright as tw

BACKENDS = ["torch", "cpu", "vgpu"]


def new(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)  # which every backend takes


def empty(shape: tuple[int, ...], layout: str) -> torch.Tensor:
    if layout == "expanded":
        return new(*shape[:-1], 1).expand(shape)
    if layout == "every second":
        return new(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "reversed":
        return new(*shape[::-1]).permute(*reversed(range(len(shape))))
    return new(*shape)


def none(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


# op -> shapes of its inputs, other arguments
CASES = {
    "rms_norm": ({"x": (0, 5), "weight": (5,), "residual": (0, 5)}, {}),
    "layer_norm": ({"x": (0, 5), "weight": (5,), "bias": (5,), "residual": (0, 5)}, {}),
    "rope": ({"q": (0, 3, 2, 8), "k": (0, 3, 1, 8), "cos": (3, 4), "sin": (3, 4)}, {}),
    "swiglu": ({"gate": (0, 5), "up": (0, 5)}, {}),
    "geglu": ({"gate": (0, 5), "up": (0, 5)}, {}),
    "cross_entropy": ({"logits": (0, 5)}, {"target": none(0).long(), "reduction": "sum"}),
    "linear_cross_entropy": (
        {"hidden": (0, 5), "weight": (7, 5)},
        {"target": none(0).long(), "reduction": "sum"},
    ),
    "linear": (
        {"x": (0, 5), "weight": (7, 5), "bias": (7,), "residual": (0, 7)},
        {"activation": "gelu"},
    ),
    "matmul": ({"a": (2, 0, 5), "b": (2, 5, 7)}, {}),
    "grouped_matmul": ({"x": (0, 5), "weights": (2, 5, 7)}, {"offsets": none(2)}),
    "flash_attention": ({"q": (1, 0, 2, 8), "k": (1, 3, 2, 8), "v": (1, 3, 2, 8)}, {}),
    "flash_attention_varlen": (
        {"q": (0, 2, 8), "k": (0, 2, 8), "v": (0, 2, 8)},
        {"cu_seqlens_q": none(2), "cu_seqlens_k": none(2)},
    ),
    "merge_attention": (
        {"out_a": (1, 0, 2, 8), "lse_a": (1, 2, 0), "out_b": (1, 0, 2, 8), "lse_b": (1, 2, 0)},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["dense", "expanded", "every second", "reversed"])
@pytest.mark.parametrize(
    "op, backend",
    [(op, b) for op in CASES for b in BACKENDS if (op, b) != ("linear_cross_entropy", "vgpu")],
)
def test_empty_tensors_in_every_layout(op, backend, layout):
    shapes, options = CASES[op]
    fn = getattr(tw, op)
    inputs = {name: empty(shape, layout).requires_grad_() for name, shape in shapes.items()}
    for name in ("lse_a", "lse_b"):
        if name in inputs:
            inputs[name] = inputs[name].detach().float().requires_grad_()
    if op == "rope":
        inputs["cos"].requires_grad_(False), inputs["sin"].requires_grad_(False)
    out = fn(**inputs, **options, backend=backend)
    out = out if isinstance(out, tuple) else (out,)
    assert all(not o.numel() or (o.dim() == 0 and o == 0) for o in out)
    sum(o.sum() for o in out).backward()
    for name, x in inputs.items():
        if x.requires_grad:
            assert x.grad.shape == x.shape and not x.grad.count_nonzero(), name
