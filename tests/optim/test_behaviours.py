"""What torch's own tests ask of an optimizer, for every class: gradients, groups, schedulers, hooks, copies, state."""

import copy
import io
import pickle

import pytest
import torch
import trainwright as tw
from numerics import same_bits
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from optim.classes import (
    ALL,
    BY_NAME,
    TORCH,
    assert_close_run,
    assert_same_run,
    copies,
    give_gradients,
    leaf,
    parameters,
    train,
)  # fmt: skip

every = pytest.mark.parametrize("optimizer", ALL, ids=str)
with_torch = pytest.mark.parametrize("optimizer", TORCH, ids=str)


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---- options


@every
def test_tensor_options_give_the_bits_of_numbers(optimizer):
    runs = []
    for as_tensor in (False, True):
        options = dict(optimizer.options)
        if as_tensor:
            options["lr"] = torch.tensor(options["lr"], dtype=torch.float64)
        if "betas" in optimizer.changes and optimizer.plain is not None:
            betas = (0.75, 0.875)
            options["betas"] = tuple(map(torch.tensor, betas)) if as_tensor else betas
        params = parameters()
        o = optimizer.ours(params, **options)
        train(o, params, range(3))
        if as_tensor:
            o.param_groups[0]["lr"].fill_(0.001)
        else:
            o.param_groups[0]["lr"] = 0.001
        train(o, params, range(3, 5))
        runs.append((params, o))
    assert_same_run(*runs[0], *runs[1])


@every
def test_a_group_has_its_own_options(optimizer):
    """Two groups are two optimizers."""
    a = parameters()
    b = copies(a)
    second = {**optimizer.options, "lr": 0.07, "weight_decay": 0.5, **optimizer.changes}
    together = optimizer.ours([{"params": a[:2]}, {"params": a[2:], **second}], **optimizer.options)
    parts = [optimizer.ours(b[:2], **optimizer.options), optimizer.ours(b[2:], **second)]
    train(together, a, range(3))
    for step in range(3):
        give_gradients(b, step)
        for part in parts:
            part.step()
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a, b))


@every
def test_a_group_added_later(optimizer):
    a = parameters()
    b = copies(a)
    first = optimizer.ours(a[:2], **optimizer.options)
    second = optimizer.ours(b[:2], **optimizer.options)
    late = optimizer.ours(b[2:], **{**optimizer.options, **optimizer.changes, "lr": 0.5})
    train(first, a[:2], range(2))
    train(second, b[:2], range(2))
    first.add_param_group({"params": a[2:], **optimizer.changes, "lr": 0.5})
    give_gradients(a, 2)
    give_gradients(b, 2)
    for o in (first, second, late):
        o.step()
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a, b))


@every
def test_a_parameter_listed_twice_is_an_error(optimizer):
    p, q = leaf(torch.ones(2)), leaf(torch.ones(2))
    for params in ([p, p], [{"params": [p]}, {"params": [q, p]}], [{"params": [p, q, q]}]):
        with pytest.raises(ValueError, match=r"listed twice|more than one parameter group"):
            optimizer.ours(params, **optimizer.options)
    o = optimizer.ours([p], **optimizer.options)
    for params in ([q, q], [p]):
        with pytest.raises(ValueError, match=r"listed twice|more than one parameter group"):
            o.add_param_group({"params": params})
    assert len(o.param_groups) == 1


@every
def test_bad_values_are_errors(optimizer):
    p = leaf(torch.ones(2))
    bad = [{"lr": -1.0}, {"weight_decay": -1.0}]
    bad += [{"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}] if "betas" in optimizer.changes else []
    for kwargs in bad:
        with pytest.raises(
            ValueError, match=next(iter(kwargs)).replace("betas", "beta")[:4] + "|learning"
        ):
            optimizer.ours([p], **kwargs)
    with pytest.raises(ValueError, match="empty parameter list"):
        optimizer.ours([])
    with pytest.raises(TypeError):
        optimizer.ours(p)


# ---- gradients


@every
def test_no_gradient_no_step(optimizer):
    a = parameters()
    before = [p.detach().clone() for p in a]
    o = optimizer.ours(a, **optimizer.options)
    o.step()
    assert not o.state and all(same_bits(p.detach(), q) for p, q in zip(a, before))
    train(o, a, range(1))
    state = copy.deepcopy(o.state_dict())
    before = [p.detach().clone() for p in a]
    o.zero_grad()
    o.step()
    assert all(p.grad is None for p in a)
    assert all(same_bits(p.detach(), q) for p, q in zip(a, before))
    for i, values in o.state_dict()["state"].items():
        assert all(same_bits(v, state["state"][i][k]) for k, v in values.items())


@with_torch
def test_zero_gradients_are_gradients(optimizer):
    """`zero_grad(set_to_none=False)`: decay and momentum go on."""
    a = parameters()
    b = copies(a)
    ours = optimizer.ours(a, **optimizer.options)
    theirs = optimizer.plain(b, foreach=False, **optimizer.options)
    for o, params in ((ours, a), (theirs, b)):
        train(o, params, range(1))
        for _ in range(3):
            o.zero_grad(set_to_none=False)
            o.step()
    assert all(p.grad.count_nonzero() == 0 for p in a)
    assert_close_run(a, ours, b, theirs, optimizer.states)


@every
def test_a_first_gradient_that_comes_late(optimizer):
    """pytorch's fused SGD raises there; DeepSpeed counts the steps of the last parameter (#8471)."""
    a, b = parameters(), parameters()
    together = optimizer.ours(a, **optimizer.options)
    alone = [optimizer.ours([q], **optimizer.options) for q in b]
    for step in range(6):
        for params in (a, b):
            give_gradients(params, step)
            for i, p in enumerate(params):
                if step < i or step % 3 == i % 2 + 1:
                    p.grad = None
        together.step()
        for o in alone:
            o.step()
    for p, q, o in zip(a, b, alone):
        assert_same_run([p], together, [q], o)


@every
def test_the_maximum_is_the_minimum_of_the_negative(optimizer):
    a = parameters()
    b = copies(a)
    up = optimizer.ours(a, maximize=True, **optimizer.options)
    down = optimizer.ours(b, **optimizer.options)
    train(up, a, range(3))
    for step in range(3):
        give_gradients(b, step, scale=-1.0)
        down.step()
    assert_same_run(a, up, b, down)


# ---- schedulers, closures, hooks, scalers

SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ]
    ),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2),
            torch.optim.lr_scheduler.PolynomialLR(o, 5),
        ],
        [2],
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@with_torch
def test_every_scheduler_does_what_it_does_to_torch(optimizer, scheduler):
    """OneCycleLR moves betas or momentum too."""
    runs = []
    for which in (optimizer.ours, optimizer.plain):
        params = parameters()
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
        o = which(groups, foreach=False, **optimizer.options)
        s = SCHEDULERS[scheduler](o)
        for step in range(6):
            train(o, params, [step])
            s.step(*([1.0] if scheduler == "plateau" else []))
        runs += [params, o]
    a, ours, b, theirs = runs
    for mine, yours in zip(ours.param_groups, theirs.param_groups):
        assert mine["lr"] == yours["lr"] and mine.get("betas") == yours.get("betas")
    assert_close_run(a, ours, b, theirs, optimizer.states)


@every
def test_a_scheduler_comes_back_from_a_checkpoint(optimizer):
    runs = []
    for resume in (False, True):
        params = parameters()
        o = optimizer.ours(params, **optimizer.options)
        s = torch.optim.lr_scheduler.CosineAnnealingLR(o, 6)
        for step in range(5):
            if resume and step == 2:
                saved = through_a_file({"o": o.state_dict(), "s": s.state_dict()})
                params = copies(params)
                o = optimizer.ours(params, **optimizer.options)
                s = torch.optim.lr_scheduler.CosineAnnealingLR(o, 6)
                s.load_state_dict(saved["s"])
                o.load_state_dict(saved["o"])
            train(o, params, [step])
            s.step()
        runs.append((params, o))
    assert_same_run(*runs[0], *runs[1])


@every
def test_closure_and_hooks(optimizer):
    p = leaf(torch.full((3,), 2.0))
    o = optimizer.ours([p], **optimizer.options)
    calls = []
    handles = [
        o.register_step_pre_hook(lambda self, args, kwargs: calls.append(("pre", self is o))),
        o.register_step_post_hook(lambda self, args, kwargs: calls.append(("post", self is o))),
        register_optimizer_step_pre_hook(lambda *_: calls.append("all pre")),
    ]

    def closure():
        o.zero_grad()
        loss = p.square().sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    assert o.step(closure).item() == 12.0 and (p < 2).all()
    assert calls == ["all pre", ("pre", True), True, ("post", True)]
    for handle in handles:
        handle.remove()
    o.step()
    assert len(calls) == 4


@every
def test_state_dict_hooks(optimizer):
    p = leaf(torch.ones(3))
    o = optimizer.ours([p], **optimizer.options)
    train(o, [p], range(1))
    calls = []
    o.register_state_dict_pre_hook(lambda self: calls.append("saving"))
    o.register_state_dict_post_hook(lambda self, sd: {**sd, "note": 7})
    o.register_load_state_dict_pre_hook(lambda self, sd: calls.append(sd["note"]))

    def halve_lr(self, sd):
        groups = [{**g, "lr": g["lr"] / 2} for g in sd["param_groups"]]
        return {**sd, "param_groups": groups}

    o.register_load_state_dict_pre_hook(halve_lr)
    o.register_load_state_dict_post_hook(lambda self: calls.append(self.param_groups[0]["lr"]))
    before = copy.deepcopy(dict(o.state[p]))
    o.load_state_dict(o.state_dict())
    assert calls == ["saving", 7, optimizer.options["lr"] / 2]
    assert all(same_bits(v, o.state[p][k]) for k, v in before.items())


@pytest.mark.parametrize("unscale_first", [False, True])
@with_torch
def test_grad_scaler_on_the_cpu(optimizer, unscale_first):
    """The overflow in step 0 must not touch first-step state, that in step 3 not the momentum."""
    runs = []
    for which in (optimizer.ours, optimizer.plain):
        params = parameters()
        o = which(params, foreach=False, **optimizer.options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            torch.manual_seed(step)
            o.zero_grad()
            loss = sum((p * torch.randn(p.shape)).sum() for p in params)
            scaler.scale(loss * (float("inf") if step in (0, 3) else 1.0)).backward()
            if unscale_first:
                scaler.unscale_(o)
            scaler.step(o)
            scaler.update()
            if which is optimizer.ours:
                assert o.last_step.skipped.item() == (step in (0, 3))
        runs += [params, o, scaler.get_scale()]
    a, ours, my_scale, b, theirs, their_scale = runs
    assert my_scale == their_scale == 2.0**10
    assert_close_run(a, ours, b, theirs, optimizer.states)


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@every
def test_a_skipped_step_changes_no_bit(optimizer, first):
    a, b = parameters(torch.bfloat16), parameters(torch.bfloat16)
    options = {"stochastic_rounding": True, "state_dtype": "int8", **optimizer.options}
    ours, never = optimizer.ours(a, **options), optimizer.ours(b, **options)
    if not first:
        train(ours, a, range(2))
        train(never, b, range(2))
    before = [p.detach().clone() for p in a]
    ours.found_inf, ours.grad_scale = torch.tensor(1.0), torch.tensor(4.0)
    train(ours, a, [50])
    del ours.found_inf, ours.grad_scale
    assert ours.last_step.skipped and all(same_bits(p.detach(), q) for p, q in zip(a, before))
    train(ours, a, range(2, 4))
    train(never, b, range(2, 4))
    assert_same_run(a, ours, b, never)


# ---- copies and state


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@every
def test_a_copied_optimizer_goes_on_alike(optimizer, how):
    params = parameters(torch.bfloat16)
    o = optimizer.ours(params, max_grad_norm=0.5, **optimizer.options)
    train(o, params, range(2))
    other = copy.deepcopy(o) if how == "deepcopy" else pickle.loads(pickle.dumps(o))
    theirs = [p for group in other.param_groups for p in group["params"]]
    for p, q in zip(params, theirs):
        assert p is not q
        q.grad_dtype = None
    train(o, params, range(2, 4))
    train(other, theirs, range(2, 4))
    assert_same_run(params, o, theirs, other)
    assert repr(other) == repr(o)


FORMATS = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "fp32, bf16 state": (torch.float32, {"state_dtype": torch.bfloat16, "stochastic_rounding": True}),
    "fp32, int8 state": (torch.float32, {"state_dtype": "int8"}),
    "fp16, fp32 master": (torch.float16, {"master_weights": "fp32"}),
    "bf16, fp32 master": (torch.bfloat16, {}),
    "bf16, split16, int8 state": (torch.bfloat16, {"master_weights": "split16", "state_dtype": "int8"}),
    "bf16, stochastic, int8 state": (
        torch.bfloat16,
        {"master_weights": "none", "state_dtype": "int8", "stochastic_rounding": True, "seed": 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@every
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(optimizer, form):
    """Through `torch.load(weights_only=True)`, after 2 of 5 steps, the model loaded before or after the optimizer."""
    dtype, options = FORMATS[form]
    options = {**optimizer.options, **options}
    a = parameters(dtype)
    o = optimizer.ours(a, **options)
    train(o, a, range(2))
    saved = through_a_file({"model": [p.detach() for p in a], "optimizer": o.state_dict()})
    kinds = {k: v.dtype for k, v in o.state[a[0]].items()}
    train(o, a, range(2, 5))
    for model_first in (True, False):
        b = parameters(dtype, seed=3)
        again = optimizer.ours(b, **options)
        train(again, b, range(7, 8))  # has a past, which must not shine through
        load_optimizer = lambda: again.load_state_dict(saved["optimizer"])  # noqa: B023, E731
        if not model_first:
            load_optimizer()
        with torch.no_grad():
            for q, value in zip(b, saved["model"]):
                q.copy_(value)
        if model_first:
            load_optimizer()
        assert {k: v.dtype for k, v in again.state[b[0]].items()} == kinds
        train(again, b, range(2, 5))
        assert_same_run(a, o, b, again)


@pytest.mark.parametrize("direction", ["torch to ours", "ours to torch"])
@with_torch
def test_checkpoints_go_both_ways_with_torch(optimizer, direction):
    a, b = parameters(), parameters(seed=3)
    makers = [lambda p: optimizer.plain(p, foreach=False, **optimizer.options),
              lambda p: optimizer.ours(p, **optimizer.options)]  # fmt: skip
    if direction == "ours to torch":
        makers.reverse()
    first, second = makers[0](a), makers[1](b)
    train(first, a, range(3))
    second.load_state_dict(through_a_file(first.state_dict()))
    with torch.no_grad():
        for p, q in zip(a, b):
            q.copy_(p)
    train(first, a, range(3, 6))
    train(second, b, range(3, 6))
    assert_close_run(a, first, b, second, optimizer.states)
    keys = [o.state_dict()["param_groups"][0].keys() for o in (first, second)]
    assert keys[0] == keys[1]


@with_torch
def test_an_older_checkpoint(optimizer):
    """Steps that are numbers or tensors of another dtype, options that did not exist, and unknown ones."""
    (p,) = a = parameters()[:1]
    o = optimizer.ours(a, maximize=True, **optimizer.options)
    train(o, a, range(2))
    saved = copy.deepcopy(o.state_dict())
    known = {"lr", "params", *optimizer.options, *optimizer.changes}
    for group in saved["param_groups"]:
        for key in set(group) - known:
            del group[key]
        group["a custom key"] = "kept"
    for step in (
        5,
        5.0,
        torch.tensor(5),
        torch.tensor([5.0]),
        torch.tensor(5.0, dtype=torch.float64),
    ):
        saved["state"][0]["step"] = step
        o.load_state_dict(copy.deepcopy(saved))
        train(o, a, range(2, 3))
        assert o.state[p]["step"].item() == 6 and o.state[p]["step"].dtype == torch.float64
        assert o.param_groups[0]["maximize"] is True
        assert o.param_groups[0]["a custom key"] == "kept"


@every
def test_named_parameters(optimizer):
    """Names are saved and taken over, and do not change what is loaded; unnamed and named load each other."""
    names = "abcdef"
    a, b, c = parameters(), parameters(), parameters()
    named = optimizer.ours(list(zip(names, a)), **optimizer.options)
    assert named.param_groups[0]["param_names"] == list(names)
    unnamed = optimizer.ours(b, **optimizer.options)
    other = optimizer.ours(list(zip("uvwxyz", c)), **optimizer.options)
    for o, params in ((named, a), (unnamed, b)):
        train(o, params, range(2))
    assert_same_run(a, named, b, unnamed)
    other.load_state_dict(through_a_file(unnamed.state_dict()))
    assert other.param_groups[0]["param_names"] == list("uvwxyz")
    other.load_state_dict(through_a_file(named.state_dict()))
    assert other.param_groups[0]["param_names"] == list(names)
    unnamed.load_state_dict(through_a_file(named.state_dict()))
    assert unnamed.param_groups[0]["param_names"] == list(names)
    with pytest.raises(ValueError, match="Some param names are missing"):
        optimizer.ours([("a", a[0]), a[1]], **optimizer.options)


@every
def test_the_state_dict_of_distributed_checkpoint(optimizer):
    """`torch.distributed.checkpoint.state_dict`: keyed by parameter name, as torchtitan saves it."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)).bfloat16()
        )
    first, second = (optimizer.ours(m.parameters(), **optimizer.options) for m in models)
    train(first, list(models[0].parameters()), range(2))
    saved = through_a_file(get_optimizer_state_dict(models[0], first))
    assert "0.weight" in saved["state"] and "master" in saved["state"]["0.weight"]
    models[1].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(models[1], second, saved)
    for o, m in ((first, models[0]), (second, models[1])):
        train(o, list(m.parameters()), range(2, 4))
    assert_same_run(list(models[0].parameters()), first, list(models[1].parameters()), second)


@every
def test_a_checkpoint_of_another_shape_or_size_is_an_error(optimizer):
    a, b = [leaf(torch.ones(4))], [leaf(torch.ones(3))]
    first, second = (optimizer.ours(p, **optimizer.options) for p in (a, b))
    train(first, a, range(1))
    train(second, b, range(1))
    before = copy.deepcopy(second.state_dict())
    text = rf"load_state_dict: ({'|'.join(optimizer.states)}): expected shape \(3,\), got \(4,\)"
    with pytest.raises(ValueError, match=text):
        second.load_state_dict(first.state_dict())
    two = optimizer.ours([leaf(torch.ones(3)), leaf(torch.ones(3))], **optimizer.options)
    with pytest.raises(ValueError, match="size of optimizer's group"):
        second.load_state_dict(two.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        second.load_state_dict({"state": {}, "param_groups": []})
    for key, value in before["state"][0].items():
        assert same_bits(value, second.state[b[0]][key])


@every
def test_the_same_bits_for_any_thread_count(optimizer):
    runs = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            params = [*parameters(), leaf(torch.arange(70001).sin())]
            o = optimizer.ours(params, max_grad_norm=0.5, **optimizer.options)
            train(o, params, range(3))
            runs.append((params, o))
    finally:
        torch.set_num_threads(2)
    assert_same_run(*runs[0], *runs[1])


def test_switching_options_on_in_the_middle_of_a_run():
    """amsgrad, momentum, centered: the state starts then, as torch's does where torch can."""
    for name, option in (
        ("AdamW", {"amsgrad": True}),
        ("Adam", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9}),
    ):
        optimizer = BY_NAME[name]
        a, b = parameters(), parameters()
        ours, theirs = optimizer.ours(a, lr=0.02), optimizer.plain(b, lr=0.02, foreach=False)
        for o, params in ((ours, a), (theirs, b)):
            train(o, params, range(2))
            o.param_groups[0].update(option)
            if "amsgrad" in option and o is theirs:
                for q in b:  # torch raises a KeyError here
                    o.state[q]["max_exp_avg_sq"] = torch.zeros_like(q)
            train(o, params, range(2, 5))
        for p, q in zip(a, b):
            torch.testing.assert_close(p, q)


def test_all_optimizers_are_exported():
    assert {o.name for o in ALL} <= set(tw.optim.__all__)
