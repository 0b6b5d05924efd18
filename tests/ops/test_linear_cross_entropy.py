"""tw.linear_cross_entropy against F.linear and F.cross_entropy: one table of cases for every backend."""

import math
import os
import subprocess
import sys

import pytest
import test_cross_entropy
import torch
import torch.nn.functional as F
import trainwright as tw
from numerics import (
    backends_for_tests,
    check_compile,
    check_gradcheck,
    check_layouts,
    check_opcheck,
    check_reference,
    run,
    same_bits,
)
from trainwright import dispatch
from trainwright.ops import _logit_tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = backends_for_tests(tw.linear_cross_entropy)
ALL = [(b, d) for b in BACKENDS for d in (DTYPES if b == "cpu" else DTYPES[:2])]

# id: (N, V, C, options, share of ignored rows, bias, class weights). From 1024 kept rows on, scalar losses walk rows.
CASES = {
    "plain": ((9, 150, 12), {}, 0, False, False),
    "none": ((9, 150, 12), {"reduction": "none"}, 0, False, False),
    "one class": ((4, 1, 3), {}, 0, True, False),
    "one row": ((1, 70, 5), {}, 0, False, False),
    "no channels": ((3, 70, 0), {}, 0, True, False),
    "ignored, bias, weight": ((13, 97, 8), {}, 0.4, True, True),
    "all options, none": (
        (11, 200, 10),
        {"softcap": 3.0, "z_loss": 1e-2, "label_smoothing": 0.1, "reduction": "none"},
        0.3,
        True,
        True,
    ),
    "all options, sum": (
        (11, 200, 10),
        {
            "softcap": 3.0,
            "z_loss": 1e-2,
            "label_smoothing": 0.1,
            "reduction": "sum",
            "ignore_index": 7,
        },
        0.3,
        True,
        True,
    ),
    "rows": ((1100, 40, 6), {}, 0, True, False),
    "rows, all options": (
        (1900, 37, 5),
        {"softcap": 3.0, "z_loss": 1e-2, "label_smoothing": 0.1},
        0.3,
        True,
        True,
    ),
}


def reference(hidden, weight, target, bias=None, class_weight=None, **options):
    return test_cross_entropy.reference(
        F.linear(hidden, weight, bias), target, weight=class_weight, **options
    )


def make(case, dtype=torch.float32):
    (N, V, C), options, ignored, has_bias, has_weight = CASES[case]
    options = dict(options)
    target = torch.randint(0, V, (N,))
    if ignored:
        target[torch.rand(N) < ignored] = options.get("ignore_index", -100)
        target[0], target[1] = options.get("ignore_index", -100), 0
    inputs = {"hidden": torch.randn(N, C).to(dtype), "weight": torch.randn(V, C).to(dtype)}
    if has_bias:
        inputs["bias"] = torch.randn(V).to(dtype)
    if has_weight:
        options["class_weight"] = torch.rand(V) + 0.1
    return {**inputs, "target": target}, options


@pytest.mark.parametrize(("backend", "dtype"), ALL, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith("rows")])
def test_matches_reference(case, dtype, backend):
    inputs, options = make(case, dtype)
    check_reference(tw.linear_cross_entropy, reference, inputs, options, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("rows")])
def test_matches_reference_when_it_walks_rows(case, dtype):
    inputs, options = make(case, dtype)
    check_reference(tw.linear_cross_entropy, reference, inputs, options, backend="cpu")


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("case", ["ignored, bias, weight", "all options, none"])
def test_products_where_bf16_is_multiplied_in_hardware_and_where_it_is_not(
    case, native, monkeypatch
):
    """In hardware, as on a GPU, tiles are bf16 and the hidden gradient is summed in fp32; else tiles are fp32."""
    monkeypatch.setattr(dispatch, "native_bf16", lambda: native)
    inputs, options = make(case, torch.bfloat16)
    check_reference(tw.linear_cross_entropy, reference, inputs, options, backend="cpu")
    seen = []
    op = _logit_tiles.TILE_GRAD_OPS["cpu"]
    monkeypatch.setitem(
        _logit_tiles.TILE_GRAD_OPS, "cpu", lambda g, *rest: (seen.append(g.dtype), op(g, *rest))
    )
    run(tw.linear_cross_entropy, inputs, options)
    assert set(seen) == {torch.bfloat16 if native else torch.float32}


@pytest.mark.parametrize("mkl", [False, True])
@pytest.mark.parametrize("case", ["rows, all options", "all options, none"])
def test_fp32_products_of_either_library(case, mkl, monkeypatch):
    """MKL's where it is faster, else ours; "mean" over many rows makes its gradients in forward."""
    ours = _logit_tiles.gemm.gemm_out_
    monkeypatch.setattr(dispatch, "mkl_is_faster", lambda: mkl)
    inputs, options = make(case)
    check_reference(tw.linear_cross_entropy, reference, inputs, options, backend="cpu")
    calls = []
    monkeypatch.setattr(_logit_tiles.gemm, "gemm_out_", lambda *a: calls.append(ours(*a)))
    run(tw.linear_cross_entropy, inputs, {**options, "backend": "cpu"})
    assert bool(calls) != mkl


@pytest.mark.parametrize("case", ["all options, none", "all options, sum"])
def test_any_layout(case):
    inputs, options = make(case)
    check_layouts(tw.linear_cross_entropy, inputs, options)


@pytest.mark.parametrize("case", ["all options, none", "ignored, bias, weight"])
def test_gradcheck(case):
    inputs, options = make(case)
    V = 9
    inputs = {k: v[:4] if k in ("hidden", "target") else v[:V] for k, v in inputs.items()}
    inputs["target"] = torch.where(inputs["target"] >= V, 3, inputs["target"])
    options["class_weight"] = options["class_weight"][:V]
    check_gradcheck(tw.linear_cross_entropy, inputs, options)


@pytest.mark.parametrize(
    "case", ["all options, none", "ignored, bias, weight", "rows, all options"]
)
def test_compiles_without_graph_break(case):
    inputs, options = make(case, torch.float32 if case.startswith("rows") else torch.bfloat16)
    check_compile(tw.linear_cross_entropy, inputs, options)


def test_opcheck():
    ops = torch.ops.trainwright
    inputs = (
        torch.randn(3, 4),
        torch.randn(5, 4),
        torch.randn(5),
        torch.tensor([4, -100, 0]),
        torch.rand(5),
    )
    options, lse = (-100, 0.1, 0.01, 2.0), torch.ones(3).double()
    check_opcheck(ops.linear_cross_entropy_fwd.default, *inputs, *options, 0, "cpu")
    needs, scale = [True, False, True], torch.ones(2).double()
    check_opcheck(
        ops.linear_cross_entropy_bwd.default,
        torch.ones(3),
        *inputs,
        lse,
        scale,
        *options,
        "cpu",
        needs,
    )
    check_opcheck(ops.linear_cross_entropy_fwd_bwd.default, *inputs, *options, 1, "cpu", needs)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_leading_dimensions_of_hidden(shape):
    h, w, t = torch.randn(*shape, 5), torch.randn(7, 5), torch.randint(0, 7, shape)
    loss = tw.linear_cross_entropy(h, w, t, reduction="none")
    flat = tw.linear_cross_entropy(h.reshape(-1, 5), w, t.reshape(-1), reduction="none")
    assert loss.shape == shape and torch.equal(loss.reshape(-1), flat)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("N", [30, 1100])
def test_only_the_gradients_that_are_needed_are_computed(N, reduction):
    """A frozen head costs no product for its gradient: counted by torch's profiler."""
    tensors = {"hidden": torch.randn(N, 6), "weight": torch.randn(70, 6), "bias": torch.randn(70)}
    t = torch.randint(0, 70, (N,))
    products = {}
    for wanted in ("hidden", "weight", "bias", "hidden weight bias"):
        leaves = {k: v.clone().requires_grad_(k in wanted) for k, v in tensors.items()}
        of = [leaves[k] for k in wanted.split()]
        with torch.autograd.profiler.profile() as profile:
            loss = tw.linear_cross_entropy(**leaves, target=t, reduction=reduction).sum()
            got = torch.autograd.grad(loss, of)
        products[wanted] = sum(
            e.name.split("::")[1] in ("mm", "addmm", "addmm_", "gemm_out_", "gemm_add_")
            for e in profile.function_events
            if "::" in e.name
        )
        ref = F.cross_entropy(F.linear(*leaves.values()), t, reduction=reduction).sum()
        for g, want in zip(got, torch.autograd.grad(ref, of)):
            assert torch.allclose(g, want, rtol=1e-4, atol=1e-5)
    one_each = (products["hidden weight bias"] - products["bias"]) // 2
    assert products["hidden"] == products["weight"] == products["bias"] + one_each and one_each > 0


@pytest.mark.parametrize("N", [30, 1100])
def test_factors_and_second_backward_of_a_scalar_loss(N):
    h, w = torch.randn(N, 6, requires_grad=True), torch.randn(40, 6, requires_grad=True)
    t = torch.randint(0, 40, (N,))
    loss = tw.linear_cross_entropy(h, w, t)
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    kept = [g.clone() for g in first]
    half = torch.autograd.grad(loss * 0.5, (h, w), retain_graph=True)
    again = torch.autograd.grad(loss, (h, w))
    for f, k, x, a in zip(first, kept, half, again):
        assert same_bits(f, k) and same_bits(f, a) and same_bits(0.5 * f, x)


@pytest.mark.parametrize("N", [6, 1100])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_ignored_row_of_nan_or_inf_reaches_nothing(value, N):
    h, w, b = torch.randn(N, 4), torch.randn(70, 4), torch.randn(70)
    t = torch.randint(0, 70, (N,))
    keep = torch.ones(N, dtype=torch.bool)
    keep[1] = keep[5] = False
    h[~keep] = value
    t[~keep] = -100
    for reduction in ("mean", "none"):
        inputs = {"hidden": h, "weight": w, "bias": b, "target": t}
        (loss,), grads, up = run(tw.linear_cross_entropy, inputs, {"reduction": reduction})
        rest = {**inputs, "hidden": h[keep], "target": t[keep]}
        (want,), expected, _ = run(
            tw.linear_cross_entropy,
            rest,
            {"reduction": reduction},
            upstream=[u[keep] if u.dim() else u for u in up],
        )
        assert same_bits(loss[keep] if loss.dim() else loss, want)
        assert torch.equal(grads["hidden"][~keep], torch.zeros(2, 4))
        assert same_bits(grads["hidden"][keep], expected["hidden"])
        assert same_bits(grads["weight"], expected["weight"]) and same_bits(
            grads["bias"], expected["bias"]
        )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("N", [0, 5])
def test_no_row_counts(N, reduction):
    h, w = torch.full((N, 4), math.nan, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    t = torch.full((N,), -100)
    loss = tw.linear_cross_entropy(h, w, t, z_loss=0.1, label_smoothing=0.1, reduction=reduction)
    loss.sum().backward()
    assert loss.sum().item() == 0 and loss.shape == ((N,) if reduction == "none" else ())
    assert torch.equal(h.grad, torch.zeros(N, 4)) and torch.equal(w.grad, torch.zeros(9, 4))


def test_a_kept_row_of_nan_stays_alone():
    h, w, t = torch.randn(4, 3), torch.randn(70, 3), torch.tensor([1, 2, 3, 4])
    h[2, 1] = math.nan
    h.requires_grad_()
    loss = tw.linear_cross_entropy(h, w, t, reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, False, True, False]
    assert h.grad.isnan().any(1).tolist() == [False, False, True, False]


def test_weight_gradient_in_bf16_is_summed_in_fp32():
    """4096 equal rows: a bf16 running sum would stop growing at a small part of the total."""
    h = torch.full((4096, 2), 0.01, dtype=torch.bfloat16)
    w = torch.zeros(200, 2, dtype=torch.bfloat16, requires_grad=True)
    tw.linear_cross_entropy(h, w, torch.zeros(4096, dtype=torch.int64), reduction="sum").backward()
    want = 4096 * h[0, 0].double() * (1 / 200 - 1)
    assert w.grad[0, 0].item() == pytest.approx(want.item(), rel=2**-8)


def test_autocast_casts_the_product_and_keeps_the_loss_in_fp32():
    h, w = torch.randn(5, 6, requires_grad=True), torch.randn(70, 6, requires_grad=True)
    b, t = torch.randn(70, requires_grad=True), torch.randint(0, 70, (5,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = tw.linear_cross_entropy(h, w, t, bias=b)
        loss.backward()
    low = [x.detach().bfloat16() for x in (h, w)]
    assert torch.equal(loss, tw.linear_cross_entropy(*low, t, bias=b.detach().bfloat16()))
    assert loss.dtype == torch.float32
    assert h.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32


# ---- peak memory

MEASURE = """
import sys, torch, trainwright as tw
N, C, V = 1280, 128, 20011
dtype = getattr(torch, sys.argv[1])
h = torch.randn(N, C, dtype=dtype).requires_grad_()
w = (torch.randn(V, C, dtype=dtype) / 16).requires_grad_()
t = torch.randint(0, V, (N,))
up = torch.rand(N)
def step(n):
    h.grad = w.grad = None
    if sys.argv[2] == "none":
        tw.linear_cross_entropy(h[:n], w, t[:n], reduction="none").backward(up[:n])
    else:
        tw.linear_cross_entropy(h[:n], w, t[:n]).backward()
step(1024)  # the BLAS keeps its buffers
h.grad = w.grad = None
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")
before = peak()
step(N)
logits = N * V * h.element_size()
print((peak() - before) / logits, (h.nbytes + w.nbytes) / logits)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_extra_memory_beyond_the_gradients_is_a_tenth_of_the_logits(reduction, dtype):
    """In a fresh process, by the high-water mark of resident memory."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs /proc/self/clear_refs")
    command = [sys.executable, "-c", MEASURE, dtype, reduction]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    total, gradients = map(float, ran.stdout.split())
    assert gradients < total <= gradients + 0.10


# ---- arguments


@pytest.mark.parametrize("backend", BACKENDS)
def test_target_out_of_range_names_value_and_position(backend):
    h, w, t = torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([0, -100, 5])
    with pytest.raises(
        IndexError,
        match=r"linear_cross_entropy: target: expected 0 <= target < 5 .*got 5 at position 2",
    ):
        tw.linear_cross_entropy(h, w, t, backend=backend)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"hidden": 1}, TypeError, "linear_cross_entropy: hidden: expected a torch.Tensor"),
        ({"weight": torch.zeros(5, 3)}, ValueError, r"weight: expected shape \(any, 2\), got \(5, 3\)"),
        ({"weight": torch.zeros(5, 2).double()}, TypeError, "weight: expected dtype float32, got float64"),
        ({"weight": torch.zeros(0, 2)}, ValueError, "weight: expected at least one class"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias: expected shape \(5\)"),
        ({"class_weight": torch.zeros(4)}, ValueError, r"class_weight: expected shape \(5\)"),
        ({"target": torch.zeros(4)}, TypeError, "target: expected class indices"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, ValueError, r"target: expected shape \(4\)"),
        ({"softcap": -1.0}, ValueError, "softcap: expected None or a number above 0"),
        ({"reduction": None}, ValueError, "reduction: expected"),
    ],
)  # fmt: skip
def test_argument_errors(change, error, text):
    arguments = {
        "hidden": torch.zeros(4, 2),
        "weight": torch.zeros(5, 2),
        "target": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(error, match=text):
        tw.linear_cross_entropy(**{**arguments, **change})


def test_module_has_the_parameters_of_linear():
    head = torch.nn.Linear(6, 11)
    loss = tw.nn.LinearCrossEntropyLoss(6, 11, bias=True, label_smoothing=0.1)
    loss.load_state_dict(head.state_dict())
    h, t = torch.randn(4, 6), torch.tensor([0, 10, -100, 3])
    assert torch.allclose(loss(h, t), F.cross_entropy(head(h), t, label_smoothing=0.1))
    loss(h, t).backward()
    assert loss.weight.grad is not None and loss.bias.grad is not None
