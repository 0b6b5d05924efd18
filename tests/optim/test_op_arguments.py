"""The optimizer ops on every backend: layouts, shards, groups, and steps that are skipped."""

import itertools

import pytest
import torch

from optim.cases import layouts
from optim.op_cases import Case, Format, make
from optim.test_ops import BACKENDS, assert_same, compare, same_values

BF16, F32 = torch.bfloat16, torch.float32
FORMS = (Format(), Format(BF16, BF16, "split16", "bf16", True), Format(BF16, F32, "none", "int8", True))  # fmt: skip
SHARDED = (Format(F32, BF16, "none", "int8", True), Format(BF16, F32, "none", "bf16", True))
ELEMENTWISE = [(n, b) for n, b in BACKENDS if n in ("adamw", "rmsprop")]
BOTH_DRIVERS = [(n, b) for n, b in BACKENDS if n in ("adamw", "lamb")]
# In Triton both have the same code for layouts, and the interpreter is slow.
LAYOUTS = [x for x in BOTH_DRIVERS if x != ("lamb", "triton")]


def outside(view):
    """The elements of the memory of a view that are not in it."""
    memory = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    inside = torch.zeros(memory.shape, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return memory[~inside]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("name", "backend"), LAYOUTS)
def test_any_layout(name, backend, form):
    case = make(name, [p for p, _ in layouts(form.dtype).values()], form)
    case.grads = [g for _, g in layouts(form.grad).values()]
    compare(case, backend, steps=1)
    after = case.clone().run(backend)
    for old, new in zip(case.params, after.params, strict=True):
        assert same_values(outside(old), outside(new))
    for old, new in zip(case.grads, after.grads, strict=True):
        assert same_values(old, new)


@pytest.mark.parametrize("form", SHARDED, ids=str)
@pytest.mark.parametrize(("name", "backend"), ELEMENTWISE)
def test_shards_of_a_parameter_get_its_bits(name, backend, form):
    cuts = (0, 256, 1024, 1500) if form.state == "int8" else (0, 5, 514, 1500)
    whole = make(name, [(1500,)], form, lost=False)
    parts = Case(name, form, hyper=whole.hyper.clone())
    for a, b in itertools.pairwise(cuts):
        parts.params.append(whole.params[0][a:b].clone())
        parts.grads.append(whole.grads[0][a:b].clone())
        for x in whole.states:
            scale = x.numel() < 1500
            parts.states.append(x[-(-a // 256) : -(-b // 256)].clone() if scale else x[a:b].clone())
        parts.steps.append(whole.steps[0].clone())
        parts.spec.append(whole.spec[0])
        parts.offsets.append(a)
    whole.run(backend, 2)
    parts.run(backend, 2)
    per_part = len(whole.states)
    assert same_values(whole.params[0], torch.cat(parts.params))
    for i, x in enumerate(whole.states):
        assert same_values(x, torch.cat(parts.states[i::per_part]))


@pytest.mark.parametrize(("name", "backend"), BOTH_DRIVERS)
def test_groups_and_steps_are_each_tensors_own(name, backend):
    case = make(name, [(9,), (0,), (257,), (4,)], Format())
    row = case.hyper[0]
    case.hyper = torch.stack([row, row * 0.5, row * 0.25])
    case.spec = [s | g << 8 for s, g in zip(case.spec, (2, 0, 1, 2))]
    for t, step in zip((0.0, 5.0, 17.0, 400000.0), case.steps):
        step.fill_(t)
    compare(case, backend)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("name", "backend"), BOTH_DRIVERS)
def test_a_skipped_step_changes_nothing(name, backend, form):
    case = make(name, [(9,), (257,)], form)
    case.grads[0].fill_(float("nan"))
    case.control = torch.tensor([0.5, 1.0], dtype=torch.float64)
    assert_same(case.clone().run(backend), case)


@pytest.mark.parametrize(("name", "backend"), BOTH_DRIVERS)
def test_the_gradient_multiplier_and_maximize(name, backend):
    case = make(name, [(33,)], Format(), maximize=1.0)
    case.control = torch.tensor([0.125, 0.0], dtype=torch.float64)
    compare(case, backend)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("name", "backend"), ELEMENTWISE)
def test_a_gradient_that_is_not_finite(name, backend, form):
    """Its element, and with int8 states its block of 256, of which the codes mean nothing."""
    case = make(name, [(600,)], form, lost=False)
    case.grads[0][3] = float("nan")
    case.grads[0][300] = float("inf")
    ours, reference = (case.clone().run(b, 2) for b in (backend, "torch"))
    if form.state == "int8":
        for c in (ours, reference):
            for codes, scales in zip(c.states[::2], c.states[1::2], strict=True):
                assert scales.isnan().tolist() == [True, True, False]
                codes[:512] = 0
    assert_same(ours, reference)


def test_nan_of_any_bits_stays_nan_in_an_update_of_bf16_alone():
    """Whose kernel leaves out the search for NaN before it rounds: no bit of one may carry into its exponent."""
    form = Format(BF16, BF16, "none", "bf16")
    case = make("adamw", [(4 * 64,)], form, flags=0, lost=False)
    patterns = torch.tensor([0x7FFF, -1, 0x7F81, -0x7F, 0x7FC0, 0x7F80], dtype=torch.int16)
    for i, t in enumerate((case.params[0], case.grads[0], *case.states)):
        t.view(torch.int16)[64 * i : 64 * i + 6] = patterns
    want = case.clone().run("torch")
    case.run("cpu")
    for ours, reference in zip(case.results(), want.results(), strict=True):
        assert torch.equal(ours.isnan(), reference.isnan())
    noisy = torch.tensor([0x7FF8_0000_FFFF_FFFF, 0]).view(torch.float64)  # the loss scale is NaN
    bad = make("adamw", [(64,)], form, flags=0, lost=False)
    bad.control = noisy
    bad.run("cpu")
    assert all(t.isnan().all() for t in (bad.params[0], *bad.states))
