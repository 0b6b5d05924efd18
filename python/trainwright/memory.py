"""Memory that the CPU kernels keep between calls."""

from __future__ import annotations

import torch

from trainwright import dispatch


def empty_cache() -> None:
    """Give the idle memory of large CPU outputs back to the system.

    Outputs of 32 MiB and more take the memory of dead ones of their size, as a training step needs the same sizes again
    and new memory has to be cleared and mapped page by page. Never more is kept than was in use at one time, and the
    system takes idle pages back by itself when it runs short; call this to see them gone from the resident set at once.
    CUDA memory is torch's: `torch.cuda.empty_cache`.

    Example:
        >>> import trainwright as tw
        >>> tw.empty_cache()
    """
    if dispatch.extension("_C").loaded:
        torch.ops.trainwright.empty_cache()
