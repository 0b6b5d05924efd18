"""What users of other libraries reported, as cases on real Gloo ranks (report_cases.py)."""

import pytest

ON_WORLD = {
    2: [
        "strided_operands_reduce_other_data", "a_second_model_is_split_by_the_sizes_of_the_first",
        "gathered_logits_add_log_w_to_the_loss", "dropout_differs_between_shardings",
        "autocast_gradients_have_the_wrong_dtype",
    ],
    3: ["a_second_model_is_split_by_the_sizes_of_the_first", "dropout_differs_between_shardings"],
    4: ["two_groups_wait_for_each_other"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "case"), [(w, c) for w, cases in ON_WORLD.items() for c in cases]
)
def test_on_ranks(rank_pools, world, case):
    for rank, wrong in enumerate(rank_pools.run(world, "report_cases", case, timeout=60)):
        assert not wrong, f"rank {rank} of {world}: {wrong}"
