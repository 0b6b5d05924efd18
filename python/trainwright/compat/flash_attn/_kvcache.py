"""flash-attn's `flash_attn_with_kvcache`: decoding with a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.compat.flash_attn._options import Window, options
from trainwright.errors import check_bool, check_int, check_tensor, type_error, value_error
from trainwright.ops.flash_attention_varlen import flash_attention_varlen
from trainwright.ops.rope import rope

OP = "flash_attn_with_kvcache"
INTS = (torch.int32, torch.int64)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache of keys and values, to which new ones are first appended in place.

    Args:
        q: (B, Tq, H, D).
        k_cache, v_cache: (B_cache, T_cache, G, D); with `block_table` (blocks, block size, G, D), any block size.
        k, v: (B, T_new, G, D), written to the cache from position `cache_seqlens` on; needs `cache_seqlens`.
        rotary_cos, rotary_sin: (positions, R/2): k is rotated at positions cache_seqlens, cache_seqlens + 1, ..; so is
            q if causal or with a window, otherwise all of it at cache_seqlens.
        cache_seqlens: tokens already in the cache, an int or (B,); None: all of it.
        cache_batch_idx: (B,) which row of the cache each q belongs to; not with `block_table`.
        cache_leftpad: (B,) first position of the cache that counts; not with `block_table`.
        block_table: (B, blocks per sequence): where the pages of each sequence are.
        num_splits: accepted; keys are divided by the shape of the call alone, so it has no influence.
        softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes: as in `flash_attn_func`.

    Returns:
        out (B, Tq, H, D), and with `return_softmax_lse` lse (B, H, Tq). No gradients.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, shape or range. On the CPU that includes lengths
            that the cache does not hold.
    """
    B, Tq = _check_tensors(q, k_cache, v_cache, k, v)
    check_bool(OP, "rotary_interleaved", rotary_interleaved)
    check_bool(OP, "return_softmax_lse", return_softmax_lse)
    check_int(OP, "num_splits", num_splits, minimum=0)
    common = options(OP, causal, window_size, softcap, alibi_slopes, softmax_scale)
    for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if x is not None:
            check_tensor(OP, name, x, dtypes=INTS, shape=(B,), device=q.device)
            if block_table is not None:
                raise value_error(OP, name, "None together with block_table", "a tensor")
    rows = _cache_rows(q, k_cache, cache_batch_idx, block_table)
    lengths = _lengths(q, k, cache_seqlens, rows.shape[1], cache_leftpad)
    if (rotary_cos is None) != (rotary_sin is None):
        raise value_error(OP, "rotary_sin", "a table if and only if rotary_cos is one", rotary_sin)
    if rotary_cos is not None and rotary_sin is not None:
        if k is None:
            raise value_error(OP, "rotary_cos", "None without k and v", "a table")
        step = torch.arange(k.shape[1], device=q.device)
        tables = (rotary_cos, rotary_sin)
        k = _rotated(k, lengths[:, None] + step, tables, rotary_interleaved)
        step = torch.arange(Tq, device=q.device)
        moving = causal or common["window"] != (-1, -1)
        at = lengths[:, None] + (step if moving else torch.zeros_like(step))
        q = _rotated(q, at, tables, rotary_interleaved)
    if k is not None and v is not None:
        at = rows.gather(1, lengths[:, None] + torch.arange(k.shape[1], device=q.device)).flatten()
        place = at // k_cache.shape[1], at % k_cache.shape[1]
        k_cache[place], v_cache[place] = k.flatten(0, 1), v.flatten(0, 1)
        lengths = lengths + k.shape[1]
    flat_k, flat_v = (x.flatten(0, 1) for x in (k_cache, v_cache))
    if cache_batch_idx is not None or block_table is not None:
        flat_k, flat_v = (x[rows.flatten()] for x in (flat_k, flat_v))
    out, lse = _attend(q, flat_k, flat_v, rows.shape[1], lengths, cache_leftpad, common)
    return (out, lse) if return_softmax_lse else out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, room: int, lengths: Tensor, first: Tensor | None, common: dict[str, Any]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """k, v (B * room, G, D) are packed sequences with gaps: every second sequence is the gap, and has no queries."""
    B, Tq = q.shape[:2]
    base = torch.arange(B, device=q.device) * room
    start = base if first is None else base + first
    starts_k = torch.stack([start, base + lengths], 1).flatten()
    starts_q = (torch.arange(2 * B, device=q.device) + 1) // 2 * Tq
    if B == 0:
        starts_k = starts_q = torch.zeros(1, dtype=torch.int64, device=q.device)
    slopes = common["alibi_slopes"]
    if isinstance(slopes, Tensor) and slopes.dim() == 2:
        common = common | {"alibi_slopes": slopes.repeat_interleave(2, 0)[: max(2 * B - 1, 0)]}
    out, lse = flash_attention_varlen(
        q.flatten(0, 1), k, v, starts_q, starts_k, max_seqlen_q=Tq, max_seqlen_k=room if first is None else 2 * room,
        check=q.device.type == "cpu", return_lse=True, **common,
    )  # fmt: skip
    return out.unflatten(0, (B, Tq)), lse.unflatten(1, (B, Tq)).transpose(0, 1).contiguous()


def _check_tensors(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> tuple[int, int]:
    check_tensor(OP, "q", q, shape=(None,) * 4)
    B, Tq, H, D = q.shape
    same: dict[str, Any] = {"dtypes": (q.dtype,), "device": q.device}
    check_tensor(OP, "k_cache", k_cache, shape=(None, None, None, D), **same)
    check_tensor(OP, "v_cache", v_cache, shape=(*k_cache.shape[:3], None), **same)
    G = k_cache.shape[2]
    if G == 0 or H % G:
        raise value_error(OP, "k_cache", f"a number of heads that divides q's {H}", G)
    if (k is None) != (v is None):
        raise value_error(OP, "v", "a tensor if and only if k is one", type(v).__name__)
    if k is not None and v is not None:
        check_tensor(OP, "k", k, shape=(B, None, G, D), **same)
        check_tensor(OP, "v", v, shape=(*k.shape[:3], v_cache.shape[3]), **same)
    return B, Tq


def _cache_rows(
    q: Tensor, k_cache: Tensor, batch_idx: Tensor | None, block_table: Tensor | None
) -> Tensor:
    """(B, room): the row of the flattened cache where each position of each sequence lies."""
    B, size = q.shape[0], k_cache.shape[1]
    within = torch.arange(size, device=q.device)
    if block_table is not None:
        check_tensor(OP, "block_table", block_table, dtypes=INTS, shape=(B, None), device=q.device)
        return (block_table.long()[..., None] * size + within).flatten(1)
    if batch_idx is None:
        check_tensor(OP, "k_cache", k_cache, shape=(B, None, None, None))
        batch_idx = torch.arange(B, device=q.device)
    return batch_idx.long()[:, None] * size + within


def _lengths(
    q: Tensor, k: Tensor | None, cache_seqlens: object, room: int, leftpad: Tensor | None
) -> Tensor:
    """(B,) tokens in the cache before this call."""
    B = q.shape[0]
    new = 0 if k is None else k.shape[1]
    if cache_seqlens is None:
        if k is not None:
            raise value_error(OP, "cache_seqlens", "an int or a tensor together with k", None)
        cache_seqlens = room
    if isinstance(cache_seqlens, Tensor):
        check_tensor(OP, "cache_seqlens", cache_seqlens, dtypes=INTS, shape=(B,), device=q.device)
        lengths = cache_seqlens.long()
    elif isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        lengths = torch.full((B,), cache_seqlens, device=q.device)
    else:
        expected = "None, an int or a tensor"
        raise type_error(OP, "cache_seqlens", expected, type(cache_seqlens).__name__)
    if q.device.type == "cpu" and B:
        if int(lengths.min()) < 0 or int(lengths.max()) + new > room:
            expected = f"lengths of at least 0 that with {new} new tokens fit in {room}"
            raise value_error(OP, "cache_seqlens", expected, lengths.tolist())
        if leftpad is not None and bool(((leftpad < 0) | (leftpad > lengths)).any()):
            expected = "positions within cache_seqlens"
            raise value_error(OP, "cache_leftpad", expected, leftpad.tolist())
    return lengths


def _rotated(x: Tensor, at: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    for name, table in zip(("rotary_cos", "rotary_sin"), tables):
        check_tensor(OP, name, table, shape=(None, None), device=x.device)
    last = int(at.max()) if x.device.type == "cpu" and at.numel() else 0
    if last >= tables[0].shape[0]:
        raise value_error(OP, "rotary_cos", f"at least {last + 1} positions", tables[0].shape[0])
    cos, sin = (t.detach()[at] for t in tables)
    return rope(x, x[:, :, :1], cos, sin, interleaved=interleaved)[0]
