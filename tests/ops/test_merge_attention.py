"""tw.merge_attention: partial results over disjoint keys."""

import pytest
import torch
import trainwright as tw
from attention_cases import INF, NAN, qkv, with_lse
from numerics import (
    assert_within_rule,
    backends_for_tests,
    check_compile,
    check_layouts,
    check_opcheck,
    check_reference,
    interpreted,
    same_bits,
)

BACKENDS = backends_for_tests(tw.merge_attention)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def reference(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = ((x - lse).exp().transpose(1, 2)[..., None] for x in (lse_a, lse_b))
    out = torch.where(a == 0, 0.0, a * out_a) + torch.where(b == 0, 0.0, b * out_b)
    wide = FP64 if out_a.dtype == FP64 else FP32
    return out.to(torch.promote_types(out_a.dtype, out_b.dtype)), lse.to(wide)


def parts(shape, a=FP32, b=FP32):
    B, T, H, _ = shape
    wide = FP64 if FP64 in (a, b) else FP32
    lse = [2 * torch.randn(B, H, T, dtype=FP64) for _ in "ab"]
    lse = [x.to(wide) for x in lse]
    return {
        "out_a": torch.randn(shape, dtype=FP64).to(a), "lse_a": lse[0],
        "out_b": torch.randn(shape, dtype=FP64).to(b), "lse_b": lse[1],
    }  # fmt: skip


# The interpreter is slow: there, the dtypes of a ring and no others.
PAIRS = [(FP32, FP32), (FP32, BF16), (BF16, BF16), (FP16, FP16), (BF16, FP16), (FP64, FP64)]
TABLE = [
    pytest.param(shape, *pair, backend, id=f"{shape[3]}-{str(pair[0])[6:]}-{str(pair[1])[6:]}-{backend}")
    for backend in BACKENDS
    for shape in ((2, 5, 3, 64), (1, 20, 2, 13), (1, 30, 2, 200))
    for pair in (PAIRS[1:2] if interpreted(backend) else PAIRS)
]  # fmt: skip


@pytest.mark.parametrize(("shape", "a", "b", "backend"), TABLE)
def test_matches_reference(shape, a, b, backend):
    check_reference(tw.merge_attention, reference, parts(shape, a, b), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_asked_for(backend):
    inputs = parts((1, 4, 2, 8))
    leaves = {n: x.requires_grad_(n != "lse_b") for n, x in inputs.items()}
    out, lse = tw.merge_attention(**leaves, backend=backend)
    whole = torch.autograd.grad(
        (out.sum() + lse.sum()), [leaves[n] for n in ("out_a", "lse_a", "out_b")]
    )
    for n, expected in zip(("out_a", "lse_a", "out_b"), whole):
        one = {m: x.detach().requires_grad_(m == n) for m, x in inputs.items()}
        out, lse = tw.merge_attention(**one, backend=backend)
        assert same_bits(torch.autograd.grad(out.sum() + lse.sum(), one[n])[0], expected)
    (alone,) = torch.autograd.grad(
        tw.merge_attention(**leaves, backend=backend)[1].sum(), leaves["lse_a"]
    )
    torch.testing.assert_close(alone, torch.sigmoid(leaves["lse_a"] - leaves["lse_b"]).detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts(backend):
    check_layouts(tw.merge_attention, parts((1, 4, 2, 8)), backend=backend)


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (1, 0, 2, 4), (1, 3, 2, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_merge(shape, backend):
    inputs = parts(shape)
    out, lse = tw.merge_attention(**inputs, backend=backend)
    torch.testing.assert_close(lse, torch.logaddexp(inputs["lse_a"], inputs["lse_b"]))
    assert out.shape == shape


def test_compile_and_opcheck():
    inputs = parts((1, 4, 2, 8), FP32, BF16)
    check_compile(tw.merge_attention, inputs)
    check_opcheck(torch.ops.trainwright.merge_attention_fwd.default, *inputs.values())
    arguments = (torch.randn(1, 4, 2, 8), None, *inputs.values(), [True] * 4)
    check_opcheck(torch.ops.trainwright.merge_attention_bwd.default, *arguments)


def test_merge_of_split_keys_is_the_whole():
    q, k, v = qkv(2, 9, 20, 2, 1, 8, 8, torch.float64).values()
    whole = with_lse(q=q, k=k, v=v)
    a = with_lse(q=q, k=k[:, :7], v=v[:, :7])
    b = with_lse(q=q, k=k[:, 7:], v=v[:, 7:])
    torch.testing.assert_close(tw.merge_attention(*a, *b), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_with_nothing(backend):
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    none, never = torch.full_like(out, NAN), torch.full_like(lse, -INF)
    merged, merged_lse = tw.merge_attention(out, lse, none, never, backend=backend)
    torch.testing.assert_close((merged, merged_lse), (out, lse))
    leaves = [x.clone().requires_grad_() for x in (none, never, none, never)]
    merged, merged_lse = tw.merge_attention(*leaves, backend=backend)
    assert (merged == 0).all() and (merged_lse == -INF).all()
    grads = torch.autograd.grad(merged.sum(), leaves)
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_gradcheck(backend):
    shapes = ((1, 3, 2, 4), (1, 2, 3)) * 2
    values = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def op(*args):
        return tw.merge_attention(*args, backend=backend)

    assert torch.autograd.gradcheck(op, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(op, values, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_gradients_beside_a_part_with_nothing(backend):
    out_a, out_b = (
        torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    lse_a = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    lse_b = torch.randn(1, 2, 3, dtype=torch.float64)
    lse_b[..., 1] = -INF
    lse_b.requires_grad_()
    leaves = (out_a, lse_a, out_b, lse_b)
    out, lse = tw.merge_attention(*leaves, backend=backend)
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
        ({"backend": "cuda"}, tw.BackendError, "cuda: needs CUDA tensors"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_bad_arguments(changed, error, text):
    with pytest.raises(error, match=text):
        tw.merge_attention(**{"out_a": X, "lse_a": LSE, "out_b": X, "lse_b": LSE, **changed})
