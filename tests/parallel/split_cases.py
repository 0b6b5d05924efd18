"""What test_split_matmul.py and test_vocab.py run in each rank: case(rank, world) -> list of what is wrong.

Operands are small integers, so every order of summation gives the same bits and equality is exact.
"""

import itertools
import time

import torch
import torch.distributed as dist
import trainwright as tw
from torch.distributed.device_mesh import DeviceMesh
from trainwright.parallel import (
    VocabParallelEmbedding,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    summa_matmul,
    vocab_parallel_cross_entropy,
)
from trainwright.parallel._sizes import shard_slice, split_evenly

# (M, K, N): divisible, prime, fewer than ranks (empty shards), none
SHAPES = [(8, 12, 8), (7, 13, 11), (2, 3, 1), (3, 1, 2), (0, 4, 4), (4, 0, 3)]


def integers(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


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
    for (M, K, N), dtype, overlap in itertools.product(
        SHAPES, (torch.float32, torch.bfloat16), ("auto", "off")
    ):
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
            time.sleep(0.002 * (rank == 1))
            got = function(left, right, overlap=overlap)
            got.backward(upstream)
            case = f"{function.__name__} {(M, K, N)} {dtype} {overlap}"
            wrong += wrong_tensors(case, (got.detach(), left.grad, right.grad), expected, dtype)
    return wrong


def summa(rank, world):
    wrong = []
    for rows, cols in [(r, world // r) for r in range(1, world + 1) if world % r == 0]:
        mesh = DeviceMesh("cpu", torch.arange(world).view(rows, cols))
        i, j = divmod(rank, cols)
        for (M, K, N), dtype, overlap in itertools.product(
            SHAPES, (torch.float32, torch.bfloat16), ("auto", "off")
        ):
            a, b = integers(M, K, seed=1, dtype=dtype), integers(K, N, seed=2, dtype=dtype)
            dy = integers(M, N, seed=3, dtype=dtype)
            y, da, db = whole_product(a, b, dy)
            m, n = shard_slice(split_evenly(M, rows), i), shard_slice(split_evenly(N, cols), j)
            ka, kb = shard_slice(split_evenly(K, cols), j), shard_slice(split_evenly(K, rows), i)
            left, right = a[m, ka].clone().requires_grad_(), b[kb, n].clone().requires_grad_()
            time.sleep(0.002 * (rank == 1))
            got = summa_matmul(left, right, mesh=mesh, overlap=overlap)
            got.backward(dy[m, n])
            case = f"summa {rows}x{cols} {(M, K, N)} {dtype} {overlap}"
            expected = (y[m, n], da[m, ka], db[kb, n])
            wrong += wrong_tensors(case, (got.detach(), left.grad, right.grad), expected, dtype)
    return wrong


def overlap_changes_no_bit(rank, world):
    generator = torch.Generator().manual_seed(rank)
    a, b = (torch.randn(s, generator=generator) for s in ((1531, 37), (37, 401)))
    mesh = DeviceMesh("cpu", torch.arange(world).view(1, world))
    functions = {
        "all_gather_matmul": lambda o: all_gather_matmul(a, b, overlap=o),
        "matmul_reduce_scatter": lambda o: matmul_reduce_scatter(a, b, overlap=o),
        "matmul_all_reduce": lambda o: matmul_all_reduce(a, b, overlap=o),
        "summa_matmul": lambda o: summa_matmul(
            a, torch.cat([b] * world) if world > 1 else b, mesh=mesh, overlap=o
        ),
    }
    return [n for n, f in functions.items() if not torch.equal(f("auto"), f("off"))]


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
            same = torch.allclose(loss.flatten(), expected.flatten(), rtol=2e-6, atol=1e-6)
            near = (
                {"rtol": 1e-5, "atol": 1e-7}
                if dtype == torch.float32
                else {"rtol": 1e-2, "atol": 1e-4}
            )
            if not same or not torch.allclose(shard.grad.flatten(0, 1), grad[:, mine], **near):
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
    wrong += [] if abs(loss[2].item() - expected.item()) < 1e-5 else [f"loss {loss[2]}"]
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
    near = torch.allclose(layer.weight.grad, table.grad[mine], rtol=1e-5, atol=1e-6)
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
