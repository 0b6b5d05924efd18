"""DataParallel on 1 to 4 Gloo ranks. The cases themselves, one function each, are in the four modules below."""

import inspect

import average_cases
import parameter_cases
import pytest
import unused_cases
import wrapper_cases
from rank_pool import Ranks

CASES = {
    1: ["arguments", "one_process_on_the_whole_batch", "sums_in_rank_order_at_every_position",
        "weight_zero_alone", "accumulate_is_one_process_on_all_microbatches", "accumulate_in_fp32",
        "accumulate_adds_to_what_was_there", "unused_alone", "mixed_dtypes", "strided_and_complex",
        "recomputed_blocks_used_three_times", "static_counts_with_no_sync", "gradients_of_the_user",
        "an_undefined_gradient_is_none", "copies_are_made_together", "a_module_is_wrapped_once"],
    3: ["one_process_on_the_whole_batch", "sums_in_rank_order_at_every_position", "nan_stays_where_it_is",
        "accumulate_is_one_process_on_all_microbatches", "a_rank_without_any_gradient_syncs",
        "unused_raises_in_the_same_backward", "those_who_joined_early_are_not_left_behind",
        "uneven_number_of_batches", "two_replicas_in_one_backward",
        "different_parameters_are_named", "strided_and_complex", "empty_parameters", "bf16_on_the_wire"],
    4: ["one_process_on_the_whole_batch", "sums_in_rank_order_at_every_position", "a_group_of_some_ranks",
        "sixteen_bit_gradients_are_summed_in_fp32", "unused_zero_with_branches_by_rank",
        "large_gradients_are_exchanged_where_they_lie"],
}  # fmt: skip
LEAVE = ("leave_a_replica_behind", "leave_in_the_middle_of_a_step")
OTHER = ("a_group_of_some_ranks", "weight_zero_alone", "unused_alone", *LEAVE)
MODULE_OF = {
    name: module.__name__
    for module in (average_cases, unused_cases, parameter_cases, wrapper_cases)
    for name, f in vars(module).items()
    if inspect.isfunction(f)
    and f.__module__ == module.__name__
    and list(inspect.signature(f).parameters) == ["rank", "world"]
}
SELECTED = (
    [(1, n) for n in CASES[1]]
    + [(2, n) for n in MODULE_OF if n not in (*OTHER, *CASES[3])]
    + [(3, n) for n in CASES[3]]
    + [(4, n) for n in CASES[4]]
)


@pytest.mark.parametrize("case", LEAVE)
def test_processes_end_cleanly(case):
    """With threads of ours still running: no abort, no hang."""
    ranks = Ranks(4)
    try:
        ranks.run(MODULE_OF[case], case)
        ranks.leave(range(4))
        assert [process.exitcode for process in ranks.processes] == [0] * 4
    finally:
        ranks.close()


@pytest.mark.parametrize(("world", "case"), SELECTED, ids=[f"{n}-{w}" for w, n in SELECTED])
def test_data_parallel(rank_pools, world, case):
    """Each rank runs the case to its end; `run` raises the traceback of one that does not."""
    assert rank_pools.run(world, MODULE_OF[case], case) == [None] * world
