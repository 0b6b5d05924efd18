"""What test_split_matmul.py and test_vocab.py run in each rank: case(rank, world) -> list of what is wrong.

Operands are small integers, so every order of summation gives the same bits and equality is exact.
"""

import itertools

import torch
import torch.distributed as dist
import trainwright as tw
from numerics import parallel_close
from tensor_cases import MODES, integers, late, poisoned
from torch.distributed.device_mesh import DeviceMesh
from trainwright.parallel import (
    VocabParallelEmbedding,
    all_gather_matmul,
    calibrate,
    decisions,
    matmul_all_reduce,
    matmul_reduce_scatter,
    summa_matmul,
    vocab_parallel_cross_entropy,
)
from trainwright.parallel._sizes import shard_slice, split_evenly
from trainwright.parallel.cost_model import forced

# (M, K, N): divisible, prime, fewer than ranks (empty shards), none
SHAPES = [(8, 12, 8), (7, 13, 11), (2, 3, 1), (3, 1, 2), (0, 4, 4), (4, 0, 3)]


def whole_product(a, b, dy):
    a, b = a.double().requires_grad_(), b.double().requires_grad_()
    y = a @ b
    y.backward(dy.double())
    return y.detach(), a.grad, b.grad


def wrong_tensors(case, got, expected, dtype):
    """Sums stay below 2^8 in magnitude, so bf16 holds them exactly too."""
    names = ("y", "da", "db")
    return [
        f"{case}: {name}"
        for name, g, e in zip(names, got, expected)
        if g.dtype != dtype or not torch.equal(g.double(), e)
    ]


def one_dimension(rank, world):
    wrong = []
    for (i, (M, K, N)), mode in itertools.product(enumerate(SHAPES), MODES):
        dtype = (torch.float32, torch.bfloat16)[(i + mode[1]) % 2]
        reduce = ("ordered", "ring")[i // 2 % 2]
        a, b = integers(M, K, seed=1, dtype=dtype), integers(K, N, seed=2, dtype=dtype)
        dy = integers(M, N, seed=3, dtype=dtype)
        y, da, db = whole_product(a, b, dy)
        rows = shard_slice(split_evenly(M, world), rank)
        ins, outs = (shard_slice(split_evenly(n, world), rank) for n in (K, N))
        parts = {  # operands, upstream, expected
            all_gather_matmul: (a[rows], b[:, outs], dy[:, outs], (y[:, outs], da[rows], db[:, outs])),
            matmul_reduce_scatter: (a[:, ins], b[ins], dy[rows], (y[rows], da[:, ins], db[ins])),
            matmul_all_reduce: (a[:, ins], b[ins], dy, (y, da[:, ins], db[ins])),
        }  # fmt: skip
        for function, (left, right, upstream, expected) in parts.items():
            left, right = left.clone().requires_grad_(), right.clone().requires_grad_()
            with poisoned(), late(rank), forced(*mode):
                got = function(left, right, reduce=reduce)
                got.backward(upstream)
            case = f"{function.__name__} {(M, K, N)} {dtype} {mode} {reduce}"
            wrong += wrong_tensors(case, (got.detach(), left.grad, right.grad), expected, dtype)
    return wrong


def summa(rank, world):
    wrong = []
    for rows, cols in [(r, world // r) for r in range(1, world + 1) if world % r == 0]:
        mesh = DeviceMesh("cpu", torch.arange(world).view(rows, cols))
        i, j = divmod(rank, cols)
        for (s, (M, K, N)), mode in itertools.product(enumerate([*SHAPES, (5, 150, 3)]), MODES[:2]):
            dtype = (torch.float32, torch.bfloat16)[(s + mode[0]) % 2] if K < 100 else torch.float32
            a, b = integers(M, K, seed=1, dtype=dtype), integers(K, N, seed=2, dtype=dtype)
            dy = integers(M, N, seed=3, dtype=dtype)
            y, da, db = whole_product(a, b, dy)
            m, n = shard_slice(split_evenly(M, rows), i), shard_slice(split_evenly(N, cols), j)
            ka, kb = shard_slice(split_evenly(K, cols), j), shard_slice(split_evenly(K, rows), i)
            left, right = a[m, ka].clone().requires_grad_(), b[kb, n].clone().requires_grad_()
            with poisoned(), late(rank), forced(*mode):
                got = summa_matmul(left, right, mesh=mesh)
                got.backward(dy[m, n])
            case = f"summa {rows}x{cols} {(M, K, N)} {dtype} {mode}"
            expected = (y[m, n], da[m, ka], db[kb, n])
            wrong += wrong_tensors(case, (got.detach(), left.grad, right.grad), expected, dtype)
    return wrong


def overlap_changes_no_bit(rank, world):
    """Whatever the chunks and the order of sums: also what the cost model chooses, which is asked for these sizes."""
    generator = torch.Generator().manual_seed(rank)
    a, b = (torch.randn(s, generator=generator) for s in ((331, 257), (257, 401)))
    mesh = DeviceMesh("cpu", torch.arange(world).view(1, world))
    wide = torch.cat([b] * world)
    functions = {
        "all_gather_matmul": lambda o, r: all_gather_matmul(a, b, overlap=o, reduce=r),
        "matmul_reduce_scatter": lambda o, r: matmul_reduce_scatter(a, b, overlap=o, reduce=r),
        "matmul_all_reduce": lambda o, r: matmul_all_reduce(a, b, overlap=o, reduce=r),
        "summa_matmul": lambda o, r: summa_matmul(a, wide, mesh=mesh, overlap=o),
    }
    wrong = []
    for (name, function), reduce in itertools.product(functions.items(), ("ordered", "ring")):
        plain = function("off", reduce)
        wrong += [] if torch.equal(function("auto", reduce), plain) else [f"{name} {reduce}"]
        for mode in MODES:
            with forced(*mode):
                same = torch.equal(function("auto", reduce), plain)
            wrong += [] if same else [f"{name} {reduce} {mode}"]
    return wrong


def decisions_are_alike(rank, world):
    """The cost model is measured once and the same on every rank; what it chose is on record, and `tw.explain` shows
    it."""
    a, b = torch.ones(256, 128), torch.ones(128, 128)
    text = tw.explain(matmul_all_reduce, a, b)
    model = calibrate()
    found = decisions()[-1]
    mine = [(model, found.overlap, found.chunks, found.predicted_s, found.plain_s)]
    every = [None] * world
    dist.all_gather_object(every, mine)
    wrong = [] if all(e == mine for e in every) else [f"differ: {every}"]
    if found.call.split()[0] != "matmul_all_reduce" or not found.actual_s or found.calls < 1:
        wrong.append(str(found))
    if calibrate() is not model or str(found) not in text or "times as fast as plain" not in text:
        wrong.append(text)
    if not (model.latency_s > 0 and model.bytes_per_s > 0 and model.flops_per_s > 0):
        wrong.append(str(model))
    return wrong


def several_matrices(rank, world):
    """all_gather_matmul with several w: the results of single calls."""
    x = integers(3 + rank, 5, seed=rank)
    ws = [integers(5, n, seed=n) for n in (4, 1, 6)]
    together = all_gather_matmul(x, ws)
    alone = [all_gather_matmul(x, w) for w in ws]
    return [f"{i}" for i, (a, b) in enumerate(zip(together, alone)) if not torch.equal(a, b)]


def replicated_weight(rank, world):
    """The same w and upstream gradient on every rank: the same bits of dw, though the rows come in another order."""
    generator = torch.Generator().manual_seed(5)
    M = 23 * world
    x, w, dy = (torch.randn(s, generator=generator) for s in ((M, 67), (67, 29), (M, 29)))
    w.requires_grad_()
    all_gather_matmul(x[23 * rank : 23 * rank + 23], w).backward(dy)
    every = [torch.empty_like(w) for _ in range(world)]
    dist.all_gather(every, w.grad)
    return [] if all(torch.equal(e, w.grad) for e in every) else ["dw differs"]


def summa_that_does_not_fit(rank, world):
    """Every rank hears of it, whichever rank's block is wrong; nobody waits for ever."""
    mesh = DeviceMesh("cpu", torch.arange(world).view(1, world))
    try:
        summa_matmul(torch.ones(2 + (rank == world - 1), 3), torch.ones(3 * world, 2), mesh=mesh)
    except ValueError as error:
        return [] if "summa_matmul: a, b: expected equal heights" in str(error) else [str(error)]
    return ["no error"]


def matmul_messages(rank, world):
    mesh = DeviceMesh("cpu", torch.arange(world))
    a = torch.ones(2, 3)
    cases = {
        "ValueError all_gather_matmul: w: expected shape (3, any), got (2, 3)": lambda: all_gather_matmul(a, a),
        "TypeError matmul_all_reduce: "
        "b: expected dtype float32, got float64": lambda: matmul_all_reduce(a, a.t().double()),
        "ValueError matmul_reduce_scatter: "
        "overlap: expected 'auto' or 'off', got 1": lambda: matmul_reduce_scatter(a, a.t(), overlap=1),
        "ValueError matmul_all_reduce: a, b: expected the same rows of a and columns of b on every rank, "
        f"got {[2 + r for r in range(world)]} rows and {[2] * world} columns by rank": lambda: (
            matmul_all_reduce(torch.ones(2 + rank, 3), a.t())
        ),
        "ValueError summa_matmul: mesh: expected two dimensions, got 1": lambda: summa_matmul(a, a, mesh=mesh),
        "TypeError summa_matmul: "
        "mesh: expected a torch DeviceMesh, got NoneType": lambda: summa_matmul(a, a, mesh=None),
    }  # fmt: skip
    return unexpected(cases)


def unexpected(cases):
    wrong = []
    for expected, function in cases.items():
        try:
            function()
            wrong.append(f"no error, expected {expected}")
        except (TypeError, ValueError, IndexError) as error:
            if f"{type(error).__name__} {error}" != expected:
                wrong.append(f"{type(error).__name__} {error}")
    return wrong


# ---- the ends of a language model


LOSSES = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-3, "reduction": "sum"},
    {"label_smoothing": 0.3, "z_loss": 1e-2, "reduction": "none", "ignore_index": 2},
]


def cross_entropy(rank, world):
    """Against tw.cross_entropy of the whole logits; shards even, uneven, empty; ignored targets."""
    wrong = []
    for V, dtype, options in itertools.product(
        (11, 2, 64), (torch.float32, torch.bfloat16), LOSSES
    ):
        logits = torch.randn(5, 3, V, generator=torch.Generator().manual_seed(V)).to(dtype) * 3
        target = torch.randint(V, (5, 3), generator=torch.Generator().manual_seed(1))
        target[1, 2] = options.get("ignore_index", -100)
        even = split_evenly(V, world)
        for sizes in (even, [V, *[0] * (world - 1)], even[::-1]):
            whole = logits.flatten(0, 1).requires_grad_()
            expected = tw.cross_entropy(whole, target.flatten(), **options)
            upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
            (grad,) = torch.autograd.grad(expected, whole, upstream)
            mine = shard_slice(sizes, rank)
            shard = logits[..., mine].clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(shard, target, **options)
            loss.backward(upstream.view(loss.shape))
            kind = "vocabulary gradient, " + str(dtype).removeprefix("torch.")
            same = parallel_close("vocabulary loss", loss.flatten(), expected.flatten())
            if not same or not parallel_close(kind, shard.grad.flatten(0, 1), grad[:, mine]):
                wrong.append(f"V {V} {dtype} {options} {sizes}")
    return wrong


def extreme_logits(rank, world):
    """-inf everywhere but on one rank; a large common offset; NaN in an ignored row."""
    V = 4 * world
    logits = torch.full((4, V), -torch.inf)
    logits[0, 1], logits[1, V - 1] = 5.0, 5.0
    logits[2] = torch.arange(V) + 1e4
    logits[3] = torch.nan
    target = torch.tensor([1, V - 1, 3, -100])
    mine = slice(4 * rank, 4 * rank + 4)
    shard = logits[:, mine].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(shard, target, reduction="none")
    loss.sum().backward()
    expected = torch.logsumexp(logits[2].double(), 0) - logits[2, 3].double()
    wrong = [] if loss[[0, 1, 3]].abs().max() == 0 else [f"loss {loss.tolist()}"]
    near = parallel_close("vocabulary loss", loss[2], expected)
    wrong += [] if near else [f"loss {loss[2]}"]
    return wrong + ([] if shard.grad.isfinite().all() else ["gradient not finite"])


def all_ignored(rank, world):
    shard = torch.randn(3, 5, requires_grad=True)
    loss = vocab_parallel_cross_entropy(shard, torch.full((3,), -100))
    loss.backward()
    return [] if loss.item() == 0 and not shard.grad.any() else ["not 0"]


def embedding(rank, world):
    """Against torch.nn.Embedding: bits of the forward, sums of integers in the backward, the start, padding."""
    wrong = []
    for V, padding, dtype in itertools.product(
        (7, 2), (None, 1, -1), (torch.float32, torch.bfloat16)
    ):
        torch.manual_seed(0)
        whole = torch.nn.Embedding(V, 3, padding, dtype=dtype)
        torch.manual_seed(rank)
        layer = VocabParallelEmbedding(V, 3, padding, dtype=dtype)
        mine = shard_slice(split_evenly(V, world), rank)
        tokens = torch.randint(V, (4, 5), generator=torch.Generator().manual_seed(3)).int()
        y, expected = layer(tokens), whole(tokens)
        dy = integers(4, 5, 3, seed=4, dtype=dtype)
        y.backward(dy)
        expected.backward(dy)
        case = f"V {V} padding {padding} {dtype}"
        if not torch.equal(layer.weight, whole.weight[mine]):
            wrong.append(f"{case}: start")
        if not torch.equal(y, expected):
            wrong.append(f"{case}: forward")
        if not torch.equal(layer.weight.grad, whole.weight.grad[mine]):
            wrong.append(f"{case}: gradient")
    empty = VocabParallelEmbedding(3, 4)(torch.zeros(0, 2, dtype=torch.int64))
    return wrong + ([] if empty.shape == (0, 2, 4) else ["no tokens"])


def gradient_sums_in_fp32(rank, world):
    """256 + 1 + 1 + ... in bf16 would stay 256."""
    layer = VocabParallelEmbedding(2, 1, dtype=torch.bfloat16)
    y = layer(torch.zeros(9, dtype=torch.int64))
    y.backward(torch.tensor([256.0] + [1.0] * 8, dtype=torch.bfloat16)[:, None])
    return [] if rank or layer.weight.grad[0].item() == 264 else [layer.weight.grad[0].item()]


def tied(rank, world):
    """Embedding and head share one parameter: both gradients are summed in it."""
    V, C = 7, 4
    layer = VocabParallelEmbedding(V, C)
    head = tw.parallel.ColumnParallelLinear(C, V, bias=False)
    head.weight = layer.weight
    whole = integers(V, C, seed=1)
    mine = shard_slice(split_evenly(V, world), rank)
    with torch.no_grad():
        layer.weight.copy_(whole[mine])
    tokens, target = torch.tensor([0, 3, 6, 3]), torch.tensor([1, 6, 2, 0])
    vocab_parallel_cross_entropy(head(layer(tokens)), target).backward()
    table = whole.clone().requires_grad_()
    tw.cross_entropy(table[tokens] @ table.t(), target).backward()
    near = parallel_close("tied gradient", layer.weight.grad, table.grad[mine])
    return [] if near else ["gradient"]


def vocab_messages(rank, world):
    layer, x = VocabParallelEmbedding(4, 2), torch.zeros(3, 2)
    ce, t = vocab_parallel_cross_entropy, torch.zeros(3, dtype=torch.int64)
    V = 2 * world
    cases = {
        "ValueError VocabParallelEmbedding: "
        "padding_idx: expected None or an index within [-4, 4), got 4": lambda: VocabParallelEmbedding(4, 2, 4),
        "IndexError VocabParallelEmbedding: "
        "tokens: expected 0 <= token < 4, got 4 at position 1": lambda: layer(torch.tensor([0, 4])),
        "TypeError VocabParallelEmbedding: tokens: expected dtype int64, int32, got float32": lambda: layer(x),
        "IndexError vocab_parallel_cross_entropy: "
        f"target: expected 0 <= target < {V} or ignore_index -100, got {V} at position 0": lambda: ce(x, t + V),
        "ValueError vocab_parallel_cross_entropy: target: expected shape (3), got (2,)": lambda: ce(x, t[:2]),
        "ValueError vocab_parallel_cross_entropy: "
        "label_smoothing: expected at most 1, got 2.0": lambda: ce(x, t, label_smoothing=2.0),
        'ValueError vocab_parallel_cross_entropy: '
        'reduction: expected "none", "mean" or "sum", got \'all\'': lambda: ce(x, t, reduction="all"),
    }  # fmt: skip
    dist.barrier()
    return unexpected(cases)
