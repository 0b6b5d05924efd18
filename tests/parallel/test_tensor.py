"""Tensor-parallel linear layers on real Gloo ranks against one unsharded layer.

Operands are small integers, so every order of summation gives the same bits and equality is exact; a separate case
with random floats checks that overlap changes no bit.
"""

import functools
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from trainwright.parallel import ColumnParallelLinear, RowParallelLinear
from trainwright.parallel._exchange import gather_sizes, gathered_shards
from trainwright.parallel._sizes import shard_slice, split_evenly

# (T rows, K in, N out): divisible, prime, fewer than ranks (empty shards), none
SHAPES = [(8, 12, 8), (7, 13, 11), (2, 3, 1), (3, 1, 2), (0, 4, 4)]
LAYERS = ["column", "column gather", "column sequence", "row", "row split", "row sequence"]


def integers(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def unsharded(x, weight, bias, dy):
    """Output and gradients of the whole layer, in fp64."""
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    y = torch.nn.functional.linear(x, weight, bias)
    y.backward(dy.double())
    return y.detach(), x.grad, weight.grad, bias.grad


def run_layer(kind, shape, dtype, overlap="auto", fill=integers, lead=()):
    """One sharded forward and backward. Returns this rank's tensors and the slices of the whole they stand for."""
    T, K, N = shape
    world, rank = dist.get_world_size(), dist.get_rank()
    x, weight, bias = (
        fill(T, *lead, K, seed=1, dtype=dtype),
        fill(N, K, seed=2, dtype=dtype),
        fill(N, seed=3, dtype=dtype),
    )
    dy = fill(T, *lead, N, seed=4, dtype=dtype)
    rows = shard_slice(split_evenly(T, world), rank)
    ins, outs = shard_slice(split_evenly(K, world), rank), shard_slice(split_evenly(N, world), rank)
    every = slice(None)
    column = kind.startswith("column")
    options = {"overlap": overlap, "dtype": dtype}
    if column:
        layer = ColumnParallelLinear(
            K,
            N,
            gather_output=kind == "column gather",
            sequence_parallel=kind == "column sequence",
            **options,
        )
        w_part, b_part = (outs, every), outs
        x_part = (rows, every) if kind == "column sequence" else (every, every)
        y_part = (every, every) if kind == "column gather" else (every, outs)
    else:
        layer = RowParallelLinear(
            K,
            N,
            input_is_parallel=kind != "row split",
            sequence_parallel=kind == "row sequence",
            **options,
        )
        w_part, b_part = (every, ins), every
        x_part = (every, every) if kind == "row split" else (every, ins)
        y_part = (rows, every) if kind == "row sequence" else (every, every)
    with torch.no_grad():
        layer.weight.copy_(weight[w_part])
        layer.bias.copy_(bias[b_part])

    def part(whole, where):
        return whole[where[0]][..., where[1]]

    x_r = part(x, x_part).clone().requires_grad_()
    y_r = layer(x_r)
    y_r.backward(part(dy, y_part))
    exact = unsharded(x, weight, bias, dy)
    expected = (part(exact[0], y_part), part(exact[1], x_part), exact[2][w_part], exact[3][b_part])
    return (y_r.detach(), x_r.grad, layer.weight.grad, layer.bias.grad), expected


def exact():
    """Every layer on every shape: names of what is not exactly equal to the unsharded layer."""
    wrong = []
    dtypes = [torch.float32, torch.bfloat16]
    for kind, shape, dtype in [
        *itertools.product(LAYERS, SHAPES, dtypes),
        ("row", SHAPES[1], torch.float64),
    ]:
        got, expected = run_layer(kind, shape, dtype)
        for name, g, e in zip(("y", "dx", "dw", "db"), got, expected):
            # Sums stay below 2^8 in magnitude, so bf16 holds them exactly too.
            if g.dtype != dtype or not torch.equal(g.double(), e):
                wrong.append(f"{kind} {shape} {dtype}: {name}")
    got, expected = run_layer("column sequence", (5, 6, 4), torch.float32, lead=(3,))
    wrong += ["three dimensions" for g, e in zip(got, expected) if not torch.equal(g.double(), e)]
    return wrong


def randoms(*shape, seed, dtype=torch.float32):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def overlap_changes_a_bit():
    """Random floats, large enough for several chunks, one rank late before each layer: overlap on against off."""
    differ = []
    for kind, dtype in itertools.product(LAYERS, [torch.float32, torch.bfloat16]):
        runs = []
        for overlap in ("off", "auto"):
            time.sleep(0.01 * (dist.get_rank() == 1))
            runs.append(run_layer(kind, (1531, 37, 401), dtype, overlap, fill=randoms)[0])
        differ += [f"{kind} {dtype}" for a, b in zip(*runs) if not torch.equal(a, b)]
    return differ


def uneven_rows():
    """Sequence parallel with rows that no rule predicts, the last rank empty; an expanded gradient."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [8] if world == 1 else [3, 5, *[0] * (world - 2)]
    x, weight = integers(8, 6, seed=1), integers(4, 6, seed=2)
    layer = ColumnParallelLinear(6, 4, bias=False, sequence_parallel=True, gather_output=True)
    with torch.no_grad():
        layer.weight.copy_(weight[shard_slice(split_evenly(4, world), rank)])
    mine = x[shard_slice(sizes, rank)].clone().requires_grad_()
    y = layer(mine)
    y.sum().backward()
    right = torch.equal(mine.grad, weight.sum(0).expand(sizes[rank], 6))
    return [] if right and torch.equal(y, x @ weight.t()) else ["differs"]


def late_shards():
    """What is yielded is what arrived: receive buffers start as NaN, and one rank sends late."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((rank + 1, 2), float(rank))
    shapes = [(r + 1, 2) for r in range(world)]
    torch.use_deterministic_algorithms(True)  # new_empty gives NaN
    try:
        seen = []
        for _ in range(3):
            time.sleep(0.05 * (rank == 1))
            seen += [(r, s.clone()) for r, s in gathered_shards(mine, shapes, None, overlap=True)]
    finally:
        torch.use_deterministic_algorithms(False)
    wrong = [r for r, s in seen if not torch.equal(s, torch.full((r + 1, 2), float(r)))]
    sizes = gather_sizes(rank + 1, None, mine.device)
    return wrong + ([] if sizes == list(range(1, world + 1)) else [sizes])


def starts():
    """Parameters: slices of the layer that torch makes on rank 0, whatever the other ranks' seeds."""
    torch.manual_seed(0)
    whole = torch.nn.Linear(10, 7)
    torch.manual_seed(dist.get_rank())
    column = ColumnParallelLinear(10, 7)
    torch.manual_seed(dist.get_rank())
    row = RowParallelLinear(10, 7)
    rank = dist.get_rank()
    outs, ins = shard_slice(column.out_sizes, rank), shard_slice(row.in_sizes, rank)
    pairs = {
        "column weight": (column.weight, whole.weight[outs]),
        "column bias": (column.bias, whole.bias[outs]),
        "row weight": (row.weight, whole.weight[:, ins]),
        "row bias": (row.bias, whole.bias),
    }
    return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


def frozen_and_autocast():
    layer = RowParallelLinear(6, 4)
    layer.weight.requires_grad_(False)
    x = torch.randn(5, layer.weight.shape[1], requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    right = (
        y.dtype == torch.bfloat16 and layer.weight.grad is None and x.grad.dtype == torch.float32
    )
    return [] if right else ["wrong"]


MESSAGES = {
    "TypeError ColumnParallelLinear: in_features: expected an int, got float": lambda: (
        ColumnParallelLinear(4.0, 4)
    ),
    "ValueError ColumnParallelLinear: out_features: expected at least 0, got -1": lambda: (
        ColumnParallelLinear(4, -1)
    ),
    "ValueError RowParallelLinear: overlap: expected 'auto' or 'off', got 'on'": lambda: (
        RowParallelLinear(4, 4, overlap="on")
    ),
    "TypeError RowParallelLinear: sequence_parallel: expected a bool, got int": lambda: (
        RowParallelLinear(4, 4, sequence_parallel=1)
    ),
    "ValueError ColumnParallelLinear: x: expected last dimension 4, got (2, 5)": lambda: (
        ColumnParallelLinear(4, 4)(torch.randn(2, 5))
    ),
    "TypeError ColumnParallelLinear: x: expected the weight's dtype torch.float32, got torch.float64": lambda: (
        ColumnParallelLinear(4, 4)(torch.randn(2, 4).double())
    ),
}


def messages():
    got = []
    for make in MESSAGES.values():
        try:
            make()
            got.append("no error")
        except (TypeError, ValueError) as error:
            got.append(f"{type(error).__name__} {error}")
    return [text for text in got if text not in MESSAGES]


FACTS = [
    exact,
    overlap_changes_a_bit,
    uneven_rows,
    late_shards,
    starts,
    frozen_and_autocast,
    messages,
]


def every_fact(names):
    """Run in each rank: what is wrong, by fact."""
    return {fact.__name__: fact() for fact in FACTS if fact.__name__ in names}


# Each world is spawned once; the larger ones check what depends on their size.
ON_WORLD = {
    1: ["exact", "starts", "messages"],
    2: [fact.__name__ for fact in FACTS],
    3: ["exact", "overlap_changes_a_bit", "uneven_rows", "late_shards"],
    4: ["exact", "uneven_rows"],
}


@functools.lru_cache(maxsize=4)
def wrong_on(world):
    return run_ranks(world, every_fact, ON_WORLD[world])


@pytest.mark.parametrize(
    ("world", "fact"), [(w, fact) for w, facts in ON_WORLD.items() for fact in facts]
)
def test_on_ranks(world, fact):
    for rank, wrong in enumerate(wrong_on(world)):
        assert not wrong[fact], f"rank {rank} of {world}: {wrong[fact]}"


def test_needs_a_process_group():
    with pytest.raises(RuntimeError, match="distributed is not initialised"):
        ColumnParallelLinear(4, 4)


def test_split_evenly():
    assert (
        split_evenly(7, 3) == [3, 2, 2]
        and split_evenly(2, 4) == [1, 1, 0, 0]
        and split_evenly(0, 2) == [0, 0]
    )
