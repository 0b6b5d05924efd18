"""No hang: when one rank fails, all others raise CollectiveError within the timeout, naming it, and can exit."""

import random
import re
import time

import fault_cases
import pytest
from rank_pool import Ranks

FAULTS = [
    ("kill", 2),
    ("kill", 0),  # the host of the store
    ("stop", 2),
    ("stop", 0),
    ("stall", 1),
    ("skip", 1),
    ("interrupt", 1),
]


ABSENT = "absent"


@pytest.fixture(scope="module")
def scenarios():
    """All faults at once, each in ranks of its own: they mostly wait for a timeout."""
    started = {}
    try:
        for how, victim in FAULTS:
            started[how, victim] = Ranks(3, store="tcp")
        started[ABSENT] = Ranks(2, store="tcp")
        for (how, victim), ranks in list(started.items())[:-1]:
            ranks.start("fault_cases", "one_rank_fails", how=how, victim=victim)
        started[ABSENT].start("fault_cases", "one_rank_is_absent")
        yield started
    finally:
        for ranks in started.values():
            ranks.close()


@pytest.mark.parametrize(("how", "victim"), FAULTS, ids=[f"{h}-rank{v}" for h, v in FAULTS])
def test_one_rank_fails(scenarios, how, victim):
    ranks = scenarios[how, victim]
    others = [r for r in range(3) if r != victim]
    for r, (kind, result) in ranks.answers(others, 4 * fault_cases.TIMEOUT).items():
        assert kind == "ok", f"--- rank {r}\n{result}"
        seconds, message, blamed, step = result
        assert seconds < 1.5 * fault_cases.TIMEOUT, f"rank {r}: {seconds:.1f} s"
        assert "step 2" in message and step == 2, message
        assert blamed == (victim,) and f"rank {victim}" in message, message
        if how != "interrupt":
            assert "bucket " in message or "header" in message, message
    began = time.monotonic()
    ranks.leave(others)
    assert time.monotonic() - began < 2 * fault_cases.TIMEOUT


IN_EVERY_RUN = (4, 7)  # a rank that is killed, one that is stopped


@pytest.mark.parametrize(
    "seed", [s if s in IN_EVERY_RUN else pytest.param(s, marks=pytest.mark.slow) for s in range(20)]
)
def test_a_rank_fails_at_any_moment(seed):
    """Of DataParallel or a stage of Zero: all other ranks say in time who, in which step, and what they were doing."""
    ranks = Ranks(3, store="tcp")
    try:
        ranks.start("fault_cases", "any_moment", seed=seed)
        victim = random.Random(seed).randrange(3)
        others = [r for r in range(3) if r != victim]
        for r, (kind, result) in ranks.answers(others, 5 * fault_cases.TIMEOUT).items():
            assert kind == "ok", f"--- rank {r}\n{result}"
            seconds, message, blamed, step, _ = result
            assert seconds < 1.5 * fault_cases.TIMEOUT, f"rank {r}: {seconds:.1f} s"
            assert blamed == (victim,) and f"rank {victim}" in message, message
            assert step >= 0 and re.search(
                r"step \d+, (bucket|block|header|footer|all-gather)", message
            )
    finally:
        ranks.close()


def test_one_rank_is_absent(scenarios):
    kind, result = scenarios[ABSENT].answers([0], 3 * fault_cases.TIMEOUT)[0]
    assert kind == "ok", result
    assert result < 1.5 * fault_cases.TIMEOUT
