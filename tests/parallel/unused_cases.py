"""Cases of DataParallel in the ranks (see rank_pool.py): missing gradients, ranks without batches, recomputation."""

import copy

import pytest
import torch
from case_tools import assert_close, assert_same_on_all_ranks, batch, grads, mlp, share, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint


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


def those_who_joined_early_are_not_left_behind(rank, world):
    """Without after_step: parameters and buffers of a rank that made the last step."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    dp = wrap(model)
    optimizer = torch.optim.SGD(dp.parameters(), lr=0.1)
    with dp.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            dp(batch(4, 3, torch.float32)).square().sum().backward()
            optimizer.step()
    assert_same_on_all_ranks({**dict(dp.named_parameters()), **dict(dp.named_buffers())})
    assert dp.module[0].num_batches_tracked == 1 + world
    with dp.join():
        pass  # nobody has a batch: nothing is sent
    assert_same_on_all_ranks(dict(dp.named_parameters()))


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
