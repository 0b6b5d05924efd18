"""Cases of DataParallel that run in the ranks (see rank_pool.py). Each states what users rely on; many are reports."""

import copy
import gc
import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist
import trainwright as tw
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainwright.parallel import DataParallel, LayoutError, _job, layout

TIMEOUT = 20.0


def wrap(module, **options):
    return DataParallel(module, **{"timeout": TIMEOUT, **options})


def mlp(*sizes, dtype=torch.float64, bias=True):
    torch.manual_seed(1)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=bias, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(rows, columns, dtype=torch.float64, seed=7):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def share(x, rank, world, sizes=None):
    """This rank's rows; `sizes` gives each rank's number of rows."""
    if sizes is None:
        return x[rank::world]
    start = sum(sizes[:rank])
    return x[start : start + sizes[rank]]


def grads(module):
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def everyone(value):
    """The value of each rank."""
    result = [None] * dist.get_world_size()
    dist.all_gather_object(result, value)
    return result


def assert_same_on_all_ranks(tensors):
    for other in everyone(tensors):
        for name, x in tensors.items():
            y = other[name]
            assert (x is None) == (y is None), name
            assert x is None or torch.equal(x, y), name


def assert_close(a, b, rtol=1e-11, atol=1e-13):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] is None) == (b[name] is None), name
        assert a[name] is None or torch.equal(a[name], b[name]), name


# ---- averaging


def one_process_on_the_whole_batch(rank, world):
    """Uneven shares, weighted by rows, three optimizer steps: parameters as of one process, and equal on all ranks."""
    alone = mlp(6, 9, 9, 3)
    dp = wrap(copy.deepcopy(alone), bucket_mb=0.0005)
    sizes = [r + 2 for r in range(world)]
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (dp, alone))
    for step in range(3):
        x = batch(sum(sizes), 6, seed=step)
        theirs.zero_grad()
        alone(x).square().mean().backward()
        theirs.step()
        ours.zero_grad()
        dp.loss_weight(sizes[rank])
        dp(share(x, rank, world, sizes)).square().mean().backward()
        ours.step()
    assert_close(dp.state_dict(), alone.state_dict())
    assert_same_on_all_ranks(dict(dp.named_parameters()))
    stats = dp.stats()
    assert stats.step == 2
    assert stats.buckets > 1
    assert (stats.sent_bytes > 0) == (world > 1)


def start_from_rank_0(rank, world):
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Conv1d(2, 3, 1))
    model[1].running_mean.fill_(rank)
    dp = wrap(model)
    assert_same_on_all_ranks(dict(dp.state_dict()))
    assert dp.state_dict()["1.running_mean"].eq(0).all()


def sums_in_rank_order_at_every_position(rank, world):
    """Exactly ((g0 + g1) + g2) / W in fp32, whatever the buckets, even where parameters are cut."""
    x = batch(4 * world, 33, torch.float32, seed=3)

    def run(**options):
        model = mlp(33, 192, 40, 5, dtype=torch.float32)
        dp = wrap(model, **options)
        for _ in range(2):  # the second step launches in the learned order
            dp.zero_grad()
            dp(share(x, rank, world)).square().sum().backward()
        return grads(dp), dp.stats().buckets

    local = mlp(33, 192, 40, 5, dtype=torch.float32)
    local(share(x, rank, world)).square().sum().backward()
    expected = {}
    for name, parts in ((n, [e[n] for e in everyone(grads(local))]) for n in grads(local)):
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        expected[name] = total * (1.0 / world)
    before, layout.MIN_PIECE_BYTES = layout.MIN_PIECE_BYTES, 64
    try:
        counts = set()
        for options in (
            {},
            {"bucket_mb": 1e-9},
            {"bucket_mb": 0.0007},
            {"bucket_mb": 0.004},
            {"bucket_mb": 1000},
        ):
            got, buckets = run(**options)
            counts.add(buckets)
            assert_equal(got, expected)
    finally:
        layout.MIN_PIECE_BYTES = before
    assert len(counts) >= 4, counts


def large_gradients_are_exchanged_where_they_lie(rank, world):
    """Without a copy, to the same bits: also with weights, and where a rank has no gradient."""
    copies = []

    def run(weight, everywhere, **options):
        torch.manual_seed(1)
        module = nn.ParameterDict({"a": torch.randn(192, 8), "b": torch.randn(192, 16)})
        dp = wrap(module, unused="zero", **options)
        a, b = (torch.randn(p.shape) + rank for p in module.values())
        loss = (module["a"] * a).square().sum()
        if everywhere or rank:
            loss = loss + (module["b"] * b).square().sum()
        dp.loss_weight(weight)
        copies.clear()
        loss.backward()
        return grads(dp)

    before, layout.MIN_PIECE_BYTES = layout.MIN_PIECE_BYTES, 64
    run_op = _job.run_op
    _job.run_op = lambda op, *arguments: copies.append(op) or run_op(op, *arguments)
    try:
        for everywhere in (True, False):
            for weights in (
                [1.0] * world,
                [3.0 + r for r in range(world)],
                [1.0] + [0.0] * (world - 1),
            ):
                weight = weights[rank]
                got = run(weight, everywhere)
                if everywhere and weights[0] == weights[-1]:
                    assert copies == []
                assert_equal(got, run(weight, everywhere, bucket_mb=1000))
                assert "bucket_pack" in copies or world == 1
    finally:
        layout.MIN_PIECE_BYTES, _job.run_op = before, run_op


def nan_stays_where_it_is(rank, world):
    """A NaN on one rank reaches that element on every rank, and no other."""
    model = nn.Linear(5, 3, bias=False)
    dp = wrap(model, bucket_mb=1e-5)
    scale = torch.ones(3, 5)
    if rank == world - 1:
        scale[1, 2], scale[2, 4] = float("nan"), float("inf")
    (dp.weight * scale).sum().backward()
    expected = torch.ones(3, 5)
    expected[1, 2], expected[2, 4] = float("nan"), float("inf")
    torch.testing.assert_close(dp.weight.grad, expected, equal_nan=True)


def weight_zero_counts_for_nothing(rank, world):
    """A rank without tokens: its NaN gradient is left out, and its unused parameters are no error."""
    model = mlp(3, 3)
    dp = wrap(model)
    x = batch(2, 3)
    local = copy.deepcopy(model)
    local(x).sum().backward()
    if rank == 0:
        dp.loss_weight(0)
        (dp(x)[:, 0].sum() * float("nan")).backward()
    else:
        dp.loss_weight(torch.tensor(3))
        dp(x).sum().backward()
    assert_close(grads(dp), grads(local))
    dp.zero_grad()
    dp(x).sum().backward()  # the weight was for one backward only
    assert_close(grads(dp), grads(local))
    dp.zero_grad()
    dp.loss_weight(0)
    dp(x).sum().backward()  # no rank has any
    assert all(g.eq(0).all() for g in grads(dp).values())


def sixteen_bit_gradients_are_summed_in_fp32(rank, world):
    """bf16 parameters: the fp32 sum rounded once, with equal weights (bf16 on the wire) and unequal ones (fp32)."""
    torch.manual_seed(rank)
    for dtype, weights in (
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, (1, 2, 3, 7)),
    ):
        g = torch.randn(1000).to(dtype)
        p = nn.Module()
        p.w = nn.Parameter(torch.zeros(1000, dtype=dtype))
        dp = wrap(p)
        if weights:
            dp.loss_weight(weights[rank])
        (dp.w * g).sum().backward()
        w = weights[:world] if weights else [1] * world
        total = torch.zeros(1000)
        for r, other in enumerate(everyone(g)):
            total = total + other.float() * w[r]
        expected = (total * (1.0 / sum(w))).to(dtype)
        assert dp.w.grad.dtype == dtype
        assert torch.equal(dp.w.grad, expected)
        sent = 2000 if weights is None else 3000
        assert dp.stats().sent_bytes >= sent * 2 * (world - 1) // world


def bf16_on_the_wire(rank, world):
    """wire_dtype=bf16: each gradient and the average are rounded to bf16, the sum is fp32; half the bytes."""
    torch.manual_seed(rank)
    g = torch.randn(4096)
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(4096))
    dp = wrap(module, wire_dtype=torch.bfloat16)
    (dp.w * g).sum().backward()
    total = sum(other.bfloat16().float() for other in everyone(g))
    expected = (total * (1.0 / world)).bfloat16().float()
    assert torch.equal(dp.w.grad, expected)
    padded = -(-4096 // (16 * world)) * 16 * world
    assert dp.stats().sent_bytes == 2 * 2 * padded * (world - 1) // world


def all_reduce_gives_the_same_average(rank, world):
    """deterministic=False."""
    alone = mlp(6, 9, 3)
    dp = wrap(copy.deepcopy(alone), deterministic=False, bucket_mb=0.0005)
    x = batch(4 * world, 6)
    alone(x).square().mean().backward()
    for _ in range(2):
        dp.zero_grad()
        dp(share(x, rank, world)).square().mean().backward()
    assert_close(grads(dp), grads(alone))


def a_group_of_some_ranks(rank, world):
    """Only the group's members take part; the first of them is its rank 0."""
    members = [1, world - 1]
    group = dist.new_group(members)
    if rank in members:
        torch.manual_seed(rank)
        dp = wrap(nn.Linear(2, 2, bias=False), group=group)
        start = dp.weight.detach().clone()
        (dp.weight.sum() * rank).backward()
        assert torch.equal(dp.weight.grad, torch.full((2, 2), sum(members) / 2))
        torch.manual_seed(1)
        assert torch.equal(start, nn.Linear(2, 2, bias=False).weight)
        dp.close()
    else:
        with pytest.raises(RuntimeError, match="not a member"):
            wrap(nn.Linear(2, 2), group=group)
    dist.barrier()


# ---- accumulation


def accumulate_is_one_process_on_all_microbatches(rank, world):
    """Uneven ranks and microbatches, weighted by rows; only the last communicates; a NaN microbatch of weight 0."""
    n = 3
    sizes = [[(r + 2 * m) % 4 + 1 for m in range(n)] for r in range(world)]
    alone = mlp(5, 7, 2)
    dp = wrap(copy.deepcopy(alone), bucket_mb=0.0003)
    rows = sum(map(sum, sizes))
    for step in range(2):
        x = batch(rows, 5, seed=step)
        alone.zero_grad()
        alone(x).square().mean().backward()
        dp.zero_grad()
        offset = sum(sum(sizes[r]) for r in range(rank))
        for m in range(n + 1):
            with dp.accumulate(m, n + 1):
                if m == 1:  # a microbatch without tokens
                    dp.loss_weight(0)
                    (dp(x[:1]).sum() * float("nan")).backward()
                    continue
                size = sizes[rank][m - (m > 1)]
                dp.loss_weight(size)
                dp(x[offset : offset + size]).square().mean().backward()
                offset += size
            if m < n:
                assert all(p.grad is None for p in dp.parameters())
                assert dp.stats().step == step - 1
        assert_close(grads(dp), grads(alone))
        assert dp.stats().step == step


def accumulate_in_fp32(rank, world):
    """64 microbatches of bf16 gradients that bf16 sums would lose (pytorch #106395)."""
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    dp = wrap(module)
    for i in range(64):
        with dp.accumulate(i, 64):
            (dp.w * (256.0 if i == 0 else 1.0)).sum().backward()
    expected = torch.full((8,), (256 + 63) / 64).bfloat16()
    assert torch.equal(dp.w.grad, expected)


def accumulate_adds_to_what_was_there(rank, world):
    dp = wrap(nn.Linear(2, 2, bias=False))
    dp.weight.grad = torch.full((2, 2), 10.0)
    mine = dp.weight.grad
    for i in range(2):
        with dp.accumulate(i, 2):
            (dp.weight * (i + 1) * (rank + 1)).sum().backward()
    expected = 10 + 1.5 * sum(range(1, world + 1)) / world
    assert dp.weight.grad is mine and torch.allclose(mine, torch.tensor(expected))


def accumulate_in_order(rank, world):
    """A microbatch out of order, or a plain backward in the middle, is an error and not a wrong gradient."""
    dp = wrap(nn.Linear(2, 2, bias=False))
    with (
        pytest.raises(ValueError, match=r"accumulate: i: expected a number in 0\.\.1, got 2"),
        dp.accumulate(2, 2),
    ):
        pass
    with dp.accumulate(0, 3):
        dp.weight.sum().backward()
    with pytest.raises(ValueError, match="i: expected 1"), dp.accumulate(2, 3):
        pass
    with pytest.raises(RuntimeError, match="a backward ran outside of it after 1 microbatches"):
        dp.weight.sum().backward()
    dp.zero_grad()
    for i in range(2):
        with dp.accumulate(i, 2):
            (dp.weight * (i + 1)).sum().backward()
    assert torch.equal(dp.weight.grad, torch.full((2, 2), 1.5))


def the_backward_decides_about_no_sync(rank, world):
    """build-nanogpt PR #30: no_sync around only the forward, or only the backward."""
    dp = wrap(nn.Linear(2, 2, bias=False))

    def loss():
        return dp(torch.full((1, 2), float(rank + 1))).sum()

    average = sum(range(1, world + 1)) / world
    with dp.no_sync():
        out = loss()
    out.backward()
    assert torch.equal(dp.weight.grad, torch.full((2, 2), average))
    dp.zero_grad()
    out = loss()
    with dp.no_sync():
        out.backward()
    assert torch.equal(dp.weight.grad, torch.full((2, 2), float(rank + 1)))
    loss().backward()  # the sum is averaged
    assert torch.equal(dp.weight.grad, torch.full((2, 2), 2 * average))


def static_counts_with_no_sync(rank, world):
    """accelerate #3679: two steps of three microbatches, gradients added, and equal on all ranks at both."""
    dp = wrap(mlp(4, 4, 4))
    alone = copy.deepcopy(dp.module)
    for step in range(2):
        dp.zero_grad()
        alone.zero_grad()
        for m in range(3):
            x = batch(2 * world, 4, seed=10 * step + m)
            alone(x).mean().backward()
            if m < 2:
                with dp.no_sync():
                    dp(share(x, rank, world)).mean().backward()
            else:
                dp(share(x, rank, world)).mean().backward()
        assert_close(grads(dp), grads(alone))
        assert dp.stats().step == step


# ---- unused, repeated, recomputed, frozen


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.never = (
            nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)
        )
        self.last = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x, branch):
        for layer in branch:
            x = getattr(self, layer)(x)
        return self.last(x)


def unused_raises_in_the_same_backward(rank, world):
    """pytorch #128949: not one step later; on every rank, naming parameter and rank; and the next step works."""
    dp = wrap(Branches())
    x = batch(2, 3)
    branch = ["first"] if rank == 1 else ["first", "second"]
    with pytest.raises(
        RuntimeError,
        match=r"no gradient for second\.weight \(rank 1\), second\.bias \(rank 1\), never",
    ):
        dp(x, branch).sum().backward()
    dp.zero_grad()
    dp(x, ["first", "second", "never"]).sum().backward()
    alone = Branches()
    alone(x, ["first", "second", "never"]).sum().backward()
    assert_close(grads(dp), grads(alone))


def unused_zero_with_branches_by_rank(rank, world):
    """pytorch #43259: other branches on other ranks, 20 steps."""
    dp, alone = wrap(Branches(), unused="zero", bucket_mb=0.0001), Branches()
    branches = [["first"], ["second"], ["second", "first"], ["first", "second"]]
    for step in range(20):
        x = batch(2, 3, seed=step)
        dp.zero_grad(set_to_none=step % 2 == 0)
        alone.zero_grad()
        dp(x, branches[(rank + step) % len(branches)]).sum().backward()
        sum(
            alone(x, branches[(r + step) % len(branches)]).sum() / world for r in range(world)
        ).backward()
        expected = {
            n: torch.zeros_like(p) if p.grad is None else p.grad
            for n, p in alone.named_parameters()
        }
        assert_close(grads(dp), expected)


def unused_skip_leaves_none(rank, world):
    """pytorch #28294: globally unused parameters keep no gradient, so weight decay does not move them."""
    dp = wrap(Branches(), unused="skip")
    optimizer = torch.optim.AdamW(dp.parameters(), weight_decay=0.5)
    before = copy.deepcopy(dp.state_dict())
    dp(batch(2, 3), ["first"] if rank == 0 else ["second"]).sum().backward()
    assert dp.never.weight.grad is None and dp.never.bias.grad is None
    assert dp.first.weight.grad is not None and dp.second.weight.grad is not None
    optimizer.step()
    after = dp.state_dict()
    assert torch.equal(after["never.weight"], before["never.weight"])
    assert not torch.equal(after["second.weight"], before["second.weight"])
    assert_same_on_all_ranks(dict(after))


def a_rank_without_any_gradient_syncs(rank, world):
    """pytorch #40566: all parameters unused on one rank."""
    dp = wrap(nn.Linear(2, 2, bias=False), unused="zero")
    if rank == 0:
        torch.ones(
            1, requires_grad=True
        ).sum().backward()  # a loss that does not depend on the parameters
        dp.sync()
    else:
        dp.weight.sum().backward()
    assert torch.allclose(dp.weight.grad, torch.full((2, 2), (world - 1) / world))
    strict = wrap(nn.Linear(2, 2, bias=False))
    with pytest.raises(RuntimeError, match=r"no gradient for weight \(rank 0\)"):
        strict.sync() if rank == 0 else strict.weight.sum().backward()


def uneven_number_of_batches(rank, world):
    """pytorch #33148: a rank that has run out of data takes part with weight 0."""
    dp = wrap(mlp(3, 3))
    alone = copy.deepcopy(dp.module)
    for step in range(world):
        x = batch(world, 3, seed=step)
        has_data = [r for r in range(world) if step <= r]
        dp.zero_grad()
        if rank in has_data:
            dp(x[rank : rank + 1]).sum().backward()
        else:
            dp.loss_weight(0)
            dp.sync()
        alone.zero_grad()
        (alone(x[has_data]).sum() / len(has_data)).backward()
        assert_close(grads(dp), grads(alone))


class Recomputed(nn.Module):
    """A block used three times, through a checkpoint, between plain layers."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(1)
        self.reentrant = reentrant
        self.block = mlp(4, 4, 4)
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x):
        for _ in range(3):
            if self.reentrant is None:
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x)


def recomputed_blocks_used_three_times(rank, world):
    """accelerate #389, pytorch #109191: both checkpoint modes, three steps, as without a checkpoint."""
    for reentrant in (True, False):
        dp = wrap(Recomputed(reentrant), bucket_mb=0.0001)
        alone = Recomputed(None)
        for step in range(3):
            x = batch(2 * world, 4, seed=step)
            dp.zero_grad()
            alone.zero_grad()
            mine = share(x, rank, world).clone().requires_grad_()
            dp(mine).mean().backward()
            alone(x).mean().backward()
            assert_close(grads(dp), grads(alone))
            assert_same_on_all_ranks(grads(dp))


def nothing_but_checkpoints(rank, world):
    """Reentrant checkpoints around everything, nested: no parameter in the outer backward. Unused still raises."""
    dp = wrap(Branches())

    def inner(y):
        return checkpoint(dp.module.second, dp.module.first(y), use_reentrant=True)

    def loss(with_never):
        x = batch(2, 3, seed=rank).requires_grad_()
        y = checkpoint(inner, x, use_reentrant=True)
        y = checkpoint(dp.module.never if with_never else dp.module.first, y, use_reentrant=True)
        return checkpoint(dp.module.last, y, use_reentrant=True).sum()

    loss(True).backward()
    alone = Branches()
    x = torch.cat([batch(2, 3, seed=r) for r in range(world)])
    (alone(x, ["first", "second", "never"]).sum() / world).backward()
    assert_close(grads(dp), grads(alone))
    with pytest.raises(RuntimeError, match=r"no gradient for never\.weight \(rank 0"):
        loss(False).backward()


def accumulate_with_recomputation(rank, world):
    dp, alone = wrap(Recomputed(True), bucket_mb=0.0001), Recomputed(None)
    for _ in range(2):
        dp.zero_grad()
        alone.zero_grad()
        for i in range(2):
            x = batch(2 * world, 4, seed=i)
            with dp.accumulate(i, 2):
                dp(share(x, rank, world).clone().requires_grad_()).mean().backward()
            (alone(x).mean() / 2).backward()
        assert_close(grads(dp), grads(alone))


def tied_and_repeated(rank, world):
    def make():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
        model[2].weight = model[0].weight
        return model

    dp, alone = wrap(make(), bucket_mb=1e-4), make()
    x = batch(2 * world, 4)
    for _ in range(2):
        dp.zero_grad()
        alone.zero_grad()
        dp(dp(share(x, rank, world))).mean().backward()
        alone(alone(x)).mean().backward()
        assert_close(grads(dp), grads(alone))


def freeze_and_unfreeze(rank, world):
    """pytorch #104690: a layer is frozen from the start, unfrozen at step 2, another one frozen at step 4."""
    dp, alone = wrap(mlp(4, 4, 4, 4), bucket_mb=1e-4), mlp(4, 4, 4, 4)
    dp.module[0].requires_grad_(True)
    for step in range(6):
        for model in (dp.module, alone):
            model[0].requires_grad_(step >= 2)
            model[2].requires_grad_(step < 4)
            model.zero_grad()
        x = batch(2 * world, 4, seed=step)
        dp(share(x, rank, world)).mean().backward()
        alone(x).mean().backward()
        assert_close(grads(dp), grads(alone))
        assert (dp.module[0].weight.grad is None) == (step < 2)


def frozen_from_the_start(rank, world):
    model = mlp(4, 4, 4)
    model[0].requires_grad_(False)
    dp = wrap(model)
    dp(batch(2, 4)).sum().backward()
    assert dp.module[0].weight.grad is None
    dp.module.requires_grad_(True)
    dp.zero_grad()
    (dp(batch(2, 4)).sum() * (rank + 1)).backward()
    assert_same_on_all_ranks(grads(dp))


def frozen_on_one_rank_only(rank, world):
    model = mlp(4, 4, 4)
    model[0].weight.requires_grad_(rank != 1)
    with pytest.raises(LayoutError, match=r"rank 1.*: 0\.weight: "):
        wrap(model)
    dp = wrap(mlp(4, 4, 4), timeout=8.0)
    dp.module[2].bias.requires_grad_(rank != 1)
    with pytest.raises(tw.parallel.CollectiveError, match=r"2\.bias: "):
        dp(batch(2, 4)).sum().backward()


def mixed_dtypes(rank, world):
    """bf16 matrices between fp32 norms and an fp64 head; each averaged in its own dtype."""
    torch.manual_seed(1)
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    module.b = nn.Parameter(torch.zeros(3, 4))
    module.c = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    module.d = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
    dp = wrap(module, bucket_mb=1e-5)
    sum((p * (rank + 1)).double().sum() for p in dp.parameters()).backward()
    for p in dp.parameters():
        assert p.grad.dtype == p.dtype
        assert torch.equal(p.grad, torch.full_like(p, sum(range(1, world + 1)) / world))


# ---- gradients of every kind


def strided_and_complex(rank, world):
    """pytorch #47163, #70222: channels_last, transposed, 1x1 convolution, complex."""
    torch.manual_seed(1)
    model = nn.Module()
    model.conv = nn.Conv2d(4, 6, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    model.pointwise = nn.Conv2d(6, 5, 1, dtype=torch.float64)
    model.turned = nn.Parameter(torch.randn(5, 7, dtype=torch.float64).t())
    model.phase = nn.Parameter(torch.randn(5, 2, dtype=torch.complex128))
    alone, dp = copy.deepcopy(model), wrap(model, bucket_mb=1e-4)

    def loss(m, x):
        y = m.pointwise(m.conv(x.to(memory_format=torch.channels_last))).mean((2, 3))
        return ((y @ m.turned.t()).sum() + (y.to(torch.complex128) @ m.phase).abs().sum()) / len(x)

    x = torch.randn(2 * world, 4, 5, 5, dtype=torch.float64)
    loss(dp.module, share(x, rank, world)).backward()
    loss(alone, x).backward()
    assert_close(grads(dp), grads(alone))
    for p in dp.parameters():
        assert p.grad.stride() == p.stride() and p.grad.dtype == p.dtype


def empty_parameters(rank, world):
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(0))
    module.b = nn.Parameter(torch.zeros(3))
    module.c = nn.Parameter(torch.zeros(2, 0, 4, dtype=torch.bfloat16))
    for bucket_mb in ("auto", 1e-9):
        dp = wrap(copy.deepcopy(module), bucket_mb=bucket_mb)
        sum(p.float().sum() * (rank + 1) for p in dp.parameters()).backward()
        assert dp.a.grad.shape == (0,) and dp.c.grad.shape == (2, 0, 4)
        assert torch.equal(dp.b.grad, torch.full((3,), sum(range(1, world + 1)) / world))


def gradients_of_the_user(rank, world):
    """Assigned, expanded, zeroed in place; in place stays in place."""
    average = sum(range(1, world + 1)) / world
    dp = wrap(nn.Linear(2, 3, bias=False))
    mine = torch.full((3, 2), 5.0)
    dp.weight.grad = mine
    (dp.weight * (rank + 1)).sum().backward()
    assert dp.weight.grad is mine and torch.equal(mine, torch.full((3, 2), 5 + average))
    dp.zero_grad(set_to_none=False)
    assert dp.weight.grad is mine
    (dp.weight * (rank + 1)).sum().backward()
    assert dp.weight.grad is mine and torch.equal(mine, torch.full((3, 2), average))
    lax = wrap(nn.Linear(2, 3), unused="zero")
    lax.bias.grad = torch.full((1,), rank + 1.0).expand(3)
    (lax.weight * (rank + 1)).sum().backward()
    if world > 1:  # one rank alone leaves everything as it is
        assert torch.equal(lax.bias.grad, torch.full((3,), average))


def gradients_are_held_by_the_user(rank, world):
    """A gradient kept from an earlier step does not change when the next one comes."""
    dp = wrap(nn.Linear(2, 2, bias=False))
    (dp.weight * 1.0).sum().backward()
    kept = dp.weight.grad
    dp.zero_grad()
    (dp.weight * 3.0).sum().backward()
    assert torch.equal(kept, torch.ones(2, 2)) and torch.equal(
        dp.weight.grad, torch.full((2, 2), 3.0)
    )


def gradient_of_a_gradient(rank, world):
    """create_graph=True: the average is a plain tensor, as with torch."""
    dp = wrap(mlp(3, 3))
    x = batch(2, 3, seed=rank).requires_grad_()
    (slope,) = torch.autograd.grad(dp(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert_same_on_all_ranks(grads(dp))
    dp.zero_grad()
    dp(x).square().sum().backward(create_graph=True)
    assert_same_on_all_ranks({n: g.detach() for n, g in grads(dp).items()})
    dp.zero_grad()


def autograd_grad_is_local(rank, world):
    """pytorch #47562: documented, and no hang."""
    dp = wrap(nn.Linear(2, 2, bias=False))
    (g,) = torch.autograd.grad((dp.weight * (rank + 1)).sum(), dp.weight)
    assert torch.equal(g, torch.full((2, 2), float(rank + 1)))


def hooks_of_the_user(rank, world):
    """On tensors and modules they act on this rank's own gradients; after the backward there is the average."""
    dp = wrap(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False)))
    expected = wrap(copy.deepcopy(dp.module))
    seen = []
    dp.module[0].weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    dp.module[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    dp.module[1].register_full_backward_hook(lambda m, inner, outer: seen.append("module"))
    for step in range(2):
        seen.clear()
        x = batch(2, 3, torch.float32, seed=10 * step + rank)
        for model in (dp, expected):
            model.zero_grad()
            model(x).sum().backward()
        local = copy.deepcopy(dp.module)
        local.zero_grad()
        local(x).sum().backward()
        own = next(s for s in seen if isinstance(s, torch.Tensor))
        assert torch.equal(own, local[0].weight.grad)
        assert "accumulated" in seen and "module" in seen
        assert torch.allclose(dp.module[0].weight.grad, 2 * expected.module[0].weight.grad)
        assert torch.equal(dp.module[1].weight.grad, expected.module[1].weight.grad)


def sparse_gradients_are_refused(rank, world):
    dp = wrap(nn.Embedding(4, 2, sparse=True), timeout=6.0)
    with pytest.raises(TypeError, match="weight: expected a dense gradient"):
        dp(torch.tensor([1])).sum().backward()


# ---- modules, buffers, modes


def the_module_shows_through(rank, world):
    model = mlp(3, 4, 2)
    dp = wrap(model)
    assert list(dp.state_dict()) == list(model.state_dict())
    assert [n for n, _ in dp.named_parameters()] == [n for n, _ in model.named_parameters()]
    dp.load_state_dict(model.state_dict())
    model.tag = "here"
    assert dp.tag == "here"
    with pytest.raises(AttributeError):
        _ = dp.no_such_thing
    dp.eval()
    assert not model.training


def the_wrapper_may_be_bypassed(rank, world):
    dp = wrap(mlp(3, 4, 2))
    alone = copy.deepcopy(dp.module)
    x = batch(2 * world, 3)
    alone(x).mean().backward()
    dp.module(share(x, rank, world)).mean().backward()
    assert_close(grads(dp), grads(alone))


def torch_compile_inside_and_outside(rank, world):
    """The compiled graph has all gradients at once; the average is the same."""
    alone = mlp(3, 4, 2)
    x = batch(2 * world, 3)
    alone(x).mean().backward()
    for inside in (True, False):
        model = copy.deepcopy(alone)
        model.zero_grad()
        options = {"backend": "aot_eager", "fullgraph": True}
        dp = wrap(torch.compile(model, **options) if inside else model)
        run = dp if inside else torch.compile(dp, **options)
        for _ in range(2):
            dp.zero_grad()
            run(share(x, rank, world)).mean().backward()
        assert_close(grads(model), grads(alone))


def evaluation_does_not_communicate(rank, world):
    """One rank evaluates, in eval mode and under no_grad; the others do not; the step after it lines up."""
    dp = wrap(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    if rank == 0:
        dp.eval()
        dp(torch.randn(2, 3))
        dp.train()
        with torch.no_grad():
            dp(torch.randn(2, 3))
    dp(torch.randn(4, 3)).square().sum().backward()
    assert_same_on_all_ranks(grads(dp))
    assert_same_on_all_ranks(dict(dp.state_dict()))


def a_replaced_parameter_is_noticed(rank, world):
    """pytorch #12603: its hook is gone, so its gradient would silently stay local."""
    dp = wrap(mlp(3, 3, 3))
    dp.module[0].weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"0\.weight was replaced"):
        dp(batch(2, 3)).sum().backward()


def two_forwards_before_one_backward(rank, world):
    """pytorch #22095: batch norm, GAN style; buffers equal after the step; versions not bumped."""
    torch.manual_seed(rank)
    dp = wrap(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    a, b = dp(torch.randn(4, 3) + rank), dp(torch.randn(4, 3) - rank)
    assert len({m.sum().item() for m in everyone(dp.module[1].running_mean)}) == world
    version = dp.module[1].running_mean._version
    (a.square().sum() + (a * b).sum()).backward()
    assert dp.module[1].running_mean._version == version
    assert_same_on_all_ranks(dict(dp.named_buffers()))
    dp.eval()
    frozen = dp(torch.randn(4, 3))  # saves the running statistics
    dp.train()
    other = dp(torch.randn(4, 3) + rank)
    other.square().sum().backward(retain_graph=True)
    assert_same_on_all_ranks(dict(dp.named_buffers()))
    frozen.sum().backward()


def buffers_can_be_left_alone(rank, world):
    torch.manual_seed(rank)
    dp = wrap(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), broadcast_buffers=False)
    dp(torch.randn(4, 3) + rank).square().sum().backward()
    assert len({m.sum().item() for m in everyone(dp.module[1].running_mean)}) == world


def different_parameters_are_named(rank, world):
    """pytorch #68803: on all ranks, at construction; and the next construction works."""
    for make, name in (
        (
            lambda: mlp(4, 5 if rank == 1 else 4, 4),
            r"0\.weight: float64 \(4, 4\).*against float64 \(5, 4\)",
        ),
        (lambda: mlp(4, 4, 4, bias=rank != 1), r"0\.bias: .* against no such parameter"),
        (
            lambda: mlp(4, 4, dtype=torch.float32 if rank == 1 else torch.float64),
            r"0\.weight: float64",
        ),
        (lambda: nn.BatchNorm1d(3, track_running_stats=rank != 1), "running_mean: "),
    ):
        with pytest.raises(LayoutError, match=name) as caught:
            wrap(make())
        assert caught.value.ranks == (1,)
    wrap(mlp(4, 4))


def two_replicas_in_one_backward(rank, world):
    """GAN: generator and discriminator, whose gradients come in another order on another rank."""
    torch.manual_seed(1)
    first, second = wrap(mlp(3, 3, 3), bucket_mb=1e-4), wrap(mlp(3, 4, 3), bucket_mb=1e-4)
    alone = copy.deepcopy(first.module), copy.deepcopy(second.module)
    x = batch(2, 3)
    order = (first, second) if rank % 2 else (second, first)
    order[1](order[0](x)).sum().backward()
    ones = [(alone[0], alone[1]) if r % 2 else (alone[1], alone[0]) for r in range(world)]
    (sum(b(a(x)).sum() for a, b in ones) / world).backward()
    assert_close(grads(first), grads(alone[0]))
    assert_close(grads(second), grads(alone[1]))


# ---- overlap, resources


class WaitForFirstBucket(torch.autograd.Function):
    """Identity whose backward waits until the first bucket is averaged; appends whether it is to `seen`. Without
    `seen` it does not wait: buckets of the first step leave at its end.
    """

    @staticmethod
    def forward(ctx, x, dp, seen):
        ctx.dp, ctx.seen = dp, seen
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.seen is None:
            return g, None, None
        deadline = time.monotonic() + 10
        done = ctx.dp[0]._reducer.driver.round.jobs
        while time.monotonic() < deadline and not (done and done[0].complete):
            time.sleep(0.001)
        ctx.seen.append(bool(done and done[0].complete))
        return g, None, None


def the_backward_hides_the_communication(rank, world):
    """While the last layer's backward still runs, the first buckets have been averaged."""
    model, found = mlp(4, 4, 4, 4), []
    dp = wrap(model, bucket_mb=1e-4)
    for seen in (None, found):
        dp.zero_grad()
        x = WaitForFirstBucket.apply(model[0](batch(2, 4)), [dp], seen)
        model[1:](x).sum().backward()
    assert found == [True]
    assert_same_on_all_ranks(grads(dp))


def memory_that_the_backward_still_needs(rank, world):
    """Autograd lets a gradient share memory with the one that flows on: that one must not become an average."""
    module = nn.ParameterDict({"first": torch.ones(4, 4), "second": torch.zeros(16)})
    dp, found = wrap(module, bucket_mb=1e-5), []
    weight = rank + 1.0
    for seen in (None, found):
        dp.zero_grad()
        x = WaitForFirstBucket.apply(module["first"] * weight, [dp], seen)
        h = x + module["second"].view(4, 4)  # its gradient is that of h, in another shape
        (h * weight).sum().backward()
    assert found == [True]
    weights = torch.arange(1.0, world + 1)
    assert torch.equal(module["second"].grad, weights.mean().expand(16))
    assert torch.equal(module["first"].grad, weights.square().mean().expand(4, 4))


def gradients_that_are_views_of_the_user(rank, world):
    """Views of one flat buffer stay that: the averages are in it."""
    dp = wrap(nn.Linear(3, 4))
    flat = torch.zeros(16)
    dp.weight.grad, dp.bias.grad = flat[:12].view(4, 3), flat[12:]
    ((dp.weight.sum() + dp.bias.sum()) * (rank + 1)).backward()
    assert torch.equal(flat, torch.full((16,), sum(range(1, world + 1)) / world))
    assert dp.weight.grad.data_ptr() == flat.data_ptr()


def threads_end_with_the_object(rank, world):
    def ours():
        return [t for t in threading.enumerate() if t.name.startswith("trainwright")]

    gc.collect()
    dist.barrier()
    deadline = time.monotonic() + 10
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not ours()
    dp = wrap(mlp(3, 3))
    model = dp.module
    dp(batch(2, 3)).sum().backward()
    assert len(ours()) == 4  # driver, watch, and one for each Gloo channel
    del dp
    gc.collect()
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not ours()
    model.zero_grad()
    (model(batch(2, 3)).sum() * (rank + 1)).backward()  # a plain module again
    assert model[0].bias.grad[0] == 2 * (rank + 1)


def arguments(rank, world):
    for options, error, text in (
        ({"bucket_mb": 0}, ValueError, "bucket_mb: expected a positive number"),
        ({"bucket_mb": "big"}, TypeError, "bucket_mb"),
        (
            {"wire_dtype": "int4"},
            ValueError,
            'wire_dtype: expected None, torch.bfloat16 or "int8", got int4',
        ),
        ({"unused": "ignore"}, ValueError, "unused: expected one of error, zero, skip"),
        ({"deterministic": 1}, TypeError, "deterministic: expected a bool"),
        ({"timeout": -1}, ValueError, "timeout"),
    ):
        with pytest.raises(error, match=text):
            wrap(nn.Linear(2, 2), **options)
    with pytest.raises(TypeError, match=r"module: expected an nn\.Module, got int"):
        wrap(3)
    dp = wrap(nn.Linear(2, 2))
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="loss_weight: n"):
            dp.loss_weight(bad)


CASES = {
    1: ["arguments", "one_process_on_the_whole_batch", "sums_in_rank_order_at_every_position",
        "weight_zero_alone", "accumulate_is_one_process_on_all_microbatches", "accumulate_in_fp32",
        "accumulate_adds_to_what_was_there", "unused_alone", "mixed_dtypes", "strided_and_complex",
        "recomputed_blocks_used_three_times", "static_counts_with_no_sync", "gradients_of_the_user"],
    3: ["one_process_on_the_whole_batch", "sums_in_rank_order_at_every_position", "nan_stays_where_it_is",
        "accumulate_is_one_process_on_all_microbatches", "a_rank_without_any_gradient_syncs",
        "unused_raises_in_the_same_backward", "uneven_number_of_batches", "two_replicas_in_one_backward",
        "different_parameters_are_named", "strided_and_complex", "empty_parameters", "bf16_on_the_wire"],
    4: ["one_process_on_the_whole_batch", "sums_in_rank_order_at_every_position", "a_group_of_some_ranks",
        "sixteen_bit_gradients_are_summed_in_fp32", "unused_zero_with_branches_by_rank",
        "large_gradients_are_exchanged_where_they_lie"],
}  # fmt: skip


def weight_zero_alone(rank, world):
    dp = wrap(mlp(3, 3))
    dp.loss_weight(0)
    (dp(batch(2, 3)).sum() * float("nan")).backward()
    assert all(g.eq(0).all() for g in grads(dp).values())


def unused_alone(rank, world):
    """One rank alone finds what two would."""
    for policy in ("error", "zero", "skip"):
        dp = wrap(Branches(), unused=policy)
        loss = dp(batch(2, 3), ["first"]).sum()
        if policy == "error":
            with pytest.raises(RuntimeError, match=r"no gradient for second\.weight \(rank 0\)"):
                loss.backward()
        else:
            loss.backward()
            assert (dp.never.weight.grad is None) == (policy == "skip")


def leave_a_replica_behind(rank, world):
    """Keeps a DataParallel alive until the process ends."""
    globals()["left_behind"] = dp = wrap(mlp(3, 3))
    dp(batch(2, 3)).sum().backward()


def leave_in_the_middle_of_a_step(rank, world):
    """Rank 0 alone has begun a step, which an exception ended; nothing that it sent will ever be answered."""
    global left
    left = wrap(mlp(3, 3, 3), bucket_mb=1e-4)
    left(batch(2, 3)).sum().backward()
    if rank == 0:
        x = left.module[0](batch(2, 3))
        x.register_hook(lambda g: {}["went bad"])
        with pytest.raises(KeyError, match="went bad"):
            left.module[1:](x).sum().backward()
