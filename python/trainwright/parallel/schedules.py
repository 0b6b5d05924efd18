"""The schedules that the split products carry out, for any number of ranks, shards of any size, and any chunks."""

from __future__ import annotations

from trainwright.parallel._gather_schedules import all_gather_matmul_schedule
from trainwright.parallel._panel_schedules import (
    all_gather_panels_schedule,
    summa_schedule,
)
from trainwright.parallel._reduce_schedules import (
    matmul_all_reduce_schedule,
    matmul_reduce_scatter_schedule,
)

__all__ = [
    "all_gather_matmul_schedule",
    "all_gather_panels_schedule",
    "matmul_all_reduce_schedule",
    "matmul_reduce_scatter_schedule",
    "summa_schedule",
]
