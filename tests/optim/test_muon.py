"""tw.optim.Muon and tw.muon_: against fp64 and torch, every layout, dtype and kind of parameter, and reported bugs.
What lasts from step to step: test_muon_state.py."""

import itertools
import sys

import pytest
import torch
import trainwright as tw
from numerics import (
    backends_for_tests,
    check_opcheck,
    interpreted,
    optimizer_close,
    same_bits,
)
from torch.testing._internal.common_optimizers import (
    optim_error_inputs_func_muon,
    optim_inputs_func_muon,
)
from trainwright.ops import _optimizer_formats as formats
from trainwright.ops._optimizer import Spec, pack_spec

from optim.cases import DTYPES, layouts
from optim.muon_cases import Oracle, both_ways, leaf, set_grad, train

OP = sys.modules[tw.muon_.__module__]
BACKENDS = backends_for_tests(tw.muon_)


# ---- the maths


OPTIONS = [
    {},
    {"nesterov": False, "momentum": 0.3},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"adjust_lr_fn": "original", "momentum": 0.0, "ns_steps": 2},
]
PRODUCT = list(itertools.product(DTYPES, DTYPES, OPTIONS))
# For Triton's interpreter; its passes have the bits of the reference (below).
SOME = [
    (torch.bfloat16, torch.bfloat16, OPTIONS[0]),
    (torch.float32, torch.float32, OPTIONS[2]),
    (torch.float16, torch.float32, OPTIONS[3]),
]


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "options", "backend"),
    [
        (*c, b)
        for b in BACKENDS
        for c in (SOME if interpreted(b) else PRODUCT)
        if not (b == "triton" and c[0] == torch.float64)  # which it does not have
    ],
    ids=lambda v: str(v).removeprefix("torch."),
)
def test_matches_fp64(dtype, grad_dtype, options, backend):
    """The exact value (master, or the parameter itself), for 2-, 3- and 4-D parameters."""
    shapes = [(5, 9), (9, 5), (3, 4, 6), (4, 3, 3, 2), (9, 5)]
    params = [leaf(torch.randn(s).to(dtype)) for s in shapes]
    exact = [Oracle(p, lr=0.02, **options) for p in params]
    ours = tw.optim.Muon(params, lr=0.02, backend=backend, **options)
    for _ in range(3):
        for p, e in zip(params, exact):
            g = torch.randn(p.shape).to(grad_dtype)
            set_grad(p, g)
            e.step(g)
        kept = [p.grad.clone() for p in params]
        ours.step()
        assert all(same_bits(p.grad, k) for p, k in zip(params, kept))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for p, e in zip(params, exact):
        state = ours.state[p]
        assert state["momentum_buffer"].dtype == wide
        value = state.get("master", p).detach()
        assert value.dtype == wide
        torch.testing.assert_close(value.double(), e.p, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(
            state["momentum_buffer"].double(), e.b, atol=tolerance, rtol=tolerance
        )
        if "master" in state:
            assert same_bits(p.detach(), state["master"].to(dtype))


@pytest.mark.parametrize("ns_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(48, 80), (80, 48)], ids=str)
def test_as_near_to_fp64_as_torch(shape, ns_dtype):
    a = leaf(torch.randn(shape))
    b, e = leaf(a.detach().clone()), Oracle(a, lr=0.02)
    ours = tw.optim.Muon([a], lr=0.02, ns_dtype=ns_dtype)
    theirs = torch.optim.Muon([b], lr=0.02)
    for _ in range(5):
        a.grad = torch.randn(shape)
        b.grad = a.grad.clone()
        e.step(a.grad)
        ours.step()
        theirs.step()
    ours_error, their_error = ((x.detach() - e.p).square().mean().sqrt() for x in (a, b))
    assert ours_error <= their_error * (0.01 if ns_dtype is None else 1.0)
    torch.testing.assert_close(a, b, atol=5e-3, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.bfloat16, b) for b in BACKENDS]
    + [(torch.float32, b) for b in BACKENDS if not interpreted(b)],
    ids=str,
)
@pytest.mark.parametrize("name", [k for k, (p, _) in layouts().items() if p.dim() >= 2])
def test_every_layout_gives_the_bits_of_contiguous(name, dtype, backend):
    """Matched by logical index, and nothing outside the view is touched."""
    p, g = layouts(dtype)[name]
    base = p._base if p._base is not None else p
    untouched = torch.ones_like(base, dtype=torch.bool)
    untouched.as_strided(p.shape, p.stride(), p.storage_offset()).zero_()
    before = base.clone()
    dense = leaf(p.clone(memory_format=torch.contiguous_format))
    p = leaf(p)
    dense.grad, p.grad = g.clone(memory_format=torch.contiguous_format), g
    for x in (dense, p):
        optimizer = tw.optim.Muon([x], lr=0.1, backend=backend)
        optimizer.step()
        optimizer.step()
    assert same_bits(p.detach(), dense.detach())
    assert torch.equal(base.detach()[untouched], before[untouched])


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "torch"])
def test_batched_with_others_or_alone_the_bits_are_the_same(backend, monkeypatch):
    """Whatever shares the shape, the group or the batch; and batches that are too large are cut."""
    shapes = [(6, 10), (6, 10), (10, 6), (6, 10), (2, 6, 10), (6, 5, 2, 1), (6, 10)]
    start = [torch.randn(s) for s in shapes]

    def result(split):
        params = [leaf(x.clone()) for x in start]
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.3, "momentum": 0.5}]
        if split:
            groups = [{**g, "params": [p]} for g in groups for p in g["params"]]
        each = [[g] for g in groups] if split else [groups]
        optimizers = [tw.optim.Muon(x, lr=0.1, backend=backend) for x in each]
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for p in params]

    together, alone = result(False), result(True)
    monkeypatch.setattr(OP, "BATCH_ELEMENTS", 130)
    in_parts = result(False)
    for a, b, c in zip(together, alone, in_parts):
        assert same_bits(a, b) and same_bits(a, c)


def test_same_bits_for_any_thread_count_and_repeat():
    def result(threads):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        shapes = [(200, 300), (200, 300), (90, 70), (4, 20, 30), (0, 4)]
        params = [leaf(torch.randn(s)) for s in shapes] + [leaf(torch.randn(200, 99).t())]
        optimizer = tw.optim.Muon(params, lr=0.1, max_grad_norm=0.5)
        train(optimizer, params, range(3))
        return [p.detach() for p in params] + [optimizer.last_step.grad_norm]

    try:
        results = [result(t) for t in (1, 2, 3, 2)]
    finally:
        torch.set_num_threads(2)
    assert all(same_bits(a, b) for r in results for a, b in zip(r, results[0]))


def stored(dtype, master, state):
    """A parameter's masters and states in these formats, of random values."""
    shapes = [(3, 700), (5, 5), (70, 33)]
    exact, momenta = ([torch.randn(s) for s in shapes] for _ in range(2))
    params, masters, states = [x.to(dtype) for x in exact], [], []
    if master == formats.FP32_MASTER:
        masters = [x.clone() for x in exact]
    elif master == formats.SPLIT16_MASTER:
        params, masters = map(list, zip(*map(formats.split16, exact)))
    for m in momenta:
        if state == formats.INT8_STATE:
            states += formats.int8_encode(m, True, None)
        else:
            states.append(m.to(torch.bfloat16) if state == formats.BF16_STATE else m)
    return params, masters, states


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "torch"])
@pytest.mark.parametrize(
    ("dtype", "master", "state", "stochastic"),
    [
        (torch.float32, formats.NO_MASTER, formats.FULL_STATE, False),
        (torch.float32, formats.NO_MASTER, formats.INT8_STATE, True),
        (torch.bfloat16, formats.FP32_MASTER, formats.BF16_STATE, False),
        (torch.bfloat16, formats.SPLIT16_MASTER, formats.INT8_STATE, False),
        (torch.bfloat16, formats.NO_MASTER, formats.BF16_STATE, True),
        (torch.float16, formats.NO_MASTER, formats.FULL_STATE, True),
    ],
    ids=str,
)
def test_the_passes_over_elements_have_the_bits_of_the_reference(
    dtype, master, state, stochastic, backend
):
    control = torch.tensor([0.37, 0.0], dtype=torch.float64)
    for momentum, nesterov in ((0.95, 1.0), (0.3, 0.0)):
        blend = torch.tensor([[momentum, nesterov, 0.0]], dtype=torch.float64)
        rates = torch.tensor([[0.07, 0.3, 1.3, 0.0]], dtype=torch.float64)
        results = []
        for name in (backend, "torch"):
            torch.manual_seed(0)
            params, masters, states = stored(dtype, master, state)
            grads = [torch.randn(p.shape).to(dtype) for p in params]
            updates = [torch.zeros(p.shape) for p in params]
            steps = [torch.full((), 3.0, dtype=torch.float64) for _ in params]
            first = pack_spec(Spec(0, 0, stochastic, state))
            OP.MOMENTUM_PASS[name](
                updates, grads, [], states, steps, [first] * 3, [0] * 3, blend, control, 5, None
            )
            second = pack_spec(Spec(0, 0, stochastic, formats.FULL_STATE, master))
            OP.UPDATE_PASS[name](
                params, updates, masters, [], steps, [second] * 3, [0] * 3, rates, None, 5, None
            )
            results.append([*states, *updates, *params, *masters, *steps])
        assert all(same_bits(a, b) for a, b in zip(*results))


def test_split16_masters_are_fp32_masters():
    """The same exact parameters, bit for bit, in fewer bytes."""
    start = [torch.randn(20, 33).bfloat16(), torch.randn(3, 8, 5).bfloat16()]
    runs = []
    for master in ("fp32", "split16"):
        params = [leaf(p.clone()) for p in start]
        optimizer = tw.optim.Muon(params, lr=0.02, master_weights=master)
        train(optimizer, params, range(4))
        exact = [optimizer.state[p]["master"] for p in params]
        if master == "split16":
            exact = [formats.split16_join(p.detach(), x) for p, x in zip(params, exact)]
        runs.append(exact)
    assert all(same_bits(a, b) for a, b in zip(*runs))


def test_8_bit_momentum_moves_the_parameters_as_fp32_momentum_does():
    start, moved = torch.randn(64, 48), []
    for state in (torch.float32, "int8"):
        p = leaf(start.clone())
        optimizer = tw.optim.Muon([p], lr=0.02, weight_decay=0.0, state_dtype=state)
        train(optimizer, [p], range(10))
        moved.append(p.detach() - start)
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.int8
    distance = (moved[1] - moved[0]).norm()
    assert optimizer_close("8-bit momentum, movement", moved[0].norm() + distance, moved[0].norm())


def test_stochastic_rounding_keeps_updates_that_bf16_cannot_hold():
    """A step moves elements of 1 by about 2e-4, a tenth of half of bf16's spacing."""
    start, moved = torch.ones(64, 64).bfloat16(), []
    gradient = torch.randn(64, 64)
    for options in ({"master_weights": "fp32"}, {"master_weights": "none", "stochastic_rounding": True}):  # fmt: skip
        p = leaf(start.clone())
        optimizer = tw.optim.Muon([p], lr=1e-3, weight_decay=0.1, **options)
        for _ in range(40):
            p.grad = gradient.bfloat16()
            optimizer.step()
        exact = optimizer.state[p].get("master", p.detach()).float()
        moved.append((exact - 1.0).mean().item())
    assert optimizer.state[p]["step"].item() == 40
    assert moved[0] == pytest.approx(-0.004, abs=1e-3)
    assert moved[1] == pytest.approx(moved[0], abs=1e-3)


# ---- torch's own inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_torch_s_own_optimizer_inputs(dtype):
    configs = [c.kwargs for c in optim_inputs_func_muon("cpu", dtype)]
    configs.append({"lr": torch.tensor(1e-2)})
    assert len(configs) >= 6
    for kwargs in configs:
        torch.manual_seed(0)
        a = [leaf(torch.randn(16, 8).to(dtype)), leaf(torch.randn(8, 24).to(dtype))]
        b = [leaf(p.detach().clone()) for p in a]
        groups = [[{"params": x[:1]}, {"params": x[1:], "lr": 0.05, "weight_decay": 0.3}] for x in (a, b)]  # fmt: skip
        ours, theirs = tw.optim.Muon(groups[0], **kwargs), torch.optim.Muon(groups[1], **kwargs)
        for i in range(5):
            for p, q in zip(a, b):
                p.grad = torch.randn(*reversed(p.shape), dtype=dtype).t()
                q.grad = p.grad.clone(memory_format=torch.contiguous_format)
            if i == 2:
                a[1].grad = b[1].grad = None
            ours.step()
            theirs.step()
            for p, q in zip(a, b):
                # torch's orthogonalisation is in bf16
                torch.testing.assert_close(p, q, atol=5e-3, rtol=1e-2)
                key = "momentum_buffer"
                torch.testing.assert_close(ours.state[p][key], theirs.state[q][key])


@pytest.mark.filterwarnings("ignore")
def test_torch_s_own_error_inputs():
    inputs = optim_error_inputs_func_muon("cpu", torch.float32)
    assert len(inputs) >= 6
    for error in inputs:
        spec = error.optimizer_error_input
        if spec.desc == "only support 2D parameters":
            continue  # a 3-D parameter: ours takes it
        params = spec.params if spec.params is not None else [leaf(torch.ones(2, 2))]
        if spec.desc == "does not support complex parameters":  # torch finds out at the first step
            with pytest.raises(TypeError, match="complex64"):
                tw.optim.Muon(params, **spec.kwargs)
            continue
        kind = ValueError if error.error_type is UserWarning else error.error_type
        with pytest.raises(kind) as caught:
            tw.optim.Muon(params, **spec.kwargs)
        if error.error_type is not UserWarning:
            caught.match(error.error_regex)


# ---- parameters that are no matrices, or bad ones


def test_vectors_and_scalars_are_refused_by_name():
    with pytest.raises(ValueError, match=r"params\[1\]: expected at least 2 dimensions .*, got \(7,\)"):  # fmt: skip
        tw.optim.Muon([leaf(torch.ones(2, 2)), leaf(torch.ones(7))])
    module = torch.nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"params\[1\] \('bias'\): expected at least 2"):
        tw.optim.Muon(module.named_parameters())
    optimizer = tw.optim.Muon([module.weight])
    with pytest.raises(ValueError, match=r"params\[0\]: expected at least 2 .*, got \(\)"):
        optimizer.add_param_group({"params": leaf(torch.tensor(1.0))})
    assert len(optimizer.param_groups) == 1


def test_three_dimensions_are_a_batch_of_matrices_and_more_are_flattened():
    experts, conv = torch.randn(3, 6, 4), torch.randn(6, 4, 3, 2)
    a, b = leaf(experts.clone()), leaf(conv.clone())
    singles = [leaf(m.clone()) for m in experts] + [leaf(conv.reshape(6, 24).clone())]
    for options in ({}, {"adjust_lr_fn": "match_rms_adamw"}):
        ours = tw.optim.Muon([a, b], lr=0.1, **options)
        flat = tw.optim.Muon(singles, lr=0.1, **options)
        a.grad, b.grad = torch.randn(3, 6, 4), torch.randn(6, 4, 3, 2)
        for single, g in zip(singles, [*a.grad, b.grad.reshape(6, 24)]):
            single.grad = g.clone()
        ours.step()
        flat.step()
        for i in range(3):
            assert same_bits(a.detach()[i], singles[i].detach())
        assert same_bits(b.detach().reshape(6, 24), singles[3].detach())
    linear_1d = leaf(torch.randn(5, 2, 2, 2, 2))
    train(tw.optim.Muon([linear_1d]), [linear_1d], range(1))  # Conv3d


def test_zero_size_parameters_anywhere_do_not_stop_the_others():
    shapes = [(0, 3), (5, 4), (3, 0), (0, 5, 4), (2, 5, 0), (5, 4), (0, 1, 1, 1)]
    params = [leaf(torch.ones(s)) for s in shapes]
    train(tw.optim.Muon(params, lr=0.1), params, range(2))
    assert all((p != 1).all() for p in params)
    tw.optim.Muon([leaf(torch.ones(2, 2))]).step()  # no gradient at all


def test_a_parameter_without_gradient_gets_no_state_and_no_decay():
    p, q = leaf(torch.ones(3, 3)), leaf(torch.ones(3, 3))
    optimizer = tw.optim.Muon([p, q], weight_decay=0.5, lr=0.1)
    train(optimizer, [p], range(2))
    assert (q == 1).all() and q not in optimizer.state
    exact = Oracle(q, weight_decay=0.5, lr=0.1)
    q.grad = torch.randn(3, 3)  # the first one comes late
    exact.step(q.grad)
    optimizer.step()
    torch.testing.assert_close(q.detach().double(), exact.p, atol=1e-6, rtol=1e-6)


# ---- gradients of every kind


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_zero_gradient_gives_a_zero_update(dtype, backend):
    p = leaf(torch.full((4, 6), 2.0, dtype=dtype))
    p.grad = torch.zeros(4, 6, dtype=dtype)
    tw.optim.Muon([p], lr=0.5, weight_decay=0.5, backend=backend).step()
    assert (p == 1.5).all()


def test_low_rank_gradients():
    p = leaf(torch.zeros(40, 60))
    exact = Oracle(p, lr=1.0)
    optimizer = tw.optim.Muon([p], lr=1.0)
    for rank in (1, 3):
        p.grad = torch.randn(40, rank) @ torch.randn(rank, 60)
        p.grad[7] = 0.0
        exact.step(p.grad)
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), exact.p, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e30])
def test_the_scale_of_the_gradients_matters_only_below_eps(scale):
    p = leaf(torch.zeros(9, 20))
    exact = Oracle(p, lr=1.0)
    p.grad = torch.randn(9, 20) * scale
    exact.step(p.grad)
    tw.optim.Muon([p], lr=1.0).step()
    torch.testing.assert_close(p.detach().double(), exact.p, atol=0, rtol=1e-3)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("ns_dtype", [None, torch.bfloat16], ids=str)
def test_a_512_x_1408_gradient_and_the_momentum_stay_as_they_are(ns_dtype, nesterov):
    """dion#76: NaN for this shape. And torch's step, in bf16 without nesterov, divides its momentum by its norm."""
    p = leaf(torch.randn(512, 1408).bfloat16())
    optimizer = tw.optim.Muon([p], nesterov=nesterov, ns_dtype=ns_dtype, state_dtype=torch.bfloat16)
    p.grad = torch.randn(512, 1408).bfloat16()
    kept = p.grad.clone()
    optimizer.step()
    assert p.isfinite().all() and same_bits(p.grad, kept)
    expected = (0.05 * kept.float()).bfloat16()
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], expected, atol=0, rtol=0.01)


def test_nan_without_a_scaler_stays_in_its_matrix():
    p = leaf(torch.ones(2, 3, 3))
    p.grad = torch.ones(2, 3, 3)
    p.grad[1, 0, 0] = float("nan")
    tw.optim.Muon([p]).step()
    assert p[1].isnan().all() and p[0].isfinite().all()


# ---- low precision, versions, errors


def test_bf16_parameters_without_a_master():
    a, b = both_ways(torch.bfloat16)
    none = tw.optim.Muon(a, lr=0.1, master_weights="none")
    with_master = tw.optim.Muon(b, lr=0.1)
    train(none, a, range(1))
    train(with_master, b, range(1))
    assert "master" not in none.state[a[0]]
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a, b))
    with torch.no_grad():
        b[0].fill_(5.0)
    with_master.refresh_masters()
    train(with_master, b, range(1, 2))
    assert (b[0] > 3).all()


def test_updates_bump_the_version_counter():
    p, x = leaf(torch.ones(3, 3)), torch.ones(3, 3, requires_grad=True)
    out = (p * x).sum()  # saves p for the gradient of x
    p.grad = torch.ones(3, 3)
    tw.optim.Muon([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_the_function_does_what_the_optimizer_does():
    p = leaf(torch.randn(6, 4))
    q, b = p.detach().clone(), torch.zeros(6, 4)
    p.grad = torch.randn(6, 4)
    tw.muon_([q], [p.grad], [b], lr=0.1)
    optimizer = tw.optim.Muon([p], lr=0.1)
    optimizer.step()
    assert same_bits(p.detach(), q) and same_bits(optimizer.state[p]["momentum_buffer"], b)


def test_opcheck():
    numbers = torch.tensor([[0.1, 0.1, 0.9, 0.0]], dtype=torch.float64)
    p, b, g, u = (torch.randn(3, 4) for _ in range(4))
    step = torch.zeros((), dtype=torch.float64)
    rest = [step], [0], [0]
    ops = torch.ops.trainwright
    check_opcheck(ops.muon_momentum_.default, [u], [g], [], [b], *rest, numbers[:, 1:], None, 0, None)  # fmt: skip
    check_opcheck(ops.muon_update_.default, [p], [u], [], [], *rest, numbers, None, 0, None)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"ns_steps": 100}, ValueError, "ns_steps: expected at most 99"),
        ({"ns_steps": 1.5}, TypeError, "ns_steps: expected an int"),
        ({"ns_coefficients": (1.0, 2.0)}, ValueError, "ns_coefficients: expected three numbers"),
        ({"ns_dtype": torch.int8}, TypeError, "ns_dtype: expected None"),
        ({"adjust_lr_fn": "x"}, ValueError, "adjust_lr_fn: expected None, 'original'"),
        ({"master_weights": "fp8"}, ValueError, "master_weights: expected 'auto'"),
        ({"state_dtype": torch.int8}, ValueError, "state_dtype: expected torch.float32"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm: expected at least 0.0"),
    ],
)  # fmt: skip
def test_bad_options(kwargs, error, text):
    with pytest.raises(error, match=text):
        tw.optim.Muon([leaf(torch.ones(2, 2))], **kwargs)


def test_bad_parameters_gradients_and_arguments():
    p = leaf(torch.ones(2, 2))
    with pytest.raises(ValueError, match="listed twice"):
        tw.optim.Muon([p, p])
    with pytest.raises(TypeError, match="an expanded tensor"):
        tw.optim.Muon([torch.ones(1).expand(4, 4).detach().requires_grad_()])
    optimizer = tw.optim.Muon([p])
    p.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    p.grad = torch.ones(2, 2)
    with pytest.raises(tw.BackendError):
        tw.optim.Muon([p], backend="cuda").step()
    one = torch.ones(2, 2)

    def call(**changes):
        arguments = {"params": [one], "grads": [one], "momentum_buffers": [one], "lr": 0.1}
        arguments.update(changes)
        lists = [arguments.pop(k) for k in ("params", "grads", "momentum_buffers")]
        tw.muon_(*lists, **arguments)

    for changes, error, text in [
        ({"grads": []}, ValueError, "grads: expected 1 tensors, got 0"),
        ({"grads": [torch.ones(3, 2)]}, ValueError, r"grads\[0\]: expected shape \(2, 2\)"),
        ({"params": [torch.ones(2)]}, ValueError, r"params\[0\]: expected at least 2 dimension"),
        ({"momentum_buffers": [one.half()]}, TypeError, r"momentum_buffers\[0\]: expected dtype"),
        (
            {"momentum_buffers": [one.char()]},
            ValueError,
            "scales: expected scales for the torch.int8 state",
        ),
        ({"stochastic_rounding": True}, ValueError, "steps: expected step counts"),
        ({"masters": [one]}, ValueError, r"masters\[0\]: expected None for a torch.float32"),
        ({"control": torch.ones(2)}, TypeError, "control: expected dtype float64"),
        ({"momentum": -1.0}, ValueError, "momentum: expected at least 0"),
        ({"ns_steps": 100}, ValueError, "ns_steps: expected at most 99"),
        ({"ns_dtype": "bf16"}, TypeError, "ns_dtype"),
    ]:
        with pytest.raises(error, match=text):
            call(**changes)
    assert (one == 1).all()
