"""The int8 wire on Gloo ranks; the cases are in int8_cases.py."""

import pytest

CASES = {
    "codes_and_errors_add_up": (2, 3),
    "other_kinds_of_gradients": (3,),
    "saved_and_resumed": (2,),
    "zero_steps_as_data_parallel": (2,),
}


@pytest.mark.parametrize(("world", "case"), [(w, c) for c, worlds in CASES.items() for w in worlds])
def test_int8_wire(rank_pools, world, case):
    assert rank_pools.run(world, "int8_cases", case) == [None] * world


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_errors_fit_any_world_size(rank_pools, stage):
    saved = rank_pools.run(2, "int8_cases", "save_errors", stage=stage)
    for world in (1, 3):
        rank_pools.run(world, "int8_cases", "resume_errors", stage=stage, saved=saved)
