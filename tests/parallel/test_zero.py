"""Zero on 1 to 3 Gloo ranks. The cases themselves, one function each, are in zero_cases.py."""

import itertools

import pytest
import torch
from torch import nn
from trainwright.parallel._blocks import find_blocks, ranges_of
from trainwright.parallel._shards import by_owner, divide
from trainwright.parallel.layout import FlatLayout

CASES = {
    "every_kind_of_parameter": (1, 2, 3),
    "formats_of_state": (2, 3),
    "groups_accumulation_and_clipping": (2, 3),
    "freeze_and_unfreeze": (3,),
    "scalers_skip_together": (2,),
    "convert": (2,),
    "gradients_of_stages_2_and_3": (2, 3),
    "bytes_of_model_state": (1, 3, 4),
    "a_rank_that_does_not_step": (2,),
    "offloaded_state": (2,),
    "uneven_numbers_of_batches": (3,),
    "arguments": (2,),
}
SELECTED = [(world, case) for case, worlds in CASES.items() for world in worlds]


@pytest.mark.parametrize(("world", "case"), SELECTED, ids=[f"{n}-{w}" for w, n in SELECTED])
def test_zero(rank_pools, world, case):
    assert rank_pools.run(world, "zero_cases", case) == [None] * world


@pytest.mark.parametrize(("stage", "kind"), [(1, "int8"), (2, "zoo"), (3, "int8"), (3, "zoo")])
def test_state_dicts_fit_any_world_size(rank_pools, stage, kind):
    """Saved on 1, 2 and 3 ranks, loaded on each of the others, from the shards and from the whole."""
    for world, others in ((1, (3,)), (2, (1, 3)), (3, (1, 2))):
        saved = rank_pools.run(world, "zero_cases", "save", stage=stage, kind=kind)
        for other in others:
            rank_pools.run(other, "zero_cases", "resume", stage=stage, kind=kind, saved=saved)


LATE = {
    "same_bits": (2, 3),
    "waits_for_what_a_module_uses": (2,),
    "readers_see_complete_values": (3,),
    "steps_without_a_forward_between": (2,),
    "compiled_parts_are_refused": (2,),
}


@pytest.mark.parametrize(("world", "case"), [(w, c) for c, worlds in LATE.items() for w in worlds])
def test_parameters_that_arrive_under_the_next_forward(rank_pools, world, case):
    assert rank_pools.run(world, "late_cases", case) == [None] * world


STAGE_3 = {
    "whole_only_while_used": (2, 3),
    "one_block_and_the_next": (2,),
    "used_from_anywhere": (3,),
    "recomputed": (2,),
    "evaluation_gathers": (2,),
    "after_an_exception": (2,),
    "the_user_reads_and_writes": (2,),
    "what_stage_3_refuses": (2,),
    "a_rank_that_runs_no_forward": (2,),
    # older torches cannot exchange a storage's memory: there a kept view is an illegal access
    "kept_views_read_as_nan": (2,) if hasattr(torch.UntypedStorage, "_swap_data_ptr_") else (),
    "a_gradient_of_a_gradient": (2,),
    "compiled_parts_are_refused": (2,),
    "join_without_a_step": (2,),
}


@pytest.mark.parametrize(
    ("world", "case"), [(w, c) for c, worlds in STAGE_3.items() for w in worlds]
)
def test_stage_3(rank_pools, world, case):
    assert rank_pools.run(world, "stage_3_cases", case) == [None] * world


@pytest.mark.parametrize("unit", [1, 256])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_element_of_a_block_has_one_owner(world, unit):
    """Blocks hold each parameter once; their parts tile them, are about equal, and begin at units of parameters."""
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {
            "large": nn.Sequential(nn.Linear(40, 513), nn.Linear(300, 300, dtype=torch.bfloat16)),
            "small": nn.Sequential(nn.Linear(3, 2), nn.ParameterList([torch.empty(0, 3)])),
        }
    )
    module["tied"] = nn.Linear(3, 2, bias=False)
    module["tied"].weight = module["small"][0].weight
    module.scale = nn.Parameter(torch.tensor(1.0))
    params = list(dict.fromkeys(module.parameters()))
    blocks = find_blocks(module, params, limit_bytes=50_000, world=world, unit=unit)
    assert sorted(i for b in blocks for i in b.params) == list(range(len(params)))
    assert [b.anchor for b in blocks] == ["", "large.0", "large.1", "small"]
    for b in blocks:
        assert len({params[i].dtype for i in b.params}) == 1
        assert (b.cuts[0], b.cuts[-1]) == (0, b.numel)
        sizes = [end - begin for begin, end in itertools.pairwise(b.cuts)]
        assert min(sizes) >= 0
        assert max(sizes) - min(sizes) <= 2 * max(unit, 16) + 1
    for p, ranges in zip(params, ranges_of(blocks, [p.numel() for p in params])):
        assert ranges[0].begin == 0
        assert ranges[-1].end == p.numel()
        for a, b in itertools.pairwise(ranges):
            assert (a.end, a.owner < b.owner) == (b.begin, True)
            assert b.begin % unit == 0


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
