"""tw.optim.AdamW and tw.adamw_: against fp64 in every pair of dtypes, and what has no test for all optimizers
(test_every_optimizer.py, test_behaviours.py, test_torch_inputs.py, test_reports.py) or all ops (test_ops.py)."""

import copy
import itertools

import pytest
import torch
import trainwright as tw
from numerics import assert_within_rule, backends_for_tests, check_opcheck, same_bits

from optim.cases import DTYPES, SIZES, Oracle
from optim.classes import leaf, train

BACKENDS = backends_for_tests(tw.adamw_)
OPTIONS = [
    {},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True},
    {"betas": (0.0, 0.5), "eps": 1e-3},
]
# (dtype, gradient's dtype, options): all of them for the compiled kernel; the others have its bits (test_ops.py).
PRODUCT = list(itertools.product(DTYPES, DTYPES, OPTIONS))
SOME = [
    (torch.float32, torch.float32, OPTIONS[1]),
    (torch.bfloat16, torch.bfloat16, OPTIONS[0]),
    (torch.float32, torch.float64, OPTIONS[2]),
    (torch.float64, torch.float64, OPTIONS[3]),
]


# ---- the maths


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "options", "backend"),
    [(*c, b) for b in BACKENDS for c in (PRODUCT if b == "cpu" else SOME)],
    ids=lambda v: str(v).removeprefix("torch."),
)
def test_matches_fp64(dtype, grad_dtype, options, backend):
    """The exact value (master, or the parameter itself) is as near to fp64 as torch's AdamW in that dtype."""
    options = {"lr": 1e-2, **options}
    shapes = [(n,) for n in SIZES] if backend != "triton" else [(9,), (257,), (0,)]
    start = [torch.randn(s).to(dtype) for s in shapes]
    params = [leaf(x.clone()) for x in start]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain_params = [leaf(x.to(wide)) for x in start]
    ours = tw.optim.AdamW(params, backend=backend, **options)
    plain = torch.optim.AdamW(plain_params, foreach=False, **options)
    exact = [Oracle(x, **options) for x in start]
    for _ in range(3):
        for p, q, e in zip(params, plain_params, exact):
            g = torch.randn(p.shape).to(grad_dtype)
            p.grad = g
            q.grad = g.to(wide)
            e.step(g)
        ours.step()
        plain.step()
    for p, q, e in zip(params, plain_params, exact):
        state = ours.state[p]
        assert_within_rule("parameter", state.get("master", p).detach(), q.detach(), e.p)
        assert_within_rule("exp_avg", state["exp_avg"], plain.state[q]["exp_avg"], e.m)
        assert_within_rule("exp_avg_sq", state["exp_avg_sq"], plain.state[q]["exp_avg_sq"], e.v)
        assert state["step"].item() == 3 and p.grad.dtype == grad_dtype
        if "master" in state:
            assert same_bits(p.detach(), state["master"].to(dtype))


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("n", SIZES)
def test_an_element_has_the_same_bits_wherever_it_lies(n, offset):
    """Vector body and tail, aligned and not."""
    whole, g = torch.randn(n + 8), torch.randn(n + 8)
    single = leaf(whole.clone())
    single.grad = g
    tw.optim.AdamW([single], lr=0.1).step()
    part = leaf(whole[offset : offset + n])
    part.grad = g[offset : offset + n]
    tw.optim.AdamW([part], lr=0.1).step()
    assert same_bits(part.detach(), single.detach()[offset : offset + n])


# ---- state


def both_ways(dtype=torch.float32):
    params = [leaf(torch.randn(5, 7).to(dtype)), leaf(torch.randn(33).to(dtype))]
    return params, [leaf(p.detach().clone()) for p in params]


def test_flags_and_options_come_from_the_constructor_not_from_a_checkpoint():
    a, b = both_ways(torch.bfloat16)
    first = torch.optim.AdamW(a, foreach=True, capturable=False, lr=0.5)
    train(first, a, range(1))
    second = tw.optim.AdamW(
        b, fused=True, backend="torch", max_grad_norm=2.0, master_weights="none"
    )
    second.load_state_dict(first.state_dict())
    group = second.param_groups[0]
    assert group["fused"] is True and group["foreach"] is None and group["lr"] == 0.5
    third = tw.optim.AdamW(a)
    train(third, a, range(1))
    second.load_state_dict(third.state_dict())
    assert "master" not in second.state[b[0]]  # master_weights="none" was asked for
    train(second, b, range(1))
    assert second.last_step.grad_norm is not None and second._options.backend == "torch"


def moved_state(o, p):
    o.state[p]["exp_avg"] = o.state[p]["exp_avg"].clone()


def moved_state_data(o, p):
    o.state[p]["exp_avg_sq"].data = o.state[p]["exp_avg_sq"].data.clone()


def moved_parameter(o, p):
    p.data = p.data.clone()


def strided_parameter(o, p):
    p.data = p.data.t().contiguous().t()


def strided_gradient(o, p):
    p.grad = p.grad.t().contiguous().t()


def fp64_gradient(o, p):
    p.grad = p.grad.double()


def no_gradient(o, p):
    p.grad = None


def fresh_state(o, p):
    o.state[p] = copy.deepcopy(o.state[p])


def reloaded(o, p):
    o.load_state_dict(copy.deepcopy(o.state_dict()))


def amsgrad_on(o, p):
    o.param_groups[0]["amsgrad"] = True


def another_group(o, p):
    o.add_param_group({"params": [leaf(torch.ones(3))]})


def another_learning_rate(o, p):
    o.param_groups[0]["lr"] = 0.5


def forgotten_state(o, p):
    del o.state[p]


@pytest.mark.parametrize(
    "change",
    [moved_state, moved_state_data, moved_parameter, strided_parameter, strided_gradient, fp64_gradient, no_gradient,
     fresh_state, reloaded, amsgrad_on, another_group, another_learning_rate, forgotten_state],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["cpu", "vgpu"])
def test_nothing_remembered_from_the_last_step_goes_stale(dtype, change, where):
    """The optimizer keeps a table of addresses between steps; it must notice whatever the user does in between."""

    def step(times):
        for _ in range(times):
            for x in (p, q):
                x.grad = torch.randn(x.shape).to(x.dtype)
            optimizer.step()

    runs = []
    for chosen in (where, "torch"):  # the torch reference remembers nothing
        torch.manual_seed(0)
        p, q = leaf(torch.randn(6, 5).to(dtype)), leaf(torch.randn(40))
        optimizer = tw.optim.AdamW([p, q], lr=0.1, backend=chosen)
        step(3)
        assert (optimizer._plan is not None) == (chosen == where)
        for x in (p, q):
            x.grad = torch.ones_like(x)
        change(optimizer, p)
        optimizer.step()
        step(2)
        states = [v.clone() for state in optimizer.state.values() for v in state.values()]
        runs.append([p.detach(), q.detach(), *states])
    assert len(runs[0]) == len(runs[1])
    for a, b in zip(*runs):
        torch.testing.assert_close(
            a, b, atol=1e-6, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5
        )


def test_masters_are_refreshed_after_an_edit_by_hand():
    p = leaf(torch.ones(4, dtype=torch.bfloat16))
    optimizer = tw.optim.AdamW([p], lr=0.1, weight_decay=0.0)
    train(optimizer, [p], range(1))
    with torch.no_grad():
        p.fill_(5.0)
    optimizer.refresh_masters()
    train(optimizer, [p], range(1, 2))
    assert (p > 4).all()


# ---- clipping and loss scaling


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_clipping_inside_the_step_equals_clipping_before_it(dtype, backend):
    a, b = both_ways(dtype)
    ours = tw.optim.AdamW(a, lr=0.1, max_grad_norm=0.75, backend=backend)
    plain = tw.optim.AdamW(b, lr=0.1, backend=backend)
    for scale in (10.0, 0.001):
        grads = [torch.randn(p.shape) * scale for p in a]
        total = torch.sqrt(sum(g.to(dtype).double().square().sum() for g in grads))
        coefficient = min(1.0, 0.75 / (total.item() + 1e-6))
        for p, q, g in zip(a, b, grads):
            p.grad = g.to(dtype)
            q.grad = g.to(dtype).double() * coefficient
        kept = [p.grad.clone() for p in a]
        ours.step()
        plain.step()
        assert all(same_bits(p.grad, k) for p, k in zip(a, kept))
        assert ours.last_step.grad_norm.item() == pytest.approx(total.item(), rel=1e-6)
        assert ours.last_step.grad_norm.dtype == torch.float32 and not ours.last_step.skipped
    for p, q in zip(a, b):
        x, y = (o.state[t].get("master", t).detach() for o, t in ((ours, p), (plain, q)))
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)


def test_no_norm_is_computed_when_nothing_needs_it():
    p = leaf(torch.ones(2))
    optimizer = tw.optim.AdamW([p])
    train(optimizer, [p], range(1))
    assert optimizer.last_step.grad_norm is None and optimizer.last_step.skipped.item() is False


@pytest.mark.parametrize("found", [1.0, 2.0, 0.5, float("nan")])
def test_found_inf_of_any_value_but_zero_skips_the_step(found):
    """Which then changes no bit: test_behaviours.py, and on every backend test_op_arguments.py."""
    p = leaf(torch.ones(3))
    p.grad = torch.full((3,), float("inf"))
    optimizer = tw.optim.AdamW([p])
    optimizer.found_inf = torch.tensor(found)
    optimizer.step()
    assert optimizer.last_step.skipped.item() is True and (p == 1).all()


def test_nan_without_a_scaler_reaches_the_parameter():
    p = leaf(torch.ones(3))
    p.grad = torch.tensor([1.0, float("nan"), 1.0])
    tw.optim.AdamW([p]).step()
    assert p.isnan().tolist() == [False, True, False]


# ---- errors and the rest of the contract


def test_updates_bump_the_version_counter():
    p = leaf(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    out = (p * x).sum()  # saves p for the gradient of x
    p.grad = torch.ones(3)
    tw.optim.AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"master_weights": "bf16"}, ValueError, "master_weights: expected 'auto', 'fp32', 'split16' or 'none'"),
        ({"state_dtype": torch.float16}, ValueError, "state_dtype: expected"),
        ({"stochastic_rounding": 1}, TypeError, "stochastic_rounding: expected a bool"),
        ({"seed": 1.5}, TypeError, "seed: expected an int"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm: expected at least 0.0"),
        ({"backend": "gpu"}, ValueError, "backend: expected one of"),
        ({"differentiable": True}, ValueError, "differentiable: expected False"),
    ],
)  # fmt: skip
def test_bad_options(kwargs, error, text):
    with pytest.raises(error, match=text):
        tw.optim.AdamW([leaf(torch.ones(2))], **kwargs)


def test_bad_parameters_and_gradients():
    p = leaf(torch.ones(2))
    with pytest.raises(ValueError, match="listed twice"):
        tw.optim.AdamW([p, p])
    with pytest.raises(TypeError, match=r"params\[0\]: expected a dense .*complex64"):
        tw.optim.AdamW([torch.ones(2, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(TypeError, match="an expanded tensor"):
        tw.optim.AdamW([torch.ones(1).expand(4).detach().requires_grad_()])
    optimizer = tw.optim.AdamW([p])
    p.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    with pytest.raises(tw.BackendError):
        p.grad = torch.ones(2)
        tw.optim.AdamW([p], backend="cuda").step()


def test_functional_form_checks_its_arguments():
    def call(**changes):
        one = lambda: [torch.zeros(3)]  # noqa: E731
        arguments = {"params": one(), "grads": one(), "exp_avgs": one(), "exp_avg_sqs": one(),
                     "steps": [torch.zeros((), dtype=torch.float64)], "lr": 0.1, **changes}  # fmt: skip
        tw.adamw_(**arguments)

    call()
    for changes, error, text in [
        ({"grads": []}, ValueError, "grads: expected 1 tensors, got 0"),
        ({"grads": [torch.zeros(4)]}, ValueError, r"grads\[0\]: expected shape \(3\)"),
        (
            {"exp_avgs": [torch.zeros(3).half()]},
            TypeError,
            r"exp_avgs\[0\]: expected dtype float32",
        ),
        ({"steps": [torch.zeros(())]}, TypeError, r"steps\[0\]: expected dtype float64"),
        ({"masters": [torch.zeros(3)]}, ValueError, r"masters\[0\]: expected None"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]: expected a number below 1"),
        ({"lr": "1"}, TypeError, "lr: expected a number"),
    ]:
        with pytest.raises(error, match=text):
            call(**changes)


def test_functional_form_compiles_without_graph_break():
    def step(p, g, m, v, t):
        tw.adamw_([p], [g], [m], [v], [t], lr=0.1)
        return p * 2

    def make():
        torch.manual_seed(0)
        return [
            torch.randn(5),
            torch.randn(5),
            torch.zeros(5),
            torch.zeros(5),
            torch.zeros((), dtype=torch.float64),
        ]

    a, b = make(), make()
    expected = step(*a)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*b)
    assert same_bits(got, expected) and all(same_bits(x, y) for x, y in zip(a, b))


def test_opcheck():
    hyper = torch.tensor([[0.1, 0.9, 0.999, 1e-8, 0.01, 0.0]], dtype=torch.float64)
    p, g = torch.randn(4, 3).t(), torch.randn(3, 4)
    check_opcheck(
        torch.ops.trainwright.adamw_.default, [p], [g], [], [torch.zeros(3, 4) for _ in range(3)],
        [torch.zeros((), dtype=torch.float64)], [1 << 5], [0], hyper, None, 0, None,
    )  # fmt: skip
