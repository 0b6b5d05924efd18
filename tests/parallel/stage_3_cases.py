"""Cases of Zero's stage 3, whose parameters are whole only while they are used (see rank_pool.py)."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import trainwright as tw
from case_tools import assert_same_on_all_ranks, batch, everyone, mlp, share
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trainwright.parallel import CollectiveError, DataParallel, Zero, estimate

TIMEOUT = 20.0
SMALL = {"timeout": TIMEOUT, "bucket_mb": 0.0005, "lr": 0.02}


class Memory:
    """Asked at the edges of every module's forward and backward: bytes of whole blocks beside this rank's parts."""

    def __init__(self, zero):
        self.zero = zero
        self.most = self.count = 0
        for module in zero.module.modules():
            module.register_forward_pre_hook(self.look)
            module.register_forward_hook(self.look)
        for p in zero.module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.look)

    def now(self):
        return sum(b.held_bytes for b in self.zero._set.blocks)

    def look(self, *_):
        self.count += 1
        self.most = max(self.most, self.now())


def both(make, *, options=None, **kwargs):
    """DataParallel with AdamW, and stage 3."""
    options = {**SMALL, **(options or {})}
    dp = DataParallel(make(), timeout=TIMEOUT)
    zero = Zero(make(), stage=3, **options, **kwargs)
    return dp, tw.optim.AdamW(dp.parameters(), lr=options["lr"]), zero


def assert_equal_training(dp, plain, zero, loss, steps=3):
    for step in range(steps):
        for model, optimizer in ((dp, plain), (zero, zero.optimizer)):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss(model, step).backward()
            optimizer.step()
        theirs, ours = dp.state_dict(), zero.state_dict()
        for name, x in theirs.items():
            assert torch.equal(x, ours[name]), (step, name)


def square(model, step, rank, world):
    x = batch(4 * world, 32, torch.float32, seed=step)
    return model(share(x, rank, world)).square().mean()


def whole_only_while_used(rank, world):
    """16 bytes per parameter over W between steps, within 3 %; plus at most one block with overlap off."""
    sizes = [32, 160, 160, 160, 32]
    for overlap, at_once in (("off", 1), ("auto", 2)):
        make = functools.partial(mlp, *sizes, dtype=torch.float32)
        zero = Zero(make(), stage=3, overlap=overlap, timeout=TIMEOUT, bucket_mb=0.02)
        memory = Memory(zero)
        expected = estimate(make(), stage=3, world=world, bucket_mb=0.02, overlap=overlap)
        formula = 16 * sum(p.numel() for p in zero.parameters()) / world
        block = max(b.nbytes for b in zero._set.blocks)
        for step in range(3):
            zero.optimizer.zero_grad()
            square(zero, step, rank, world).backward()
            assert memory.now() == 0
            zero.optimizer.step()
            assert abs(zero.model_state_bytes() - formula) <= 0.03 * formula
            assert abs(zero.model_state_bytes() - expected.total) <= 0.001 * formula + 64 * 20
        assert expected.gathered >= memory.most
        assert block == 4 * (160 * 160 + 160)
        assert block <= memory.most <= at_once * block
        assert memory.count > 50


def one_block_and_the_next(rank, world):
    """Exactly what is sent, and when: each block once forward and once backward, the next one while this is used."""
    zero = Zero(
        mlp(32, 160, 160, 160, 32, dtype=torch.float32), stage=3, timeout=TIMEOUT, bucket_mb=0.02
    )
    home, events = zero._set, []
    exchange = home.wire.fetch.exchange

    def record(outs, sends, total):
        events.append(("send", total))
        return exchange(outs, sends, total)

    home.wire.fetch.exchange = record
    for module in zero.module:
        module.register_forward_pre_hook(lambda *_: events.append("forward"))
    sizes = [4 * b.block.numel for b in home.blocks]
    for step in range(3):
        events.clear()
        zero.optimizer.zero_grad()
        square(zero, step, rank, world).backward()
        zero.optimizer.step()
        sent = [e[1] for e in events if e != "forward"]
        # The last block of the forward is the first of the backward, and is freed between them.
        assert sent == sizes + sizes[::-1], step
        ahead = events.index("forward")
        assert ahead == (1 if step == 0 else 2)
    del home.wire.fetch.exchange
    assert home.last_cost.sent_bytes == 2 * sum(b.part.nbytes for b in home.blocks) * (world - 1)
    assert zero.stats().sent_bytes > home.last_cost.sent_bytes
    assert home.last_cost.busy_ms > 0
    with torch.no_grad():
        square(zero, 0, rank, world)
    assert home.cost.sent_bytes == 0  # evaluation is not part of a step


class Anywhere(nn.Module):
    """Parameters that are looked up by parents, returned by modules, kept in lists of their own, tied and repeated."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self):
            return self.weight

    class Aside(nn.Linear):
        def forward(self, x):
            self.found = super().forward(x)

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(31, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)  # reads its parameters from a list of its own
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)  # looks up those of a child
        self.repeated = nn.Linear(16, 16)
        self.own = self.Own()
        self.aside = self.Aside(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.normal = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x, _ = self.lstm(self.embedding(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.repeated(self.repeated(x)) @ self.own()
        self.aside(x)
        x = self.normal(self.frozen(self.aside.found)) * self.scale
        return (
            F.cross_entropy(
                (self.repeated(x) @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten()
            )
            + self.head(x).square().mean()
        )


def used_from_anywhere(rank, world):
    def loss(model, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randint(31, (2, 5), generator=generator))

    for bucket_mb in (0.0005, 1.0):  # a block per module; one for all of them
        assert_equal_training(*both(Anywhere, options={"bucket_mb": bucket_mb}), loss)


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(2)
        self.reentrant = reentrant
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(mlp(32, 48, 32, dtype=torch.float32) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(32))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        x = self.first(x) * self.scale
        for block in [*self.blocks, self.blocks[0]]:
            x = x + checkpoint(
                lambda y, b=block: self.dropout(b(y)), x, use_reentrant=self.reentrant
            )
        return x * self.scale


def recomputed(rank, world):
    """Both ways of recomputing, blocks used twice, in the forward and in the middle of the backward."""
    for reentrant in (True, False):
        make = functools.partial(Recomputed, reentrant)
        loss = functools.partial(square, rank=rank, world=world)
        for options in ({"bucket_mb": 0.0005}, {"bucket_mb": 0.004}, {"overlap": "off"}):
            dp, plain, zero = both(make, options=options)
            memory = Memory(zero)
            assert_equal_training(dp, plain, zero, loss, steps=2)
            assert memory.now() == 0
            assert memory.most < sum(b.nbytes for b in zero._set.blocks)


def evaluation_gathers(rank, world):
    """In eval mode and under no_grad the forward exchanges parameters, and nothing else is exchanged."""
    dp, plain, zero = both(functools.partial(mlp, 32, 40, 8, dtype=torch.float32))
    loss = functools.partial(square, rank=rank, world=world)
    assert_equal_training(dp, plain, zero, loss)
    x = batch(4, 32, torch.float32, seed=rank)
    step, kinds = zero.stats().step, []
    announce = zero._set.driver.announce
    zero._set.driver.announce = lambda *a: kinds.append(a[2]) or announce(*a)
    for model in (dp, zero):
        model.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(dp(x), zero(x))
    assert torch.equal(dp(x), zero(x))  # with a graph, of which no backward is made
    assert zero.stats().step == step
    assert set(kinds) == {"all-gather"}
    for model in (dp, zero):
        model.train()
    assert_equal_training(dp, plain, zero, loss)
    assert_equal_training(dp.module, plain, zero.module, loss, steps=0)


def after_an_exception(rank, world):
    """In a forward, and in a backward on all ranks before anything was sent: the next step is as if it had not been."""

    class Fails(nn.Module):
        def forward(self, x):
            if self.how == "forward":
                raise KeyError("data went bad")
            y = x.clone()
            if self.how == "backward":
                y.register_hook(lambda g: {}["data went bad"])
            return y

    def make():
        model = nn.Sequential(nn.Linear(32, 24), Fails(), nn.Linear(24, 32))
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
        return model

    dp, plain, zero = both(make, options={"bucket_mb": 0.003})
    loss = functools.partial(square, rank=rank, world=world)
    for how in ("forward", ""):
        for model in (dp.module, zero.module):
            model[1].how = how
        if how:
            for model in (dp, zero):
                with pytest.raises(KeyError, match="data went bad"):
                    loss(model, 0).backward()
        else:
            assert_equal_training(dp, plain, zero, loss, steps=2)
            assert not any(b.held_bytes for b in zero._set.blocks)


def the_user_reads_and_writes(rank, world):
    model = mlp(32, 24, 8, dtype=torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    zero = Zero(model, stage=3, **SMALL)
    weight = zero.module[0].weight
    assert weight.shape == (24, 32) and weight.isnan().all()
    with pytest.raises(RuntimeError, match="divided among the ranks; call state_dict"):
        zero.module.state_dict()
    copied = copy.deepcopy(zero.module)
    assert type(copied[0]._parameters) is dict
    with zero.gathered():
        assert torch.equal(weight, before["0.weight"])
        assert torch.equal(zero.module.state_dict()["0.weight"], weight)
        weight.data.mul_(2)
    zero.optimizer.refresh_masters()
    state = zero.state_dict()
    assert torch.equal(state["0.weight"], 2 * before["0.weight"])
    zero.load_state_dict({**state, "0.bias": torch.ones(24)})
    assert zero.state_dict()["0.bias"].eq(1).all()
    assert weight.isnan().all()
    assert_same_on_all_ranks(zero.state_dict())


def what_stage_3_refuses(rank, world):
    zero = Zero(mlp(32, 24, 32, dtype=torch.float32), stage=3, **SMALL)
    x = batch(2, 32, torch.float32)
    with pytest.raises(ValueError, match='Zero: overlap: expected "auto", "forward" or "off", got'):
        Zero(mlp(2, 2), stage=3, overlap="on", timeout=TIMEOUT)
    zero.close()
    zero = Zero(mlp(32, 24, 32, dtype=torch.float32), stage=3, **SMALL)
    for _ in range(2):  # torch.compile leaves the module alone
        torch.compile(zero, backend="eager")(x).square().mean().backward()
        zero.optimizer.step()


def a_rank_that_runs_no_forward(rank, world):
    zero = Zero(mlp(32, 24, 32, dtype=torch.float32), stage=3, **{**SMALL, "timeout": 2.0})
    if rank:
        with pytest.raises(
            CollectiveError, match=r"rank 0 .*block 0 \(0\), all-gather of \d+ parameters"
        ):
            square(zero, 0, rank, world)
    dist.barrier()
    assert len(set(everyone("done"))) == 1


def kept_views_read_as_nan(rank, world):
    """Between uses, and after the module is gone; a numpy array keeps its memory. A clone is the user's."""
    kept = {}

    def keep(module, *_):
        w = module.weight
        kept.update(
            view=w.view(-1), detached=w.detach(), turned=w.t()[1:], clone=w.detach().clone()
        )

    zero = Zero(mlp(32, 24, 32, dtype=torch.float32), stage=3, **SMALL)
    handle = zero.module[0].register_forward_hook(keep)
    x = batch(2, 32, torch.float32)
    loss = zero(x).square().mean()
    moments = [lambda: loss.backward(), zero.optimizer.step, lambda: zero.module.eval()(x)]
    for moment in moments:
        for name in ("view", "detached", "turned"):
            assert kept[name].isnan().all() and (kept[name] + 1).isnan().all(), name
        assert kept["clone"].isfinite().all()
        moment()
    handle.remove()
    handle = zero.module[0].register_forward_hook(
        lambda m, *_: kept.update(array=m.weight.detach().numpy())
    )
    for _ in range(2):
        zero.optimizer.zero_grad()
        zero(x).square().mean().backward()
        zero.optimizer.step()
    with zero.gathered():
        expected = zero.module[0].weight.detach().clone()
    zero(x)
    assert torch.equal(torch.from_numpy(kept["array"]), expected)


def a_gradient_of_a_gradient(rank, world):
    """autograd.grad with and without create_graph, and backward of a penalty, as in stage 1."""
    results = []
    for stage in (1, 3):
        zero = Zero(mlp(32, 24, 32, dtype=torch.float32), stage=stage, **SMALL)
        found = []
        for step in range(3):
            zero.optimizer.zero_grad()
            x = batch(4, 32, torch.float32, seed=step + rank).requires_grad_()
            loss = zero(x).square().mean()
            (dx,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + dx.square().sum()).backward()
            found.append(dx.detach().clone())
            zero.optimizer.step()
            loss = zero(x).square().mean()
            found += torch.autograd.grad(loss, [x, *zero.module.parameters()])
            assert stage == 1 or not any(b.held_bytes for b in zero._set.blocks)
        with zero.gathered():
            found += [p.detach().clone() for p in zero.module.parameters()]
        results.append(found)
    for a, b in zip(*results):
        assert torch.equal(a, b)


def compiled_parts_are_refused(rank, world):
    """torch.compile does not see when parameters come and go: said at construction. Stage 2 takes them."""
    whole = torch.compile(mlp(8, 8, 8, dtype=torch.float32), backend="eager")
    part = mlp(8, 8, 8, dtype=torch.float32)
    part[2] = torch.compile(part[2], backend="eager")
    in_place = mlp(8, 8, 8, dtype=torch.float32)
    in_place[2].compile(backend="eager")
    for model, name in ((whole, "the module itself"), (part, "2"), (in_place, "2")):
        message = f"Zero: module: expected no part compiled in stage 3, got {name}; compile nothing"
        with pytest.raises(ValueError, match=message):
            Zero(model, stage=3, **SMALL)
        zero = Zero(model, stage=2, **SMALL)
        zero(batch(2, 8, torch.float32)).sum().backward()
        zero.optimizer.step()


def join_without_a_step(rank, world):
    zero = Zero(mlp(8, 8, dtype=torch.float32), stage=3, **{**SMALL, "timeout": 4.0})
    message = "join: stage 3: expected a rank that has made a step"
    with pytest.raises((RuntimeError, CollectiveError), match=message), zero.join():
        for _ in range(1 - rank):
            zero(batch(2, 8, torch.float32)).sum().backward()
            zero.optimizer.step()
    dist.barrier()
