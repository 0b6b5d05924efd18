"""The split matrix products and the vocabulary-parallel ends of a model, on real Gloo ranks (split_cases.py)."""

import pytest
import torch
from trainwright.parallel import (
    VocabParallelEmbedding,
    all_gather_matmul,
    vocab_parallel_cross_entropy,
)
from trainwright.parallel._summa import panels_of

ON_WORLD = {
    1: ["one_dimension", "summa", "cross_entropy", "embedding"],
    2: [
        "one_dimension", "summa", "overlap_changes_no_bit", "decisions_are_alike", "several_matrices",
        "replicated_weight", "summa_that_does_not_fit", "matmul_messages", "cross_entropy", "extreme_logits",
        "all_ignored", "embedding", "gradient_sums_in_fp32", "tied", "vocab_messages",
    ],
    3: [
        "one_dimension", "summa", "overlap_changes_no_bit", "replicated_weight", "cross_entropy", "extreme_logits",
        "embedding", "tied",
    ],
    4: ["one_dimension", "summa", "cross_entropy", "embedding"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "case"), [(w, c) for w, cases in ON_WORLD.items() for c in cases]
)
def test_on_ranks(rank_pools, world, case):
    for rank, wrong in enumerate(rank_pools.run(world, "split_cases", case, timeout=120)):
        assert not wrong, f"rank {rank} of {world}: {wrong}"


@pytest.mark.parametrize(
    ("a_widths", "b_heights"), [([3, 2], [5]), ([4, 4], [3, 3, 2]), ([2, 0, 3], [0, 5]), ([0], [0])]
)
def test_panels_cover_k_once(a_widths, b_heights):
    panels = panels_of(a_widths, b_heights)
    covered = [0] * sum(a_widths)
    for p in panels:
        assert p.width > 0 and p.in_b.stop - p.in_b.start == p.width
        a0, b0 = sum(a_widths[: p.column]), sum(b_heights[: p.row])
        assert a0 + p.in_a.start == b0 + p.in_b.start
        assert p.in_a.stop <= a_widths[p.column] and p.in_b.stop <= b_heights[p.row]
        for k in range(a0 + p.in_a.start, a0 + p.in_a.stop):
            covered[k] += 1
    assert covered == [1] * sum(a_widths)


def test_needs_a_process_group():
    x = torch.ones(2, 2)
    for call in (
        lambda: all_gather_matmul(x, x),
        lambda: VocabParallelEmbedding(4, 2),
        lambda: vocab_parallel_cross_entropy(x, torch.zeros(2, dtype=torch.int64)),
    ):
        with pytest.raises(RuntimeError, match="distributed is not initialised"):
            call()
