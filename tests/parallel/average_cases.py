"""Cases of DataParallel in the ranks (see rank_pool.py): averages over ranks and over microbatches."""

import copy

import pytest
import torch
import torch.distributed as dist
from case_tools import (
    assert_close,
    assert_equal,
    assert_same_on_all_ranks,
    batch,
    everyone,
    grads,
    mlp,
    share,
    wrap,
)
from torch import nn
from trainwright.parallel import _job, layout


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


def weight_zero_alone(rank, world):
    dp = wrap(mlp(3, 3))
    dp.loss_weight(0)
    (dp(batch(2, 3)).sum() * float("nan")).backward()
    assert all(g.eq(0).all() for g in grads(dp).values())
