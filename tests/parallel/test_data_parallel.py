"""DataParallel on 1 to 4 Gloo ranks. The cases themselves, one function each, are in data_cases.py."""

import inspect

import data_cases
import pytest
from rank_pool import Ranks

EVERY = [
    name
    for name, f in vars(data_cases).items()
    if inspect.isfunction(f)
    and f.__module__ == "data_cases"
    and list(inspect.signature(f).parameters) == ["rank", "world"]
]
LEAVE = ("leave_a_replica_behind", "leave_in_the_middle_of_a_step")
OTHER = ("a_group_of_some_ranks", "weight_zero_alone", "unused_alone", *LEAVE)
TWO = [n for n in EVERY if n not in OTHER]
SELECTED = (
    [(1, n) for n in data_cases.CASES[1]]
    + [(2, n) for n in TWO if n not in data_cases.CASES[3]]
    + [(3, n) for n in data_cases.CASES[3]]
    + [(4, n) for n in data_cases.CASES[4]]
)


@pytest.mark.parametrize("case", LEAVE)
def test_processes_end_cleanly(case):
    """With threads of ours still running: no abort, no hang."""
    ranks = Ranks(4)
    try:
        ranks.run("data_cases", case)
        ranks.leave(range(4))
        assert [process.exitcode for process in ranks.processes] == [0] * 4
    finally:
        ranks.close()


@pytest.mark.parametrize(("world", "case"), SELECTED, ids=[f"{n}-{w}" for w, n in SELECTED])
def test_data_parallel(rank_pools, world, case):
    """Each rank runs the case to its end; `run` raises the traceback of one that does not."""
    assert rank_pools.run(world, "data_cases", case) == [None] * world
