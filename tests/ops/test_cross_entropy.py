"""tw.cross_entropy: one table of cases for every backend, against torch's function and plain formulas around it."""

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw
from numerics import (
    assert_within_rule,
    backends_for_tests,
    check_compile,
    check_gradcheck,
    check_layouts,
    check_opcheck,
    check_reference,
    same_bits,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = backends_for_tests(tw.cross_entropy)
ALL = [(b, d) for b in BACKENDS for d in (DTYPES if b in ("cpu", "vgpu") else DTYPES[:2])]
INF, NAN = math.inf, math.nan

# id: (shape of logits, options, share of ignored rows, class weights)
CASES = {
    "plain": ((6, 50), {}, 0, False),
    "sum, odd width": ((5, 97), {"reduction": "sum"}, 0, False),
    "none": ((7, 33), {"reduction": "none"}, 0, False),
    "one class": ((3, 1), {}, 0, False),
    "two classes": ((4, 2), {"label_smoothing": 0.1}, 0, False),
    "no batch": ((31,), {}, 0, False),
    "channels second": ((2, 11, 3, 2), {}, 0.3, True),
    "channels second, none": ((2, 7, 5), {"reduction": "none", "z_loss": 0.01}, 0.3, False),
    "ignored": ((9, 40), {}, 0.5, False),
    "ignored, own index": ((9, 40), {"ignore_index": 3, "reduction": "none"}, 0.5, False),
    "weight": ((9, 40), {}, 0.3, True),
    "weight, sum": ((9, 41), {"reduction": "sum"}, 0.3, True),
    "smoothing": ((8, 45), {"label_smoothing": 0.1}, 0.3, False),
    "smoothing, weight": ((8, 45), {"label_smoothing": 0.2}, 0.3, True),
    "smoothing 1, weight, none": (
        (8, 45),
        {"label_smoothing": 1.0, "reduction": "none"},
        0.3,
        True,
    ),
    "z-loss, weight": ((8, 37), {"z_loss": 0.02}, 0.4, True),
    "z-loss, sum": ((8, 37), {"z_loss": 0.5, "reduction": "sum"}, 0.4, False),
    "softcap": ((8, 37), {"softcap": 3.0}, 0, False),
    "all options": (
        (10, 83),
        {"softcap": 5.0, "z_loss": 1e-3, "label_smoothing": 0.1, "reduction": "none"},
        0.3,
        True,
    ),
    "several blocks": (
        (3, 4500),
        {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0},
        0,
        True,
    ),
}


def reference(
    logits, target, weight=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"
):  # fmt: skip
    """torch's function, plus softcap before it and z-loss beside it; the loss of 16-bit logits in fp32."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    w = None if weight is None else weight.to(z.dtype)
    loss = F.cross_entropy(z, target, w, None, ignore_index, None, reduction, label_smoothing)
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    if z_loss:
        lse = torch.logsumexp(z, -1 if z.dim() == 1 else 1).to(loss.dtype)
        kept = target != ignore_index
        square = torch.where(kept, lse.square(), 0.0)
        square = {"none": square, "sum": square.sum(), "mean": square.sum() / kept.sum()}
        loss = loss + z_loss * square[reduction]
    return loss


def make(case, dtype=torch.float32):
    shape, options, ignored, has_weight = CASES[case]
    classes = shape[min(len(shape) - 1, 1)]
    rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    logits = 3 * torch.randn(shape, dtype=torch.float64)
    target = torch.randint(0, classes, rows)
    if ignored:
        drop = torch.rand(rows) < ignored
        drop.view(-1)[0], drop.view(-1)[1] = True, False
        target[drop] = options.get("ignore_index", -100)
    inputs = {"logits": logits.to(dtype), "target": target}
    options = dict(options)
    if has_weight:
        options["weight"] = torch.rand(classes) + 0.1
    return inputs, options


@pytest.mark.parametrize(("backend", "dtype"), ALL, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, dtype, backend):
    inputs, options = make(case, dtype)
    check_reference(tw.cross_entropy, reference, inputs, options, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_is_fp32_for_16_bit_logits(backend):
    target = torch.tensor([0, 1])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        loss = tw.cross_entropy(torch.ones(2, 3, dtype=dtype), target, backend=backend)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(math.log(3), rel=1e-6)
    assert tw.cross_entropy(torch.ones(2, 3).double(), target).dtype == torch.float64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["all options", "channels second"])
def test_any_layout(case, backend):
    inputs, options = make(case)
    check_layouts(tw.cross_entropy, inputs, options, backend=backend)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "triton"])
@pytest.mark.parametrize(
    "case", ["weight", "smoothing, weight", "z-loss, weight", "all options", "no batch"]
)
def test_gradcheck(case, backend):
    inputs, options = make(case)
    if inputs["logits"].dim() == 2:  # few elements: each costs two calls
        inputs = {"logits": inputs["logits"][:3, :11], "target": inputs["target"][:3] % 11}
        inputs["target"][0] = -100
        options = {k: v[:11] if k == "weight" else v for k, v in options.items()}
    check_gradcheck(tw.cross_entropy, inputs, options, backend=backend)


@pytest.mark.parametrize("case", ["plain", "all options", "z-loss, weight", "channels second"])
def test_compiles_without_graph_break(case):
    inputs, options = make(case, torch.bfloat16)
    check_compile(tw.cross_entropy, inputs, options)


def test_compiled_call_raises_index_error_too():
    torch._dynamo.reset()
    compiled = torch.compile(tw.cross_entropy, fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match="got 5 at position 1"):
        compiled(torch.zeros(3, 5), torch.tensor([0, 5, -7]))


def test_opcheck():
    ops = torch.ops.trainwright
    x, w = torch.randn(3, 5), torch.rand(5)
    t = torch.tensor([4, -100, 0])
    options, ones = (-100, 0.1, 0.01, 2.0), torch.ones(3)
    lse, scale = torch.ones(3).double(), torch.ones(2).double()
    check_opcheck(ops.cross_entropy_fwd.default, x, t, w, *options, 1)
    check_opcheck(ops.cross_entropy_fwd_bwd.default, x, t, w, *options, 2, 0.5)
    check_opcheck(ops.cross_entropy_bwd.default, ones, x, t, w, lse, scale, *options)
    check_opcheck(
        ops.cross_entropy_tile_state_.default,
        torch.zeros(3, 4).double(),
        x,
        t,
        w,
        0,
        5,
        -100,
        0.1,
        2.0,
    )
    check_opcheck(
        ops.cross_entropy_tile_grad_.default, torch.empty(3, 5), ones, x, t, w, lse, scale, 0, 5, *options
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_target_dtypes(dtype, backend):
    x, t = torch.randn(4, 6), torch.tensor([0, 5, -100, 2], dtype=dtype)
    assert torch.allclose(tw.cross_entropy(x, t, backend=backend), F.cross_entropy(x, t.long()))


# ---- values that are odd


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_ignored_is_zero_with_zero_gradient(backend):
    for options in ({}, {"z_loss": 0.1, "label_smoothing": 0.1, "weight": torch.rand(5)}):
        x = torch.full((3, 5), NAN).requires_grad_()
        loss = tw.cross_entropy(x, torch.full((3,), -100), **options, backend=backend)
        loss.backward()
        assert loss.item() == 0 and torch.equal(x.grad, torch.zeros(3, 5))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_no_rows(reduction, backend):
    x = torch.empty(0, 5, requires_grad=True)
    loss = tw.cross_entropy(
        x, torch.empty(0, dtype=torch.int64), reduction=reduction, backend=backend
    )
    loss.sum().backward()
    assert loss.shape == ((0,) if reduction == "none" else ()) and loss.sum().item() == 0
    assert x.grad.shape == (0, 5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 4.0, "label_smoothing": 0.1, "z_loss": 0.1}], ids=["plain", "all"]
)
def test_a_row_of_nan_or_inf_stays_alone_or_is_ignored(options, value, backend):
    x = torch.randn(4, 40)
    t = torch.tensor([1, 2, 3, 4])
    x[2, 7] = value
    x.requires_grad_()
    capped_inf = value == INF and "softcap" in options  # becomes finite
    loss = tw.cross_entropy(x, t, reduction="none", **options, backend=backend)
    loss.sum().backward()
    assert loss[[0, 1, 3]].isfinite().all() and x.grad[[0, 1, 3]].isfinite().all()
    assert loss[2].isnan() != capped_inf and x.grad[2].isnan().all() != capped_inf
    t[2], x.grad = -100, None
    loss = tw.cross_entropy(x, t, **options, backend=backend)
    loss.backward()
    rest = x.detach()[[0, 1, 3]].clone().requires_grad_()
    tw.cross_entropy(rest, t[[0, 1, 3]], **options, backend=backend).backward()
    assert loss.isfinite() and torch.equal(x.grad[2], torch.zeros(40))
    assert torch.equal(x.grad[[0, 1, 3]], rest.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_masked_vocabulary_as_in_torch(weighted, smoothing, backend):
    """-inf logits: a whole first block, the target itself, a whole row; and a row with +inf."""
    x = torch.randn(4, 5000, dtype=torch.float64)
    x[0, :4500] = -INF
    x[1, 17] = -INF
    x[2] = -INF
    x[3, 4000] = INF
    t = torch.tensor([4700, 17, 3, 5])
    w = torch.rand(5000, dtype=torch.float64) if weighted else None
    x.requires_grad_()
    ours = tw.cross_entropy(
        x, t, weight=w, label_smoothing=smoothing, reduction="none", backend=backend
    )
    want = F.cross_entropy(x, t, w, label_smoothing=smoothing, reduction="none")
    assert torch.allclose(ours, want, rtol=1e-12, equal_nan=True), (ours, want)
    for row in range(4):
        (ours_grad,) = torch.autograd.grad(ours[row], x, retain_graph=True)
        (want_grad,) = torch.autograd.grad(want[row], x, retain_graph=True)
        assert torch.allclose(
            ours_grad[row], want_grad[row], rtol=1e-10, atol=1e-15, equal_nan=True
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [0.0, 3e4, -3e4])
def test_large_logits_neither_overflow_nor_lose_the_smoothing_term(shift, backend):
    x = (20 * torch.randn(3, 5000) + shift).requires_grad_()
    t = torch.tensor([0, 1, 2])
    for smoothing in (0.0, 0.3):
        inputs = {"logits": x.detach(), "target": t}
        check_reference(
            tw.cross_entropy, reference, inputs, {"label_smoothing": smoothing}, backend=backend
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_rows_of_zero_weight_give_nan_as_in_torch(backend):
    x, t, w = torch.randn(2, 3), torch.tensor([1, 1]), torch.tensor([1.0, 0.0, 1.0])
    assert F.cross_entropy(x, t, w).isnan()
    assert tw.cross_entropy(x, t, weight=w, backend=backend).isnan()


# ---- the gradient that forward makes


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_made_in_forward_have_the_bits_of_the_separate_backward(dtype, reduction):
    """Forward makes the gradient for the upstream gradient that came last twice; right or wrong, the bits are the same.

    Also for a second backward, which must not touch what the first has handed out.
    """
    inputs, _ = make("ignored", dtype)
    x, t = inputs["logits"].requires_grad_(), inputs["target"]
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0}
    scale = torch.ones(2, dtype=torch.float64)
    if reduction == "mean":
        scale /= (t != -100).sum()
    ops = torch.ops.trainwright
    lse = ops.cross_entropy_fwd(x.detach(), t, None, -100, 0.1, 0.01, 4.0, 0)[1]
    for factor in (1.0, 0.37, 0.37, 0.37, -2.0, 0.0, 0.37, 0.37, 1.0, 1.0, 1.0):
        loss = tw.cross_entropy(x, t, reduction=reduction, **options, backend="cpu")
        first = torch.autograd.grad(loss * factor, x, retain_graph=True)[0]
        kept_first = first.clone()
        second = torch.autograd.grad(loss * 3.0, x, retain_graph=True)[0]
        third = torch.autograd.grad(loss * factor, x)[0]
        want, of_three = (
            ops.cross_entropy_bwd(
                torch.tensor(f), x.detach(), t, None, lse, scale, -100, 0.1, 0.01, 4.0
            )
            for f in (factor, 3.0)
        )
        assert same_bits(first, want) and same_bits(second, of_three) and same_bits(third, want)
        assert same_bits(first, kept_first), (
            "a later backward changed a gradient already handed out"
        )


def test_forward_makes_the_gradient_when_the_upstream_gradient_is_steady():
    x, t = torch.randn(4, 61, requires_grad=True), torch.tensor([0, 1, 2, 3])

    def made_in_forward(factor):
        loss = tw.cross_entropy(x, t, backend="cpu")
        made = loss.grad_fn.grad is not None
        (loss * factor).backward()
        return made

    assert [made_in_forward(f) for f in (1.0, 0.5, 0.5, 0.5, 1.0, 0.5, 1.0)] == [
        True, True, False, True, True, False, False,
    ]  # fmt: skip


def test_gradients_accumulate_and_no_gradient_is_made_without_need():
    x, t = torch.randn(4, 6, requires_grad=True), torch.tensor([0, 1, 2, 3])
    tw.cross_entropy(x, t).backward()
    once = x.grad.clone()
    tw.cross_entropy(x, t).backward()
    assert torch.allclose(x.grad, 2 * once)
    with torch.no_grad():
        assert tw.cross_entropy(x, t).grad_fn is None
    assert tw.cross_entropy(x.detach(), t).grad_fn is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_gradient_per_row(backend):
    inputs, _ = make("none")
    x, t = inputs["logits"].requires_grad_(), inputs["target"]
    up = torch.randn(t.shape)
    (got,) = torch.autograd.grad(tw.cross_entropy(x, t, reduction="none", backend=backend), x, up)
    (want,) = torch.autograd.grad(F.cross_entropy(x, t, reduction="none"), x, up)
    x64 = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(x64, t, reduction="none"), x64, up.double())
    assert_within_rule("gradient", got, want, exact)


def in_process(threads):
    code = (
        "import torch, trainwright as tw; torch.manual_seed(0); x = torch.randn(37, 3001, requires_grad=True);"
        "t = torch.randint(0, 3001, (37,)); l = tw.cross_entropy(x, t, label_smoothing=.1); l.backward();"
        "print(l.item().hex(), x.grad.view(torch.int32).sum().item())"
    )
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout


def test_bits_do_not_depend_on_the_number_of_threads():
    assert in_process(1) == in_process(2)


# ---- peak memory


def test_extra_memory_is_the_gradient_and_nothing_else_large():
    """In a fresh process, by the high-water mark of resident memory."""
    code = """
import torch, trainwright as tw
x = torch.randn(1024, 20000, requires_grad=True)
t = torch.randint(0, 20000, (1024,))
tw.cross_entropy(x[:2], t[:2]).backward()
x.grad = None
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
for factor in (1.0, 0.5):
    tw.empty_cache()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = peak()
    (tw.cross_entropy(x, t) * factor).backward()
    print((peak() - before) / (x.numel() * 4))
    x.grad = None
"""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs /proc/self/clear_refs")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    one, half = map(float, run.stdout.split())
    assert 0.9 < one <= 1.05 and 0.9 < half <= 1.05


# ---- arguments


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "vgpu"])  # as on a GPU: NaN
@pytest.mark.parametrize("value", [5, -1, 2**40])
def test_target_out_of_range_names_value_and_position(value, backend):
    t = torch.tensor([0, -100, value, 99])
    with pytest.raises(
        IndexError,
        match=rf"cross_entropy: target: expected 0 <= target < 5 .*got {value} at position 2",
    ):
        tw.cross_entropy(torch.zeros(4, 5), t, backend=backend)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"logits": [1.0]}, TypeError, "cross_entropy: logits: expected a torch.Tensor, got list"),
        ({"logits": torch.zeros(4, 5, dtype=torch.int64)}, TypeError, "logits: expected dtype"),
        ({"logits": torch.zeros(())}, ValueError, "logits: expected at least 1 dimension"),
        ({"logits": torch.zeros(4, 0)}, ValueError, "logits: expected at least one class"),
        ({"target": torch.zeros(4, 5)}, TypeError, "class probabilities are not supported"),
        ({"target": torch.zeros(4, dtype=torch.int16)}, TypeError, "target: expected dtype int64, int32"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, ValueError, r"target: expected shape \(4\), got \(3,\)"),
        ({"weight": torch.ones(4)}, ValueError, r"weight: expected shape \(5\)"),
        ({"weight": torch.ones(5, requires_grad=True)}, ValueError, "weight: expected a tensor that does not require"),
        ({"ignore_index": 1.0}, TypeError, "ignore_index: expected an int"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing: expected at most 1"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing: expected at least 0"),
        ({"z_loss": -1.0}, ValueError, "z_loss: expected at least 0"),
        ({"z_loss": NAN}, ValueError, "z_loss: expected a finite number"),
        ({"softcap": 0.0}, ValueError, "softcap: expected None or a number above 0"),
        ({"softcap": "x"}, TypeError, "softcap: expected a number"),
        ({"reduction": "batch"}, ValueError, 'reduction: expected "none", "mean" or "sum"'),
        ({"backend": "nope"}, ValueError, "backend: expected one of"),
    ],
)  # fmt: skip
def test_argument_errors(change, error, text):
    arguments = {"logits": torch.zeros(4, 5), "target": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(error, match=text):
        tw.cross_entropy(**{**arguments, **change})


def test_module_matches_torch_and_keeps_its_state():
    w = torch.rand(6)
    ours = tw.nn.CrossEntropyLoss(w, ignore_index=2, label_smoothing=0.1, reduction="sum")
    theirs = torch.nn.CrossEntropyLoss(w, ignore_index=2, label_smoothing=0.1, reduction="sum")
    x, t = torch.randn(5, 6), torch.tensor([0, 2, 5, 1, 3])
    assert torch.allclose(ours(x, t), theirs(x, t))
    assert ours.state_dict().keys() == theirs.state_dict().keys() == {"weight"}


def test_autocast_keeps_fp32_logits():
    x, t = torch.randn(3, 7), torch.tensor([0, 1, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tw.cross_entropy(x, t), tw.cross_entropy(x.clone(), t))
        assert tw.cross_entropy(x.bfloat16(), t).dtype == torch.float32
