"""FlatLayout: every element has exactly one place, whatever the sizes; equal models give equal layouts."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainwright.parallel import FlatLayout, layout

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


def meta(shape, dtype=torch.float32, device="meta"):
    return torch.empty(shape, dtype=dtype, device=device)


def covered(plan):
    """Each slot's pieces in order, checked against the buckets they lie in."""
    pieces = {i: [] for i in range(len(plan.slots))}
    for bucket in plan.buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.offset == end
            end += piece.end - piece.begin
            slot = plan.slots[piece.slot]
            assert slot.offset + piece.begin == bucket.start + piece.offset
            pieces[piece.slot].append((piece.begin, piece.end))
        assert end == bucket.numel
    return pieces


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(DTYPES)), min_size=1, max_size=30),
    st.integers(1, 5),
    st.sampled_from(["auto", 1e-9, 0.001, 0.01, 100.0]),
    st.sampled_from(["cpu", "meta"]),
)
def test_every_element_has_one_place(parameters, world, bucket_mb, device):
    before, layout.MIN_PIECE_BYTES = layout.MIN_PIECE_BYTES, 256
    try:
        named = [(f"p{i}", meta((n,), dtype, device)) for i, (n, dtype) in enumerate(parameters)]
        plan = FlatLayout.build(named, world=world, bucket_mb=bucket_mb)
    finally:
        layout.MIN_PIECE_BYTES = before
    assert [s.name for s in plan.slots] == [name for name, _ in reversed(named)]
    for i, spans in covered(plan).items():
        assert spans[0][0] == 0 and spans[-1][1] == plan.slots[i].numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    for bucket in plan.buckets:
        size = (bucket.numel + bucket.padding) * getattr(torch, bucket.dtype).itemsize
        assert size % (world * layout.ALIGN_BYTES) == 0
    assert FlatLayout.from_json(plan.to_json()) == plan


def test_small_buckets_at_both_ends():
    """A GPT-2-124M: starts early, leaves little to wait for, and no bucket is larger than the limit."""
    shapes = [(50257, 768), (1024, 768)]
    for _ in range(12):
        shapes += [
            (768,),
            (2304, 768),
            (2304,),
            (768, 768),
            (768,),
            (3072, 768),
            (3072,),
            (768, 3072),
            (768,),
        ]
    named = [(f"p{i}", meta(shape)) for i, shape in enumerate(shapes)]
    plan = FlatLayout.build(named, world=2)
    sizes = [b.numel * 4 for b in plan.buckets]
    assert max(sizes) <= 1.6 * layout.AUTO_LIMITS["cuda"][1]
    assert sizes[0] < max(sizes) / 2 and sizes[-1] <= max(sizes) / 4
    assert len(sizes) > 6


def test_large_parameters_are_alone_on_the_cpu():
    """They are exchanged in place: no other parameter, no padding. The small ones between them share buckets."""
    named = []
    for i in range(6):
        named += [(f"{i}.weight", torch.empty(768, 768)), (f"{i}.bias", torch.empty(768))]
    named.append(("wide", torch.empty(9 << 18)))  # larger than a bucket: cut
    named.append(("odd", torch.empty((1 << 18) + 1)))  # does not split evenly between the ranks
    plan = FlatLayout.build(named, world=2)
    names = [[plan.slots[p.slot].name for p in b.pieces] for b in plan.buckets]
    alone = [n[0] for n, b in zip(names, plan.buckets) if len(n) == 1 and not b.padding]
    assert {f"{i}.weight" for i in range(6)} <= set(alone)
    assert alone.count("wide") > 1 and "odd" not in alone
    assert len(names) < len(named) + alone.count("wide")
    ready = [max(p.slot for p in b.pieces) for b in plan.buckets]
    assert ready == sorted(ready)


def test_launch_order_is_by_the_last_gradient():
    """A dtype with few parameters all over the model does not hold up the others."""
    named = []
    for i in range(20):
        named += [(f"{i}.norm", meta((16,))), (f"{i}.weight", meta((64, 64), torch.bfloat16))]
    plan = FlatLayout.build(named, world=2, bucket_mb=0.02)
    ready = [max(p.slot for p in b.pieces) for b in plan.buckets]
    assert ready == sorted(ready)
    assert plan.buckets[-1].dtype == "float32" and len(plan.buckets) > 5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.add_module("2", nn.Linear(3, 3)), r"2\.weight: no such parameter against float32 \(3, 3\)"),
        (lambda m: m.__setitem__(1, nn.Linear(3, 4)), r"1\.weight: float32 \(3, 3\) .* against float32 \(4, 3\)"),
        (lambda m: m.double(), r"0\.weight: float32 .* against float64"),
        (lambda m: m.__setitem__(0, nn.Linear(3, 3, bias=False)), r"0\.bias: .* against no such parameter"),
        (lambda m: None, None),
    ],
)  # fmt: skip
def test_first_difference(change, text):
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)]
    change(models[1])
    a, b = (FlatLayout.build(m.named_parameters(), world=2) for m in models)
    assert (a.fingerprint == b.fingerprint) == (text is None)
    difference = a.first_difference(b)
    if text is None:
        assert difference is None
    else:
        assert re.match(text, difference), difference


def test_other_buckets_are_a_difference():
    named = [("a", meta((64, 64))), ("b", meta((64, 64)))]
    a, b = (FlatLayout.build(named, world=2, bucket_mb=mb) for mb in (0.01, 1))
    assert "bucket" in a.first_difference(b)


def test_no_parameters():
    plan = FlatLayout.build([], world=2)
    assert plan.slots == () and plan.buckets == ()


def test_wrong_arguments_are_named():
    for options, message in (
        ({"world": 0}, "world: expected at least 1"),
        ({"bucket_mb": -1}, "bucket_mb: expected"),
    ):
        with pytest.raises(ValueError, match=f"FlatLayout.build: {message}"):
            FlatLayout.build([("a", torch.ones(3))], **{"world": 2, **options})
