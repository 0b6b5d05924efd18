"""What a bucket takes from a parameter: its gradient, in whose memory the average may be written or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainwright.parallel.layout import Piece

_storage_uses = torch._C._storage_Use_Count
ALONE = 2  # uses of a storage that one tensor and the storage's own Python object have


def take(
    name: str, p: nn.Parameter, *, averaged: bool, contiguous: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Takes `p.grad` away. Returns the gradient, the tensor for its average, and the tensor that others see.

    Args:
        name: of the parameter, for the error.
        averaged: it is sent now, so there is a tensor for the average: the gradient itself if nobody else sees it.
        contiguous: wanted for a gradient that lies in several buckets.
    """
    grad = p.grad
    if grad is not None and averaged and _is_plain(grad):  # nearly always
        p.grad = None
        return grad, grad, None
    if grad is None:
        return None, _real(torch.empty_like(p, requires_grad=False)) if averaged else None, None
    if grad.layout is not torch.strided:
        raise TypeError(
            f"DataParallel: {name}: expected a dense gradient, got {grad.layout} (sparse=False helps)"
        )
    p.grad = None
    shared = None
    own = not grad.requires_grad
    if averaged and own and _storage_uses(grad.untyped_storage()._cdata) > ALONE:
        own = False
        if _writable(grad):
            shared = grad
    grad = _real(grad if own else grad.detach())
    if not grad.is_contiguous():
        own = own and _writable(grad)
        if contiguous:
            grad, own = grad.contiguous(), True
    out = None
    if averaged:
        out = grad if own else torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    return grad, out, shared


def take_plain(parameters: Sequence[nn.Parameter], *, averaged: bool) -> list[Tensor] | None:
    """As `take` for parameters that lie in no other bucket, if all have a gradient that needs no care."""
    found = [p.grad for p in parameters]
    grads = [
        g
        for g in found
        if g is not None
        and g.layout is torch.strided
        and not g.requires_grad
        and not g.is_complex()
        and (not averaged or (g.is_contiguous() and _alone(g)))
    ]
    if len(grads) < len(found):
        return None
    for p in parameters:
        p.grad = None
    return grads


def cut(x: Tensor | None, piece: Piece) -> Tensor | None:
    return None if x is None else part(x, piece)


def part(x: Tensor, piece: Piece) -> Tensor:
    """The part of a tensor that lies in a bucket. A tensor that is really cut is contiguous."""
    whole = piece.end - piece.begin == x.numel()
    return x if whole else x.view(-1)[piece.begin : piece.end]


def _is_plain(grad: Tensor) -> bool:
    """Dense, row-major, real, and in memory that nobody else sees: so the average can be written there."""
    return (
        grad.layout is torch.strided
        and grad.is_contiguous()
        and not grad.requires_grad
        and not grad.is_complex()
        and _alone(grad)
    )


def _alone(grad: Tensor) -> bool:
    return _storage_uses(grad.untyped_storage()._cdata) <= ALONE


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _writable(grad: Tensor) -> bool:
    """Whether each element has its own memory (an expanded gradient has not)."""
    return all(n <= 1 or s for n, s in zip(grad.shape, grad.stride()))
