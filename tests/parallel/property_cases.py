"""Random models, bucket sizes, accumulations, weights and stages: drawn from a seed, the same on all ranks."""

import copy
import random

import torch
import trainwright as tw
from case_tools import assert_same_on_all_ranks
from numerics import parallel_close
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainwright.parallel import DataParallel, Zero

TIMEOUT = 20.0
WIDTH = 6


class Strided(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype).t() / 3)
        self.empty = nn.Parameter(torch.empty(0, 2, dtype=dtype))
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x):
        return x @ self.weight * self.scale + self.empty.sum()


class Narrow(nn.Linear):
    """In bf16, whatever the rest is in."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x):
        return super().forward(x.bfloat16()).to(x.dtype)


class Drawn(nn.Module):
    """A chain of parts; some are used twice, tied, frozen, recomputed, or looked up by the parent."""

    def __init__(self, seed, dtype):
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        kinds = ["linear", "mlp", "norm", "strided", "frozen", "tied", "looked up"]
        kinds += ["narrow"] if dtype == torch.float32 else []
        self.parts, self.order = nn.ModuleList(), []
        for i, kind in enumerate(draw.choices(kinds, k=draw.randint(2, 6))):
            part = {
                "norm": lambda: nn.LayerNorm(WIDTH, dtype=dtype),
                "strided": lambda: Strided(dtype),
                "narrow": Narrow,
                "mlp": lambda: nn.Sequential(
                    nn.Linear(WIDTH, 40, dtype=dtype), nn.Tanh(), nn.Linear(40, WIDTH, dtype=dtype)
                ),
            }.get(kind, lambda: nn.Linear(WIDTH, WIDTH, dtype=dtype))()
            if kind == "frozen":
                part.requires_grad_(False)
            linears = [p for p in self.parts if type(p) is nn.Linear and p.weight.requires_grad]
            if kind == "tied" and linears:
                part.weight = linears[0].weight
            self.parts.append(part)
            how = draw.choice(["plain", "plain", "recomputed", "recomputed nested"])
            self.order.append((i, "looked up" if kind == "looked up" else how))
        self.order.append((draw.randrange(len(self.parts)), "plain"))  # once more

    def forward(self, x):
        for i, how in self.order:
            part = self.parts[i]
            if how == "looked up":
                y = nn.functional.linear(x, part.weight, part.bias)
            elif how == "plain":
                y = part(x)
            else:
                y = checkpoint(part, x, use_reentrant=how == "recomputed nested")
            x = x + y.tanh()
        return x


def agrees(rank, world, seed):
    """Stage `seed % 4` with random buckets: the bits of DataParallel with one bucket, after three steps; and, in fp64,
    what one process gets from all microbatches of all ranks.
    """
    draw = random.Random(1000 + seed)
    stage, dtype = seed % 4, draw.choice([torch.float32, torch.float64])
    microbatches = draw.randint(1, 3)
    bucket_mb = draw.choice([1e-6, 2e-4, 5e-4, 1.0])
    weights = [
        [[draw.randint(0, 3) + (r == 0) for _ in range(microbatches)] for r in range(world)]
        for _ in range(3)
    ]
    options = {"timeout": TIMEOUT, "unused": "zero"}
    alone = Drawn(seed, dtype)
    plain = tw.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=0.01)
    dp = DataParallel(copy.deepcopy(alone), bucket_mb=1000, **options)
    runs = [(dp, tw.optim.AdamW([p for p in dp.parameters() if p.requires_grad], lr=0.01))]
    if stage:
        given = copy.deepcopy(alone)
        params = [p for p in given.parameters() if p.requires_grad]
        zero = Zero(given, stage=stage, params=params, lr=0.01, bucket_mb=bucket_mb, **options)
        runs.append((zero, zero.optimizer))
    else:
        other = DataParallel(copy.deepcopy(alone), bucket_mb=bucket_mb, **options)
        own = [p for p in other.parameters() if p.requires_grad]
        runs.append((other, tw.optim.AdamW(own, lr=0.01)))

    def loss_of(model, step, r, m):
        generator = torch.Generator().manual_seed(step * 100 + r * 10 + m)
        x = torch.randn(4, WIDTH, generator=generator).to(dtype).requires_grad_()
        return model(x).square().mean()

    for step in range(3):
        for model, optimizer in runs:
            model.zero_grad()
            for m in range(microbatches):
                model.loss_weight(weights[step][rank][m])
                with model.accumulate(m, microbatches):
                    loss_of(model, step, rank, m).backward()
            optimizer.step()
        plain.zero_grad()
        total = sum(map(sum, weights[step]))
        for r in range(world):
            for m in range(microbatches):
                (loss_of(alone, step, r, m) * (weights[step][r][m] / total)).backward()
        plain.step()
        theirs, ours = (model.state_dict() for model, _ in runs)
        for name, x in theirs.items():
            assert torch.equal(x, ours[name]), (step, name, stage, bucket_mb)
    assert_same_on_all_ranks(ours)
    if dtype == torch.float64:
        for name, x in alone.state_dict().items():
            assert parallel_close("random model, float64", ours[name], x), name
