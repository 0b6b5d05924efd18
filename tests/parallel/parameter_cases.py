"""Cases of DataParallel in the ranks (see rank_pool.py): kinds of parameters, gradients that belong to the user."""

import copy

import pytest
import torch
import trainwright as tw
from case_tools import assert_close, assert_same_on_all_ranks, batch, grads, mlp, share, wrap
from torch import nn
from trainwright.parallel import LayoutError


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


def gradients_that_are_views_of_the_user(rank, world):
    """Views of one flat buffer stay that: the averages are in it."""
    dp = wrap(nn.Linear(3, 4))
    flat = torch.zeros(16)
    dp.weight.grad, dp.bias.grad = flat[:12].view(4, 3), flat[12:]
    ((dp.weight.sum() + dp.bias.sum()) * (rank + 1)).backward()
    assert torch.equal(flat, torch.full((16,), sum(range(1, world + 1)) / world))
    assert dp.weight.grad.data_ptr() == flat.data_ptr()


def an_undefined_gradient_is_none(rank, world):
    """A hook runs for it, but there is nothing to average: as for a parameter that was not used."""
    for policy, message in (("error", "no gradient for 0.weight"), ("skip", ""), ("zero", "")):
        dp = wrap(mlp(3, 2), unused=policy)
        loss = torch._C._functions.UndefinedGrad()(dp(batch(2, 3)).sum())
        if message:
            with pytest.raises(RuntimeError, match=message):
                loss.backward()
        else:
            loss.backward()
            for p in dp.parameters():
                assert (p.grad is None) == (policy == "skip")
    with dp.no_sync():
        dp(batch(2, 3)).sum().backward()
    torch._C._functions.UndefinedGrad()(dp(batch(2, 3)).sum()).backward()
    assert all(p.grad.ne(0).any() for p in dp.parameters())
