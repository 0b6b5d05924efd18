"""flash-attn's `bert_padding`: between padded (B, T, ...) and packed (tokens, ...) tensors, with gradients.

Source: Dao-AILab/flash-attention, `flash_attn/bert_padding.py` (the interface; five results of `unpad_input`, as since
version 2.7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.errors import check_int, check_tensor, value_error

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]

_MASKS = (
    torch.bool,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.float32,
    torch.bfloat16,
    torch.float16,
)


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (n,) of input (rows, ...)."""
    check_tensor(
        "index_first_axis", "indices", indices, dtypes=(torch.int32, torch.int64), shape=(None,)
    )
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...): `values` (n, ...) at rows `indices` (n,), which are distinct, and 0 elsewhere."""
    op = "index_put_first_axis"
    check_tensor(
        op, "indices", indices, dtypes=(torch.int32, torch.int64), shape=(values.shape[0],)
    )
    check_int(op, "first_axis_dim", first_axis_dim, minimum=0)
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of hidden_states (B, T, ...) that the masks select, end to end.

    Args:
        hidden_states: (B, T, ...).
        attention_mask: (B, T), nonzero for tokens.
        unused_mask: (B, T), nonzero for rows to keep room for that are no tokens.

    Returns:
        (rows (n, ...), their indices in (B·T) (n,), cu_seqlens (B + 1,) int32, the longest sequence, the number of
        tokens of each (B,) int32 without the unused ones).
    """
    op = "unpad_input"
    check_tensor(op, "attention_mask", attention_mask, dtypes=_MASKS, shape=hidden_states.shape[:2])
    kept = attention_mask != 0
    used = kept.sum(-1, dtype=torch.int32)
    if unused_mask is not None:
        check_tensor(op, "unused_mask", unused_mask, dtypes=_MASKS, shape=hidden_states.shape[:2])
        kept = kept | (unused_mask != 0)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1).index_select(0, indices), indices, starts, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...): hidden_states (n, ...) at rows `indices` of (batch·seqlen), 0 elsewhere."""
    check_int("pad_input", "batch", batch, minimum=0)
    check_int("pad_input", "seqlen", seqlen, minimum=0)
    if hidden_states.shape[0] > batch * seqlen:
        expected = f"at most {batch}·{seqlen} rows"
        raise value_error("pad_input", "hidden_states", expected, hidden_states.shape[0])
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))
