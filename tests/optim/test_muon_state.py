"""tw.optim.Muon between steps: checkpoints, copies, groups and schedulers, clipping and loss scaling."""

import copy
import io
import pickle

import pytest
import torch
import trainwright as tw
from numerics import backends_for_tests, optimizer_close, same_bits

from optim.cases import DTYPES
from optim.muon_cases import Oracle, assert_same_state, bits_of, both_ways, leaf, set_grad, train

BACKENDS = backends_for_tests(tw.muon_)

# ---- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["torch to ours", "ours to torch"])
def test_a_checkpoint_loads_in_both_directions_mid_run(direction, dtype):
    a, b = both_ways(dtype)
    options = {"lr": 1e-2, "momentum": 0.8, "weight_decay": 0.3}
    makers = [lambda p: torch.optim.Muon(p, **options), lambda p: tw.optim.Muon(p, **options)]
    if direction == "ours to torch":
        makers.reverse()
    first = makers[0](a)
    train(first, a, range(4))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = makers[1](b)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    for p, q in zip(a, b):
        q.data.copy_(p.data)
    train(first, a, range(4, 7))
    train(second, b, range(4, 7))
    for p, q in zip(a, b):
        theirs = f"torch's Muon, {str(dtype).removeprefix('torch.')}"
        assert optimizer_close(f"{theirs} parameters", p, q)
        momenta = first.state[p]["momentum_buffer"], second.state[q]["momentum_buffer"]
        assert optimizer_close(f"{theirs} momentum", *momenta)
    keys = [o.state_dict()["param_groups"][0].keys() for o in (first, second)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resume_is_bit_equal(dtype, state):
    a, b = both_ways(dtype, ((5, 7), (3, 4, 5), (4, 2, 3, 3)))
    options = {"lr": 1e-2, "state_dtype": state}
    first = tw.optim.Muon(a, **options)
    train(first, a, range(3), dtype=torch.float32)
    expected = torch.float64 if dtype == torch.float64 else state
    assert first.state[a[0]]["momentum_buffer"].dtype == expected
    second = tw.optim.Muon(b, **options)
    buffer = io.BytesIO()
    torch.save({"model": [p.detach() for p in a], "optimizer": first.state_dict()}, buffer)
    buffer.seek(0)
    checkpoint = torch.load(buffer, weights_only=True)
    for q, saved in zip(b, checkpoint["model"]):
        q.data.copy_(saved)
    second.load_state_dict(checkpoint["optimizer"])
    assert_same_state(first, second)
    for optimizer, params in ((first, a), (second, b)):
        train(optimizer, params, range(3, 6), dtype=torch.float32)
    assert_same_state(first, second)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a, b))


def test_bf16_state_is_the_fp32_state_rounded_in_every_step():
    a, b = both_ways()
    narrow, wide = tw.optim.Muon(a, state_dtype=torch.bfloat16), tw.optim.Muon(b)
    train(narrow, a, range(1))
    train(wide, b, range(1))
    for p, q in zip(a, b):
        assert same_bits(p.detach(), q.detach())  # the update itself comes from the unrounded value
        assert same_bits(
            narrow.state[p]["momentum_buffer"], wide.state[q]["momentum_buffer"].bfloat16()
        )
    wide.load_state_dict(narrow.state_dict())  # the options are the constructor's
    assert wide.state[b[0]]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_optimizer_goes_on_alike(how):
    p = leaf(torch.randn(8, 5).bfloat16())
    optimizer = tw.optim.Muon([p], lr=0.1, max_grad_norm=0.5, ns_dtype=torch.bfloat16)
    train(optimizer, [p], range(2))
    other = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    q = other.param_groups[0]["params"][0]
    assert q is not p
    for o, x in ((optimizer, p), (other, q)):
        train(o, [x], range(2, 4))
    assert same_bits(p.detach(), q.detach()) and other._options == optimizer._options
    assert_same_state(optimizer, other)


def test_groups_with_their_own_options_and_a_group_added_later():
    p, q = leaf(torch.randn(5, 6)), leaf(torch.randn(6, 5))
    optimizer = tw.optim.Muon([{"params": [p], "lr": 0.1, "nesterov": False}], lr=torch.tensor(0.3))
    e = Oracle(p, lr=0.1, nesterov=False)
    f = Oracle(q, lr=0.3, momentum=0.5, ns_steps=3, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        if step == 2:
            optimizer.add_param_group(
                {"params": q, "momentum": 0.5, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
            )
        for x, oracle in ((p, e), (q, f)):
            x.grad = torch.randn_like(x)
            if x is p or step >= 2:
                oracle.step(x.grad)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = e.lr = e.lr * 0.5
    assert optimizer_close("fp64 Muon", p, e.p)
    assert optimizer_close("fp64 Muon", q, f.p)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_scheduler_moves_the_learning_rate(tensor_lr):
    p = leaf(torch.zeros(1, 1))
    optimizer = tw.optim.Muon([p], lr=torch.tensor(1.0) if tensor_lr else 1.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
    moved = []
    for _ in range(3):
        before = p.item()
        p.grad = torch.ones(1, 1)
        optimizer.step()
        scheduler.step()
        moved.append(before - p.item())
    assert optimizer_close("step of half the rate", moved[1:], [moved[0] / 2, moved[0] / 4])


# ---- clipping and loss scaling


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clipping_inside_the_step_equals_clipping_before_it(dtype, backend):
    a, b = both_ways(dtype)
    ours = tw.optim.Muon(a, lr=0.1, max_grad_norm=0.75, backend=backend)
    plain = tw.optim.Muon(b, lr=0.1, backend=backend)
    for scale in (10.0, 0.001):
        grads = [(torch.randn(p.shape) * scale).to(dtype) for p in a]
        total = torch.sqrt(sum(g.double().square().sum() for g in grads))
        coefficient = min(1.0, 0.75 / (total.item() + 1e-6))
        for p, q, g in zip(a, b, grads):
            p.grad = g.clone()
            set_grad(q, g.double() * coefficient)
        ours.step()
        plain.step()
        assert all(same_bits(p.grad, g) for p, g in zip(a, grads))
        assert optimizer_close("gradient norm", ours.last_step.grad_norm, total)
    for p, q in zip(a, b):
        x, y = (o.state[t].get("master", t).detach() for o, t in ((ours, p), (plain, q)))
        assert optimizer_close("clipped before the step", x, y)


@pytest.mark.parametrize(
    ("backend", "found"),
    [*((b, 1.0) for b in BACKENDS), ("cpu", 0.5), ("cpu", float("nan"))],
)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_skipped_step_changes_no_bit(dtype, first, found, backend):
    """DeepSpeed#8432: the overflow was folded into the momentum before the step was skipped."""
    a, b = both_ways(dtype)
    ours, never = (tw.optim.Muon(x, lr=0.1, backend=backend) for x in (a, b))
    if not first:
        train(ours, a, range(1))
        train(never, b, range(1))
    params, state = [p.detach().clone() for p in a], bits_of(ours)
    ours.found_inf, ours.grad_scale = torch.tensor(found), torch.tensor(4.0)
    train(ours, a, range(50, 52), scale=float("inf"))
    assert ours.last_step.skipped.item() is True
    del ours.found_inf, ours.grad_scale
    assert all(same_bits(p.detach(), q) for p, q in zip(a, params))
    if not first:
        assert all(same_bits(x, y) for (_, x), (_, y) in zip(state, bits_of(ours)))
    train(ours, a, range(1, 3))
    train(never, b, range(1, 3))
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a, b))
    assert_same_state(ours, never)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_op_itself_skips_without_looking_from_the_host(backend):
    """What happens on a GPU, where the flag is not read back."""
    control = torch.tensor([0.5, 1.0], dtype=torch.float64)
    p, b, g = torch.randn(4, 6), torch.randn(4, 6), torch.full((4, 6), float("nan"))
    kept = p.clone(), b.clone()
    tw.muon_([p], [g], [b], lr=0.1, control=control, backend=backend)
    assert same_bits(p, kept[0]) and same_bits(b, kept[1])


def test_works_with_torch_s_grad_scaler():
    a, b = both_ways()
    ours, plain = tw.optim.Muon(a, lr=0.1), tw.optim.Muon(b, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(5):
        for params in (a, b):
            torch.manual_seed(step)
            factor = float("inf") if step == 3 and params is a else 1.0
            loss = sum((p * torch.randn_like(p)).sum() for p in params) * factor
            for p in params:
                p.grad = None
            (scaler.scale(loss) if params is a else loss).backward()
        scaler.step(ours)
        scaler.update()
        assert ours.last_step.skipped.item() == (step == 3)
        if step != 3:
            plain.step()
    for p, q in zip(a, b):
        assert optimizer_close("scaled loss", p, q)
