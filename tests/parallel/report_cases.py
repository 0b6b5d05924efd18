"""Reports from the field about other libraries, one case each, named after its symptom: case(rank, world) -> what is
wrong.

Those about gradients that were summed too often or not at all, shared heads, uneven shards, tied weights, narrow sums
and clipping are cases of tensor_cases.py, split_cases.py and parallelize_cases.py.
"""

import torch
import torch.distributed as dist
from numerics import same_bits
from tensor_cases import integers, late
from torch import nn
from trainwright.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    sharded_dropout,
    vocab_parallel_cross_entropy,
)
from trainwright.parallel._sizes import shard_slice, split_evenly
from trainwright.parallel.cost_model import forced


def strided_operands_reduce_other_data(rank, world):
    """Transposed, sliced and expanded operands and upstream gradients are as good as their contiguous copies."""
    wrong = []
    x = integers(6, 5, seed=rank)
    w = integers(5, 4, seed=9)
    odd_x = integers(5, 6, seed=0).t().copy_(x).t().t()
    odd_w = torch.zeros(5, 8)[:, ::2]
    odd_w.copy_(w)
    functions = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
    for function in functions:
        results = []
        for left, right in ((x, w), (odd_x, odd_w)):
            left, right = left.detach().requires_grad_(), right.detach().requires_grad_()
            y = function(left, right)
            y.sum().backward()  # an expanded gradient
            results.append((y.detach(), left.grad, right.grad))
        if not all(torch.equal(a, b) for a, b in zip(*results)):
            wrong.append(function.__name__)
    layer = RowParallelLinear(world * 3, 4)
    part = integers(3, 7, seed=rank).t()
    return wrong + ([] if torch.equal(layer(part), layer(part.contiguous())) else ["row layer"])


def a_second_model_is_split_by_the_sizes_of_the_first(rank, world):
    sizes = [(6, 9), (4, 2), (5, 7)]
    layers = [ColumnParallelLinear(k, n) for k, n in sizes]
    wrong = []
    for (k, n), layer in zip(sizes, layers):
        mine = split_evenly(n, world)[rank]
        if layer.weight.shape != (mine, k) or layer(torch.ones(2, k)).shape != (2, mine):
            wrong.append(f"{k} to {n}")
    return wrong


def gathered_logits_add_log_w_to_the_loss(rank, world):
    """Whole logits in the place of a shard are an error where the number of classes is given."""
    logits, target = torch.zeros(2, 6), torch.tensor([1, 5])
    mine = shard_slice(split_evenly(6, world), rank)
    vocab_parallel_cross_entropy(logits[:, mine], target, num_classes=6)
    try:
        vocab_parallel_cross_entropy(logits, target, num_classes=6)
    except ValueError as error:
        return [] if f"shards of 6 classes in all, got {[6] * world}" in str(error) else [error]
    return ["no error"]


def two_groups_wait_for_each_other(rank, world):
    """Two tensor-parallel groups at their own pace, with messages across them in between."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, inner = groups[rank // 2], rank % 2
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][inner]
    wrong = []
    for step in range(3):
        a, b = integers(5, 6, seed=step), integers(6, 4, seed=step + 1)
        part = slice(3 * inner, 3 * inner + 3)
        with late(rank, who=step, seed=step), forced(True, 2):
            y = matmul_all_reduce(a[:, part], b[part], group=group)
            dist.all_reduce(y, group=across)
        wrong += [] if torch.equal(y, 2 * (a @ b)) else [step]
    return wrong


def dropout_differs_between_shardings(rank, world):
    """Rows split, columns split, or whole: the same elements are dropped, forward and backward; replicas alike."""
    x = torch.randn(7, 3, 10, generator=torch.Generator().manual_seed(0))
    whole = sharded_dropout(x, 0.3, seed=5)
    rows, columns = (shard_slice(split_evenly(n, world), rank) for n in (7, 10))
    by_rows = sharded_dropout(x[rows], 0.3, seed=5, first_row=3 * rows.start)
    leaf = x[..., columns].clone().requires_grad_()
    by_columns = sharded_dropout(leaf, 0.3, seed=5, first_column=columns.start)
    by_columns.sum().backward()
    checks = {
        "rows": same_bits(by_rows, whole[rows]),
        "columns": same_bits(by_columns.detach(), whole[..., columns]),
        "gradient": torch.equal(leaf.grad != 0, whole[..., columns] != 0),
        "seeds": not torch.equal(whole, sharded_dropout(x, 0.3, seed=6)),
        "share": 0.15 < (whole == 0).float().mean() < 0.45,
        "nan": not sharded_dropout(torch.full((40,), torch.nan), 1.0, seed=1).isnan().any(),
    }
    return [name for name, right in checks.items() if not right]


def autocast_gradients_have_the_wrong_dtype(rank, world):
    """bf16 upstream gradients and fp32 weights, through two layers."""
    model = nn.Sequential(ColumnParallelLinear(6, 8), RowParallelLinear(8, 6))
    x = torch.randn(3, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    y.sum().backward()
    kinds = {p.grad.dtype for p in model.parameters()} | {x.grad.dtype}
    return [] if kinds == {torch.float32} and y.dtype == torch.bfloat16 else [kinds, y.dtype]
