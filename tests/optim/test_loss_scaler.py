"""tw.LossScaler: GradScaler's behaviour step by step, a floor, hysteresis, and no host read in the step."""

import math

import pytest
import torch
import trainwright as tw
from numerics import same_bits

OPTIMIZERS = {
    "ours": lambda p: tw.optim.AdamW(p, lr=0.1),
    "torch fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "torch": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
}


def iterate(scaler, optimizer, params, step, bad, unscale=False):
    torch.manual_seed(step)
    optimizer.zero_grad()
    loss = sum((p * torch.randn(p.shape)).sum() for p in params) * (math.inf if bad else 1.0)
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def make(kind):
    torch.manual_seed(7)
    params = [torch.randn(33, requires_grad=True), torch.randn(4, 5, requires_grad=True)]
    return params, OPTIMIZERS[kind](params)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_same_run_as_with_grad_scaler(kind, unscale):
    a, ours = make(kind)
    b, theirs = make("torch")
    scaler = tw.LossScaler(2.0**10, growth_interval=2)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(9):
        bad = step in (3, 4, 7)
        iterate(scaler, ours, a, step, bad, unscale)
        iterate(reference, theirs, b, step, bad, unscale)
        assert scaler.get_scale() == reference.get_scale()
        for p, q in zip(a, b):
            torch.testing.assert_close(p, q)
    assert scaler.state_dict().items() >= reference.state_dict().items()


def test_our_step_does_not_touch_the_gradients_and_clips_the_unscaled_ones():
    p = torch.zeros(2, requires_grad=True)
    optimizer = tw.optim.AdamW([p], max_grad_norm=1.0)
    scaler = tw.LossScaler(1024.0)
    scaler.scale((p * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.step(optimizer)
    assert p.grad.tolist() == [3072.0, 4096.0] and optimizer.last_step.grad_norm.item() == 5.0
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.tensor([0.06, 0.08]))
    scaler.update()


def test_floor():
    p, optimizer = make("ours")
    scaler = tw.LossScaler(8.0, min_scale=3.0)
    scales = []
    for step in range(4):
        iterate(scaler, optimizer, p, step, bad=True)
        scales.append(scaler.get_scale())
    assert scales == [4.0, 3.0, 3.0, 3.0]


def test_hysteresis_counts_overflows_in_a_row():
    p, optimizer = make("ours")
    scaler = tw.LossScaler(64.0, hysteresis=3, growth_interval=3)
    scales = []
    #           2 are forgiven, a good one, then 4 in a row: the third and fourth back off; 3 good ones grow
    for step, bad in enumerate([1, 1, 0, 1, 1, 1, 1, 0, 0, 0]):
        iterate(scaler, optimizer, p, step, bad)
        scales.append(scaler.get_scale())
        assert optimizer.last_step.skipped.item() == bool(bad)
    assert scales == [64, 64, 64, 64, 64, 32, 16, 16, 16, 32]


@pytest.mark.parametrize("source", ["ours", "GradScaler"])
def test_state_round_trip(source):
    first = tw.LossScaler(2.0**9, growth_interval=3, hysteresis=2, min_scale=2.0)
    if source == "GradScaler":
        first = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=3)
    p, optimizer = make("torch")
    for step, bad in enumerate([0, 0, 1, 0]):
        iterate(first, optimizer, p, step, bad)
    second = tw.LossScaler(4.0, hysteresis=2, min_scale=2.0)
    second.load_state_dict(first.state_dict())
    assert second.state_dict().items() >= first.state_dict().items()
    third = torch.amp.GradScaler("cpu")
    third.load_state_dict(second.state_dict())
    assert third.get_scale() == first.get_scale()


def test_fp16_parameters_train_with_scaled_gradients():
    p = torch.ones(16, dtype=torch.float16, requires_grad=True)
    optimizer = tw.optim.AdamW([p], lr=1e-3, weight_decay=0.0)
    scaler = tw.LossScaler(2.0**15)
    for _ in range(10):
        optimizer.zero_grad()
        scaler.scale((p.float() * 1e-7).sum()).backward()  # 1e-7 itself is a subnormal in fp16
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[p]["master"][0].item() == pytest.approx(0.99, abs=2e-3)
    with pytest.raises(ValueError, match="fp16 gradients would underflow"):
        scaler.unscale_(optimizer)


def test_two_optimizers_share_one_scale():
    (p, first), (q, second) = make("ours"), make("ours")
    scaler = tw.LossScaler(16.0)
    before = [x.detach().clone() for x in p]
    scaler.scale(sum(x.sum() for x in q)).backward()
    for x in p:
        x.grad = torch.full_like(x, math.inf)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert scaler.get_scale() == 8.0 and all(same_bits(x.detach(), y) for x, y in zip(p, before))
    assert first.last_step.skipped and not second.last_step.skipped


def test_scale_of_containers_and_new_scale():
    scaler = tw.LossScaler(4.0)
    one = torch.ones(())
    assert scaler.scale([one, (one, one)]) == [4.0, (4.0, 4.0)]
    scaler.update(10.0)
    assert scaler.get_scale() == 10.0 and scaler.scale(one).item() == 10.0


def test_disabled_calls_through():
    p, optimizer = make("ours")
    q, plain = make("ours")
    scaler = tw.LossScaler(enabled=False)
    for params, o in ((p, optimizer), (q, plain)):
        for x in params:
            x.grad = torch.ones_like(x)
        scaler.step(o) if o is optimizer else o.step()
    scaler.update()
    assert scaler.scale(torch.ones(())).item() == 1.0 and scaler.get_scale() == 1.0
    assert scaler.state_dict() == {} and all(
        same_bits(a.detach(), b.detach()) for a, b in zip(p, q)
    )


def test_calls_out_of_order_are_errors():
    p, optimizer = make("ours")
    scaler = tw.LossScaler(4.0)
    with pytest.raises(RuntimeError, match="no step"):
        scaler.update()
    scaler.scale(sum(x.sum() for x in p)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="call update"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="call update"):
        scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: 1.0)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"init_scale": 0}, ValueError, "init_scale: expected a positive number"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor: expected a number above 1"),
        ({"backoff": 1.5}, ValueError, "backoff: expected a number below 1"),
        ({"growth_interval": 0}, ValueError, "growth_interval: expected at least 1"),
        ({"hysteresis": 1.0}, TypeError, "hysteresis: expected an int"),
        (
            {"init_scale": 1.0, "min_scale": 2.0},
            ValueError,
            "init_scale: expected at least min_scale",
        ),
    ],
)
def test_bad_arguments(kwargs, error, text):
    with pytest.raises(error, match=text):
        tw.LossScaler(**kwargs)
