"""The ends of a language model split over the vocabulary: `VocabParallelEmbedding` and `vocab_parallel_cross_entropy`.

Shape letters: V vocabulary, C embedding_dim, N tokens, W ranks. Rank r holds the part V_r of the vocabulary, in rank
order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright import dispatch
from trainwright.errors import check_int, check_number, check_tensor, type_error, value_error
from trainwright.ops._cross_entropy_tiles import (
    NONE,
    REDUCTIONS,
    TILE_GRAD_OPS,
    TILE_STATE_OPS,
    check_targets,
    finish,
    scale_of,
)
from trainwright.ops._library import acc_dtype
from trainwright.ops.cross_entropy import check_target
from trainwright.parallel import _sharded_linear
from trainwright.parallel._exchange import How, all_gather_flat, check_group, gather_sizes
from trainwright.parallel._schedule_runtime import Group
from trainwright.parallel._sizes import shard_slice, split_evenly
from trainwright.parallel.tensor import Shard, even_ranges

__all__ = ["VocabParallelEmbedding", "tied_logits", "vocab_parallel_cross_entropy"]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, first: int, padding_idx: int, group: Group
    ) -> Tensor:
        local = tokens - first
        inside = (local >= 0) & (local < weight.shape[0])
        ctx.save_for_backward(local, inside)
        ctx.rows, ctx.padding_idx = weight.shape[0], padding_idx
        y = weight.new_zeros((tokens.numel(), weight.shape[1]))
        y[inside] = weight[local[inside]]
        # One rank has the row and all others zeros: a sum of bytes brings its bits to every rank.
        if dist.get_world_size(group) > 1 and y.numel():
            dist.all_reduce(y.view(torch.uint8), group=group)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        local, inside = ctx.saved_tensors
        acc = acc_dtype(dy.dtype)
        dw = dy.new_zeros((ctx.rows, dy.shape[1]), dtype=acc)
        if ctx.rows:
            dw = torch.ops.aten.embedding_dense_backward(
                dy[inside].to(acc), local[inside], ctx.rows, ctx.padding_idx, False
            )
        return None, dw.to(dy.dtype), None, None, None


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the ranks: every rank gets the whole (..., C) for every token.

    Args:
        num_embeddings, embedding_dim: sizes V and C of the unsharded table; rank r holds weight (V_r, C), V split as
            evenly as possible, larger shards first. The weight may be tied to a ColumnParallelLinear of V outputs.
        padding_idx: as in torch.nn.Embedding, negative values count from the end; that row starts at 0 and gets no
            gradient.
        group: process group; None is the default group.
        whole: an embedding whose weight, as the group's first rank has it, is taken instead of a new one.

    `forward(tokens)`: int64 or int32 of any shape, the same on every rank. The gradient of the result is taken as the
    same on every rank; that of the weight needs no communication and is summed in fp32.

    The weight starts as torch.nn.Embedding's on the group's first rank.

    Source: Shoeybi et al., "Megatron-LM", 2019.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: a wrong argument.
        IndexError: a token is outside [0, V) (CPU; on a GPU its row is 0).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group = None,
        whole: nn.Embedding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "VocabParallelEmbedding"
        check_int(op, "num_embeddings", num_embeddings, minimum=1)
        check_int(op, "embedding_dim", embedding_dim, minimum=0)
        if padding_idx is not None:
            check_int(op, "padding_idx", padding_idx)
            if not -num_embeddings <= padding_idx < num_embeddings:
                expected = f"None or an index within [-{num_embeddings}, {num_embeddings})"
                raise value_error(op, "padding_idx", expected, padding_idx)
            padding_idx %= num_embeddings
        check_group(op, group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.group = padding_idx, group
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sizes = split_evenly(num_embeddings, self.world)
        if whole is None:
            whole = nn.Embedding(
                num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype
            )
        weight = whole.weight.detach().contiguous()
        if self.world > 1 and weight.numel():
            source = 0 if group is None else dist.get_global_rank(group, 0)
            dist.broadcast(weight, source, group=group)
        mine = weight[shard_slice(self.sizes, self.rank)].clone()
        self.weight = nn.Parameter(mine, whole.weight.requires_grad)
        self.shards = {"weight": Shard(0, even_ranges(num_embeddings, self.world))}

    def forward(self, tokens: Tensor) -> Tensor:
        op = "VocabParallelEmbedding"
        check_tensor(
            op, "tokens", tokens, dtypes=(torch.int64, torch.int32), device=self.weight.device
        )
        flat = tokens.reshape(-1).long()
        if flat.device.type == "cpu":
            bad = (flat < 0) | (flat >= self.num_embeddings)
            if bad.any():
                position = int(bad.nonzero()[0])
                raise IndexError(
                    f"{op}: tokens: expected 0 <= token < {self.num_embeddings}, got {int(flat[position])} at position "
                    f"{position}"
                )
        first = shard_slice(self.sizes, self.rank).start
        padding = -1
        if self.padding_idx is not None and 0 <= self.padding_idx - first < self.weight.shape[0]:
            padding = self.padding_idx - first
        y = _Embedding.apply(flat, self.weight, first, padding, self.group)
        return y.view(*tokens.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, rank={self.rank} of {self.world}"


def tied_logits(
    hidden: Tensor, embedding: VocabParallelEmbedding, *, overlap: str = "auto", wire_dtype: torch.dtype | None = None,
    reduce: str = "ordered",
) -> Tensor:  # fmt: skip
    """``hidden · weightᵀ`` with the weight of an embedding: the head of a language model with tied weights.

    Args:
        hidden: (..., C), the same on every rank, in the weight's dtype; its gradient is summed over the ranks.
        embedding: the layer whose rows (V_r, C) are this rank's classes.
        overlap, wire_dtype, reduce: as in `ColumnParallelLinear`.

    Returns:
        (..., V_r), as `vocab_parallel_cross_entropy` takes them. The weight gets the sum of both its gradients.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
    """
    op = "tied_logits"
    if not isinstance(embedding, VocabParallelEmbedding):
        raise type_error(op, "embedding", "a VocabParallelEmbedding", type(embedding).__name__)
    weight: Tensor = embedding.weight
    width = embedding.embedding_dim
    how = How.checked(op, embedding.group, overlap, wire_dtype, reduce, max(embedding.sizes))
    check_tensor(op, "hidden", hidden, min_dim=1, device=weight.device)
    if hidden.shape[-1] != width:
        raise value_error(op, "hidden", f"last dimension {width}", tuple(hidden.shape))
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    check_tensor(op, "hidden", hidden, dtypes=(weight.dtype,))
    rows = hidden.reshape(math.prod(hidden.shape[:-1]), width)
    (y,) = _sharded_linear.Column.apply(rows, how, [None], weight, None)
    return y.view(*hidden.shape[:-1], y.shape[-1])


def _combine(states: Tensor, target: Tensor, starts: Tensor) -> Tensor:
    """(W, N, 4) states of the shards -> (N, 4) of the whole rows, in rank order."""
    row_max = states[..., 0].amax(0)
    base = torch.where(row_max == -math.inf, 0.0, row_max)
    sum_exp, sum_z = torch.zeros_like(row_max), torch.zeros_like(row_max)
    for state in states.unbind():
        sum_exp = sum_exp + state[:, 1] * torch.exp(state[:, 0] - base)
        sum_z = sum_z + state[:, 2]
    owner = torch.bucketize(target, starts, right=True) - 1  # starts: first class of each rank
    owner = owner.clamp(0, states.shape[0] - 1)
    z_target = states[..., 3].gather(0, owner[None])[0]
    return torch.stack([row_max, sum_exp, sum_z, z_target], 1)


class _CrossEntropy(torch.autograd.Function):
    """logits (N, V_r), target (N,)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, sizes: list[int], options: tuple[int, float, float], reduction: int,
        backend: str, group: Group,
    ) -> Tensor:  # fmt: skip
        ignore_index, label_smoothing, z_loss = options
        logits = logits.contiguous()
        first, classes = shard_slice(sizes, dist.get_rank(group)).start, sum(sizes)
        start = torch.tensor(
            [-math.inf, 0.0, 0.0, math.nan], dtype=torch.float64, device=logits.device
        )
        state = start.repeat(logits.shape[0], 1)
        if logits.numel():
            TILE_STATE_OPS[backend](
                state, logits, target, None, first, classes, ignore_index, label_smoothing, 0.0
            )
        states = all_gather_flat(state, group)
        starts = torch.tensor(sizes, device=logits.device).cumsum(0).roll(1)
        starts[0] = 0
        state = _combine(states, target, starts)
        scale = scale_of(target, None, ignore_index, reduction)
        loss, lse = finish(
            state, target, None, scale, classes, ignore_index, label_smoothing, z_loss, reduction
        )
        ctx.save_for_backward(logits, target, lse, scale)
        ctx.where, ctx.options, ctx.backend = (first, classes), options, backend
        return loss.to(acc_dtype(logits.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, target, lse, scale = ctx.saved_tensors
        grad = torch.empty_like(logits)
        if grad.numel():
            TILE_GRAD_OPS[ctx.backend](
                grad, dloss.contiguous(), logits, target, None, lse, scale, *ctx.where, *ctx.options, 0.0
            )  # fmt: skip
        return grad, *[None] * 6


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_classes: int | None = None,
    group: Group = None,
) -> Tensor:
    """`trainwright.cross_entropy` of logits that are split over the classes, as a column-parallel head leaves them.

    With the logits x of all ranks side by side, ε = label_smoothing and V classes in all:
    ``loss = (1 − ε) · (lse − x[t]) + ε / V · Σ_j (lse − x[j]) + z_loss · lse²``.
    The shards are never gathered: ranks exchange 32 bytes per row.

    Args:
        logits_shard: (..., V_r), this rank's classes; fp32, bf16, fp16 or fp64. Shards may differ in size, or be empty.
        target: (...), int64 or int32, the same on every rank: 0 <= target < V, or ignore_index.
        ignore_index, label_smoothing, z_loss, reduction: as in `trainwright.cross_entropy`.
        num_classes: V, which the shards then have to add up to: logits that were gathered by mistake would count W
            times.
        group: process group; None is the default group.

    Returns:
        fp32 (fp64 for fp64 logits), the same bits on every rank: a scalar, or the shape of target for "none". Its
        gradient is taken as the same on every rank.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        IndexError: a target is out of range (CPU; on a GPU the loss is NaN).

    Numerics: as `trainwright.cross_entropy`; the states of the shards are combined in fp64 in rank order.

    Source: Shoeybi et al., "Megatron-LM", 2019; online softmax: Milakov and Gimelshein, arXiv:1805.02867.
    """
    op = "vocab_parallel_cross_entropy"
    check_group(op, group)
    check_tensor(op, "logits_shard", logits_shard, min_dim=1)
    check_target(op, target, logits_shard.shape[:-1], logits_shard.device)
    check_int(op, "ignore_index", ignore_index)
    check_number(op, "label_smoothing", label_smoothing, minimum=0.0)
    if label_smoothing > 1:
        raise value_error(op, "label_smoothing", "at most 1", label_smoothing)
    check_number(op, "z_loss", z_loss, minimum=0.0)
    if not isinstance(reduction, str):
        raise type_error(op, "reduction", "a str", type(reduction).__name__)
    if reduction not in REDUCTIONS:
        raise value_error(op, "reduction", '"none", "mean" or "sum"', repr(reduction))
    sizes = gather_sizes(logits_shard.shape[-1], group, logits_shard.device)
    if sum(sizes) == 0:
        raise value_error(op, "logits_shard", "at least one class on some rank", sizes)
    if num_classes is not None and sum(sizes) != num_classes:
        expected = f"shards of {num_classes} classes in all"
        raise value_error(op, "logits_shard", expected, sizes)
    flat_target = target.reshape(-1).long().contiguous()
    check_targets(flat_target, sum(sizes), ignore_index, op)
    chosen = dispatch.resolve(
        "cross_entropy", None, logits_shard.device, logits_shard.dtype, V=logits_shard.shape[-1]
    )
    loss = _CrossEntropy.apply(
        logits_shard.reshape(flat_target.numel(), logits_shard.shape[-1]), flat_target, sizes,
        (ignore_index, float(label_smoothing), float(z_loss)), REDUCTIONS[reduction], chosen, group,
    )  # fmt: skip
    return loss.view(target.shape) if REDUCTIONS[reduction] == NONE else loss
