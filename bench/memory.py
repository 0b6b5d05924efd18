"""Peak of extra memory of one call."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch
import trainwright as tw

STATUS = pathlib.Path("/proc/self/status")
CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.M)
    assert match, field
    return 1024 * int(match.group(1))


def peak_extra_bytes(function: Callable[[], Any], device: torch.device) -> int | None:
    """Highest memory during a call minus that before it; what the call returns counts, its inputs do not.

    GPU: torch's allocator. CPU: the process's resident memory, so scratch that a kernel or BLAS allocates counts too.
    The heap and our own idle blocks are given back first (memory that is used again would not show), and the high-water
    mark is reset (Linux; None elsewhere). Good to about 1 MiB. Call `function` once before, so that one-off allocations
    (code, thread stacks, workspaces) are made.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        tw.empty_cache()
        CLEAR_REFS.write_text("5")
    except (OSError, AttributeError):
        return None
    before = _status_bytes("VmRSS")
    result = function()
    peak = _status_bytes("VmHWM")
    del result
    return max(0, peak - before)
