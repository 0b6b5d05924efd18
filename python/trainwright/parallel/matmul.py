"""One matrix product split over ranks, its communication under the product; gradients for every operand.

Shape letters: M rows, K inner dimension, N columns, W ranks. A subscript _r marks this rank's shard; shards may have
any size, also none. Partial sums over ranks are in fp32 (fp64 for fp64), in rank order, rounded once; `overlap` never
changes a bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainwright.errors import check_tensor, type_error, value_error
from trainwright.parallel import _sharded_linear, _summa
from trainwright.parallel._exchange import Group, check_group, gather_sizes
from trainwright.parallel._sizes import split_evenly

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "summa_matmul"]


def _check(
    op: str, left: tuple[str, Any], right: tuple[str, Any], group: Group, overlap: Any
) -> tuple[Tensor, Tensor, bool]:
    """The operands, cast under autocast, and whether to overlap."""
    check_group(op, group)
    if overlap not in ("auto", "off"):
        raise value_error(op, "overlap", "'auto' or 'off'", repr(overlap))
    (name_a, a), (name_b, b) = left, right
    check_tensor(op, name_a, a, shape=(None, None))
    check_tensor(op, name_b, b, shape=(a.shape[1], None), device=a.device)
    if torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b = (x if x.dtype == torch.float64 else x.to(dtype) for x in (a, b))
    check_tensor(op, name_b, b, dtypes=(a.dtype,))
    return a, b, overlap == "auto"


def all_gather_matmul(
    x: Tensor, w: Tensor, *, group: Group = None, overlap: str = "auto"
) -> Tensor:
    """``all_gather(x) · w``, the shards multiplied as they arrive.

    Args:
        x: (M_r, K), this rank's rows; fp32, bf16, fp16 or fp64.
        w: (K, N) in the dtype of x, this rank's own (a column shard, or the same on every rank).
        group: process group; None is the default group.
        overlap: "auto" hides communication under the product where it can; "off" runs one after the other.

    Returns:
        (M, N), M = Σ_r M_r, in the dtype of x. The gradient of x is summed over the ranks and scattered back under the
        product; that of w belongs to this rank. The gathered x is not kept for backward.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
    Models", ASPLOS 2023.
    """
    x, w, overlapped = _check("all_gather_matmul", ("x", x), ("w", w), group, overlap)
    sizes = gather_sizes(x.shape[0], group, x.device)
    return _sharded_linear.ColumnSequence.apply(x, w.t(), None, group, overlapped, sizes)


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, *, group: Group = None, overlap: str = "auto"
) -> Tensor:
    """This rank's rows of ``Σ_r a_r · b_r``: the rows of the others are computed first and sent while it goes on.

    Args:
        a: (M, K_r), this rank's columns; fp32, bf16, fp16 or fp64. M is the same on every rank.
        b: (K_r, N) in the dtype of a, this rank's rows.
        group, overlap: as in `all_gather_matmul`.

    Returns:
        (M_r, N) in the dtype of a; M is split as evenly as possible, larger shards first. Backward gathers the gradient
        under the products.

    Raises:
        As `all_gather_matmul`.

    Source: as `all_gather_matmul`.
    """
    a, b, overlapped = _check("matmul_reduce_scatter", ("a", a), ("b", b), group, overlap)
    sizes = split_evenly(a.shape[0], dist.get_world_size(group))
    return _sharded_linear.RowSequence.apply(a, b.t(), None, group, overlapped, sizes)


def matmul_all_reduce(
    a: Tensor, b: Tensor, *, group: Group = None, overlap: str = "auto"
) -> Tensor:
    """``Σ_r a_r · b_r`` on every rank, reduced by chunks of rows while the next chunk is computed.

    Args:
        a: (M, K_r), this rank's columns; fp32, bf16, fp16 or fp64. M is the same on every rank.
        b: (K_r, N) in the dtype of a, this rank's rows.
        group, overlap: as in `all_gather_matmul`.

    Returns:
        (M, N) in the dtype of a, the same bits on every rank. Its gradient is taken as the same on every rank, so
        backward needs no communication.

    Raises:
        As `all_gather_matmul`.

    Source: as `all_gather_matmul`.
    """
    a, b, overlapped = _check("matmul_all_reduce", ("a", a), ("b", b), group, overlap)
    return _sharded_linear.Row.apply(a, b.t(), None, group, overlapped)


def summa_matmul(a: Tensor, b: Tensor, *, mesh: DeviceMesh, overlap: str = "auto") -> Tensor:
    """Product of matrices that are split in both dimensions over a mesh of ranks.

    Rank (i, j) of the mesh, number i·cols + j of its ranks, holds blocks A_ij, B_ij and gets C_ij = Σ_k A_ik · B_kj. K
    is walked in panels: the ranks that hold a panel of A send it along their row of the mesh, those that hold the
    panel of B along their column, while the panel before is multiplied.

    Args:
        a: (M_i, K_j), fp32, bf16, fp16 or fp64. Blocks of one row of the mesh have equal heights, those of one column
            equal widths.
        b: (K_i, N_j) in the dtype of a. K may be split differently in a (over columns) and b (over rows).
        mesh: a 2-D torch DeviceMesh with this rank in it.
        overlap: as in `all_gather_matmul`.

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
    if overlap not in ("auto", "off"):
        raise value_error(op, "overlap", "'auto' or 'off'", repr(overlap))
    check_tensor(op, "a", a, shape=(None, None))
    check_tensor(op, "b", b, shape=(None, None), device=a.device)
    if torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b = (x if x.dtype == torch.float64 else x.to(dtype) for x in (a, b))
    check_tensor(op, "b", b, dtypes=(a.dtype,))
    return _summa.Summa.apply(a, b, _summa.Grid(mesh, a, b), overlap == "auto")
