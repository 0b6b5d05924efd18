"""Models split by a plan, on real Gloo ranks, against the whole model (parallelize_cases.py)."""

import pytest
from torch import nn
from trainwright.parallel import parallelize

ON_WORLD = {
    1: ["trains_as_the_whole_model", "there_and_back", "clips_by_the_norm_of_the_whole", "rows", "router_gradients"],
    2: [
        "trains_as_the_whole_model", "there_and_back", "clips_by_the_norm_of_the_whole", "shared_rows_count_once",
        "rows", "router_gradients", "tied_head", "messages",
    ],
    3: [
        "trains_as_the_whole_model", "there_and_back", "shared_rows_count_once", "rows", "router_gradients",
        "tied_head",
    ],
    4: ["averaged_and_divided"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "case"), [(w, c) for w, cases in ON_WORLD.items() for c in cases]
)
def test_on_ranks(rank_pools, world, case):
    for rank, wrong in enumerate(rank_pools.run(world, "parallelize_cases", case, timeout=120)):
        assert not wrong, f"rank {rank} of {world}: {wrong}"


def test_needs_a_process_group():
    with pytest.raises(RuntimeError, match="distributed is not initialised"):
        parallelize(nn.Linear(2, 2), {})
