"""Exact attention without the (Tq, Tk) matrix. The torch ops and their gradients are in `_attention`.

The torch reference (`_attention_reference`) stores the matrix; it is the specification of all backends.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES
from trainwright.ops import _library
from trainwright.ops._attention import attention
from trainwright.ops._attention_checks import check_plain, check_terms, checked_qkv

__all__ = ["flash_attention"]

_SIZES = (("D", 512), ("Dv", 512))
CANDIDATES = (  # of flash_attention_varlen too
    Candidate("cpu", FLOAT_DTYPES, limits=_SIZES),
    Candidate("cuda", FLOAT_DTYPES[1:3], limits=(("D", 256), ("Dv", 256))),
    Candidate("triton", FLOAT_DTYPES[:3], limits=_SIZES),
    Candidate("torch", FLOAT_DTYPES, limits=_SIZES),
)


@dispatch.register("flash_attention", *CANDIDATES)
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    causal_align: str = "bottom-right",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    first_head: int = 0,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query over the keys it sees.

    ``out[i] = Σ_j softmax_j(score[i, j]) v[j]``, ``score = softcap(scale · q[i]·k[j]) + bias + alibi``, ``lse = log Σ_j
    exp(score)``. A query with nothing to attend to gives out 0, lse −inf and gradients 0.

    Args:
        q: (B, Tq, H, D); fp32, bf16, fp16 or fp64; any strides; D up to 512.
        k: (B, Tk, G, D), dtype and device of q; H a multiple of G: query head h reads key head h // (H / G).
        v: (B, Tk, G, Dv).
        causal: query i sees keys up to its own position.
        causal_align: position of query i: "bottom-right" i + Tk − Tq, "top-left" i.
        scale: any finite number; default 1/√D.
        window: (left, right), keys seen to either side of the position, inclusive; −1 for no limit.
        softcap: score becomes c·tanh(score/c); above 0.
        alibi_slopes: (H,) or (B, H); adds −slope·|i + (Tk − Tq) − j|.
        bias: broadcastable to (B, H, Tq, Tk).
        sinks: (H,) logits that join the softmax denominator of `out`, not of `lse`.
        dropout_p: probability in [0, 1] of dropping a weight.
        seed: of the dropout mask; None draws one from torch's default generator.
        first_head: place of q's first head among all, by which dropout counts heads: a rank of a tensor-parallel group
            drops what one process with all heads would. With `seed` None the ranks' generators must agree.
        return_lse: also return lse; gradients flow through it.
        deterministic: every backend is bit-reproducible; accepted for compatibility.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        out (B, Tq, H, Dv), dtype of q; with `return_lse` the pair ``(out, lse)``, lse (B, H, Tq) natural log, fp32
        (fp64 for fp64).

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, shape or range.
        trainwright.BackendError: no backend can run the call.

    Numerics: scores, softmax and sums in fp32 (fp64 for fp64), rounded once; bit-equal for any number of threads. A key
    that a query does not see never reaches it, even if it is NaN or inf. The CPU kernels run every option; what another
    backend lacks runs on the torch reference, which stores the (Tq, Tk) matrix. Under autocast q, k, v are cast to the
    autocast dtype. Forward mode and second derivatives come from a formula that stores that matrix; `torch.func.vmap`
    makes one call per element.

    Source: Dao, "FlashAttention-2", 2023; Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    >>> import torch, trainwright as tw
    >>> q, k, v = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    >>> tw.flash_attention(q, k, v, causal=True).flatten()
    tensor([1., 2.])
    """
    op = "flash_attention"
    q, k, v = checked_qkv(op, q, k, v)
    scale, sides = check_plain(
        op, q.shape, k.shape, v.shape, causal, causal_align, scale, window, softcap, dropout_p, return_lse,
        deterministic,
    )  # fmt: skip
    check_terms(op, q, k, q.shape[0], alibi_slopes, bias, sinks, seed, first_head)
    out, lse = attention(
        op, backend, q, k, v, max_seqlen=(q.shape[1], k.shape[1]), alibi_slopes=alibi_slopes, bias=bias, sinks=sinks,
        scale=scale, window=sides, top_left=causal_align == "top-left", softcap=softcap, dropout_p=dropout_p, seed=seed,
        first_head=first_head,
    )  # fmt: skip
    return (out, lse) if return_lse else out


@dispatch.self_check("flash_attention")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    dtype = dispatch.check_dtype("flash_attention", backend)
    shapes = (1, 19, 4, 8), (1, 23, 2, 8), (1, 23, 2, 6)
    q, k, v = (torch.randn(s).to(dtype) for s in shapes)
    return _library.outputs_and_gradients(
        functools.partial(flash_attention, causal=True, return_lse=True), backend, device, q=q, k=k, v=v
    )  # fmt: skip
