"""Cases of the int8 wire, which run in the ranks (see rank_pool.py)."""

import contextlib

import torch
import trainwright as tw
from case_tools import assert_same_on_all_ranks, batch, everyone, grads, mlp, wrap
from numerics import parallel_close
from trainwright.parallel import Zero
from zero_cases import TIMEOUT

SIZES = (33, 61, 17)


def make(dtype=torch.float32):
    return mlp(*SIZES, dtype=dtype)


def backward(model, rank, step, columns=33):
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    model.loss_weight(rank + 1)
    model(batch(8, columns, dtype, seed=100 * rank + step)).square().mean().backward()


def codes_and_errors_add_up(rank, world):
    """Averages, the same codes on all ranks, plus what all ranks keep as errors are the exact averages, summed over
    steps; a step sends a quarter of the bytes.
    """
    for bucket_mb in ("auto", 0.001):
        exact = wrap(make(), bucket_mb=bucket_mb)
        dp = wrap(make(), bucket_mb=bucket_mb, wire_dtype="int8")
        sums = {name: torch.zeros_like(p) for name, p in dp.named_parameters()}
        for step in range(4):
            for model in (exact, dp):
                backward(model, rank, step)
            assert_same_on_all_ranks(grads(dp))
            for name, p in exact.named_parameters():
                sums[name] += p.grad - dict(dp.named_parameters())[name].grad
        assert 0.25 < dp.stats().sent_bytes / exact.stats().sent_bytes < 0.28
        errors = dp.error_feedback()
        assert bool(errors) == (rank == 0)
        for name, mean in errors.items():
            assert parallel_close("int8 error of four steps", mean * world, sums[name].flatten())
            assert mean.abs().max() > 0
        assert len(errors) in (0, len(sums))


def other_kinds_of_gradients(rank, world):
    """bf16, accumulated, frozen and unfrozen, without an element, on one rank alone NaN."""
    dp = wrap(make(torch.bfloat16), wire_dtype="int8", unused="skip", bucket_mb=0.001)
    exact = wrap(make(torch.bfloat16), unused="skip", bucket_mb=0.001)
    for step in range(4):
        for model in (exact, dp):
            model.module[0].requires_grad_(step % 2 == 0)
            model.zero_grad()
            for i in range(2):
                with model.accumulate(i, 2):
                    x = batch(4, 33, torch.bfloat16, seed=10 * step + i + rank)
                    model(x).square().mean().backward()
        for name, p in exact.named_parameters():
            q = dict(dp.named_parameters())[name]
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                off = (p.grad - q.grad).float().abs().max()
                assert off <= 0.05 * p.grad.float().abs().max()
    assert set(dp.state_dict()["wire_error"]["sent"]) == {n for n, _ in dp.named_parameters()}
    bias = dp.module[2].bias
    dp.zero_grad()
    loss = dp(batch(4, 33, torch.bfloat16)).square().mean()
    (loss + bias[0] * (float("nan") if rank == world - 1 else 1.0)).backward()
    assert bias.grad.isnan().any() and dp.module[0].weight.grad is None
    backward(dp, rank, 1)
    assert bias.grad.isfinite().all()


def saved_and_resumed(rank, world):
    """state_dict and sharded_state_dict hold this rank's errors: the next step is the same, bit for bit."""
    for stage in (0, 1, 2, 3):
        options = {"timeout": TIMEOUT, "wire_dtype": "int8", "bucket_mb": 0.001}

        def build(stage=stage, options=options):
            if stage:
                zero = Zero(make(), stage=stage, lr=0.01, **options)
                return zero, zero.optimizer
            dp = wrap(make(), **options)
            return dp, tw.optim.AdamW(dp.parameters(), lr=0.01)

        runs = [build(), build()]
        for step in range(2):
            backward(runs[0][0], rank, step)
            runs[0][1].step()
        if stage:
            runs[1][0].load_sharded_state_dict(everyone(runs[0][0].sharded_state_dict()))
        else:
            runs[1][0].load_state_dict(runs[0][0].state_dict())
            runs[1][1].load_state_dict(runs[0][1].state_dict())
        for model, optimizer in runs:
            backward(model, rank, 2)
            optimizer.step()
        ours, theirs = (model.state_dict() for model, _ in runs)
        for name in ("0.weight", "2.bias"):
            assert torch.equal(ours[name], theirs[name]), (stage, name)
        full = runs[0][0].full_state_dict() if stage else {}
        if stage and rank == 0:
            assert full["wire_error"].keys() == full["model"].keys()
        if stage:
            runs[1][0].load_full_state_dict(full)
            again = runs[1][0].error_feedback()
            for name, x in again.items():
                torch.testing.assert_close(x, full["wire_error"][name])


def zero_steps_as_data_parallel(rank, world):
    """Stages 2 and 3 keep the averages of their own part as they are; all learn alike."""
    losses = {}
    for stage, wire in ((0, None), (0, "int8"), (1, "int8"), (2, "int8"), (3, "int8")):
        options = {"timeout": TIMEOUT, "wire_dtype": wire, "bucket_mb": 0.001}
        if stage:
            model = Zero(make(), stage=stage, lr=0.01, **options)
            optimizer = model.optimizer
        else:
            model = wrap(make(), **options)
            optimizer = tw.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(30):
            model.zero_grad()
            loss = (model(batch(16, 33, torch.float32, seed=rank)) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
        losses[stage, wire] = sum(everyone(loss.item())) / world
    exact = losses.pop((0, None))
    assert exact < 0.5
    for loss in losses.values():
        assert abs(loss - exact) <= 0.02 * exact, losses


def _with_errors(stage, bucket_mb):
    options = {"timeout": TIMEOUT, "wire_dtype": "int8", "bucket_mb": bucket_mb}
    return Zero(make(), stage=stage, lr=0.01, **options) if stage else wrap(make(), **options)


def _state(model, stage):
    return (
        {"shard": model.sharded_state_dict()} if stage else {"weights": model.module.state_dict()}
    )


def save_errors(rank, world, stage):
    """After two steps: this rank's state, and what all errors come to."""
    model = _with_errors(stage, 0.001)
    for step in range(2):
        backward(model, rank, step)
        if stage:
            model.optimizer.step()
    return {**_state(model, stage), "errors": model.error_feedback()}


def resume_errors(rank, world, stage, saved):
    """On another number of ranks and in other buckets: by parameter and position the same, also when saved again; and
    the next average makes up for them."""
    model, exact = _with_errors(stage, 0.003), wrap(make(), bucket_mb=0.003)
    errors = saved[0]["errors"]
    if stage:
        model.load_sharded_state_dict([s["shard"] for s in saved])
    else:
        model.module.load_state_dict(saved[0]["weights"])
        model.load_error_feedback(errors)
    again = model.error_feedback()
    assert again.keys() == (errors.keys() if rank == 0 else set())
    for name, mean in again.items():
        assert parallel_close("int8 value and error", mean, errors[name])
    if world == 1:
        return None  # nothing is rounded: they are kept for more ranks
    with model.gathered() if stage else contextlib.nullcontext():
        exact.module.load_state_dict(model.module.state_dict())
    for m in (exact, model):
        backward(m, rank, 5)
    left = {name: p.grad.clone() for name, p in exact.named_parameters()}
    if stage < 2:
        for name, p in model.named_parameters():
            left[name] -= p.grad
    else:
        for name, shards in zip(model._set.names, model._set.shards):
            for s in shards:
                left[name].view(-1)[s.shard_offset : s.shard_offset + s.numel()] -= s.grad
        owned = {name: torch.zeros_like(g) for name, g in left.items()}
        for name, shards in zip(model._set.names, model._set.shards):
            for s in shards:
                begin, end = s.shard_offset, s.shard_offset + s.numel()
                owned[name].view(-1)[begin:end] = left[name].view(-1)[begin:end]
        left = {name: sum(o[name] for o in everyone(owned)) for name in owned}
    for name, mean in model.error_feedback().items():
        got = mean - left[name].flatten() / world
        assert parallel_close("int8 error of four steps", got, errors[name])
    return None
