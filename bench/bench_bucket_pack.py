"""tw.bucket_pack: a 25 MB bucket of gradients, packed, scaled, checked and squared, against passes of torch."""

import itertools

import pytest
import torch
import trainwright as tw

SHAPES = [(3072, 768), (768, 3072), (2304, 768), (768,), (3072,), (768,)]
SCALE = 1 / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bucket_pack(compare, device, dtype):
    grads = [torch.randn(s, device=device).to(dtype) for s in SHAPES]
    offsets = [0, *itertools.accumulate(g.numel() for g in grads)]
    buffers = {name: torch.empty(offsets[-1], device=device) for name in ("ours", "copies", "cat")}

    def ours():
        squares, nonfinite = tw.bucket_pack(grads, buffers["ours"], offsets, scale=SCALE)
        return [buffers["ours"], squares.float(), nonfinite.float()]

    def checked(flat):
        return [flat, flat.square().sum(), (~torch.isfinite(flat).all()).float()]

    def copies():
        flat = buffers["copies"]
        for g, begin, end in zip(grads, offsets, offsets[1:]):
            flat[begin:end].copy_(g.view(-1))
        return checked(flat.mul_(SCALE))

    def fused():
        views = [buffers["cat"][b:e].view_as(g) for g, b, e in zip(grads, offsets, offsets[1:])]
        torch._foreach_copy_(views, grads)
        torch._foreach_mul_(views, SCALE)
        return checked(buffers["cat"])

    def exact():
        flat = torch.cat([g.view(-1) for g in grads]).double() * SCALE
        return [flat, flat.square().sum(), torch.zeros((), dtype=torch.float64)]

    calls = {"trainwright": ours, "torch eager": copies, "torch fused": fused}
    moved = sum(g.nbytes for g in grads) + buffers["ours"].nbytes
    compare("bucket_pack", "pack", "25 MB bucket", dtype, calls, exact, bytes_moved=moved)
