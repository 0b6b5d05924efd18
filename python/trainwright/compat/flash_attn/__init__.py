"""The functions of the flash-attn library on `tw.flash_attention`: same names, arguments and meaning.

``from trainwright.compat.flash_attn import flash_attn_func`` in place of ``from flash_attn import flash_attn_func``.
Window sizes below 0 mean no limit, softcap 0 means none, causal is aligned bottom-right.

Differences: any device, fp32 and fp64 too, any head dim up to 512, Dv ≠ D, softcap together with dropout, gradients of
`alibi_slopes` and through the returned lse; the backward is always deterministic; a query with nothing to attend to has
lse −inf (flash-attn: +inf); dropout masks are drawn from torch's default generator but are not flash-attn's.
`return_attn_probs` returns ``(out, lse, None)``: the matrix of probabilities is never made.

Source: Dao-AILab/flash-attention, whose documentation is the specification.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainwright.compat.flash_attn import bert_padding as bert_padding
from trainwright.compat.flash_attn._kvcache import flash_attn_with_kvcache
from trainwright.compat.flash_attn._options import Result, Window, check_packed, options
from trainwright.compat.flash_attn._paged import unpaged
from trainwright.errors import check_bool
from trainwright.ops.flash_attention import flash_attention
from trainwright.ops.flash_attention_varlen import flash_attention_varlen

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _result(result: Any, return_attn_probs: bool) -> Result:
    return (*result, None) if return_attn_probs else result


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (B, Tq, H, D) over k (B, Tk, G, D), v (B, Tk, G, Dv); out (B, Tq, H, Dv), lse (B, H, Tq)."""
    name = "flash_attn_func"
    check_bool(name, "return_attn_probs", return_attn_probs)
    common = options(name, causal, window_size, softcap, alibi_slopes, softmax_scale)
    result = flash_attention(
        q, k, v, **common, dropout_p=dropout_p, deterministic=deterministic, return_lse=return_attn_probs
    )  # fmt: skip
    return _result(result, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with k and v in one tensor kv (B, Tk, 2, G, D)."""
    k, v = check_packed("flash_attn_kvpacked_func", "kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with q, k and v in one tensor qkv (B, T, 3, H, D)."""
    q, k, v = check_packed("flash_attn_qkvpacked_func", "qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention of packed sequences: q (ΣTq, H, D), k and v (ΣTk, G, D); out (ΣTq, H, Dv), lse (H, ΣTq).

    The values of cu_seqlens and max_seqlen are checked on the CPU, and not on a GPU, where that would wait for it.
    With `block_table` (sequences, pages of one), k and v are (pages, page size, G, D), any page size: sequence b has
    its key j in page ``block_table[b, j // size]``. Entries behind a sequence's end may be anything.
    """
    name = "flash_attn_varlen_func"
    check_bool(name, "return_attn_probs", return_attn_probs)
    common = options(name, causal, window_size, softcap, alibi_slopes, softmax_scale)
    if block_table is not None:
        k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, common = unpaged(
            name, k, v, cu_seqlens_q, cu_seqlens_k, block_table, common
        )
    on_cpu = isinstance(q, Tensor) and q.device.type == "cpu"
    result = flash_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, check=on_cpu,
        **common, dropout_p=dropout_p, deterministic=deterministic, return_lse=return_attn_probs,
    )  # fmt: skip
    return _result(result, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with k and v in one tensor kv (ΣTk, 2, G, D)."""
    k, v = check_packed("flash_attn_varlen_kvpacked_func", "kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with q, k and v in one tensor qkv (ΣT, 3, H, D)."""
    q, k, v = check_packed("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
