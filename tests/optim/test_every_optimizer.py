"""What holds for every optimizer class of `tw.optim`, in every storage format: the right values, any layout, resume,
skipped steps, low precision that does not stall."""

import copy
import io
from itertools import pairwise

import pytest
import torch
import trainwright as tw
from numerics import same_bits

from optim.cases import layouts
from optim.oracles import ORACLES

CLASSES = ("AdamW", "Adam", "SGD", "RMSprop", "Lion", "Lamb")
# Options that switch every optional state and term on.
OPTIONS = {
    "AdamW": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True, "betas": (0.0, 0.5)}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "SGD": [{}, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}],
    "RMSprop": [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"centered": True, "momentum": 0.5}, {"centered": True}],
    "Lion": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Lamb": [{}, {"weight_decay": 0.1}, {"maximize": True, "eps": 1e-3}],
}  # fmt: skip
ALL = [(name, options) for name in CLASSES for options in OPTIONS[name]]
RICH = {name: OPTIONS[name][1] for name in CLASSES}
RICH["RMSprop"] = {"centered": True, "momentum": 0.5}
# master_weights, state_dtype, stochastic_rounding for bf16 parameters
STORAGE = [
    ("fp32", torch.float32, False),
    ("split16", torch.float32, False),
    ("split16", torch.bfloat16, True),
    ("none", torch.bfloat16, False),
    ("none", "int8", True),
    ("fp32", "int8", False),
]


def leaf(x):
    return x.detach().requires_grad_()


def make(name, params, lr=0.01, **options):
    return getattr(tw.optim, name)(params, lr=lr, **options)


def storage(master, state, stochastic):
    return {"master_weights": master, "state_dtype": state, "stochastic_rounding": stochastic, "seed": 7}  # fmt: skip


def give_gradients(params, step, dtype=None, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        g = torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
        p.grad_dtype = None
        p.grad = g.to(dtype or p.dtype)


def train(optimizer, params, steps, **how):
    for step in steps:
        give_gradients(params, step, **how)
        optimizer.step()


def everything(optimizer, params):
    """All bits of a run: parameters and state."""
    state = [(k, v) for p in params for k, v in sorted(optimizer.state[p].items())]
    return [("p", p.detach()) for p in params] + state


def assert_same_bits(a, b):
    assert [k for k, _ in a] == [k for k, _ in b]
    for (key, x), (_, y) in zip(a, b):
        assert same_bits(x, y), f"{key} differs"


def snapshot(bits):
    return [(k, v.clone()) for k, v in bits]


# ---- values


@pytest.mark.parametrize(("name", "options"), ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_five_steps_match_fp64(name, options, dtype):
    params = [leaf(torch.randn(n, dtype=dtype)) for n in (1, 7, 33, 257)] + [
        leaf(torch.randn((), dtype=dtype))
    ]
    exact = [ORACLES[name](p, lr=0.01, **options) for p in params]
    optimizer = make(name, params, **options)
    for step in range(5):
        give_gradients(params, step)
        for p, e in zip(params, exact):
            e.step(p.grad)
        optimizer.step()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for p, e in zip(params, exact):
        torch.testing.assert_close(p.detach().double(), e.p, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", STORAGE, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_low_precision_stays_near_fp64(name, form):
    """20 steps: parameters within what bf16 can hold plus the noise of the state's format."""
    p = leaf(torch.randn(2000).bfloat16())
    exact = ORACLES[name](p, lr=0.01)
    optimizer = make(name, [p], **storage(*form))
    for step in range(20):
        give_gradients([p], step, dtype=torch.bfloat16)
        exact.step(p.grad)
        optimizer.step()
    error = (p.detach().double() - exact.p).abs()
    moved = (exact.p - exact.start).abs()
    rounding = exact.p.abs() * 2**-8 * (1 if form[0] != "none" else 8)
    flips = 0.1 if name == "Lion" else 0.03  # a sign of almost nothing may be the other one
    assert (error <= rounding + 0.5 * moved + flips).all()
    assert error.mean() < 0.25 * moved.mean() + rounding.mean()


# ---- layouts, sharding, threads


@pytest.mark.parametrize("form", [STORAGE[i] for i in (0, 2, 4)], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_every_layout_gives_the_bits_of_contiguous(name, form):
    """Matched by logical index, and nothing outside the view is touched (torch's fused CPU step gets both wrong)."""
    for label, (p, g) in layouts(torch.bfloat16).items():
        base = p._base if p._base is not None else p
        untouched = torch.ones_like(base, dtype=torch.bool)
        untouched.as_strided(p.shape, p.stride(), p.storage_offset()).zero_()
        before = base.clone()
        dense = leaf(p.clone(memory_format=torch.contiguous_format))
        p = leaf(p)
        dense.grad, p.grad = g.clone(memory_format=torch.contiguous_format), g
        kept = g.clone()
        for x in (dense, p):
            optimizer = make(name, [x], lr=0.1, **RICH[name], **storage(*form))
            optimizer.step()
            optimizer.step()
        if name == "Lamb":  # norms are sums: another memory order, another last bit
            torch.testing.assert_close(p.detach(), dense.detach(), rtol=2e-2, atol=2e-2)
        else:
            assert same_bits(p.detach(), dense.detach()), label
        assert torch.equal(base.detach()[untouched], before[untouched]), label
        assert same_bits(p.grad, kept), label


@pytest.mark.parametrize("form", STORAGE, ids=str)
@pytest.mark.parametrize("name", [n for n in CLASSES if n != "Lamb"])
def test_shards_have_the_bits_of_the_whole(name, form):
    """Random bits and block edges go by the element's place in the whole parameter."""
    whole = leaf(torch.randn(1500).bfloat16())
    cuts = [0, 512, 768, 1500] if form[1] == "int8" else [0, 501, 502, 1500]
    shards = [leaf(whole.detach()[a:b].clone()) for a, b in pairwise(cuts)]
    for shard, begin in zip(shards, cuts):
        shard.shard_offset = begin
    one = make(name, [whole], **RICH[name], **storage(*form))
    many = make(name, shards, **RICH[name], **storage(*form))
    for step in range(3):
        give_gradients([whole], step)
        for shard, (a, b) in zip(shards, pairwise(cuts)):
            shard.grad = whole.grad[a:b].clone()
        one.step()
        many.step()
    assert same_bits(torch.cat([s.detach() for s in shards]), whole.detach())
    for key, value in one.state[whole].items():
        if key != "step":
            assert same_bits(torch.cat([many.state[s][key] for s in shards]), value), key


def test_lamb_refuses_a_shard_before_it_changes_anything():
    shard = leaf(torch.ones(256))
    shard.shard_offset = 0
    optimizer = make("Lamb", [shard])
    shard.grad = torch.ones(256)
    with pytest.raises(
        ValueError, match=r"params\[0\]: expected whole parameters .*got a shard at 0"
    ):
        optimizer.step()
    assert (shard.detach() == 1).all()


@pytest.mark.parametrize("form", STORAGE[2:5], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_same_bits_for_any_thread_count(name, form):
    def result(threads):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        params = [leaf(torch.randn(n).bfloat16()) for n in (40001, 3, 0)]
        optimizer = make(name, params, max_grad_norm=0.5, **RICH[name], **storage(*form))
        train(optimizer, params, range(2))
        return everything(optimizer, params)

    try:
        first, *others = [result(t) for t in (1, 2, 3)]
    finally:
        torch.set_num_threads(2)
    for other in others:
        assert_same_bits(first, other)


# ---- state


@pytest.mark.parametrize("form", STORAGE, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_resume_is_bit_equal(name, form):
    def start():
        torch.manual_seed(1)
        tensors = torch.randn(300).bfloat16(), torch.randn(5, 7), torch.randn(4).double()
        params = [leaf(x) for x in tensors]
        return params, make(name, params, **RICH[name], **storage(*form))

    a, first = start()
    train(first, a, range(3))
    buffer = io.BytesIO()
    torch.save({"model": [p.detach() for p in a], "optimizer": first.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    b, second = start()
    for p, x in zip(b, saved["model"]):
        p.data.copy_(x)
    second.load_state_dict(saved["optimizer"])
    assert_same_bits(everything(first, a), everything(second, b))
    third = copy.deepcopy(second)
    c = [p for group in third.param_groups for p in group["params"]]
    for optimizer, params in ((first, a), (second, b), (third, c)):
        train(optimizer, params, range(3, 6))
    assert_same_bits(everything(first, a), everything(second, b))
    assert_same_bits(everything(first, a), everything(third, c))


@pytest.mark.parametrize("form", STORAGE, ids=str)
@pytest.mark.parametrize("first_step", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_a_skipped_step_changes_no_bit(name, first_step, form):
    """And the run goes on as if there had been none: momentum, step counts and random bits included."""
    params = [leaf(torch.randn(300).bfloat16()), leaf(torch.randn(5))]
    others = [leaf(p.detach().clone()) for p in params]
    ours, never = (make(name, x, **RICH[name], **storage(*form)) for x in (params, others))
    if not first_step:
        train(ours, params, range(2))
        train(never, others, range(2))
    before = snapshot(everything(ours, params))
    ours.grad_scale, ours.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    train(ours, params, range(50, 52), scale=float("inf"))
    assert ours.last_step.skipped.item() is True
    del ours.found_inf, ours.grad_scale
    if first_step:
        assert all(same_bits(p.detach(), x) for p, (_, x) in zip(params, before))
    else:
        assert_same_bits(everything(ours, params), before)
    train(ours, params, range(3, 6))
    train(never, others, range(3, 6))
    assert_same_bits(everything(ours, params), everything(never, others))


@pytest.mark.parametrize("name", CLASSES)
def test_converts_between_formats_on_load(name):
    p = leaf(torch.randn(600).bfloat16())
    source = make(name, [p], **RICH[name])
    train(source, [p], range(3))
    for form in STORAGE[1:]:
        q = leaf(p.detach().clone())
        other = make(name, [q], **RICH[name], **storage(*form))
        other.load_state_dict(source.state_dict())
        back = make(name, [leaf(p.detach().clone())], **RICH[name])
        back.load_state_dict(other.state_dict())
        want, got = source.state[p], back.state[back.param_groups[0]["params"][0]]
        for key, value in want.items():
            loose = form[1] != torch.float32 and key not in ("step", "master")
            if key == "master" and form[0] == "none":
                continue
            if not loose:
                assert same_bits(got[key], value), (form, key)
            else:
                coarse = 0.01 * value.abs().max() if form[1] == "int8" else 0.0
                assert ((got[key] - value).abs() <= 0.005 * value.abs() + coarse).all(), (form, key)


# ---- low precision (pytorch#120376, #1124 of ao: bf16 stagnation)


@pytest.mark.parametrize("form", [f for f in STORAGE if f[0] != "none" or f[2]], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion"])
def test_small_updates_are_not_lost(name, form):
    """p = 1, 100 steps of lr 1e-3 up the same slope: 0.9. Without a master and stochastic rounding p stays 1.0."""
    p = leaf(torch.ones(512, dtype=torch.bfloat16))
    optimizer = make(name, [p], lr=1e-3, weight_decay=0.0, **storage(*form))
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(0.9, abs=2e-3)
    q = leaf(torch.ones(4, dtype=torch.bfloat16))
    stuck = make(name, [q], lr=1e-3, weight_decay=0.0, master_weights="none", count_lost_updates=True)  # fmt: skip
    for _ in range(5):
        q.grad = torch.ones_like(q)
        stuck.step()
    assert q[0].item() == 1.0 and stuck.last_step.lost_update_fraction.item() == 1.0


def test_weight_decay_alone_acts():
    """1000 steps of lr 1e-3 and decay 0.1: 0.905."""
    p = leaf(torch.ones(512, dtype=torch.bfloat16))
    options = storage("none", torch.bfloat16, True)
    optimizer = make("AdamW", [p], lr=1e-3, weight_decay=0.1, **options)
    for _ in range(1000):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(0.9048, abs=2e-3)


@pytest.mark.parametrize("state", [torch.bfloat16, "int8"], ids=str)
def test_a_second_moment_decays_when_gradients_stop(state):
    """0.999^3000 = 0.0497 of it; in bf16 rounded to nearest v * 0.999 is v again."""
    p = leaf(torch.zeros(1024))
    optimizer = make("AdamW", [p], state_dtype=state, stochastic_rounding=True)
    give_gradients([p], 0)
    optimizer.step()
    before = value_of(optimizer, p, "exp_avg_sq").double().sum().item()
    for _ in range(3000):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    after = value_of(optimizer, p, "exp_avg_sq").double().sum().item()
    assert after / before == pytest.approx(0.999**3000, rel=0.05)


def value_of(optimizer, p, name):
    from trainwright.ops._optimizer_formats import int8_decode

    state = optimizer.state[p]
    scale = state.get(name + "_scale")
    return state[name] if scale is None else int8_decode(state[name], scale)


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 3e-6)]
)
def test_stochastic_rounding_is_unbiased(dtype, value):
    """The mean of many roundings of one number is the number, for fp16's subnormals too."""
    n, update = 200_000, value * 1.0e-4
    p = leaf(torch.full((n,), value, dtype=dtype))
    start = p.detach().double()[0].item()
    optimizer = make("SGD", [p], lr=update, master_weights="none", stochastic_rounding=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    spacing = (p.detach().double().max() - p.detach().double().min()).item()
    mean = p.detach().double().mean().item()
    assert spacing > 0 and abs(mean - (start - update)) < 4 * spacing / n**0.5


def test_nan_and_inf_are_not_hidden_by_int8_codes():
    for bad in (float("nan"), float("inf")):
        p = leaf(torch.ones(700))
        optimizer = make("AdamW", [p], state_dtype="int8")
        train(optimizer, [p], range(1))
        p.grad = torch.ones(700)
        p.grad[300] = bad
        optimizer.step()
        assert not p[300].isfinite() and p[[0, 255, 512, 699]].isfinite().all()
        give_gradients([p], 1)
        optimizer.step()
        assert not p[256:512].isfinite().any() and p[[0, 255, 512, 699]].isfinite().all()


# ---- groups, dtypes


@pytest.mark.parametrize("name", CLASSES)
def test_many_groups_and_dtypes_in_one_step(name):
    """And hyper-parameters that change between steps, with nothing moved: the cached table."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    params = [leaf(torch.randn(20).to(dtypes[i % 4])) for i in range(40)]
    groups = [{"params": [p], "lr": 0.001 * (i + 1)} for i, p in enumerate(params)]
    optimizer = make(name, groups)
    exact = [ORACLES[name](p, lr=0.001 * (i + 1)) for i, p in enumerate(params)]
    for step in range(4):
        give_gradients(params, step, dtype=torch.float32)
        if step == 2:
            for group, e in zip(optimizer.param_groups, exact):
                group["lr"] *= 0.5
                e.options["lr"] *= 0.5
        for p, e in zip(params, exact):
            e.step(p.grad)
        optimizer.step()
    for p, e in zip(params, exact):
        value = optimizer.state[p].get("master", p).detach().double()
        torch.testing.assert_close(value, e.p, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", CLASSES)
def test_a_gradient_that_comes_late_and_an_empty_parameter(name):
    params = [leaf(torch.randn(n)) for n in (0, 5, 0, 7, 0)]
    exact = [ORACLES[name](p, lr=0.1, **RICH[name]) for p in params]
    optimizer = make(name, params, lr=0.1, **RICH[name])
    for step in range(4):
        give_gradients(params, step)
        if step < 2:
            params[3].grad = None
        for p, e in zip(params, exact):
            if p.grad is not None:
                e.step(p.grad)
        optimizer.step()
    for p, e in zip(params, exact):
        torch.testing.assert_close(p.detach().double(), e.p, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["Lion", "Lamb"])
@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"lr": -1.0}, "lr: expected at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]: expected a number in \[0, 1\)"),
        ({"weight_decay": -0.1}, "weight_decay: expected at least 0"),
        ({"lr": torch.ones(2)}, "lr: expected a number or a tensor of one"),
    ],
)
def test_bad_hyper_parameters(name, kwargs, text):
    with pytest.raises(ValueError, match=text):
        getattr(tw.optim, name)([leaf(torch.ones(2))], **kwargs)


def test_split16_is_for_bf16_only():
    with pytest.raises(ValueError, match="master_weights: expected 'fp32' or 'none' for fp16"):
        make("AdamW", [leaf(torch.ones(2).half())], master_weights="split16")
