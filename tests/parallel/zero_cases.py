"""Cases of Zero that run in the ranks (see rank_pool.py): what DataParallel with the same optimizer gives, in bits."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import trainwright as tw
from case_tools import assert_close, assert_same_on_all_ranks, batch, everyone, mlp, share
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainwright.parallel import DataParallel, LayoutError, Zero, estimate

TIMEOUT = 20.0
STAGES = (1, 2, 3)


class Zoo(nn.Module):
    """Tied, frozen, strided, empty, scalar and mixed-dtype parameters, of sizes that no world size divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(13, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.strided = nn.Parameter(torch.randn(11, 7).t())
        self.back = nn.Linear(11, 7, dtype=torch.bfloat16)
        self.fp64 = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(7)

    def forward(self, tokens):
        x = self.norm(self.frozen(self.embedding(tokens)))
        x = self.back((x @ self.strided).bfloat16()).float() * self.scale
        return self.head(x).square().mean() * self.fp64.sum() + self.empty.sum()


def loss_of(model, rank, world, step):
    if isinstance(model.module, Zoo):
        generator = torch.Generator().manual_seed(step)
        return model(share(torch.randint(13, (6 * world,), generator=generator), rank, world))
    columns = next(model.parameters()).shape[1]
    x = batch(4 * world, columns, torch.float32, seed=step)
    return model(share(x, rank, world)).square().mean()


def wide(dtype=torch.float32):
    """Parameters of several buckets, some of them cut, and int8 blocks across their edges."""
    return mlp(33, 61, 17, dtype=dtype)


def run_both(
    make, rank, world, optimizer, *, stage, steps=3, options=None, extra=None, act=None, **kwargs
):
    """Train with DataParallel and with Zero; both, after their parameters were found equal at every step."""
    options = {"timeout": TIMEOUT, "unused": "zero", **(options or {})}
    clipped = act is not None and stage > 1
    dp = DataParallel(make(), **options)
    groups = list(dp.parameters()) if extra is None else extra(dp.module)
    plain = optimizer(groups, **kwargs)
    model = make()
    params = None if extra is None else extra(model)
    zero = Zero(model, optimizer, stage=stage, params=params, **{**options, **kwargs})
    for step in range(steps):
        for m, opt in ((dp, plain), (zero, zero.optimizer)):
            opt.zero_grad()
            m.loss_weight(rank + 1)
            torch.manual_seed(step)
            if act is None:
                loss_of(m, rank, world, step).backward()
                opt.step()
            else:
                act(m, opt, step)
        assert_equal_state(dp, zero, last_bit_of_fp64=not clipped)
    return dp, plain, zero


def assert_equal_state(dp, zero, *, last_bit_of_fp64=True):
    """A norm that is summed rank by rank in fp64 decides about the last bit of fp64 parameters."""
    theirs, ours = dp.state_dict(), zero.state_dict()
    assert theirs.keys() == ours.keys()
    for name, x in theirs.items():
        if x.dtype == torch.float64 and not last_bit_of_fp64:
            assert_close({name: x}, {name: ours[name]})
        else:
            assert torch.equal(x, ours[name]), name


def assert_equal_optimizers(ours, theirs):
    """Of two state_dicts."""
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for key, x in state.items():
            y = ours["state"][number][key]
            assert x.dtype == y.dtype, key
            assert torch.equal(x, y), (number, key)
    assert ours["param_groups"] == theirs["param_groups"]


OPTIMIZERS = {
    "adamw": (tw.optim.AdamW, {"lr": 0.02}),
    "sgd": (tw.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "rmsprop": (tw.optim.RMSprop, {"lr": 0.002, "centered": True, "momentum": 0.5}),
    "lion": (tw.optim.Lion, {"lr": 0.002}),
}


def every_kind_of_parameter(rank, world):
    for stage in STAGES if world > 1 else (2,):  # one rank alone has everything in any stage
        for bucket_mb in ("auto", 0.0002):
            options = {"bucket_mb": bucket_mb}
            for name in OPTIMIZERS if bucket_mb != "auto" else ["adamw"]:
                optimizer, kwargs = OPTIMIZERS[name]
                _, plain, zero = run_both(
                    Zoo, rank, world, optimizer, stage=stage, steps=2, options=options, **kwargs
                )
                full = zero.full_state_dict()
                if rank == 0:
                    assert_equal_optimizers(full["optimizer"], plain.state_dict())
                else:
                    assert full == {}
            assert_same_on_all_ranks(zero.state_dict())
            assert zero.frozen.weight.grad is None


def formats_of_state(rank, world):
    """Blocks of int8 state and random bits count elements of the whole parameter, wherever the ranges begin."""
    make = functools.partial(wide, torch.bfloat16)
    common = {"lr": 0.05, "max_grad_norm": 0.01, "count_lost_updates": True}
    for stage in STAGES:
        for kwargs in (
            {"state_dtype": "int8", "stochastic_rounding": True, "master_weights": "none"},
            {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "master_weights": "none"},
            {"master_weights": "split16"},
        ):
            _, plain, zero = run_both(
                make, rank, world, tw.optim.AdamW, stage=stage, options={"bucket_mb": 0.001},
                act=lambda m, opt, step: (loss_in(m, rank, world, step).backward(), opt.step()),
                **common, **kwargs,
            )  # fmt: skip
            ours, theirs = zero.optimizer.last_step, plain.last_step
            assert torch.equal(ours.grad_norm, theirs.grad_norm)
            assert torch.equal(ours.lost_update_fraction, theirs.lost_update_fraction)
            full = zero.full_state_dict()
            if rank == 0:
                assert_equal_optimizers(full["optimizer"], plain.state_dict())


def loss_in(model, rank, world, step):
    x = batch(4 * world, 33, torch.bfloat16, seed=step)
    return model(share(x, rank, world)).square().mean()


def groups_accumulation_and_clipping(rank, world):
    def act(model, optimizer, step):
        for i in range(3):
            with model.accumulate(i, 3):
                model.loss_weight(1 + (rank + i) % 2)
                loss_of(model, rank, world, 3 * step + i).backward()
        if isinstance(model, Zero):
            norms.append(model.clip_grad_norm(0.05))
        else:
            norms.append(tw.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()

    def groups(module):
        by_rank = [
            [p for p in module.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)
        ]
        return [{"params": by_rank[0]}, {"params": by_rank[1], "weight_decay": 0.0, "lr": 0.5}]

    norms = []
    for stage in STAGES:
        for make in (wide, Zoo):
            run_both(make, rank, world, tw.optim.AdamW, stage=stage, act=act, extra=groups, steps=2)
    assert norms[::2] == norms[1::2]
    assert all(n > 0.05 for n in norms)


def freeze_and_unfreeze(rank, world):
    def act(model, optimizer, step):
        model.module[0].requires_grad_(step % 2 == 0)
        loss_of(model, rank, world, step).backward()
        optimizer.step()

    for stage in STAGES:
        run_both(wide, rank, world, tw.optim.AdamW, stage=stage, act=act, steps=4,
                 options={"unused": "skip", "bucket_mb": 0.001})  # fmt: skip


def scalers_skip_together(rank, world):
    """An overflow of one element, which one rank finds and one owns: all skip, and every scale backs off."""
    for stage in STAGES:
        for scaler in (tw.LossScaler(1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)):
            for unscale in (False, True):
                zero = Zero(wide(), stage=stage, timeout=TIMEOUT)
                scale = scaler.get_scale()
                for step, bad in enumerate((False, True, False)):
                    before = copy.deepcopy(zero.state_dict())
                    zero.optimizer.zero_grad()
                    loss = loss_of(zero, rank, world, step)
                    if bad and rank == world - 1:
                        loss = loss + zero.module[0].weight[0, 0] * float("inf")
                    scaler.scale(loss).backward()
                    if unscale:
                        scaler.unscale_(zero.optimizer)
                    scaler.step(zero.optimizer)
                    scaler.update()
                    same = all(torch.equal(before[k], v) for k, v in zero.state_dict().items())
                    assert same == bad
                    assert zero.optimizer.last_step.skipped.item() == bad
                assert scaler.get_scale() == scale / 2
                assert_same_on_all_ranks(zero.state_dict())


def save(rank, world, stage, kind):
    """A run of two steps: its shards, its whole, and the parameters after a third step."""
    make, kwargs = KINDS[kind]
    zero = Zero(make(), stage=stage, timeout=TIMEOUT, unused="zero", bucket_mb=0.0003, **kwargs)
    state = {}
    for step in range(3):
        if step == 2:
            state = {"shard": zero.sharded_state_dict(), "full": zero.full_state_dict()}
        zero.optimizer.zero_grad()
        zero.loss_weight(int(rank == 0))  # so that the number of ranks does not matter
        loss_of(zero, 0, 1, step).backward()
        zero.optimizer.step()
    return state | {"after": zero.state_dict()}


KINDS = {
    "zoo": (Zoo, {"lr": 0.02}),
    "int8": (wide, {"lr": 0.02, "state_dtype": "int8", "stochastic_rounding": True}),
}


def resume(rank, world, stage, kind, saved):
    """From the shards, and from the whole, of a run on another number of ranks, at another bucket size."""
    make, kwargs = KINDS[kind]
    for way in ("shards", "full"):
        torch.manual_seed(rank)
        model = make()
        for p in model.parameters():
            p.data.mul_(0.5)
        zero = Zero(model, stage=stage, timeout=TIMEOUT, unused="zero", **{**kwargs, "lr": 9.0})
        if way == "shards":
            zero.load_sharded_state_dict([s["shard"] for s in saved][::-1])
        else:
            zero.load_full_state_dict(saved[0]["full"] if rank == 0 else {})
        full = zero.full_state_dict()
        if rank == 0:
            assert_equal_optimizers(full["optimizer"], saved[0]["full"]["optimizer"])
            for key, x in saved[0]["full"]["model"].items():
                assert torch.equal(full["model"][key], x), key
        zero.loss_weight(int(rank == 0))
        loss_of(zero, 0, 1, 2).backward()
        zero.optimizer.step()
        for key, x in saved[0]["after"].items():
            assert torch.equal(zero.state_dict()[key], x), (way, key)
        if len(saved) > 1:
            with pytest.raises(ValueError, match=f"expected each rank of {len(saved)} once"):
                zero.load_sharded_state_dict([saved[1]["shard"]])


def convert(rank, world):
    """fp32 state into int8 and bf16 masters, from a plain optimizer's checkpoint, and back into one."""
    model = wide()
    plain = tw.optim.AdamW(model.parameters(), state_dtype="int8")
    dp = DataParallel(model, timeout=TIMEOUT)
    loss_of(dp, 0, 1, 0).backward()
    plain.step()
    zero = Zero(wide(), stage=1, timeout=TIMEOUT, bucket_mb=0.0003)
    zero.load_full_state_dict({"model": dp.state_dict(), "optimizer": plain.state_dict()})
    wanted = tw.optim.AdamW(model.parameters())
    wanted.load_state_dict(plain.state_dict())
    full = zero.full_state_dict()
    if rank == 0:
        for number, state in wanted.state_dict()["state"].items():
            for key, x in state.items():
                assert torch.equal(full["optimizer"]["state"][number][key], x)
    with pytest.raises(
        ValueError, match=r"load_full_state_dict: sd: ValueError.*expected 1 groups, got 0"
    ):
        zero.load_full_state_dict({**full, "optimizer": {"state": {}, "param_groups": []}})
    with pytest.raises(ValueError, match="int8 state must be asked for at construction"):
        tw.optim.convert_state(zero.optimizer, state_dtype="int8")


# Of a parameter: itself, its gradient, its share of the state; of fp32, and of bf16 with fp32 masters.
BYTES = {
    torch.float32: {1: (8, 8), 2: (4, 12), 3: (0, 16)},
    torch.bfloat16: {1: (4, 12), 2: (2, 14), 3: (0, 16)},
}


def gradients_of_stages_2_and_3(rank, world):
    """They belong to the owners alone, and add up as those of DataParallel: in no_sync, with a use more than before,
    over the bf16 wire, from two backwards, and where a parameter is not used."""

    def uses(model, n):
        x = batch(8 * world, 9, next(model.parameters()).dtype)[rank::world].requires_grad_()
        for _ in range(n):  # each of them a backward of its own, with a gradient of its own
            x = checkpoint(model.module["a"], x, use_reentrant=True).tanh()
        return model.module["b"](x).square().mean()

    def make():
        torch.manual_seed(5)
        return nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(9, 5), "c": nn.Linear(3, 3)})

    for stage, dtype, wire in (
        (2, torch.float32, torch.bfloat16),
        (2, torch.float64, None),
        (3, torch.float64, None),
    ):
        options = {"timeout": TIMEOUT, "unused": "skip", "bucket_mb": 0.0002, "wire_dtype": wire}
        dp = DataParallel(make().to(dtype), **options)
        zero = Zero(make().to(dtype), stage=stage, **options)

        def whole(model=dp, other=zero):
            """(name, gradient of DataParallel, gradients of all ranks together), of parameters that have one."""
            mine = {
                name: [(s.shard_offset, s.grad) for s in shards if s.grad is not None]
                for name, shards in zip(other._set.names, other._set.shards)
            }
            for name, p in model.module.named_parameters():
                parts = sorted(
                    (part for m in everyone(mine) for part in m[name]), key=lambda t: t[0]
                )
                if p.grad is None:
                    assert not parts, name
                else:
                    yield name, p.grad.flatten(), torch.cat([values for _, values in parts])

        for n in (1, 3, 2):
            for model in (dp, zero):
                model.zero_grad()
                with model.no_sync():
                    uses(model, 1).backward()
                uses(model, n).backward()
            assert all(p.grad is None for p in zero.parameters())
            for name, expected, got in whole():
                assert torch.equal(expected, got), (wire, n, name)
        for model in (dp, zero):
            uses(model, 2).backward()
        close = {name: (expected, got) for name, expected, got in whole()}
        if wire is None:  # bf16 rounds twice
            assert_close(*({n: x[i] for n, x in close.items()} for i in (0, 1)))
            for p in (1.0, 3.0, "inf", float("-inf")):
                ours = zero.clip_grad_norm(0.1, p)
                torch.testing.assert_close(ours, tw.clip_grad_norm_(dp.parameters(), 0.1, p))
            close = {name: (expected, got) for name, expected, got in whole()}
            assert_close(*({n: x[i] for n, x in close.items()} for i in (0, 1)))
        zero.zero_grad()
        assert list(whole(zero)) == []


def bytes_of_model_state(rank, world):
    """AdamW, within 3 % of the formula; what `estimate` says is that of the rank with most, to a few step counts."""
    for dtype, by_stage in BYTES.items():
        for stage, (everywhere, divided) in by_stage.items():
            zero = Zero(mlp(64, 96, 64, dtype=dtype), stage=stage, timeout=TIMEOUT)
            x = batch(4, 64, dtype, seed=rank)
            zero(x).square().mean().backward()
            zero.optimizer.step()
            count = sum(p.numel() for p in zero.parameters())
            formula = (everywhere + divided / world) * count
            assert abs(zero.model_state_bytes() - formula) <= 0.03 * formula
            expected = estimate(mlp(64, 96, 64, dtype=dtype), stage=stage, world=world)
            most = max(everyone(zero.model_state_bytes()))
            assert expected.total <= most <= expected.total + 32 * len(zero._set.params)


def a_rank_that_does_not_step(rank, world):
    """It is named on the others, within the timeout."""
    zero = Zero(wide(), stage=1, timeout=2.0)
    loss_of(zero, rank, world, 0).backward()
    if rank == 0:
        dist.barrier()
    else:
        with pytest.raises(
            tw.parallel.CollectiveError, match=r"rank 0 .*all-gather of \d+ parameters"
        ):
            zero.optimizer.step()
        dist.barrier()


def offloaded_state(rank, world):
    """tw.optim.Offload around Zero's optimizer, CPU memory standing for both sides: the same bits in each stage,
    clipped, scaled and skipped; saved and loaded; edited by hand.
    """
    make = functools.partial(wide, torch.bfloat16)
    kwargs = {"lr": 0.02, "max_grad_norm": 0.01, "count_lost_updates": True}
    for stage in STAGES:
        plain, ours, new = (
            Zero(make(), stage=stage, timeout=TIMEOUT, bucket_mb=0.001, **kwargs) for _ in range(3)
        )
        offload = tw.optim.Offload(ours.optimizer, chunk_mb=0.001)
        runs = ((plain, plain.optimizer), (ours, offload))
        for step in range(4):
            for model, optimizer in runs:
                optimizer.zero_grad()
                scaler = tw.LossScaler(8.0)
                loss = loss_in(model, rank, world, step)
                if step == 2 and rank == world - 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                optimizer.param_groups[0]["lr"] = 0.01
                assert optimizer.last_step.skipped.item() == (step == 2)
            if step != 2:
                norms = [optimizer.last_step.grad_norm for _, optimizer in runs]
                assert torch.equal(*norms)
            a, b = (m.optimizer.last_step.lost_update_fraction for m in (plain, ours))
            assert torch.equal(a, b)
            assert_equal_state(plain, ours)
        assert ours.model_state_bytes() < plain.model_state_bytes()
        saved = ours.full_state_dict(), everyone(ours.sharded_state_dict())
        if rank == 0:
            assert_equal_optimizers(saved[0]["optimizer"], plain.full_state_dict()["optimizer"])
        else:
            plain.full_state_dict()
        fresh = tw.optim.Offload(new.optimizer)
        new.load_full_state_dict(saved[0])
        new.load_sharded_state_dict(saved[1])
        for model in (plain, ours, new):
            with model.gathered():
                model.module[0].bias.detach().add_(1.0)
        for model, optimizer in (*runs, (new, fresh)):
            optimizer.refresh_masters()
            optimizer.zero_grad()
            loss_in(model, rank, world, 9).backward()
            optimizer.step()
        assert_equal_state(plain, ours)
        assert_equal_state(plain, new)


def uneven_numbers_of_batches(rank, world):
    """join: each step is that of the ranks that still have a batch; parameters and state end up equal everywhere."""
    counts = [2, 5, 3][:world]
    for stage in (0, 1, 2, 3):
        alone = mlp(6, 9, 3)
        plain = tw.optim.AdamW(alone.parameters(), lr=0.02)
        kwargs = {"timeout": TIMEOUT, "bucket_mb": 0.0002}
        if stage:
            model = Zero(copy.deepcopy(alone), stage=stage, lr=0.02, **kwargs)
            optimizer, after = model.optimizer, None
        else:
            model = DataParallel(copy.deepcopy(alone), **kwargs)
            optimizer = tw.optim.AdamW(model.parameters(), lr=0.02)

            def after(optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

        with model.join(after):
            for step in range(counts[rank]):
                model.loss_weight(rank + 1)
                model(batch(4, 6, seed=10 * step + rank)).square().mean().backward()
                optimizer.step()
                model.zero_grad()
        for step in range(max(counts)):
            plain.zero_grad()
            active = [r for r in range(world) if step < counts[r]]
            total = sum(r + 1 for r in active)
            for r in active:
                x = batch(4, 6, seed=10 * step + r)
                (alone(x).square().mean() * (r + 1) / total).backward()
            plain.step()
        assert_close(model.state_dict(), alone.state_dict())
        assert_same_on_all_ranks(model.state_dict())
        with model.join(lambda: None):  # nobody has a batch; gradients stay as they were
            model(batch(4, 6)).mean().backward() if stage == 0 else None
            kept = {n: p.grad for n, p in model.named_parameters()}
        assert all(p.grad is kept[n] for n, p in model.named_parameters())


def arguments(rank, world):
    zero = functools.partial(Zero, nn.Linear(2, 2), timeout=TIMEOUT)
    for stage in (0, 4):
        with pytest.raises(ValueError, match=f"Zero: stage: expected 1, 2, 3, got {stage}"):
            zero(stage=stage)
    for optimizer in (tw.optim.Lamb, tw.optim.Muon):
        with pytest.raises(ValueError, match=f"optimizer: .*got {optimizer.__name__}, which needs"):
            zero(optimizer, stage=1)
    with pytest.raises(TypeError, match=r"optimizer: expected a class of tw\.optim.*got SGD"):
        zero(torch.optim.SGD, stage=1)
    with pytest.raises(TypeError, match=r"a real parameter, got torch\.complex64"):
        Zero(nn.ParameterDict({"c": torch.ones(2, dtype=torch.complex64)}), stage=1)
    with pytest.raises(ValueError, match="lr: expected at least 0, got -1"):
        zero(stage=1, lr=-1.0)
    with pytest.raises(ValueError, match="Zero: params: expected parameters of module"):
        zero(stage=1, params=[nn.Parameter(torch.ones(2))])
    with pytest.raises(RuntimeError, match="use full_state_dict"):
        zero(stage=1).optimizer.state_dict()
    for stage in (2, 3) if world > 1 else ():
        mine = Zero(mlp(2, 2), stage=stage, timeout=TIMEOUT)
        for kind in (torch.optim.SGD, tw.optim.AdamW) if stage == 2 else (torch.optim.SGD,):
            other = kind(mine.parameters(), lr=0.1)
            message = rf"zero\.optimizer .*got one of another {kind.__name__} on 0\.weight"
            with pytest.raises(RuntimeError, match=message):
                other.step()
        for bad, got in ((None, "NoneType"), ({"state": {}}, r"\['state'\]")):
            with pytest.raises(
                ValueError, match=f'sd: .*a dict with "model" and "optimizer", got {got}'
            ):
                mine.load_full_state_dict(bad)
        with (
            pytest.raises(
                TypeError, match="join: after_step: expected None or a function, got int"
            ),
            mine.join(3),
        ):
            pass
        with pytest.raises(
            TypeError, match="Zero: cannot be copied or pickled: each rank has a part"
        ):
            copy.deepcopy(mine)
        mine.close()
        other.step()  # has no gradient, and nobody minds
    if world > 1:
        with pytest.raises(LayoutError, match="Zero: at construction"):
            Zero(nn.Linear(2, 2 + rank), stage=1, timeout=TIMEOUT)
    assert len(set(map(str, everyone("done")))) == 1
