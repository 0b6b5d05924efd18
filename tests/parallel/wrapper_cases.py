"""Cases of DataParallel in the ranks (see rank_pool.py): the wrapper around a module, its buffers, threads, errors."""

import copy
import gc
import io
import threading
import time

import pytest
import torch
import torch.distributed as dist
import trainwright as tw
from case_tools import (
    TIMEOUT,
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
from trainwright.parallel import LayoutError


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
        ({"group": 0}, TypeError, "group: expected None or a process group, got int"),
    ):
        with pytest.raises(error, match=text):
            wrap(nn.Linear(2, 2), **options)
    with pytest.raises(TypeError, match=r"module: expected an nn\.Module, got int"):
        wrap(3)
    with pytest.raises(
        ValueError, match="module: expected a module with parameters to train, got Tanh"
    ):
        wrap(nn.Tanh())
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        ValueError,
        match=r"all parameters on one device, got 0\.weight on cpu and 1\.weight on meta",
    ):
        wrap(two)
    dp = wrap(nn.Linear(2, 2))
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="loss_weight: n"):
            dp.loss_weight(bad)


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


def copies_are_made_together(rank, world):
    """torch.save and copy.deepcopy: a wrapper of its own with the same options, and the int8 wire's errors."""
    dp = wrap(mlp(3, 4, 2), wire_dtype="int8", unused="skip", bucket_mb=0.001).eval()
    dp(batch(2, 3, seed=rank)).square().sum().backward()
    file = io.BytesIO()
    torch.save(dp, file)
    file.seek(0)
    errors = copy.deepcopy(dp.state_dict()["wire_error"])
    for other in (torch.load(file, weights_only=False), copy.deepcopy(dp)):
        assert_equal(dict(dp.module.named_parameters()), dict(other.module.named_parameters()))
        for kind, by_name in errors.items():
            assert_equal(by_name, other.state_dict()["wire_error"][kind])
        assert not other.training
        for model in (dp, other):
            model.zero_grad()
            model(batch(2, 3, seed=rank + 5)).square().sum().backward()
        assert_equal(grads(dp), grads(other))
        dp.load_state_dict({**dp.module.state_dict(), "wire_error": errors})
        other.close()
    own = wrap(mlp(3, 2), group=dist.new_group(list(range(world))))
    with pytest.raises(
        TypeError, match=r"DataParallel: cannot be copied or pickled with a group of its own"
    ):
        copy.deepcopy(own)


def a_module_is_wrapped_once(rank, world):
    model = mlp(3, 4, 2)
    dp = wrap(model)
    for again in (dp, model, nn.Sequential(nn.Linear(2, 2), model[2])):
        with pytest.raises(
            ValueError,
            match=r"DataParallel: module: expected parameters that no other .*, got .*weight; close",
        ):
            wrap(again)
    with pytest.raises(ValueError, match="Zero: module: expected parameters that no other"):
        tw.parallel.Zero(model, stage=3, timeout=TIMEOUT)
    dp.close()
    again = wrap(model)
    again(batch(2, 3)).sum().backward()
    assert_same_on_all_ranks(grads(again))
