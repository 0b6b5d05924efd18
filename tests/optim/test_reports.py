"""Failures that users reported of other optimizers, one named case each; the numbers are those of
shared/reference/optimizers.md, section 4. What is tested more widely elsewhere is said in the case.
"""

import copy
import io
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import trainwright as tw
from numerics import same_bits

from optim.classes import ALL, BY_NAME, TORCH, assert_same_run, copies, leaf, parameters, train

every = pytest.mark.parametrize("optimizer", ALL, ids=str)
with_torch = pytest.mark.parametrize("optimizer", TORCH, ids=str)


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def one_step(optimizer, p, grad, **options):
    p.grad = grad
    o = optimizer.ours([p], **{**optimizer.options, **options})
    o.step()
    return o


# ---- 1: torch's fused CPU optimizers ignore strides (all layouts, formats: test_every_optimizer.py)


@every
def test_1_a_transposed_gradient(optimizer):
    start, g = torch.randn(16, 8), torch.randn(8, 16)
    p, q = leaf(start.clone()), leaf(start.clone())
    one_step(optimizer, p, g.t())
    one_step(optimizer, q, g.t().contiguous())
    assert same_bits(p.detach(), q.detach())


@every
def test_1_an_expanded_gradient(optimizer):
    """NaN in torch: it reads beyond the one element that is there."""
    p, q = leaf(torch.ones(5, 7)), leaf(torch.ones(5, 7))
    one_step(optimizer, p, torch.tensor(2.0).expand(5, 7))
    one_step(optimizer, q, torch.full((5, 7), 2.0))
    assert same_bits(p.detach(), q.detach()) and p.isfinite().all()


@every
def test_1_a_parameter_that_is_every_second_column(optimizer):
    """torch changes 16 elements outside of the view, and only half of those inside."""
    base = torch.randn(4, 16)
    before = base.clone()
    one_step(optimizer, leaf(base[:, ::2]), torch.ones(4, 8))
    assert (base[:, ::2] != before[:, ::2]).all() and same_bits(base[:, 1::2], before[:, 1::2])


@every
def test_1_channels_last_after_one_step_and_from_a_contiguous_checkpoint(optimizer):
    x, g = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    runs = []
    for when in ("never", "after a step", "resume"):
        p = leaf(x.clone())
        o = one_step(optimizer, p, g)
        if when == "after a step":
            p.data = p.data.to(memory_format=torch.channels_last)
        elif when == "resume":
            saved = through_a_file(o.state_dict())
            p = leaf(p.detach().clone().to(memory_format=torch.channels_last))
            o = optimizer.ours([p], **optimizer.options)
            o.load_state_dict(saved)
        p.grad = g.square()
        o.step()
        runs.append(p.detach().clone(memory_format=torch.contiguous_format))
    assert same_bits(runs[0], runs[1]) and same_bits(runs[0], runs[2])


# ---- 4 to 11


def test_4_sgd_with_a_first_gradient_that_comes_late():
    """TypeError in torch's fused SGD. All classes: test_behaviours.py."""
    sgd = BY_NAME["SGD"]
    a = [leaf(torch.ones(3)), leaf(torch.ones(3))]
    b = copies(a)
    ours, theirs = (
        sgd.ours(a, fused=True, **sgd.options),
        sgd.plain(b, foreach=False, **sgd.options),
    )
    for o, (p, q) in ((ours, a), (theirs, b)):
        train(o, [p], range(1))
        train(o, [p, q], range(1, 3))
    for p, q in zip(a, b):
        torch.testing.assert_close(p, q)


@every
def test_5_loaded_state_keeps_its_dtype(optimizer):
    """fp32 moments and masters of a bf16 parameter come back as bf16 in torch (pytorch#43706); and bf16 moments must
    not become fp32 (torchtitan#4615)."""
    for state_dtype in (torch.float32, torch.bfloat16):
        p, q = leaf(torch.randn(40).bfloat16()), leaf(torch.zeros(40).bfloat16())
        first = optimizer.ours([p], state_dtype=state_dtype, **optimizer.options)
        train(first, [p], range(2))
        second = optimizer.ours([q], state_dtype=state_dtype, **optimizer.options)
        second.load_state_dict(through_a_file(first.state_dict()))
        dtypes = {k: v.dtype for k, v in second.state[q].items()}
        expected = dict.fromkeys(optimizer.states, state_dtype)
        assert dtypes == {**expected, "master": torch.float32, "step": torch.float64}
        assert all(same_bits(v, second.state[q][k]) for k, v in first.state[p].items())


@with_torch
def test_6_a_checkpoint_does_not_switch_the_implementation(optimizer):
    if optimizer.name == "RMSprop":
        pytest.skip("torch has no fused RMSprop")
    p = leaf(torch.ones(3))
    plain = optimizer.plain([p], foreach=True, **optimizer.options)
    train(plain, [p], range(1))
    ours = optimizer.ours([p], fused=True, **optimizer.options)
    ours.load_state_dict(plain.state_dict())
    assert ours.param_groups[0]["fused"] is True and ours.param_groups[0]["foreach"] is None


BF16 = {
    "fp32 master": {},
    "split16": {"master_weights": "split16"},
    "stochastic": {"master_weights": "none", "stochastic_rounding": True},
    "stochastic, bf16 state": {"master_weights": "none", "stochastic_rounding": True, "state_dtype": torch.bfloat16},
}  # fmt: skip


@pytest.mark.parametrize("form", BF16)
def test_7_bf16_does_not_stall(form):
    """torch: 1.0 after 100 steps (fp32: 0.900); 1.0 after 1000 steps of decay alone (fp32: 0.905); a second moment of
    0.064 that 3000 steps without gradient do not move (should be 0.0032)."""

    def run(steps, grad, **options):
        p = leaf(torch.ones(4096, dtype=torch.bfloat16))
        o = tw.optim.AdamW([p], lr=1e-3, **BF16[form], **options)
        for _ in range(steps):
            p.grad = torch.full_like(p, grad)
            o.step()
        return p.detach().float().mean().item(), o.state[p]

    assert run(100, 1.0, weight_decay=0.0)[0] == pytest.approx(0.9, abs=3e-3)
    assert run(1000, 0.0, weight_decay=0.1)[0] == pytest.approx(0.905, abs=3e-3)
    p = leaf(torch.zeros(4096, dtype=torch.bfloat16))
    o = tw.optim.AdamW([p], lr=0.0, **BF16[form])
    p.grad = torch.zeros_like(p)
    o.step()
    o.state[p]["exp_avg_sq"].fill_(0.064)
    for _ in range(3000):
        o.step()
    assert o.state[p]["exp_avg_sq"].float().mean().item() == pytest.approx(0.0032, rel=0.02)


@every
def test_8_a_bf16_parameter_with_an_fp32_gradient(optimizer):
    """Every implementation of torch's raises. The full product of dtypes: test_ops.py."""
    p, q = leaf(torch.randn(33).bfloat16()), None
    q = leaf(p.detach().float())
    g = torch.randn(33)
    o = one_step(optimizer, p, g)
    one_step(optimizer, q, g.clone())
    assert same_bits(o.state[p]["master"], q.detach()) and same_bits(
        p.detach(), q.detach().bfloat16()
    )
    assert p.grad is g


@every
def test_11_the_step_count_does_not_saturate(optimizer):
    """fp32 counts stop at 2^24; and a count in fp64 must survive a checkpoint (pytorch#173901)."""
    p = leaf(torch.ones(3))
    o = optimizer.ours([p], **optimizer.options)
    train(o, [p], range(1))
    o.state[p]["step"].fill_(2**24)
    train(o, [p], range(3))
    again = optimizer.ours([p], **optimizer.options)
    again.load_state_dict(through_a_file(o.state_dict()))
    assert o.state[p]["step"].item() == again.state[p]["step"].item() == 2**24 + 3


# ---- 15 to 22


@every
def test_15_zero_size_tensors_anywhere_do_not_stop_the_others(optimizer):
    """TransformerEngine #3207: last in the group, and earlier updates are silently not launched."""
    for sizes in ([5, 0], [0, 5], [0], [0, 5, 0, 0, 7, 0], [3] * 40 + [0]):
        params = [leaf(torch.ones(n)) for n in sizes]
        train(optimizer.ours(params, **optimizer.options), params, range(1))
        assert all((p != 1).all() for p in params)


def test_16_masters_of_bf16_parameters_are_not_ignored():
    """apex#1728: `master_weights=True` does nothing for bf16."""
    for dtype in (torch.bfloat16, torch.float16):
        p = leaf(torch.ones(4, dtype=dtype))
        o = tw.optim.AdamW([p], lr=5e-5, weight_decay=0.0, master_weights="fp32")
        for _ in range(3):
            p.grad = torch.ones_like(p)
            o.step()
        assert (p == 1).all() and (o.state[p]["master"] < 0.99986).all()


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float32)], ids=str
)
def test_17_intermittent_gradients_have_their_own_bias_correction(dtypes):
    """DeepSpeed #8471 counts on the last parameter only, and once per dtype; #7819 differed between sub-groups."""
    a = [leaf(torch.ones(5).to(d)) for d in dtypes]
    together = tw.optim.AdamW([{"params": a[:1]}, {"params": a[1:]}], lr=0.01)
    b = copies(a)
    alone = [tw.optim.AdamW([q], lr=0.01) for q in b]
    for step in range(6):
        for i, (p, q) in enumerate(zip(a, b)):
            p.grad = q.grad = None
            if step % (i + 1) == 0:
                p.grad = torch.full_like(p, 1.0 + step)
                q.grad = p.grad.clone()
        together.step()
        for o in alone:
            o.step()
    for p, q, o in zip(a, b, alone):
        assert_same_run([p], together, [q], o)
    assert [together.state[p]["step"].item() for p in a] == [6, 3, 2]


def test_18_decay_is_coupled_in_adam_and_decoupled_in_adamw_and_lion():
    """DeepSpeed #8307, FlagGems #4988, bitsandbytes' Lion."""
    values = {}
    for name in ("Adam", "AdamW", "Lion", "SGD"):
        p = leaf(torch.full((1,), 10.0))
        options = {"momentum": 0.0} if name == "SGD" else {}
        o = getattr(tw.optim, name)([p], lr=0.1, weight_decay=0.5, **options)
        p.grad = torch.full((1,), 1e-3)
        o.step()
        values[name] = p.item()
        if name != "SGD":
            moment = o.state[p]["exp_avg"].item()
            coupled = (1e-3 + 5.0) * 0.1
            plain = {"AdamW": 1e-4, "Lion": 1e-5}
            assert moment == pytest.approx(plain.get(name, coupled), rel=1e-3)
    # decoupled: 10 (1 − 0.1·0.5) − 0.1 · sign; coupled: 10 − 0.1 · sign, or the gradient itself
    expected = {"Adam": 9.9, "AdamW": 9.4, "Lion": 9.4, "SGD": 10 - 0.1 * 5.001}
    assert values == pytest.approx(expected, rel=1e-5)


@every
def test_19_strided_parameters_and_moments_are_updated_in_place(optimizer):
    """DeepSpeed updates a contiguous copy and drops it; a gradient's pointer is cast to the parameter's type."""
    start = torch.randn(6, 5)
    p, q = leaf(start.t().clone(memory_format=torch.contiguous_format).t()), leaf(start.clone())
    o = optimizer.ours([p], **optimizer.options)
    r = optimizer.ours([q], **optimizer.options)
    for step in range(3):
        for x in (p, q):
            x.grad = start.double() * (step + 1)
        if step == 1:  # moments in a layout that is not the parameter's
            for name in optimizer.states:
                o.state[p][name] = o.state[p][name].clone(memory_format=torch.contiguous_format)
        o.step()
        r.step()
    assert same_bits(p.detach(), q.detach())
    for name in optimizer.states:
        assert same_bits(o.state[p][name].contiguous(), r.state[q][name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every
def test_19_low_precision_at_any_address(optimizer, dtype):
    """DeepSpeed: aligned stores crash (#1983 shape (1024,) fp16; #4687 bf16)."""
    base, grads = torch.randn(1030).to(dtype), torch.randn(1030).to(dtype)
    for offset in range(5):
        p = leaf(base.clone()[offset : offset + 1024])
        q = leaf(p.detach().clone())
        one_step(optimizer, p, grads[offset : offset + 1024])
        one_step(optimizer, q, grads[offset : offset + 1024].clone())
        assert same_bits(p.detach(), q.detach())


@every
def test_20_elements_beyond_2_to_the_31(optimizer):
    """pytorch#101449, apex#1654, DeepSpeed #7640 (never updated). The pages between the elements are never touched."""
    far = 2**30 + 7
    base = torch.empty(2 * far + 2, dtype=torch.bfloat16)
    p = base.as_strided((3, 2), (far, 1))
    p.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    p, q = leaf(p), leaf(p.clone(memory_format=torch.contiguous_format))
    assert p.stride() == (far, 1)
    for x in (p, q):
        one_step(optimizer, x, torch.ones(3, 2))
    assert (
        same_bits(p.detach(), q.detach())
        and (p.detach() != torch.arange(1.0, 7.0).view(3, 2)).any()
    )


@pytest.mark.slow
def test_20_a_tensor_of_more_than_2_to_the_31_elements():
    n = 2**31 + 9
    if _free_bytes() < 3 * n:
        pytest.skip("needs 6 GB of free memory")
    p = leaf(torch.ones((), dtype=torch.bfloat16).repeat(n))
    p.grad = torch.ones((), dtype=torch.bfloat16).expand(n)
    tw.optim.SGD([p], lr=0.5, master_weights="none").step()
    for part in (p.detach()[:9], p.detach()[2**31 - 9 :], p.detach()[2**30 : 2**30 + 9]):
        assert (part == 0.5).all()


def _free_bytes():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


@every
def test_21_a_parameter_stays_where_it_is(optimizer):
    """bitsandbytes re-homes non-contiguous parameters: views of a flat buffer and tied views part from it."""
    flat = torch.randn(60)
    params = [leaf(flat[:20].view(4, 5).t()), leaf(flat[20:60].view(5, 8)[:, 1::3])]
    tied = flat[:20].view(4, 5)
    addresses = [p.data_ptr() for p in params]
    before = flat.clone()
    train(optimizer.ours(params, state_dtype="int8", **optimizer.options), params, range(2))
    assert [p.data_ptr() for p in params] == addresses
    assert same_bits(tied, params[0].detach().t()) and (flat[:20] != before[:20]).all()


@pytest.mark.parametrize("name", [o.name for o in ALL if o.name != "Lamb"])
def test_22_8_bit_state_does_not_depend_on_the_sharding(name):
    """bitsandbytes #2080, torchao #4906 choose by the size of the shard. LAMB's norms belong to the whole parameter.
    Other formats: test_every_optimizer.py."""
    optimizer = BY_NAME[name]
    whole = leaf(torch.randn(5000))
    cuts = [0, 256, 1024, 4864, 5000]
    shards = [leaf(whole.detach()[a:b].clone()) for a, b in pairwise(cuts)]
    for shard, begin in zip(shards, cuts):
        shard.shard_offset = begin
    one, parts = (
        optimizer.ours(x, state_dtype="int8", stochastic_rounding=True, **optimizer.options)
        for x in ([whole], shards)
    )
    for step in range(3):
        g = torch.randn(5000, generator=torch.Generator().manual_seed(step))
        whole.grad = g
        for shard, a, b in zip(shards, cuts, cuts[1:]):
            shard.grad = g[a:b].clone()
        one.step()
        parts.step()
    assert same_bits(torch.cat([s.detach() for s in shards]), whole.detach())
    for n in optimizer.states:
        assert one.state[whole][n].dtype in (torch.int8, torch.uint8)
        assert same_bits(torch.cat([parts.state[s][n] for s in shards]), one.state[whole][n])


# ---- 24 to 30


@every
def test_24_8_bit_state_resumes(optimizer):
    """bitsandbytes #782, #1381, #1350. All formats: test_behaviours.py."""
    a = parameters()
    first = optimizer.ours(a, state_dtype="int8", **optimizer.options)
    train(first, a, range(2))
    b = copies(a)
    second = optimizer.ours(b, state_dtype="int8", **optimizer.options)
    second.load_state_dict(through_a_file(first.state_dict()))
    for o, params in ((first, a), (second, b)):
        train(o, params, range(2, 4))
    assert_same_run(a, first, b, second)


@pytest.mark.parametrize("name", [*BY_NAME, "Muon"])
def test_25_an_overflow_does_not_reach_the_momentum(name):
    """DeepSpeed's Muon (#8432, #8435) folds it in before the step is skipped."""
    options = BY_NAME[name].options if name in BY_NAME else {"lr": 0.02}
    a = [leaf(torch.randn(8, 6)), leaf(torch.randn(4, 4))]
    o = getattr(tw.optim, name)(a, **options)
    scaler = tw.LossScaler(2.0**4)
    for step in range(3):
        before = copy.deepcopy(o.state_dict()["state"]), [p.detach().clone() for p in a]
        o.zero_grad()
        scaler.scale(
            sum(p.square().sum() for p in a) * (float("inf") if step == 2 else 1)
        ).backward()
        scaler.step(o)
        scaler.update()
    assert o.last_step.skipped.item() and all(
        same_bits(p.detach(), q) for p, q in zip(a, before[1])
    )
    for k, s in o.state_dict()["state"].items():
        assert all(same_bits(v, before[0][k][n]) for n, v in s.items())
        assert all(v.isfinite().all() for v in s.values())


def test_25_muon_is_finite_for_the_reported_shape():
    """dion#76: NaN for (512, 1408)."""
    p = leaf(torch.randn(512, 1408))
    o = tw.optim.Muon([p], lr=0.02)
    p.grad = torch.randn(512, 1408) * 1e-6
    before = p.detach().clone()
    o.step()
    assert p.isfinite().all() and (p != before).any()


@pytest.mark.parametrize("kind", ["GradScaler", "LossScaler"])
@every
def test_26_a_skipped_step_is_visible_to_who_moves_the_schedule(optimizer, kind):
    """accelerate#4242: the scheduler advances although nothing was updated."""
    p = leaf(torch.ones(3))
    o = optimizer.ours([p], **optimizer.options)
    scheduler = torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
    scaler = (
        tw.LossScaler(4.0) if kind == "LossScaler" else torch.amp.GradScaler("cpu", init_scale=4.0)
    )
    for bad in (True, False, True, True, False):
        o.zero_grad()
        scaler.scale(p.sum() * (float("inf") if bad else 1.0)).backward()
        scaler.step(o)
        scaler.update()
        assert o.last_step.skipped.item() is bad
        if not o.last_step.skipped:
            scheduler.step()
    assert o.param_groups[0]["lr"] == optimizer.options["lr"] / 4 and o.state[p]["step"].item() == 2


def test_27_an_apex_checkpoint():
    """apex#577: KeyError bias_correction; #1615: the step is in the group. All packages: test_checkpoints.py."""
    p, q = leaf(torch.ones(3)), leaf(torch.ones(3))
    plain, ours = torch.optim.AdamW([p], lr=0.1), tw.optim.AdamW([q])
    train(plain, [p], range(4))
    moments = {k: v.clone() for k, v in plain.state[p].items() if k != "step"}
    group = {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "bias_correction": True,
        "step": 4,
    }
    q.data.copy_(p.data)
    ours.load_state_dict({"state": {0: moments}, "param_groups": [{**group, "params": [0]}]})
    for o, x in ((plain, p), (ours, q)):
        train(o, [x], range(4, 6))
    torch.testing.assert_close(q, p)


def test_29_offload_with_clipping_accumulation_groups_and_a_stock_scheduler():
    """torchao's drops one of each, and loads a checkpoint of another size silently. More: test_offload.py."""
    runs = []
    for wrap in (lambda o: o, tw.optim.Offload):
        params = parameters()
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.03}]
        o = wrap(tw.optim.AdamW(groups, lr=0.1, max_grad_norm=0.7))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(o, 4)
        for step in range(3):
            o.zero_grad()
            for micro in range(2):
                torch.manual_seed(10 * step + micro)
                sum((p * torch.randn(p.shape)).sum() for p in params).backward()
            o.step()
            scheduler.step()
        runs.append((params, o))
    assert_same_run(*runs[0], *runs[1])
    other = tw.optim.AdamW(parameters()[:3])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        runs[1][1].load_state_dict(other.state_dict())


def calls_of_a_step(optimizer):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    ours = [e for e in profile.key_averages() if e.key.startswith("trainwright::adamw")]
    return sum(e.count for e in ours)


def test_30_a_group_per_parameter_is_still_one_call():
    """rf-detr#1409: groups kill fusing."""
    params = [leaf(torch.full((2,), float(i % 7))) for i in range(300)]
    groups = [{"params": [p], "lr": 0.001 * (1 + i % 3)} for i, p in enumerate(params)]
    o = tw.optim.AdamW(groups, weight_decay=0.0)
    for p in params:
        p.grad = torch.ones(2)
    assert calls_of_a_step(o) == 1
    for i in (0, 1, 2, 299):
        expected = torch.full((2,), i % 7 - 0.001 * (1 + i % 3))
        torch.testing.assert_close(params[i].detach(), expected)


def test_30_twenty_thousand_tensors():
    """TransformerEngine #3418: a pool of handles is exhausted."""
    params = [leaf(torch.ones(2)) for _ in range(20_000)]
    o = tw.optim.AdamW(params, lr=0.5, weight_decay=0.0)
    for p in params:
        p.grad = torch.ones(2)
    o.step()  # by lists
    o.step()  # by the table of addresses
    assert o._plan is not None
    values = torch.stack([p.detach() for p in params])
    assert values.unique().numel() == 1 and values[0, 0].abs() < 1e-5
