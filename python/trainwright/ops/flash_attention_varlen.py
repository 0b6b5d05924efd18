"""`flash_attention` over packed sequences of different lengths, without padding."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.errors import check_bool, check_int, check_tensor, value_error
from trainwright.ops import _library
from trainwright.ops._attention import attention
from trainwright.ops._attention_checks import check_plain, check_terms, checked_qkv
from trainwright.ops.flash_attention import CANDIDATES

__all__ = ["flash_attention_varlen"]

OP = "flash_attention_varlen"


def _check_values(cu_seqlens: Tensor, rows: int, max_seqlen: int, side: str) -> None:
    """Raise unless the starts begin at 0 or later, never decrease and end within `rows`, and no sequence is longer than
    `max_seqlen`. Reads the values, which waits for a GPU."""
    name, starts = f"cu_seqlens_{side}", cu_seqlens.tolist()
    if starts[0] < 0:
        raise value_error(OP, name, "starts of at least 0", starts[0])
    for n, (start, end) in enumerate(itertools.pairwise(starts)):
        if end < start:
            expected = f"values that do not decrease, but entry {n + 1} is below entry {n}"
            raise value_error(OP, name, expected, f"{end} after {start}")
        if end - start > max_seqlen:
            expected = f"at least the longest sequence: number {n} has {end - start} tokens"
            raise value_error(OP, f"max_seqlen_{side}", expected, max_seqlen)
    if starts[-1] > rows:
        x = "q" if side == "q" else "k and v"
        raise value_error(OP, name, f"an end within the {rows} rows of {x}", starts[-1])


def _checked(cu_seqlens: Tensor, rows: int, max_seqlen: int, side: str) -> Tensor:
    _check_values(cu_seqlens, rows, max_seqlen, side)
    return cu_seqlens.clone()


# For compiled code, where the check must be a node that something depends on.
_CHECKED = _library.define(
    "checked_cu_seqlens(Tensor cu_seqlens, SymInt rows, SymInt max_seqlen, str side) -> Tensor",
    _checked,
    lambda cu_seqlens, rows, max_seqlen, side: torch.empty_like(cu_seqlens),
)


def _check_lengths(
    x: Tensor, cu_seqlens: Any, max_seqlen: Any, side: str, check: bool
) -> tuple[Tensor, int]:
    """The starts as the kernels want them, int32 and contiguous, and a bound on the length of a sequence."""
    name = f"cu_seqlens_{side}"
    check_tensor(
        OP, name, cu_seqlens, dtypes=(torch.int32, torch.int64), shape=(None,), device=x.device
    )
    if cu_seqlens.shape[0] == 0:
        raise value_error(OP, name, "at least one entry, the start", 0)
    if max_seqlen is not None and not isinstance(max_seqlen, torch.SymInt):
        check_int(OP, f"max_seqlen_{side}", max_seqlen, minimum=0)
    starts = cu_seqlens.to(torch.int32).contiguous()
    rows = x.shape[0]
    bound = rows if max_seqlen is None else max_seqlen
    if check and torch.compiler.is_compiling():
        starts = _CHECKED(starts, rows, bound, side)
    elif check:
        _check_values(cu_seqlens, rows, bound, side)
        if max_seqlen is None:
            bound = int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0
    return starts, bound


@dispatch.register(OP, *(c for c in CANDIDATES if "varlen" not in c.lacks))
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    check: bool = True,
    causal: bool = False,
    causal_align: str = "bottom-right",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    first_head: int = 0,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of each of S sequences that lie end to end, without padding.

    Sequence n is rows ``cu_seqlens_q[n] .. cu_seqlens_q[n + 1] - 1`` of q and ``cu_seqlens_k[n] ..`` of k and v. The
    result for it is that of `flash_attention` on those rows alone. Sequences may have no queries or no keys. Rows
    before the first and past the last sequence give out 0, lse −inf and gradients 0.

    Args:
        q: (ΣTq, H, D); fp32, bf16, fp16 or fp64; any strides; D up to 512.
        k: (ΣTk, G, D), dtype and device of q; H a multiple of G.
        v: (ΣTk, G, Dv).
        cu_seqlens_q, cu_seqlens_k: (S + 1,) int32 or int64 on the device of q: starts, and the last end.
        max_seqlen_q, max_seqlen_k: bounds on the lengths; None: computed with `check`, else all rows.
        check: whether to check the values of cu_seqlens and max_seqlen, which waits for a GPU. Without it, values that
            do not fit are undefined behaviour.
        alibi_slopes: (H,) or (S, H).
        causal, causal_align, scale, window, softcap, sinks, dropout_p, seed, first_head, return_lse, deterministic,
            backend: as in `flash_attention`; dropout counts the sequence as the batch.

    Returns:
        out (ΣTq, H, Dv), dtype of q; with `return_lse` the pair ``(out, lse)``, lse (H, ΣTq) natural log, fp32 (fp64
        for fp64).

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, shape or range; with `check`, starts that
            decrease or do not fit, or a sequence longer than its max_seqlen.
        trainwright.BackendError: no backend can run the call.

    Numerics: those of `flash_attention`.

    Source: Dao, "FlashAttention-2", 2023 (packed sequences as in the flash-attn library).

    >>> import torch, trainwright as tw
    >>> x, starts = torch.ones(5, 1, 4), torch.tensor([0, 2, 5])
    >>> tw.flash_attention_varlen(x, x, x, starts, starts, causal=True).shape
    torch.Size([5, 1, 4])
    """
    q, k, v = checked_qkv(OP, q, k, v)
    scale, sides = check_plain(
        OP, q.shape, k.shape, v.shape, causal, causal_align, scale, window, softcap, dropout_p, return_lse,
        deterministic,
    )  # fmt: skip
    check_bool(OP, "check", check)
    check_tensor(OP, "cu_seqlens_q", cu_seqlens_q, dtypes=(torch.int32, torch.int64), shape=(None,))
    S = cu_seqlens_q.shape[0] - 1
    check_terms(OP, q, k, S, alibi_slopes, None, sinks, seed, first_head)
    if isinstance(cu_seqlens_k, Tensor) and cu_seqlens_k.shape != cu_seqlens_q.shape:
        expected = f"shape ({S + 1},), as cu_seqlens_q"
        raise value_error(OP, "cu_seqlens_k", expected, tuple(cu_seqlens_k.shape))
    starts_q, longest_q = _check_lengths(q, cu_seqlens_q, max_seqlen_q, "q", check)
    starts_k, longest_k = _check_lengths(k, cu_seqlens_k, max_seqlen_k, "k", check)
    out, lse = attention(
        OP, backend, q[None], k[None], v[None], cu_seqlens=(starts_q, starts_k), max_seqlen=(longest_q, longest_k),
        alibi_slopes=alibi_slopes, bias=None, sinks=sinks, scale=scale, window=sides,
        top_left=causal_align == "top-left", softcap=softcap, dropout_p=dropout_p, seed=seed,
        first_head=first_head,
    )  # fmt: skip
    return (out[0], lse[0]) if return_lse else out[0]


@dispatch.self_check(OP)
def _check(backend: str, device: torch.device) -> list[Tensor]:
    dtype = dispatch.check_dtype(OP, backend)
    q, k, v = (torch.randn(s).to(dtype) for s in ((19, 4, 8), (23, 2, 8), (23, 2, 6)))
    starts_q, starts_k = torch.tensor([0, 7, 7, 17]), torch.tensor([0, 5, 9, 22])
    return _library.outputs_and_gradients(
        functools.partial(flash_attention_varlen, causal=True, return_lse=True), backend, device, q=q, k=k, v=v,
        cu_seqlens_q=starts_q, cu_seqlens_k=starts_k,
    )  # fmt: skip
