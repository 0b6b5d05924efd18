"""Packed sequences whose keys lie in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.errors import check_tensor, value_error

INTS = (torch.int32, torch.int64)


def unpaged(
    function: str, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    block_table: Tensor, common: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, dict[str, Any]]:  # fmt: skip
    """k, v, both cu_seqlens, max_seqlen_k and the options of a call without pages that means the same.

    Each sequence brings all of its pages, so that no length has to be read from a GPU: what is behind its end becomes
    a sequence of its own, a gap without queries.
    """
    check_tensor(function, "k", k, shape=(None, None, None, None))
    check_tensor(function, "v", v, shape=(*k.shape[:3], None), dtypes=(k.dtype,), device=k.device)
    check_tensor(function, "block_table", block_table, dtypes=INTS, shape=(None, None), device=k.device)  # fmt: skip
    sequences, pages = block_table.shape
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(function, name, starts, dtypes=INTS, shape=(sequences + 1,), device=k.device)
    room, lengths = pages * k.shape[1], cu_seqlens_k.diff().long()
    if k.device.type == "cpu" and sequences:
        if int(lengths.max()) > room:
            expected = f"sequences of at most {room} keys, {pages} pages of {k.shape[1]}"
            raise value_error(function, "cu_seqlens_k", expected, int(lengths.max()))
        used = (lengths[:, None] + k.shape[1] - 1) // k.shape[1] > torch.arange(pages)
        wrong = used & ((block_table < 0) | (block_table >= k.shape[0]))
        if bool(wrong.any()):
            expected = f"pages from 0 to {k.shape[0] - 1}"
            raise value_error(function, "block_table", expected, int(block_table[wrong][0]))
    if sequences == 0 or k.shape[0] == 0:
        empty = k.flatten(0, 1)[:0], v.flatten(0, 1)[:0]
        return *empty, cu_seqlens_q, cu_seqlens_k, 0, common
    at = (
        block_table.long().clamp(0, k.shape[0] - 1).flatten()
    )  # entries behind a sequence's end may be anything
    k, v = k[at].flatten(0, 1), v[at].flatten(0, 1)
    base = torch.arange(sequences, device=k.device) * room
    starts_k = torch.stack([base, base + lengths], 1).flatten()
    starts_q = cu_seqlens_q.repeat_interleave(2)[1:-1]
    slopes = common["alibi_slopes"]
    if isinstance(slopes, Tensor) and slopes.dim() == 2:
        common = common | {"alibi_slopes": slopes.repeat_interleave(2, 0)[:-1]}
    return k, v, starts_q.to(torch.int32), starts_k.to(torch.int32), room, common
