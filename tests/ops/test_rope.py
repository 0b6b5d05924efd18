"""tw.rope: one table of cases for every backend."""

import pytest
import torch
import trainwright as tw
from numerics import (
    backends_for_tests,
    check_compile,
    check_gradcheck,
    check_layouts,
    check_opcheck,
    check_reference,
    same_bits,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = backends_for_tests(tw.rope)
# Triton's interpreter is slow, and its kernels treat all dtypes alike but for the accumulator.
RUNS = [(b, d) for b in BACKENDS for d in DTYPES if b != "triton" or d in DTYPES[:2]]
TABLES = ("cos", "sin")

# id: (B, T, H, G, D, R, tables per batch, interleaved)
CASES = {
    "half pairs": (2, 5, 4, 2, 16, 16, False, False),
    "interleaved": (2, 5, 4, 2, 16, 16, False, True),
    "part of the head": (1, 7, 3, 1, 24, 10, False, False),
    "part of the head, interleaved": (1, 7, 3, 1, 24, 10, False, True),
    "positions of each sequence": (3, 4, 2, 2, 34, 34, True, False),
    "positions of each sequence, interleaved": (3, 4, 2, 2, 34, 34, True, True),
    "odd head, one pair": (1, 3, 1, 1, 7, 2, False, True),
    "nothing rotated": (1, 3, 2, 1, 5, 0, False, False),
    "no tokens": (2, 0, 4, 2, 8, 8, False, False),
    "no key heads": (1, 3, 2, 0, 8, 4, False, False),
    "wide head": (1, 2, 20, 4, 128, 128, False, False),
}


def turn(x, cos, sin, interleaved):
    """A complex product: an independent way to write it."""
    half = cos.shape[-1]
    h, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = h.unflatten(-1, (half, 2)) if interleaved else h.unflatten(-1, (2, half)).mT
    angle = torch.stack((cos, sin), -1).unsqueeze(-3).to(x.dtype)
    real = pairs[..., 0] * angle[..., 0] - pairs[..., 1] * angle[..., 1]
    imaginary = pairs[..., 0] * angle[..., 1] + pairs[..., 1] * angle[..., 0]
    turned = torch.stack((real, imaginary), -1)
    turned = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat((turned, rest), -1)


def reference(q, k, cos, sin, interleaved=False):
    return turn(q, cos, sin, interleaved), turn(k, cos, sin, interleaved)


def make(case, dtype=torch.float32, table_dtype=None):
    B, T, H, G, D, R, batched, interleaved = CASES[case]
    angle = 6.3 * torch.rand((B, T, R // 2) if batched else (T, R // 2), dtype=torch.float64)
    inputs = {
        "q": torch.randn(B, T, H, D, dtype=torch.float64).to(dtype),
        "k": torch.randn(B, T, G, D, dtype=torch.float64).to(dtype),
        "cos": angle.cos().to(table_dtype or dtype),
        "sin": angle.sin().to(table_dtype or dtype),
    }
    return inputs, {"interleaved": interleaved}


@pytest.mark.parametrize(("backend", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, backend, dtype):
    inputs, options = make(case, dtype)
    check_reference(tw.rope, reference, inputs, options, backend=backend, no_grad=TABLES)


# Without Triton: its interpreter truncates fp32 to bf16 where the hardware rounds.
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "triton"])
@pytest.mark.parametrize("case", ["half pairs", "interleaved"])
def test_fp32_tables_are_not_rounded_for_bf16_heads(case, backend):
    inputs, options = make(case, torch.bfloat16, torch.float32)
    exact = reference(**{k: v.double() for k, v in inputs.items()}, **options)
    for got, want in zip(tw.rope(**inputs, **options, backend=backend), exact):
        # Rounded once, from a result that is exact to fp32: half a unit in the last place of each element.
        unit = torch.exp2(torch.floor(torch.log2(want.abs())) - 7)
        assert got.dtype == torch.bfloat16
        assert ((got.double() - want).abs() <= 0.5 * unit + 1e-6).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_layout(backend):
    inputs, options = make("positions of each sequence")
    inputs = {k: v[:, :2, ..., -4:] for k, v in inputs.items()}
    inputs |= {k: inputs[k][..., -2:] for k in TABLES}
    check_layouts(tw.rope, inputs, options, backend=backend, no_grad=TABLES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_of_a_fused_projection(backend):
    B, T, H, G, D = 2, 3, 4, 2, 8
    qkv = torch.randn(B, T, (H + 2 * G) * D, requires_grad=True)
    heads = qkv.view(B, T, H + 2 * G, D)
    q, k = heads[:, :, :H], heads[:, :, H : H + G]
    angle = torch.rand(T, D // 2)
    got = tw.rope(q, k, angle.cos(), angle.sin(), backend=backend)
    want = reference(q.double(), k.double(), angle.cos().double(), angle.sin().double())
    for g, w in zip(got, want):
        assert g.is_contiguous() and (g - w).abs().max() < 1e-6
    (grad,) = torch.autograd.grad([g.square().sum() for g in got], qkv)
    rotated = (H + G) * D
    # |rotated|^2 = |x|^2: the gradient is 2x, and nothing for v.
    assert (grad[..., :rotated] - 2 * qkv[..., :rotated]).abs().max() < 1e-5
    assert not grad[..., rotated:].any()


@pytest.mark.parametrize("case", ["odd head, one pair", "nothing rotated", "no key heads"])
def test_gradcheck(case):
    inputs, options = make(case)
    check_gradcheck(tw.rope, inputs, options, backend="cpu", no_grad=TABLES)


@pytest.mark.parametrize("case", ["half pairs", "part of the head, interleaved"])
def test_compiles_without_graph_break(case):
    inputs, options = make(case, torch.bfloat16, torch.float32)
    check_compile(tw.rope, inputs, options, no_grad=TABLES)


def test_opcheck():
    q, k, cos = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 1, 6), torch.rand(3, 2)
    check_opcheck(torch.ops.trainwright.rope.default, q, k, cos, cos, False, False)
    check_opcheck(torch.ops.trainwright.rope.default, q, None, cos, cos, True, True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", ["q", "k"])
def test_only_one_output_is_used(used, backend):
    inputs, options = make("half pairs")
    leaves = {n: inputs[n].requires_grad_() for n in ("q", "k")}
    both = tw.rope(**inputs, **options, backend=backend)
    one = both[0 if used == "q" else 1]
    dy = torch.randn_like(one)
    got = torch.autograd.grad(one, [*leaves.values()], dy, allow_unused=True, retain_graph=True)
    want = torch.autograd.grad(
        reference(**inputs, **options)[0 if used == "q" else 1], leaves[used], dy
    )[0]
    assert (got[0] is None) == (used == "k") and (got[1] is None) == (used == "q")
    assert (got[0 if used == "q" else 1] - want).abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_pair_and_the_rest_keeps_its_bits(backend):
    inputs, options = make("part of the head")
    inputs["q"][0, 2, 1, 3] = float("nan")  # pair 3: elements 3 and 8
    q, k = tw.rope(**inputs, **options, backend=backend)
    bad = q.isnan().nonzero().tolist()
    assert bad == [[0, 2, 1, 3], [0, 2, 1, 8]] and k.isfinite().all()
    assert same_bits(q[..., 10:], inputs["q"][..., 10:])


def test_autocast_keeps_the_input_dtype():
    inputs, options = make("half pairs")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(y.dtype == torch.float32 for y in tw.rope(**inputs, **options))


def q_k_cos_sin(**changes):
    table = torch.ones(3, 2)
    return {
        "q": torch.ones(2, 3, 4, 6),
        "k": torch.ones(2, 3, 1, 6),
        "cos": table,
        "sin": table,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": torch.ones(2, 3, 6)}, ValueError, r"rope: q: expected shape \(any, any, any, any\), got \(2, 3, 6\)"),
        ({"k": torch.ones(2, 4, 1, 6)}, ValueError, r"rope: k: expected shape \(2, 3, any, 6\)"),
        ({"k": torch.ones(2, 3, 1, 6).half()}, TypeError, "k: expected dtype float32"),
        ({"cos": torch.ones(3, 4)}, ValueError, r"cos: expected shape \(3, R/2\) or \(2, 3, R/2\) with R <= 6"),
        ({"cos": torch.ones(2)}, ValueError, "cos: expected shape"),
        ({"sin": torch.ones(3, 1)}, ValueError, r"sin: expected the shape and dtype of cos, \(3, 2\)"),
        ({"sin": torch.ones(3, 2).double()}, ValueError, "sin: expected the shape and dtype of cos"),
        ({"cos": torch.ones(3, 2, requires_grad=True)}, ValueError, "cos: expected a table without gradient"),
        ({"interleaved": 1}, TypeError, "interleaved: expected a bool, got int"),
        ({"backend": "cuda"}, tw.BackendError, "cuda: needs CUDA tensors, got cpu"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_bad_arguments(changes, error, text):
    with pytest.raises(error, match=text):
        tw.rope(**q_k_cos_sin(**changes))


@pytest.mark.parametrize("interleaved", [False, True])
def test_module_rotates_by_the_angles_of_its_positions(interleaved):
    module = tw.nn.RotaryEmbedding(8, 32, base=100.0, interleaved=interleaved)
    q, k = torch.randn(2, 5, 3, 12), torch.randn(2, 5, 1, 12)
    frequency = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    for positions in (None, torch.tensor([3, 4, 31, 0, 0]), torch.randint(0, 32, (2, 5))):
        angle = (torch.arange(5) if positions is None else positions).double()[
            ..., None
        ] * frequency
        want = reference(q.double(), k.double(), angle.cos(), angle.sin(), interleaved)
        for got, exact in zip(module(q, k, positions), want):
            assert (got - exact).abs().max() < 1e-6
    with pytest.raises(
        ValueError, match="RotaryEmbedding: q: expected at most 32 positions, got 33"
    ):
        module(torch.ones(1, 33, 1, 8), torch.ones(1, 33, 1, 8))


def test_module_tables_stay_fp32_and_out_of_the_state_dict():
    module = tw.nn.RotaryEmbedding(8, 1000)
    exact = module.cos.clone()
    module = module.bfloat16().double()
    assert module.cos.dtype == torch.float32 and torch.equal(module.cos, exact)
    assert not module.state_dict()
    with torch.device("meta"):
        late = tw.nn.RotaryEmbedding(8, 1000)
    late = late.to_empty(device="cpu")
    late.reset_parameters()
    assert torch.equal(late.cos, exact)
