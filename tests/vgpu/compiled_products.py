"""Compiled Triton matrix products on the virtual GPU: what they move, and stream-K, which the tables of cases are too
small for.

test_triton.py runs this file in a process of its own, since it needs Triton's compiler (TRITON_INTERPRET=0).
"""

import os

import pytest
import torch
from numerics import same_bits
from trainwright import vgpu
from trainwright.kernels import _product, _product_configs
from trainwright.kernels.gemm import gemm
from trainwright.kernels.grouped_matmul import grouped_matmul
from trainwright.kernels.matmul import matmul

ARCH = os.environ.get("VGPU_ARCH", "sm_80")
CAPABILITY = int(ARCH.removeprefix("sm_").rstrip("a"))
BOXES = CAPABILITY >= 90
MOST_BYTES = 1.05
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """So that small products have several waves of tiles."""
    monkeypatch.setattr(_product, "multiprocessors", lambda: 4)


def integers(*shape):
    """Small integers: every order of summation gives the exact sum."""
    return torch.randint(-4, 5, shape).double()


def at_a_line(t):
    """A copy of t that begins at a cache line, as memory of a GPU's allocator does."""
    whole = torch.empty(t.nbytes + 128, dtype=torch.uint8)
    start = -whole.data_ptr() % 128
    return whole[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)


def operands(layout, M, N, K):
    """bf16 integers (M, K) and (K, N), stored transposed where the layout says T."""
    shapes = [(K, M) if layout[0] == "T" else (M, K), (N, K) if layout[1] == "T" else (K, N)]
    stored = [at_a_line(integers(*s).to(BF16)) for s in shapes]
    return [t.t() if name == "T" else t for t, name in zip(stored, layout)]


def counted(run):
    """Result and counters by kernel, with every check on."""
    device = vgpu.Device(ARCH, count=True)
    with device:
        result = run()
    return result, {k.name.strip("_").removesuffix("_kernel"): k for k in device.counters}


def conflicts_of_the_loop(kernel):
    """Of what feeds the tensor cores; the exchange of sums before they are stored is the compiler's."""
    feeding = ("ldmatrix", "cp.async")
    rows = [r for r in kernel.instructions if r.text.startswith(feeding)]
    assert rows or BOXES
    return sum(r.counts.bank_conflicts for r in rows)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])  # forward, dgrad, wgrad
def test_bytes_are_those_of_the_tiles(layout):
    M, N, K = 256, 512, 256
    a, b = operands(layout, M, N, K)
    (c, _), found = counted(lambda: gemm(a, b, None, None, 0, BF16, False))
    kernel = found["product"]
    BLOCK_M, BLOCK_N = _product_configs.look_up("large", CAPABILITY)[:2]
    ideal = 2 * (M // BLOCK_M) * (N // BLOCK_N) * (BLOCK_M + BLOCK_N) * K + 2 * M * N
    ratio = kernel.global_bytes / ideal
    print(f"{layout}: {ratio:.4f} of ideal bytes, {kernel.bank_conflicts} bank conflicts in all")
    assert 0.999 <= ratio <= MOST_BYTES and kernel.sector_efficiency == 1.0
    assert conflicts_of_the_loop(kernel) == 0 and kernel.local_bytes == 0
    assert torch.equal(c.double(), (a.double() @ b.double()).to(BF16).double())
    moved = any("cp.async.bulk.tensor" in r.text for r in kernel.instructions)
    assert moved == BOXES


# More tiles than slots, and a remainder; fewer; K that ends within a block.
@pytest.mark.parametrize(("M", "N", "K"), [(64, 64, 1104), (128, 192, 1024), (320, 192, 640)])
@pytest.mark.parametrize("layout", ["NT", "TN"])
def test_streamed_tiles_are_exact_and_repeat(layout, M, N, K):
    a, b = operands(layout, M, N, K)
    bias, residual = integers(N).to(BF16), integers(M, N).to(BF16)
    z = a.double() @ b.double() + bias.double()
    results = []
    for _ in range(2):
        (c, pre), found = counted(lambda: gemm(a, b, bias, residual, 1, torch.float32, True))
        assert set(found) == {"product", "sum_stream"}
        assert conflicts_of_the_loop(found["product"]) == 0
        results.append(c)
    assert torch.equal(c.double(), z.relu() + residual.double()) and torch.equal(pre.double(), z)
    assert same_bits(*results)


def test_streamed_parts_cost_what_they_hold():
    M, N, K = 128, 128, 1344  # four tiles of 64 x 64, 21 blocks of K each
    a, b = operands("NN", M, N, K)
    _, found = counted(lambda: matmul(a[None], b[None], BF16, 0))
    plan = _product_configs.schedule_for(4, 21, 8, BOXES)
    assert (plan.programs, plan.whole, plan.depth) == (8, 0, 11)
    parts = 11  # the first program has 11 blocks of the first tile, the second 10, and 1 of the next tile, and so on
    ideal = 4 * 2 * 2 * 64 * K + parts * 4 * 64 * 64
    assert found["product"].global_bytes <= MOST_BYTES * ideal
    assert found["sum_stream"].global_bytes <= MOST_BYTES * (parts * 4 * 64 * 64 + 2 * M * N)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_batches_and_parts(splits):
    a, b = integers(3, 80, 320).to(BF16), integers(3, 64, 320).to(BF16)
    exact = a.double() @ b.double().mT
    c, _ = counted(lambda: matmul(a, b.mT, torch.float32, splits))
    assert torch.equal(c.double(), exact)


def test_boxes_of_a_group_reach_into_the_next():
    """Whose rows are NaN, as are those past the last: they are fetched, and must not be stored."""
    x, w = integers(208, 64).to(BF16), integers(3, 64, 128).to(BF16)
    x[70:139], x[200:] = torch.nan, torch.nan
    ends = torch.tensor([70, 139, 200], dtype=torch.int32)
    out, _ = counted(lambda: grouped_matmul(x, w, ends, torch.float32))
    assert torch.equal(out[:70].double(), x[:70].double() @ w[0].double())
    assert out[70:139].isnan().all() and (out[200:] == 0).all()
    assert torch.equal(out[139:200].double(), x[139:200].double() @ w[2].double())
