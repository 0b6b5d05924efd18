"""Tensor-parallel linear layers on real Gloo ranks against one unsharded layer (tensor_cases.py)."""

import pytest
from trainwright.parallel import ColumnParallelLinear
from trainwright.parallel._sizes import split_evenly

ON_WORLD = {
    1: ["exact", "ordered_sums_depend_on_no_place", "shared_heads", "starts"],
    2: [
        "exact", "exact_in_three_dimensions_and_fp64", "overlap_changes_no_bit", "ordered_sums_depend_on_no_place",
        "narrow_wire", "uneven_rows", "several_weights_off_one_gather", "shared_heads",
        "gathered_chunks_take_two_chunks", "starts", "frozen_and_autocast", "messages",
    ],
    3: [
        "exact", "overlap_changes_no_bit", "ordered_sums_depend_on_no_place", "narrow_wire", "uneven_rows",
        "several_weights_off_one_gather", "shared_heads", "gathered_chunks_take_two_chunks",
    ],
    4: ["exact", "uneven_rows", "shared_heads"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "case"), [(w, c) for w, cases in ON_WORLD.items() for c in cases]
)
def test_on_ranks(rank_pools, world, case):
    for rank, wrong in enumerate(rank_pools.run(world, "tensor_cases", case, timeout=120)):
        assert not wrong, f"rank {rank} of {world}: {wrong}"


def test_needs_a_process_group():
    with pytest.raises(RuntimeError, match="distributed is not initialised"):
        ColumnParallelLinear(4, 4)


def test_split_evenly():
    assert (
        split_evenly(7, 3) == [3, 2, 2]
        and split_evenly(2, 4) == [1, 1, 0, 0]
        and split_evenly(0, 2) == [0, 0]
    )
