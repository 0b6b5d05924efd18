"""Memory of large outputs (csrc/cpu/large_blocks.h): reused, bounded, and never shared by two live tensors."""

import sys

import psutil
import pytest
import torch
import trainwright as tw

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="large outputs are pooled on Linux"),
    pytest.mark.skipif(
        tw.available_backends(tw.rms_norm)["cpu"] != "ok", reason="no compiled CPU module"
    ),
]

MIB = 1 << 20


def large_output(mib, fill=1.0):
    x = torch.full((mib * 256, 1024), fill)
    return tw.rms_norm(x, torch.ones(1024), backend="cpu")


def test_the_next_output_of_the_same_size_takes_the_memory_of_a_dead_one():
    first = large_output(48)
    address = first.data_ptr()
    del first
    assert large_output(48).data_ptr() == address


def test_live_tensors_and_views_keep_their_memory():
    a = large_output(40, 1.0)
    view = a[::7, ::3]
    want = view.clone()
    del a
    b = large_output(40, -1.0)
    c = large_output(40, -1.0)
    assert torch.equal(view, want)
    assert len({t.data_ptr() for t in (view, b, c)}) == 3
    assert torch.equal(b, c)


def test_idle_memory_never_exceeds_what_was_in_use_at_once():
    large_output(96)
    before = psutil.Process().memory_info().rss
    for mib in (33, 35, 40, 50, 64, 96, 33, 64, 96):
        large_output(mib)
    assert psutil.Process().memory_info().rss - before < 32 * MIB


def test_output_of_a_pooled_block_can_be_saved_and_shared(tmp_path):
    out = large_output(33)
    torch.save(out, tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt"), out)
    assert torch.equal(out.clone().share_memory_(), out)


def test_empty_cache_gives_idle_memory_back():
    before = psutil.Process().memory_info().rss
    kept = large_output(48)
    large_output(80)
    tw.empty_cache()
    assert psutil.Process().memory_info().rss - before < (48 + 16) * MIB
    assert torch.equal(kept[0], kept[-1])
