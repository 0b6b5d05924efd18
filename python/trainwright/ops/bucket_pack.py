"""Gradients in and out of a flat buffer, and the sum of such buffers in rank order.

`bucket_pack` is the one pass of a gradient bucket: copy or add, cast, scale, finite check and sum of squares. The three
ops write into a tensor that the caller owns; none is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import (
    FLOAT_DTYPES,
    check_bool,
    check_number,
    check_tensor,
    type_error,
    value_error,
)
from trainwright.ops import _library

__all__ = ["bucket_pack", "bucket_unpack", "ordered_sum"]

PACK = "(Tensor(a!) flat, Tensor[] grads, int[] offsets, float scale, Tensor? scale_tensor, bool accumulate) -> Tensor"
UNPACK = "(Tensor flat, Tensor(a!)[] outs, int[] offsets, float scale, Tensor? scale_tensor) -> ()"
SUM = "(Tensor(a!) out, Tensor[] chunks, float scale, Tensor? scale_tensor) -> Tensor"


def _wider(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _factor(scale: float, scale_tensor: Tensor | None, dtype: torch.dtype) -> float | Tensor:
    return scale if scale_tensor is None else (scale_tensor.double() * scale).to(dtype)


def _stats(written: list[Tensor], like: Tensor) -> Tensor:
    stats = torch.zeros(2, dtype=torch.float64, device=like.device)
    for x in written:
        stats[0] += x.double().square().sum()
        stats[1] = torch.maximum(stats[1], (~x.isfinite().all()).double())
    return stats


def _pack_reference(
    flat: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    scale: float,
    scale_tensor: Tensor | None,
    accumulate: bool,
) -> Tensor:
    written = []
    for i, g in enumerate(grads):
        slot, out = flat[offsets[i] : offsets[i + 1]], flat[offsets[i] : offsets[i] + g.numel()]
        wide = _wider(flat, g)
        x = g.reshape(-1).to(wide) * _factor(scale, scale_tensor, wide)
        if accumulate:
            x = x + out.to(wide)
        else:
            slot.zero_()
        out.copy_(x)
        written.append(out)
    return _stats(written, flat)


def _unpack_reference(
    flat: Tensor,
    outs: list[Tensor],
    offsets: list[int],
    scale: float,
    scale_tensor: Tensor | None,
) -> None:
    for o, offset in zip(outs, offsets):
        wide = _wider(flat, o)
        x = flat[offset : offset + o.numel()].to(wide) * _factor(scale, scale_tensor, wide)
        o.copy_(x.view(o.shape))


def _sum_reference(
    out: Tensor, chunks: list[Tensor], scale: float, scale_tensor: Tensor | None
) -> Tensor:
    wide = _wider(chunks[0])
    total = chunks[0].to(wide)
    for chunk in chunks[1:]:
        total = total + chunk.to(wide)
    out.copy_(total * _factor(scale, scale_tensor, wide))
    return _stats([out], out)


def _stats_fake(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(2, dtype=torch.float64)


def _unpack_fake(*_: Any) -> None:
    return None


PACK_OPS = _library.define_backends(
    "bucket_pack", "bucket_pack_" + PACK, _pack_reference, _stats_fake
)
UNPACK_OPS = _library.define_backends(
    "bucket_pack", "bucket_unpack_" + UNPACK, _unpack_reference, _unpack_fake
)
SUM_OPS = _library.define_backends("bucket_pack", "ordered_sum_" + SUM, _sum_reference, _stats_fake)


def _check_scale(op: str, scale: Any, device: torch.device) -> tuple[float, Tensor | None]:
    if isinstance(scale, Tensor):
        check_tensor(op, "scale", scale, device=device)
        if scale.numel() != 1:
            raise value_error(op, "scale", "one element", tuple(scale.shape))
        return 1.0, scale.detach().reshape(())
    check_number(op, "scale", scale)
    return float(scale), None


def _check_flat(op: str, argument: str, flat: Any) -> None:
    check_tensor(op, argument, flat, shape=(None,))
    if not flat.is_contiguous():
        raise value_error(op, argument, "a contiguous tensor", f"stride {flat.stride()}")


def _bumped(*written: Tensor) -> None:
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(written)


@dispatch.register(
    "bucket_pack",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
def bucket_pack(
    grads: Sequence[Tensor | None],
    flat: Tensor,
    offsets: Sequence[int],
    *,
    scale: float | Tensor = 1.0,
    accumulate: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy or add gradients into one flat buffer, with cast, scale, sum of squares and finite check in the same pass.

    ``flat[offsets[i] : offsets[i] + n_i] = scale · grads[i].flatten()``, or ``+=`` with `accumulate`.

    Slot i runs from ``offsets[i]`` to ``offsets[i + 1]`` (the last one to the end of `flat`, or to a final extra
    offset). Without `accumulate` the slots are written completely: elements past the gradient become zero, and so does
    the whole slot of a missing gradient. With `accumulate` nothing but the gradients' elements is touched.

    Args:
        grads: tensors of fp32, bf16, fp16 or fp64 in any mix, any shape and strides, or None for a missing gradient.
        flat: 1-d, contiguous, one of those dtypes; may be a slice of a larger buffer.
        offsets: ascending first elements of the slots, one per gradient, or one more: the end of the last slot.
        scale: a number, or a one-element tensor on the device of `flat` (read there, without synchronisation).
        accumulate: add to what is in `flat` instead of overwriting it.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        ``(sum_of_squares, nonfinite)`` of the elements as they now stand in the gradients' places of `flat`, rounded to
        its dtype: 0-d fp64 tensors on its device; `nonfinite` is 1 if any of them is NaN or infinite, else 0.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or size, or slots overlap.
        trainwright.BackendError: no backend can run the call.

    Numerics: computed in fp32 (fp64 if either side is fp64) and rounded once to the dtype of `flat`. Squares are
    summed in fp64 block by block in a fixed order: the same bits for any thread count.

    Source: the multi-tensor copies of Megatron-LM's and torch DDP's gradient buckets, with their passes joined.

    >>> import torch, trainwright as tw
    >>> flat = torch.empty(5)
    >>> squares, nonfinite = tw.bucket_pack([torch.tensor([3.0, 4.0]), None], flat, [0, 3], scale=0.5)
    >>> flat.tolist(), squares.item(), nonfinite.item()
    ([1.5, 2.0, 0.0, 0.0, 0.0], 6.25, 0.0)
    """
    op = "bucket_pack"
    _check_flat(op, "flat", flat)
    factor, factor_tensor = _check_scale(op, scale, flat.device)
    check_bool(op, "accumulate", accumulate)
    ends = list(offsets)
    if len(ends) == len(grads):
        ends.append(flat.numel())
    if len(ends) != len(grads) + 1:
        raise value_error(op, "offsets", f"{len(grads)} or {len(grads) + 1} numbers", len(offsets))
    present, slots = [], []
    for i, g in enumerate(grads):
        begin, end = ends[i], ends[i + 1]
        if not 0 <= begin <= end <= flat.numel():
            raise value_error(op, "offsets", f"ascending numbers in 0..{flat.numel()}", ends)
        if g is None:
            if not accumulate:
                present.append(flat[:0])
                slots.append(begin)
            continue
        check_tensor(op, f"grads[{i}]", g, device=flat.device)
        if g.numel() > end - begin:
            raise value_error(op, f"grads[{i}]", f"at most {end - begin} elements", g.numel())
        present.append(g)
        slots.append(begin)
    slots.append(ends[-1])
    chosen = dispatch.resolve(op, backend, flat.device, flat.dtype)
    with torch.no_grad():
        stats = PACK_OPS[chosen](flat, present, slots, factor, factor_tensor, accumulate)
        _bumped(flat)
        return stats[0], stats[1]


@dispatch.register(
    "bucket_unpack",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
def bucket_unpack(
    flat: Tensor,
    outs: Sequence[Tensor],
    offsets: Sequence[int],
    *,
    scale: float | Tensor = 1.0,
    backend: str | None = None,
) -> None:
    """Copy pieces of a flat buffer into tensors, with cast and scale: the reverse of `bucket_pack`.

    ``outs[i].flatten() = scale · flat[offsets[i] : offsets[i] + n_i]``, written in place.

    Args:
        flat: 1-d, contiguous; fp32, bf16, fp16 or fp64.
        outs: tensors of those dtypes in any mix, any shape and strides (without overlap); elements of their storage
            outside the view are not touched.
        offsets: first element of each tensor in `flat`.
        scale: a number, or a one-element tensor on the device of `flat`.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or size.
        trainwright.BackendError: no backend can run the call.

    Numerics: computed in fp32 (fp64 if either side is fp64), rounded once.

    >>> import torch, trainwright as tw
    >>> out = torch.empty(2, dtype=torch.bfloat16)
    >>> tw.bucket_unpack(torch.arange(4.0), [out], [1], scale=0.5)
    >>> out.tolist()
    [0.5, 1.0]
    """
    op = "bucket_unpack"
    _check_flat(op, "flat", flat)
    factor, factor_tensor = _check_scale(op, scale, flat.device)
    if len(offsets) != len(outs):
        raise value_error(op, "offsets", f"{len(outs)} numbers", len(offsets))
    for i, (o, offset) in enumerate(zip(outs, offsets)):
        check_tensor(op, f"outs[{i}]", o, device=flat.device)
        if not 0 <= offset <= flat.numel() - o.numel():
            raise value_error(
                op, f"offsets[{i}]", f"a number in 0..{flat.numel() - o.numel()}", offset
            )
    chosen = dispatch.resolve(op, backend, flat.device, flat.dtype)
    if outs:
        with torch.no_grad():
            UNPACK_OPS[chosen](flat, list(outs), list(offsets), factor, factor_tensor)
            _bumped(*outs)


@dispatch.register(
    "ordered_sum",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES, limits=(("W", 1024),)),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
def ordered_sum(
    chunks: Tensor | Sequence[Tensor],
    out: Tensor,
    *,
    scale: float | Tensor = 1.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of W chunks in rank order, into `out`: the reduction of a deterministic reduce-scatter.

    ``out = scale · (((c_0 + c_1) + c_2) + …)``, every position in the same order, so the bits do not depend on how the
    buffer was cut into buckets or chunks.

    Args:
        chunks: (W, n), or W tensors (n,) of one dtype, contiguous: fp32, bf16, fp16 or fp64.
        out: (n,), contiguous, one of those dtypes; it may be one of the chunks.
        scale: a number, or a one-element tensor on the device of `out`.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        ``(sum_of_squares, nonfinite)`` of `out` as stored, as for `bucket_pack`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or size.
        trainwright.BackendError: no backend can run the call.

    Numerics: added in fp32 (fp64 for fp64 chunks) in rank order, scaled, rounded once to the dtype of `out`.

    >>> import torch, trainwright as tw
    >>> out = torch.empty(2)
    >>> squares, nonfinite = tw.ordered_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), out, scale=0.5)
    >>> out.tolist(), squares.item()
    ([2.0, 3.0], 13.0)
    """
    op = "ordered_sum"
    _check_flat(op, "out", out)
    factor, factor_tensor = _check_scale(op, scale, out.device)
    if isinstance(chunks, Tensor):
        check_tensor(op, "chunks", chunks, shape=(None, *out.shape), device=out.device)
    parts = list(chunks.unbind(0) if isinstance(chunks, Tensor) else chunks)
    if not parts:
        raise value_error(op, "chunks", "at least one chunk", 0)
    for i, c in enumerate(parts):
        check_tensor(op, f"chunks[{i}]", c, shape=out.shape, device=out.device)
        if c.dtype != parts[0].dtype:
            raise type_error(op, f"chunks[{i}]", str(parts[0].dtype), c.dtype)
    chosen = dispatch.resolve(op, backend, out.device, out.dtype, W=len(parts))
    with torch.no_grad():
        stats = SUM_OPS[chosen](out, [c.contiguous() for c in parts], factor, factor_tensor)
        _bumped(out)
        return stats[0], stats[1]


@dispatch.self_check("bucket_pack")
def _check_pack(backend: str, device: torch.device) -> list[Tensor]:
    grads = [torch.randn(5, 7).to(device), None, torch.randn(3).to(device)]
    flat = torch.randn(40).to(device)
    return [*bucket_pack(grads, flat, [0, 35, 37], scale=0.5, backend=backend), flat]


@dispatch.self_check("bucket_unpack")
def _check_unpack(backend: str, device: torch.device) -> list[Tensor]:
    outs = [torch.zeros(5, 7, device=device), torch.zeros(3, device=device)]
    bucket_unpack(torch.randn(40).to(device), outs, [0, 36], scale=0.5, backend=backend)
    return outs


@dispatch.self_check("ordered_sum")
def _check_sum(backend: str, device: torch.device) -> list[Tensor]:
    out = torch.zeros(33, device=device)
    return [*ordered_sum(torch.randn(3, 33).to(device), out, backend=backend), out]
