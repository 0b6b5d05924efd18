"""Cases of `Zero(overlap="forward")` that run in the ranks: parameters that arrive under the next forward."""

import copy

import pytest
import torch
import trainwright as tw
from case_tools import assert_same_on_all_ranks, batch, mlp, share
from torch import nn
from trainwright.parallel import DataParallel, Zero
from zero_cases import TIMEOUT, Zoo, assert_equal_state


class Backwards(nn.Module):
    """Runs its layers against the order of registration; one parameter is read by the parent, one module keeps
    its own references.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.last = nn.Linear(9, 4)
        self.middle = nn.Linear(9, 9)
        self.memory = nn.LSTM(6, 9, batch_first=True)
        self.first = nn.Linear(8, 6)
        self.read_by_the_parent = nn.Linear(9, 9, bias=False)

    def forward(self, x):
        x, _ = self.memory(self.first(x).unsqueeze(0))
        x = torch.tanh(x.squeeze(0) @ self.read_by_the_parent.weight)
        return self.last(torch.tanh(self.middle(x)))


def same_bits(rank, world):
    for stage in (1, 2):
        for bucket_mb in ("auto", 0.0002):
            options = {"bucket_mb": bucket_mb, "overlap": "forward"}
            run_both_late(Zoo, rank, world, stage, options)
            run_both_late(Backwards, rank, world, stage, options)


def run_both_late(make, rank, world, stage, options):
    dp = DataParallel(make(), unused="zero", timeout=TIMEOUT, bucket_mb=options["bucket_mb"])
    plain = tw.optim.AdamW(dp.parameters(), lr=0.02)
    zero = Zero(make(), lr=0.02, stage=stage, unused="zero", timeout=TIMEOUT, **options)
    for step in range(3):
        for m, opt in ((dp, plain), (zero, zero.optimizer)):
            m.zero_grad()
            m.loss_weight(rank + 1)
            if make is Zoo:
                tokens = torch.randint(
                    13, (6 * world,), generator=torch.Generator().manual_seed(step)
                )
                loss = m(share(tokens, rank, world))
            else:
                x = batch(4 * world, 8, torch.float32, seed=step)
                loss = m(share(x, rank, world)).square().mean()
            loss.backward()
            opt.step()
    assert zero._set.coming
    assert_equal_state(dp, zero)
    assert not zero._set.coming
    zero.close()
    dp.close()


def waits_for_what_a_module_uses(rank, world):
    model = mlp(16, 16, 16, 16, dtype=torch.float32)
    zero = Zero(model, lr=0.1, stage=1, bucket_mb=0.0005, overlap="forward", timeout=TIMEOUT)
    x = share(batch(4 * world, 16, torch.float32), rank, world)
    left = []
    for layer in (m for m in model if isinstance(m, nn.Linear)):
        layer.register_forward_pre_hook(lambda *_: left.append(len(zero._set.coming)))
    for _ in range(2):
        zero.zero_grad()
        left.clear()
        zero(x).square().mean().backward()
        zero.optimizer.step()
    total = len(zero._set.coming)
    zero.zero_grad()
    assert len(zero._set.coming) == total > 3  # nobody has looked
    left.clear()
    zero(x)
    assert left[0] > left[1] > left[2] >= 0, left
    assert zero.stats().sent_bytes and zero.stats().busy_ms


def readers_see_complete_values(rank, world):
    """Each way to read parameters after a step, and a held tensor after `synchronize`."""
    x = share(batch(4 * world, 16, torch.float32), rank, world)
    readers = {
        "attribute": lambda zero, held: {
            n: zero.module[i].weight for n, i in (("0.weight", 0), ("2.weight", 2))
        },
        "listed": lambda zero, held: dict(zero.named_parameters()),
        "state_dict": lambda zero, held: zero.state_dict(),
        "copy": lambda zero, held: dict(copy.deepcopy(zero.module).named_parameters()),
        "sharded": lambda zero, held: zero.sharded_state_dict() and held,
        "synchronize": lambda zero, held: zero.synchronize() or held,
        "close": lambda zero, held: zero.close() or held,
        "full": lambda zero, held: zero.full_state_dict().get("model", held),
    }
    found = {}
    for name, read in readers.items():
        zero = Zero(
            mlp(16, 16, 16, dtype=torch.float32),
            lr=0.1,
            stage=2,
            bucket_mb=0.0005,
            overlap="forward",
            timeout=TIMEOUT,
        )
        held = dict(zero.module.named_parameters())
        zero(x).square().mean().backward()
        zero.optimizer.step()
        values = {n: p.detach().clone() for n, p in read(zero, held).items()}
        assert_same_on_all_ranks(values)
        zero.close()
        for parameter, value in values.items():
            assert torch.equal(value, found.setdefault(parameter, value)), (name, parameter)


def steps_without_a_forward_between(rank, world):
    """A second step, and a load, find the first one's parameters complete."""
    models = []
    for overlap in ("auto", "forward"):
        model = mlp(16, 16, 16, dtype=torch.float32)
        zero = Zero(model, lr=0.1, stage=1, bucket_mb=0.0005, overlap=overlap, timeout=TIMEOUT)
        x = share(batch(4 * world, 16, torch.float32), rank, world)
        zero(x).square().mean().backward()
        zero.optimizer.step()
        zero.optimizer.step()
        saved = zero.full_state_dict()
        zero.optimizer.step()
        zero.load_full_state_dict(saved)
        zero.optimizer.step()
        models.append(zero)
    assert_equal_state(*models)


def compiled_parts_are_refused(rank, world):
    model = mlp(4, 4, 4, dtype=torch.float32)
    model[0].compile()
    with pytest.raises(
        ValueError,
        match='no part compiled with overlap="forward", got 0; compile nothing',
    ):
        Zero(model, stage=1, overlap="forward", timeout=TIMEOUT)
