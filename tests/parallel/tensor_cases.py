"""What test_tensor.py runs in each rank: case(rank, world) -> list of what is wrong.

Operands are small integers, so every order of summation gives the same bits and equality is exact. Buffers start as
NaN, so that a value that is used before it arrived shows; one rank is late, by random times.
"""

import collections
import contextlib
import itertools
import random
import time
import weakref

import torch
import torch.distributed as dist
from trainwright.ops.gemm import gemm
from trainwright.parallel import ColumnParallelLinear, RowParallelLinear, column_linears
from trainwright.parallel import _schedule_runtime as runtime
from trainwright.parallel._exchange import How, gather_sizes, gathered_panels, gathered_rows
from trainwright.parallel._sizes import shard_slice, split_evenly
from trainwright.parallel.cost_model import forced

LAYERS = ["column", "column gather", "column sequence", "row", "row split", "row sequence"]
MODES = [(False, 1), (True, 1), (True, 2), (True, 5)]  # overlap, chunks


def shapes(world):
    """(T rows, K in, N out) of W-1, W, W+1, a prime and 0, each in every place twice."""
    sizes = [world - 1, world, world + 1, 7, 0]
    return [tuple(sizes[(i + j * step) % 5] for j in range(3)) for step in (1, 2) for i in range(5)]


@contextlib.contextmanager
def poisoned():
    """New memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def late(rank, who=1, seed=0):
    """Rank `who` starts its messages late, by up to 2 ms."""
    start, chance = runtime._start, random.Random(seed)

    def slow(*args):
        time.sleep(chance.random() * 2e-3)
        start(*args)

    if rank == who:
        runtime._start = slow
    try:
        yield
    finally:
        runtime._start = start


def integers(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def randoms(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def unsharded(x, weight, bias, dy):
    """Output and gradients of the whole layer, in fp64."""
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    y = torch.nn.functional.linear(x, weight, bias)
    y.backward(dy.double())
    return y.detach(), x.grad, weight.grad, bias.grad


def run_layer(kind, shape, dtype, fill=integers, lead=(), **options):
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
    every, sequence = slice(None), kind.endswith("sequence")
    options = {"dtype": dtype, "sequence_parallel": sequence, **options}
    if kind.startswith("column"):
        layer = ColumnParallelLinear(K, N, gather_output=kind == "column gather", **options)
        w_part, b_part = (outs, every), outs
        x_part = (rows, every) if sequence else (every, every)
        y_part = (every, every) if kind == "column gather" else (every, outs)
    else:
        layer = RowParallelLinear(K, N, input_is_parallel=kind != "row split", **options)
        w_part, b_part = (every, ins), every
        x_part = (every, every) if kind == "row split" else (every, ins)
        y_part = (rows, every) if sequence else (every, every)
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


def exact(rank, world):
    """Every layer on every shape, plain and in chunks, both orders of sums: what is not equal to the unsharded
    layer."""
    wrong = []
    cases = itertools.product(LAYERS, enumerate(shapes(world)), MODES)
    for kind, (i, shape), mode in cases:
        dtype = (torch.float32, torch.bfloat16)[(i + mode[1]) % 2]
        reduce = ("ordered", "ring")[i % 2]
        with poisoned(), late(rank), forced(*mode):
            got, expected = run_layer(kind, shape, dtype, reduce=reduce)
        for name, g, e in zip(("y", "dx", "dw", "db"), got, expected):
            # Sums stay below 2^8 in magnitude, so bf16 holds them exactly too.
            if g.dtype != dtype or not torch.equal(g.double(), e):
                wrong.append(f"{kind} {shape} {dtype} {mode} {reduce}: {name}")
    return wrong


def exact_in_three_dimensions_and_fp64(rank, world):
    got, expected = run_layer("column sequence", (5, 6, 4), torch.float32, lead=(3,))
    wrong = ["three dimensions" for g, e in zip(got, expected) if not torch.equal(g.double(), e)]
    got, expected = run_layer("row", (7, 13, 11), torch.float64)
    return wrong + ["fp64" for g, e in zip(got, expected) if not torch.equal(g, e)]


def overlap_changes_no_bit(rank, world):
    """Random floats, one rank late: plain, and any number of chunks, give the same bits; sums in either order, on a
    narrow wire too."""
    differ = []
    options = [
        {"reduce": "ordered"}, {"reduce": "ring"}, {"reduce": "ordered", "wire_dtype": torch.bfloat16},
    ]  # fmt: skip
    for (i, kind), dtype in itertools.product(enumerate(LAYERS), [torch.float32, torch.bfloat16]):
        runs = []
        option = options[(i + (dtype == torch.bfloat16)) % 3]
        for mode in MODES:
            with late(rank), forced(*mode):
                runs.append(run_layer(kind, (151, 67, 141), dtype, randoms, **option)[0])
        for mode, run in zip(MODES[1:], runs[1:]):
            if not all(torch.equal(a, b) for a, b in zip(runs[0], run)):
                differ.append(f"{kind} {dtype} {option} {mode}")
    return differ


def ordered_sums_depend_on_no_place(rank, world):
    """Products over all rows have the bits of one process, wherever this rank stands, and a sum over ranks the same
    bits on every rank."""
    M, K, N = 66, 35, 130
    x, dy = randoms(M, K, seed=1), randoms(M, N, seed=4)
    y = run_layer("row", (M, K, N), torch.float32, randoms)[0][0]
    every = [torch.empty_like(y) for _ in range(world)]
    dist.all_gather(every, y)
    wrong = [] if all(torch.equal(e, y) for e in every) else ["row: ranks differ"]
    alone = gemm(dy.t(), x, None, None, 0, torch.float32, False)[0]
    for kind in ("column sequence", "row sequence"):
        dw = run_layer(kind, (M, K, N), torch.float32, randoms)[0][2]
        column = kind == "column sequence"
        mine = shard_slice(split_evenly(N if column else K, world), rank)
        if not torch.equal(dw, alone[mine] if column else alone[:, mine]):
            wrong.append(f"{kind}: dw is not that of one process")
    return wrong


def narrow_wire(rank, world):
    """Each partial sum is rounded to the wire's dtype once, the own one too; the sum is in fp32."""
    M, K, N = 9, 24, 10
    x, w, b = randoms(M, K, seed=1), randoms(N, K, seed=2), randoms(N, seed=3)
    wrong = []
    for kind, mode in itertools.product(("row", "row sequence"), MODES[::3]):
        with forced(*mode):
            got, _ = run_layer(kind, (M, K, N), torch.float32, randoms, wire_dtype=torch.bfloat16)
        total = torch.zeros(M, N)
        for r in range(world):
            s = shard_slice(split_evenly(K, world), r)
            part = gemm(x[:, s], w[:, s].t(), b if r == 0 else None, None, 0, torch.float32, False)[0]  # fmt: skip
            total += part.to(torch.bfloat16 if world > 1 else torch.float32)
        rows = shard_slice(split_evenly(M, world), rank) if kind == "row sequence" else slice(None)
        if not torch.equal(got[0], total[rows]):
            wrong.append(f"{kind} {mode}")
    return wrong


def uneven_rows(rank, world):
    """Sequence parallel with rows that no rule predicts, the last rank empty; an expanded gradient."""
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


def several_weights_off_one_gather(rank, world):
    """q, k and v: the layers one by one, to the bit where nothing is summed over them, with one gather of x."""
    wrong = []
    for sequence, mode in itertools.product((False, True), MODES[::2]):
        layers = [
            ColumnParallelLinear(6, n, bias=n != 3, sequence_parallel=sequence) for n in (8, 3, 5)
        ]
        for i, layer in enumerate(layers):
            with torch.no_grad():
                for p in layer.parameters():
                    p.copy_(integers(*p.shape, seed=10 * i + rank))
        x = integers(5, 6, seed=1)
        mine = x[shard_slice(split_evenly(5, world), rank)] if sequence else x
        results = []
        for call in (column_linears, lambda x, layers: [layer(x) for layer in layers]):
            leaf = mine.clone().requires_grad_()
            with poisoned(), late(rank), forced(*mode):
                ys = call(leaf, layers)
                sum((y * y).sum() for y in ys).backward()
            grads = [p.grad for layer in layers for p in layer.parameters()]
            results.append([*ys, leaf.grad, *grads])
            for layer in layers:
                layer.zero_grad(set_to_none=True)
        if not all(torch.equal(a, b) for a, b in zip(*results)):
            wrong.append(f"sequence {sequence} {mode}")
    return wrong


def shared_heads(rank, world):
    """GQA with fewer key/value heads than ranks: every rank holds what its query heads need, and the gradients of
    shared rows are those of the whole layer, the same bits on every holder."""
    features, kv_heads, dim = 5, max(1, world - 1), 2
    ranges = [(r * kv_heads // world * dim, -(-(r + 1) * kv_heads // world) * dim) for r in range(world)]  # fmt: skip
    weight, bias = integers(kv_heads * dim, features, seed=1), integers(kv_heads * dim, seed=2)
    wrong = []
    for sequence in (False, True):
        layer = ColumnParallelLinear(
            features, kv_heads * dim, ranges=ranges, sequence_parallel=sequence
        )
        begin, end = ranges[rank]
        with torch.no_grad():
            layer.weight.copy_(weight[begin:end])
            layer.bias.copy_(bias[begin:end])
        x = integers(6, features, seed=3)
        leaf = (x[shard_slice(split_evenly(6, world), rank)] if sequence else x).clone().requires_grad_()  # fmt: skip
        y = layer(leaf)
        dys = [integers(6, b - a, seed=10 + r) for r, (a, b) in enumerate(ranges)]
        y.backward(dys[rank])
        whole = torch.zeros(6, kv_heads * dim)
        for (a, b), dy in zip(ranges, dys):
            whole[:, a:b] += dy
        exact = unsharded(x, weight, bias, whole)
        rows = shard_slice(split_evenly(6, world), rank) if sequence else slice(None)
        expected = (exact[0][:, begin:end], exact[1][rows], exact[2][begin:end], exact[3][begin:end])  # fmt: skip
        got = (y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad)
        for name, g, e in zip(("y", "dx", "dw", "db"), got, expected):
            wrong += [] if torch.equal(g.double(), e) else [f"sequence {sequence}: {name}"]
    return wrong


def gathered_chunks_take_two_chunks(rank, world):
    """Memory for what is gathered: two chunks beside the own shard, all of it free again at the end."""
    made, alive, peak = [], [0], [0]
    original = runtime._receive_buffer
    empty = torch.empty

    def count(tensor):
        storage = tensor.untyped_storage()
        alive[0] += storage.nbytes()
        peak[0] = max(peak[0], alive[0])
        size = storage.nbytes()
        weakref.finalize(storage, lambda: alive.__setitem__(0, alive[0] - size))
        made.append(1)
        return tensor

    wrong = []
    rows, width = 20, 12
    sizes, mine = [rows] * world, integers(rows, width, seed=rank)
    for name, chunks in itertools.product(("rows", "panels"), (1, 2, 4)):
        made.clear()
        alive[0] = peak[0] = 0
        runtime._receive_buffer = lambda size, device: count(original(size, device))
        if name == "panels":  # their two buffers are made by the iterator
            torch.empty = lambda *a, **k: count(empty(*a, **k))
        try:
            with forced(True, chunks):
                how = How("test", None)
                gather = gathered_rows if name == "rows" else gathered_panels
                collections.deque(gather(mine, sizes, how, 1.0), maxlen=0)
        finally:
            runtime._receive_buffer, torch.empty = original, empty
        chunk = rows * width * 4 // chunks * (1 if name == "rows" else world)
        most = 2 * chunk + mine.numel() * 4
        if world > 1 and (peak[0] > most or not made):
            wrong.append(f"{name} in {chunks}: {peak[0]} bytes, at most {most}")
        if alive[0]:
            wrong.append(f"{name} in {chunks}: {alive[0]} bytes are kept")
    return wrong


def starts(rank, world):
    """Parameters: slices of the layer that torch makes on rank 0, whatever the other ranks' seeds."""
    torch.manual_seed(0)
    whole = torch.nn.Linear(10, 7)
    torch.manual_seed(rank)
    column = ColumnParallelLinear(10, 7)
    torch.manual_seed(rank)
    row = RowParallelLinear(10, 7)
    outs, ins = shard_slice(column.out_sizes, rank), shard_slice(row.in_sizes, rank)
    pairs = {
        "column weight": (column.weight, whole.weight[outs]),
        "column bias": (column.bias, whole.bias[outs]),
        "row weight": (row.weight, whole.weight[:, ins]),
        "row bias": (row.bias, whole.bias),
    }
    sizes = gather_sizes(rank + 1, None, torch.device("cpu"))
    wrong = [] if sizes == list(range(1, world + 1)) else [sizes]
    return wrong + [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


def frozen_and_autocast(rank, world):
    """Backward runs in the dtype of the forward; a frozen weight gets no gradient."""
    wrong = []
    for kind in ("row", "column"):
        layer = (RowParallelLinear if kind == "row" else ColumnParallelLinear)(6, 4)
        layer.weight.requires_grad_(False)
        x = torch.randn(5, layer.weight.shape[1], requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        y.float().sum().backward()
        right = y.dtype == torch.bfloat16 and layer.weight.grad is None
        if not right or x.grad.dtype != torch.float32 or layer.bias.grad.dtype != torch.float32:
            wrong.append(kind)
    return wrong


def messages(rank, world):
    layer = ColumnParallelLinear(4, 4)
    cases = {
        "TypeError ColumnParallelLinear: in_features: expected an int, got float": lambda: (
            ColumnParallelLinear(4.0, 4)
        ),
        "ValueError ColumnParallelLinear: out_features: expected at least 0, got -1": lambda: (
            ColumnParallelLinear(4, -1)
        ),
        "ValueError RowParallelLinear: overlap: expected 'auto' or 'off', got 'on'": lambda: (
            RowParallelLinear(4, 4, overlap="on")
        ),
        "ValueError RowParallelLinear: reduce: expected 'ordered' or 'ring', got 'tree'": lambda: (
            RowParallelLinear(4, 4, reduce="tree")
        ),
        "ValueError RowParallelLinear: wire_dtype: "
        "expected None, torch.float32, torch.bfloat16 or torch.float16, got torch.int8": lambda: (
            RowParallelLinear(4, 4, wire_dtype=torch.int8)
        ),
        "TypeError RowParallelLinear: sequence_parallel: expected a bool, got int": lambda: (
            RowParallelLinear(4, 4, sequence_parallel=1)
        ),
        "ValueError ColumnParallelLinear: ranges: "
        f"expected {world} ranges (first, end) in rising order that cover 0 to 4, got {((0, 3),) * world}": lambda: (
            ColumnParallelLinear(4, 4, ranges=[(0, 3)] * world)
        ),
        "ValueError ColumnParallelLinear: x: expected last dimension 4, got (2, 5)": lambda: layer(
            torch.randn(2, 5)
        ),
        "TypeError ColumnParallelLinear: x: expected the weight's dtype torch.float32, got torch.float64": lambda: (
            layer(torch.randn(2, 4).double())
        ),
        "ValueError column_linears: layers[1]: expected the in_features of layers[0], 4, got 5": lambda: (
            column_linears(torch.randn(2, 4), [layer, ColumnParallelLinear(5, 4)])
        ),
        "TypeError column_linears: layers[0]: expected a ColumnParallelLinear, got Linear": lambda: (
            column_linears(torch.randn(2, 4), [torch.nn.Linear(4, 4)])
        ),
    }  # fmt: skip
    got = []
    for make in cases.values():
        try:
            make()
            got.append("no error")
        except (TypeError, ValueError) as error:
            got.append(f"{type(error).__name__} {error}")
    return [text for text in got if text not in cases]
