"""The storage formats of an optimizer's state, changed in the middle of a run."""

from __future__ import annotations

from dataclasses import replace

import torch

from trainwright.errors import type_error, value_error
from trainwright.optim._base import FusedOptimizer

__all__ = ["convert_state"]


def convert_state(
    optimizer: FusedOptimizer,
    *,
    state_dtype: torch.dtype | str | None = None,
    master_weights: str | None = None,
) -> None:
    """Change the storage formats of an optimizer of `tw.optim` in the middle of a run, for the state it has and later.

    Args:
        optimizer: any class; changed in place, options included (before it is wrapped in `Offload`).
        state_dtype: torch.float32, torch.bfloat16 or "int8", see the optimizer; None: as it is.
        master_weights: "fp32", "split16", "none" or "auto"; None: as it is.

    fp32 and "split16" masters hold the same number, and bf16 and int8 state is exact in fp32: these ways back and forth
    lose nothing. A master is made of the parameter, or dropped, as asked.

    Raises:
        TypeError, ValueError: as the optimizer's constructor.

    >>> import torch, trainwright as tw
    >>> p = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    >>> opt = tw.optim.AdamW([p], lr=0.1)
    >>> p.grad = torch.ones_like(p)
    >>> opt.step()
    >>> tw.optim.convert_state(opt, state_dtype="int8", master_weights="split16")
    >>> opt.state[p]["exp_avg"].dtype, opt.state[p]["master"].dtype
    (torch.int8, torch.int16)
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise type_error(
            "convert_state", "optimizer", "an optimizer of tw.optim", type(optimizer).__name__
        )
    old = optimizer._options
    asked = replace(
        old,
        state_dtype=old.state_dtype if state_dtype is None else state_dtype,
        master_weights=old.master_weights if master_weights is None else master_weights,
    )
    last_step = optimizer.last_step
    optimizer._set_options(**vars(asked))  # checks them
    optimizer.last_step = last_step
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if asked.master_weights == "split16" and any(p.dtype == torch.float16 for p in params):
        optimizer._options = old
        raise value_error(
            "convert_state", "master_weights", "'fp32' or 'none' for fp16 parameters", "'split16'"
        )
    for p, values in list(optimizer.state.items()):
        optimizer.state[p] = optimizer._in_own_formats(p, values)
