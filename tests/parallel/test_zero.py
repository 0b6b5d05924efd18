"""Zero on 1 to 3 Gloo ranks. The cases themselves, one function each, are in zero_cases.py."""

import itertools

import pytest
import torch
from trainwright.parallel._shards import by_owner, divide
from trainwright.parallel.layout import FlatLayout

CASES = {
    "every_kind_of_parameter": (1, 2, 3),
    "formats_of_state": (2, 3),
    "groups_accumulation_and_clipping": (2, 3),
    "freeze_and_unfreeze": (3,),
    "scalers_skip_together": (2,),
    "convert": (2,),
    "gradients_of_stage_2": (2, 3),
    "bytes_of_model_state": (1, 2, 3),
    "a_rank_that_does_not_step": (2,),
    "arguments": (2,),
}
SELECTED = [(world, case) for case, worlds in CASES.items() for world in worlds]


@pytest.mark.parametrize(("world", "case"), SELECTED, ids=[f"{n}-{w}" for w, n in SELECTED])
def test_zero(rank_pools, world, case):
    assert rank_pools.run(world, "zero_cases", case) == [None] * world


@pytest.mark.parametrize(("stage", "kind"), [(1, "int8"), (2, "zoo")])
def test_state_dicts_fit_any_world_size(rank_pools, stage, kind):
    """Saved on 1, 2 and 3 ranks, loaded on each of the others, from the shards and from the whole."""
    for world, others in ((1, (3,)), (2, (1, 3)), (3, (1, 2))):
        saved = rank_pools.run(world, "zero_cases", "save", stage=stage, kind=kind)
        for other in others:
            rank_pools.run(other, "zero_cases", "resume", stage=stage, kind=kind, saved=saved)


@pytest.mark.parametrize("block", [1, 256])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_element_has_one_owner(world, block):
    """Ranges tile each parameter, begin at blocks, are about equal in sum; buckets sorted by owner hold them all."""
    sizes = [(513, 40), (7,), (0, 3), (), (5000,), (300, 300)]
    layout = FlatLayout.build(
        [(f"p{i}", torch.empty(size)) for i, size in enumerate(sizes)], world=world, bucket_mb=0.05
    )
    ranges = divide(layout, block)
    owned = [0] * world
    for slot, mine in zip(layout.slots, ranges):
        assert mine[0].begin == 0
        assert mine[-1].end == slot.numel
        for a, b in itertools.pairwise(mine):
            assert a.end == b.begin
            assert b.begin % block == 0
            assert b.begin < b.end
        for r in mine:
            owned[r.owner] += r.end - r.begin
    total = sum(slot.numel for slot in layout.slots)
    assert max(owned) - min(owned) <= (block + 16) * len(layout.buckets)
    found = 0
    for bucket in layout.buckets:
        part = by_owner(bucket, ranges, world)
        assert list(part.owners) == sorted(part.owners)
        assert part.cuts[0] == 0
        assert part.cuts[-1] == part.bucket.numel
        for piece, owner in zip(part.bucket.pieces, part.owners):
            assert part.cuts[owner] <= piece.offset <= part.cuts[owner + 1]
            found += piece.end - piece.begin
    assert found == total
