"""The CUDA attention kernels on the virtual GPU (sm_80): what they move and issue, and what only they can get wrong:
tails of tiles next to NaN, every head dim and split of the work. The tables of cases run on them too (tests/ops)."""

import re

import pytest
import torch
import trainwright as tw
import vgpu_backend
from numerics import same_bits
from trainwright import vgpu

BACKENDS = ["vgpu"]  # for conftest.py, which loads the kernels or skips
BF16 = torch.bfloat16
pytestmark = pytest.mark.parametrize("backend", BACKENDS)

# By head dim, as csrc/cuda/flash_attention_*.cuh have them: queries of a block of threads and keys of a step in the
# forward, and rows kept by a block of threads in the backward.
TILES = {64: (128, 64, 128), 96: (128, 64, 64), 128: (128, 64, 64), 256: (128, 32, 64)}
MOST_BYTES = 1.05
# PTX instructions for each tensor-core instruction; the assembler folds one in five of them (addresses, zeros).
MOST_ISSUES = {64: 6.1, 96: 4.8, 128: 4.0, 256: 4.5}


@pytest.fixture
def counters(backend):
    runtime = vgpu_backend.runtime()
    usual, counting = runtime.device, vgpu.Device("sm_80", count=True)
    runtime.attach(counting, vgpu_backend.properties())
    yield counting.counters
    runtime.attach(usual, vgpu_backend.properties())


def options(scale, right=-1):
    return (*[None] * 6, 0, 0, scale, -1, right, False, 0.0, 0.0)


def blocks_seen(T, rows, causal):
    """Rows of K that the blocks of queries see between them, whole steps of `rows` not counted."""
    return sum(min(i + rows, T) if causal else T for i in range(0, T, rows))


def ideal_bytes(D, T, H, causal):
    """By kernel: each block of threads reads what it keeps and what it must see once, and writes its results once."""
    rows, _, kept = TILES[D]
    row = 2 * D
    forward = H * (2 * T * row + 4 * T + 2 * row * blocks_seen(T, rows, causal))
    by_queries = H * (3 * T * row + 8 * T + 2 * row * blocks_seen(T, kept, causal))
    seen = blocks_seen(T, kept, causal)  # the same number of queries, by symmetry
    by_keys = H * (2 * T * row + (2 * row + 8) * seen)
    return {"fwd_kernel": forward, "ELb0E": by_queries, "ELb1E": by_keys + H * 2 * T * row}


def products(kernel):
    """Tensor-core instructions."""
    rows = kernel.instructions
    return sum(r.counts.warp_instructions for r in rows if r.text.startswith("mma.sync"))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D", TILES)
def test_counts(D, causal, counters):
    """No bank conflicts anywhere, whole sectors, bytes within 5% of the ideal of these tiles."""
    T, H = 256, 1
    q, k, v, dout = (torch.randn(1, T, H, D).to(BF16) for _ in range(4))
    numbers = options(D**-0.5, 0 if causal else -1)
    out, lse = vgpu_backend.op("flash_attention_fwd")(q, k, v, *numbers)
    need = [True] * 3 + [False] * 3
    vgpu_backend.op("flash_attention_bwd")(dout, None, q, k, v, out, lse, *numbers, need)
    ideal, found = ideal_bytes(D, T, H, causal), set()
    for kernel in counters:
        assert kernel.bank_conflicts == 0, kernel.name
        name = re.search(r"fwd_kernel|bwd_kernelI.*?Li\d+E(Lb\dE)|$", kernel.name)
        if not name[0]:
            continue  # the small kernel before the backward
        key = "E" + name[1] if name[1] else name[0]
        found.add(key)
        assert kernel.sector_efficiency == 1.0, kernel.name
        print(f"D={D} {key}: {kernel.global_bytes / ideal[key]:.3f} of ideal bytes")
        if not (D == 256 and key == "ELb1E"):  # dk and dv take a launch each there
            assert kernel.global_bytes <= MOST_BYTES * ideal[key], kernel.name
    assert found == set(ideal)


def kernel_named(counters, name):
    (kernel,) = (k for k in counters if name in k.name)
    return kernel


@pytest.mark.parametrize("D", [64, 256])
def test_split_keys_are_read_once(D, counters):
    """By one block of threads for all query heads that share them; parts are written and read once, in fp32."""
    Tk, H, G, pieces = 1600, 8, 2, 4
    q, k, v = (torch.randn(1, *n, D).to(BF16) for n in ((1, H), (Tk, G), (Tk, G)))
    vgpu_backend.op("flash_attention_fwd")(q, k, v, *options(D**-0.5, 0))
    row, part = 2 * D, 4 * D + 4
    ideal = G * 2 * Tk * row + pieces * H * (row + part)
    split, merge = (kernel_named(counters, n) for n in ("Lb1ELb1E", "merge_kernel"))
    assert len(list(counters)) == 2 and ideal <= split.global_bytes <= MOST_BYTES * ideal
    # The lse of the parts are read twice: to find the largest, and the weights.
    assert merge.global_bytes <= H * (pieces * (part + 8) + row + 4)
    for kernel in (split, merge):
        assert kernel.bank_conflicts == 0, kernel.name
    assert split.sector_efficiency >= 0.99


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_merge_attention_bytes(dtype, counters):
    T, H, D = 64, 4, 64
    out, lse = torch.randn(1, T, H, D), torch.randn(1, H, T)
    parts = out, lse, out.to(dtype), lse
    vgpu_backend.op("merge_attention_fwd")(*parts)
    vgpu_backend.op("merge_attention_bwd")(out, lse, *parts, [True] * 4)
    forward, backward = counters
    rows, a, b = T * H, 4 * D, dtype.itemsize * D
    assert forward.global_bytes == rows * (2 * a + b + 12)
    assert backward.global_bytes == rows * (3 * a + 2 * b + 20)


@pytest.mark.parametrize("D", TILES)
def test_issue_slots_of_the_main_loop(D, counters):
    """What more keys cost a block of queries, for each tensor-core instruction."""
    rows, keys, _ = TILES[D]
    totals = []
    for T in (4 * keys, 6 * keys):
        q, k, v = (torch.randn(1, n, 1, D).to(BF16) for n in (rows, T, T))
        counters.clear()
        vgpu_backend.op("flash_attention_fwd")(q, k, v, *options(D**-0.5))
        (kernel,) = counters
        totals.append((kernel.issue_slots, products(kernel)))
    (issued, multiplied), (issued_more, multiplied_more) = totals
    slots = (issued_more - issued) / (multiplied_more - multiplied)
    print(f"D={D}: {slots:.3f} issue slots for each tensor-core instruction")
    assert slots <= MOST_ISSUES[D]


def poisoned(*shape):
    """The middle of a tensor of NaN: rows next to it, and elements next to each row, must not be read into results."""
    B, T, H, D = shape
    x = torch.full((B, T + 128, H, D + 16), float("nan"), dtype=BF16)
    inner = x[:, 64 : T + 64, :, 8 : D + 8]
    inner.copy_(torch.randn(shape))
    return inner


@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_tails_of_tiles_next_to_nan(D, causal, backend):
    shapes = [(1, 75, 2, D - 8), (1, 69, 1, D - 8), (1, 69, 1, D - 16), (1, 75, 2, D - 16)]
    views = [poisoned(*s) for s in shapes]
    results = []
    for q, k, v, dout in (views, [x.contiguous() for x in views]):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = tw.flash_attention(*leaves, causal=causal, return_lse=True, backend=backend)
        results.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
    assert all(x.isfinite().all() for x in results[0] if x.shape[-1] != 75 or not causal)
    assert all(same_bits(a, b) for a, b in zip(*results))
