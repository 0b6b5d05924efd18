"""One matrix product split over ranks, its communication under the product; gradients for every operand.

Shape letters: M rows, K inner dimension, N columns, W ranks. A subscript _r marks this rank's shard; shards may have
any size, also none. Partial sums over ranks are in fp32 (fp64 for fp64), in rank order, rounded once; `overlap` never
changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainwright.errors import check_tensor, type_error, value_error
from trainwright.parallel import _sharded_linear, _summa
from trainwright.parallel._exchange import How, gather_shapes
from trainwright.parallel._schedule_runtime import Group
from trainwright.parallel._sizes import split_evenly

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "summa_matmul"]


def _cast(op: str, a: Any, b: Any, names: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """The operands, checked, and cast under autocast."""
    check_tensor(op, names[0], a, shape=(None, None))
    check_tensor(op, names[1], b, shape=(a.shape[1], None), device=a.device)
    if torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b = (x if x.dtype == torch.float64 else x.to(dtype) for x in (a, b))
    check_tensor(op, names[1], b, dtypes=(a.dtype,))
    return a, b


def _one_height(op: str, a: Tensor, b: Tensor, how: How) -> How:
    """With the widest K_r; raises on every rank if they do not agree on (M, N)."""
    rows, inner, columns = gather_shapes((*a.shape, b.shape[1]), how.group, a.device)
    if len(set(rows)) > 1 or len(set(columns)) > 1:
        got = f"{rows} rows and {columns} columns by rank"
        raise value_error(op, "a, b", "the same rows of a and columns of b on every rank", got)
    return replace(how, width=max(inner))


def all_gather_matmul(
    x: Tensor, w: Tensor | Sequence[Tensor], *, group: Group = None, overlap: str = "auto",
    wire_dtype: torch.dtype | None = None, reduce: str = "ordered",
) -> Any:  # fmt: skip
    """``all_gather(x) · w``, the shards multiplied as they arrive.

    Args:
        x: (M_r, K), this rank's rows; fp32, bf16, fp16 or fp64.
        w: (K, N) in the dtype of x, this rank's own (a column shard, or the same on every rank); or several of them,
            which share the gathered x.
        group: process group; None is the default group.
        overlap: "auto" hides communication under the product where `trainwright.parallel.cost_model` says that it pays;
            "off" runs one after the other. Never changes a bit.
        wire_dtype: float32, bfloat16 or float16: partial sums, and shards of a wider dtype, are rounded to it to travel
            (each once, the one that stays too); None sends sums in fp32 (fp64 for fp64) and shards as they are.
        reduce: "ordered" adds the partial sums in the order of the ranks where they are needed: no place in a ring,
            chunk or overlap has a say. "ring" adds them on their way, each rank to what it receives, which needs memory
            for two partial sums instead of W; the order starts after the rank that keeps the sum, and a narrow
            wire_dtype rounds at every rank.

    Returns:
        (M, N), M = Σ_r M_r, in the dtype of x; a tuple of them for several w. The gradient of x is summed over the
        ranks and scattered back under the product; that of w belongs to this rank, and is summed over the rows in one
        order on every rank. The gathered x is not kept for backward.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
    Models", ASPLOS 2023.
    """
    op = "all_gather_matmul"
    how = How.checked(op, group, overlap, wire_dtype, reduce)
    several = list(w) if isinstance(w, list | tuple) else None
    if several == []:
        raise value_error(op, "w", "at least one matrix", "none")
    x, *ws = _same_cast(op, x, [w] if several is None else several)
    sizes, widths = gather_shapes((x.shape[0], sum(m.shape[1] for m in ws)), group, x.device)
    how = replace(how, width=max(widths))
    parameters = [m.t() for m in ws] + [None] * len(ws)
    ys = _sharded_linear.ColumnSequence.apply(x, how, [None] * len(ws), sizes, *parameters)
    return ys[0] if several is None else ys


def _same_cast(op: str, x: Tensor, ws: list[Any]) -> list[Tensor]:
    names = [f"w[{i}]" for i in range(len(ws))] if len(ws) > 1 else ["w"]
    pairs = [_cast(op, x, w, ("x", name)) for w, name in zip(ws, names)]
    return [pairs[0][0], *(w for _, w in pairs)]


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, *, group: Group = None, overlap: str = "auto", wire_dtype: torch.dtype | None = None,
    reduce: str = "ordered",
) -> Tensor:  # fmt: skip
    """This rank's rows of ``Σ_r a_r · b_r``: the rows of the others are computed first and sent while it goes on.

    Args:
        a: (M, K_r), this rank's columns; fp32, bf16, fp16 or fp64. M is the same on every rank.
        b: (K_r, N) in the dtype of a, this rank's rows.
        group, overlap, wire_dtype, reduce: as in `all_gather_matmul`.

    Returns:
        (M_r, N) in the dtype of a; M is split as evenly as possible, larger shards first. Backward gathers the gradient
        under the products.

    Raises:
        As `all_gather_matmul`; on every rank if they do not agree on M and N.

    Source: as `all_gather_matmul`.
    """
    op = "matmul_reduce_scatter"
    how = How.checked(op, group, overlap, wire_dtype, reduce)
    a, b = _cast(op, a, b, ("a", "b"))
    how = _one_height(op, a, b, how)
    sizes = split_evenly(a.shape[0], how.world)
    return _sharded_linear.RowSequence.apply(a, b.t(), None, how, sizes)


def matmul_all_reduce(
    a: Tensor, b: Tensor, *, group: Group = None, overlap: str = "auto", wire_dtype: torch.dtype | None = None,
    reduce: str = "ordered",
) -> Tensor:  # fmt: skip
    """``Σ_r a_r · b_r`` on every rank, reduced by chunks of columns while the next chunk is computed.

    Args:
        a: (M, K_r), this rank's columns; fp32, bf16, fp16 or fp64. M is the same on every rank.
        b: (K_r, N) in the dtype of a, this rank's rows.
        group, overlap, wire_dtype, reduce: as in `all_gather_matmul`.

    Returns:
        (M, N) in the dtype of a, the same bits on every rank. Its gradient is taken as the same on every rank, so
        backward needs no communication.

    Raises:
        As `matmul_reduce_scatter`.

    Source: as `all_gather_matmul`.
    """
    op = "matmul_all_reduce"
    how = How.checked(op, group, overlap, wire_dtype, reduce)
    a, b = _cast(op, a, b, ("a", "b"))
    return _sharded_linear.Row.apply(a, b.t(), None, _one_height(op, a, b, how))


def summa_matmul(
    a: Tensor, b: Tensor, *, mesh: DeviceMesh, overlap: str = "auto", wire_dtype: torch.dtype | None = None
) -> Tensor:  # fmt: skip
    """Product of matrices that are split in both dimensions over a mesh of ranks.

    Rank (i, j) of the mesh, number i·cols + j of its ranks, holds blocks A_ij, B_ij and gets C_ij = Σ_k A_ik · B_kj. K
    is walked in panels: the ranks that hold a panel of A send it along their row of the mesh, those that hold the
    panel of B along their column, while the panel before is multiplied.

    Args:
        a: (M_i, K_j), fp32, bf16, fp16 or fp64. Blocks of one row of the mesh have equal heights, those of one column
            equal widths.
        b: (K_i, N_j) in the dtype of a. K may be split differently in a (over columns) and b (over rows).
        mesh: a 2-D torch DeviceMesh with this rank in it.
        overlap, wire_dtype: as in `all_gather_matmul`.

    Returns:
        (M_i, N_j) in the dtype of a. Gradients: dA = dC · Bᵀ and dB = Aᵀ · dC, panel by panel, their partial sums added
        in the order of the ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape, or the blocks do not fit together; on
            every rank.

    Source: van de Geijn and Watts, "SUMMA: Scalable Universal Matrix Multiplication Algorithm", 1997.
    """
    op = "summa_matmul"
    if not isinstance(mesh, DeviceMesh):
        raise type_error(op, "mesh", "a torch DeviceMesh", type(mesh).__name__)
    if mesh.ndim != 2:
        raise value_error(op, "mesh", "two dimensions", mesh.ndim)
    if mesh.get_coordinate() is None:
        raise value_error(op, "mesh", "a mesh that this rank is in", "a mesh without it")
    how = How.checked(op, mesh.get_group(1), overlap, wire_dtype, "ordered")
    check_tensor(op, "a", a, shape=(None, None))
    check_tensor(op, "b", b, shape=(None, None), device=a.device)
    if torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b = (x if x.dtype == torch.float64 else x.to(dtype) for x in (a, b))
    check_tensor(op, "b", b, dtypes=(a.dtype,))
    return _summa.Summa.apply(a, b, _summa.Grid(mesh, a, b, how))
