"""Cross entropy on tiles, some columns of some rows: what cross_entropy and linear_cross_entropy share.

The reference, the Triton kernels and linear_cross_entropy work on tiles. The running state of a row is four doubles:
maximum, sum of exponentials, weighted sum of logits, logit of the target. `finish` turns it into loss and lse, and with
them the gradient of any tile can be made.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainwright.ops import _library
from trainwright.ops._library import acc_dtype

NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}

OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
TILE_STATE = (
    "(Tensor(a!) state, Tensor logits, Tensor target, Tensor? weight, int first, int classes, "
    "int ignore_index, float label_smoothing, float softcap) -> ()"
)
TILE_GRAD = (
    "(Tensor(a!) out, Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor lse, Tensor scale, "
    f"int first, int classes, {OPTIONS}) -> ()"
)


def check_targets(
    target: Tensor, classes: int, ignore_index: int, op: str = "cross_entropy"
) -> None:
    """IndexError for a target out of range; on the CPU only, where looking at it needs no synchronisation."""
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bad.any():
        position = int(bad.nonzero()[0])
        raise IndexError(
            f"{op}: target: expected 0 <= target < {classes} or ignore_index {ignore_index}, "
            f"got {int(target[position])} at position {position}"
        )


def _capped(z: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(z / softcap) if softcap else z


def _target_weight(target: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return torch.ones_like(target, dtype=torch.float64)
    return weight.double()[target.clamp(0, weight.numel() - 1)]


def scale_of(target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int) -> Tensor:
    """Factors (fp64) of the summed loss and of the summed z-loss: 1 / (sum of kept class weights), 1 / (kept rows)."""
    if reduction != MEAN:
        return torch.ones(2, dtype=torch.float64, device=target.device)
    keep = target != ignore_index
    kept = keep.sum(dtype=torch.float64)
    total = torch.where(keep, _target_weight(target, weight), 0.0).sum()
    return torch.where(kept > 0, torch.stack([total, kept]).reciprocal(), 0.0)


def tile_state_reference(
    state: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, first: int, classes: int, ignore_index: int,
    label_smoothing: float, softcap: float,
) -> None:  # fmt: skip
    """Adds the columns first, first + 1, ... to the state (N, 4) of their rows; first = 0 starts it."""
    z = _capped(logits.to(acc_dtype(logits.dtype)), softcap)
    if first == 0:
        state.copy_(state.new_tensor([-math.inf, 0.0, 0.0, math.nan]).expand_as(state))
    old_max, sum_exp, sum_wz, z_target = state.unbind(1)
    new_max = torch.maximum(old_max, z.amax(1).double())
    base = torch.where(new_max == -math.inf, 0.0, new_max)  # all -inf so far: exp(-inf - 0) = 0
    d = z - base.to(z.dtype)[:, None]
    sum_exp = sum_exp * torch.exp(old_max - base) + torch.exp(d).sum(1)
    if label_smoothing:
        w = torch.ones_like(z[0]) if weight is None else weight[first : first + z.shape[1]]
        sum_wz = sum_wz + (d * w).sum(1) + base * w.sum()
    inside = (target >= first) & (target < first + z.shape[1])
    here = z.gather(1, torch.where(inside, target - first, 0)[:, None])[:, 0].double()
    new = torch.stack([new_max, sum_exp, sum_wz, torch.where(inside, here, z_target)], 1)
    state.copy_(torch.where((target == ignore_index)[:, None], state, new))


def finish(
    state: Tensor, target: Tensor, weight: Tensor | None, scale: Tensor, classes: int, ignore_index: int,
    label_smoothing: float, z_loss: float, reduction: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss and lse (N), in fp64, from the state of whole rows."""
    row_max, sum_exp, sum_wz, z_target = state.unbind(1)
    lse = row_max + torch.log(sum_exp)
    loss = (1 - label_smoothing) * _target_weight(target, weight) * (lse - z_target)
    if label_smoothing:
        total = classes if weight is None else weight.double().sum()
        loss = loss + label_smoothing / classes * (total * lse - sum_wz)
    loss = loss * scale[0]
    if z_loss:
        loss = loss + z_loss * lse.square() * scale[1]
    keep = target != ignore_index
    loss, lse = torch.where(keep, loss, 0.0), torch.where(keep, lse, 0.0)
    return loss if reduction == NONE else loss.sum(), lse


def tile_grad_reference(
    out: Tensor, dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor, scale: Tensor,
    first: int, classes: int, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
) -> None:  # fmt: skip
    """Writes the gradient of a tile of logits into `out`, which may be the tile itself."""
    acc = acc_dtype(logits.dtype)
    z = _capped(logits.to(acc), softcap)
    u, v = dloss * scale[0], dloss * scale[1]
    hard = (1 - label_smoothing) * _target_weight(target, weight)
    soft = label_smoothing / classes
    total = classes if weight is None else weight.double().sum()
    a = u * (hard + soft * total) + 2 * z_loss * lse * v
    rounded = lse.to(
        acc
    )  # exp(z - lse) = exp(z - rounded) exp(rounded - lse): the rounding of a large lse is put back
    a = a * torch.exp(rounded - lse)
    g = torch.exp(z - rounded[:, None]) * a.to(acc)[:, None]
    if label_smoothing:
        w = torch.ones_like(z[0]) if weight is None else weight[first : first + z.shape[1]]
        g = g - (u * soft).to(acc).expand(len(z))[:, None] * w
    is_target = torch.arange(first, first + z.shape[1], device=z.device) == target[:, None]
    g = g - torch.where(is_target, (u * hard).to(acc)[:, None], 0.0)
    if softcap:
        g = g * (1 - (z / softcap).square())
    out.copy_(torch.where((target == ignore_index)[:, None], 0.0, g))


def _fake(*args: Any) -> None:
    return None


TILE_STATE_OPS = _library.define_backends(
    "cross_entropy", "cross_entropy_tile_state_" + TILE_STATE, tile_state_reference, _fake
)
TILE_GRAD_OPS = _library.define_backends(
    "cross_entropy", "cross_entropy_tile_grad_" + TILE_GRAD, tile_grad_reference, _fake
)
