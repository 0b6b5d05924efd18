"""The CUDA matrix products on the virtual GPU (sm_80): what they move and issue, and what only they can get wrong:
tails of tiles next to NaN in every layout, rows that begin anywhere, groups that end within tiles. The tables of cases
run on them too (tests/ops)."""

import pytest
import torch
import trainwright as tw
import vgpu_backend
from numerics import same_bits
from trainwright import vgpu

BACKENDS = ["vgpu"]  # for conftest.py, which loads the kernels or skips
BF16 = torch.bfloat16
NAN = float("nan")
pytestmark = pytest.mark.parametrize("backend", BACKENDS)

MOST_BYTES = 1.05
# By rows of a tile: PTX instructions of a step of K for each tensor-core instruction, which takes 8 cycles of an A100.
MOST_ISSUES = {128: 3.6, 64: 9.0}
LAYOUTS = ["NN", "NT", "TN", "TT"]  # T: stored as (K, M), or as (N, K)


@pytest.fixture
def counters(backend):
    runtime = vgpu_backend.runtime()
    usual, counting = runtime.device, vgpu.Device("sm_80", count=True)
    runtime.attach(counting, vgpu_backend.properties())
    yield counting.counters
    runtime.attach(usual, vgpu_backend.properties())


def operands(layout, M, N, K, dtype=BF16, make=torch.randn):
    a = make(K, M).to(dtype).t() if layout[0] == "T" else make(M, K).to(dtype)
    b = make(N, K).to(dtype).t() if layout[1] == "T" else make(K, N).to(dtype)
    return a, b


def integers(*shape):
    """Small integers: every order of summation gives the exact sum."""
    return torch.randint(-4, 5, shape).double()


def products(kernel):
    """Tensor-core instructions."""
    rows = kernel.instructions
    return sum(r.counts.warp_instructions for r in rows if r.text.startswith("mma.sync"))


# The device says it has four multiprocessors: four tiles of 128 x 128 are enough for them, one is not.
@pytest.mark.parametrize(("tile", "M", "N"), [(128, 256, 256), (64, 128, 192)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts(layout, tile, M, N, counters):
    """No bank conflicts, whole sectors, and bytes within 5% of what the tiles have to read and write."""
    K, issued = 320, []
    for depth in (K, 2 * K):
        a, b = operands(layout, M, N, depth)
        counters.clear()
        vgpu_backend.op("matmul")(a[None], b[None], BF16, 1)
        (kernel,) = counters
        assert f"Li{tile}ELi{tile}E" in kernel.name
        ideal = 2 * (M // tile) * (N // tile) * 2 * tile * depth + 2 * M * N
        print(f"{layout} {tile}: {kernel.global_bytes / ideal:.4f} of ideal bytes")
        assert kernel.global_bytes <= MOST_BYTES * ideal
        assert kernel.bank_conflicts == 0 and kernel.sector_efficiency == 1.0
        issued.append((kernel.issue_slots, products(kernel)))
    (first, multiplied), (second, multiplied_more) = issued
    slots = (second - first) / (multiplied_more - multiplied)
    print(f"{layout} {tile}: {slots:.3f} issue slots for each tensor-core instruction")
    assert multiplied == M * N * K // (16 * 8 * 16) and slots <= MOST_ISSUES[tile]


def test_counts_of_parts_of_k(counters):
    """The parts cost their sums, written and read once in fp32."""
    a, b = operands("NN", 128, 128, 1024)
    vgpu_backend.op("matmul")(a[None], b[None], BF16, 4)
    total, sums = counters.total, 4 * 4 * 128 * 128
    ideal = 4 * 2 * 2 * 128 * 1024 // 4 + 2 * sums + 2 * 128 * 128
    assert total.bank_conflicts == 0 and total.sector_efficiency == 1.0
    assert total.global_bytes <= MOST_BYTES * ideal


def test_counts_of_groups(counters):
    """Beside the end rows a group costs what a product of its size costs."""
    x, w = torch.randn(448, 256).to(BF16), torch.randn(3, 256, 256).to(BF16)
    ends = torch.tensor([128, 128, 384], dtype=torch.int32)
    vgpu_backend.op("grouped_matmul")(x, w, ends, BF16)
    (kernel,) = counters
    ideal = (
        2 * 3 * 2 * 2 * 128 * 256 + 2 * 448 * 256
    )  # 3 x 2 tiles read 256 k, all rows are written
    assert "Li128ELi128E" in kernel.name and kernel.bank_conflicts == 0
    assert kernel.global_bytes <= MOST_BYTES * ideal
    counters.clear()
    vgpu_backend.op("grouped_matmul_wgrad")(x, torch.randn(448, 256).to(BF16), ends, BF16)
    (kernel,) = counters
    ideal = 2 * 2 * 2 * 2 * 128 * 384 + 2 * 3 * 256 * 256
    assert kernel.bank_conflicts == 0 and kernel.global_bytes <= MOST_BYTES * ideal


def poisoned(x, before, after):
    """x as the middle of a tensor of NaN, so that rows begin `before` elements past one multiple of 8 and end `after`
    before the next."""
    dense = x.t() if x.stride(-1) != 1 else x
    rows, columns = dense.shape
    whole = torch.full((rows + 160, before + columns + after), NAN, dtype=x.dtype)
    inner = whole[80 : 80 + rows, before : before + columns]
    inner.copy_(dense)
    return inner.t() if dense is not x else inner


# Rows of 16-byte blocks, and rows that begin anywhere; both tiles; K within one step, and past several.
@pytest.mark.parametrize("margins", [(8, 8), (3, 2)], ids=["aligned", "anywhere"])
@pytest.mark.parametrize("size", [(130, 381, 75), (61, 70, 131), (1, 9, 31)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tails_of_tiles_next_to_nan(layout, size, margins, backend):
    M, N, K = size
    before, after = margins
    a, b = operands(layout, M, N, K, make=integers)
    up = [(after - x.shape[-2 if x.stride(-1) != 1 else -1]) % 8 + after for x in (a, b)]
    dirty = [poisoned(x, before, after if before % 8 else u) for x, u in zip((a, b), up)]
    exact = a.double() @ b.double()
    for splits in (1, 2):
        got = vgpu_backend.op("matmul")(dirty[0][None], dirty[1][None], torch.float32, splits)
        assert torch.equal(got[0].double(), exact)


def test_neither_stride_is_one(backend):
    a, b = integers(70, 90).bfloat16(), integers(90, 66).bfloat16()
    spread = torch.full((140, 270), NAN, dtype=BF16)[::2, ::3]
    spread.copy_(a)
    column = torch.full((90, 1), 3.0, dtype=BF16)
    for left, right in ((spread, b), (spread, column.expand(90, 66)), (a[:1].expand(70, 90), b)):
        got = tw.matmul(left, right, out_dtype=torch.float32, backend=backend)
        assert torch.equal(got.double(), left.double() @ right.double())


def test_operands_of_two_types_are_multiplied_exactly(backend):
    """What the gradients of a product that keeps its fp32 sums are made of."""
    op = vgpu_backend.op("matmul")
    for first, second in ((torch.float32, BF16), (torch.float16, BF16), (torch.float32,) * 2):
        a, b = torch.randn(2, 67, 200).to(first), torch.randn(2, 200, 70).to(second)
        exact = a.double() @ b.double()
        plain = a.float() @ b.float()
        for x, y in ((a, b), (a, b.mT.contiguous().mT)):
            error = (op(x, y, torch.float32, 3).double() - exact).abs().max()
            assert error <= 2 * (plain - exact).abs().max()


def test_groups_that_end_within_tiles(backend):
    """Rows of other groups and past the last are NaN where a group must not read them."""
    x, w = integers(300, 40).bfloat16(), integers(5, 40, 72).bfloat16()
    ends = torch.tensor([0, 129, 130, 130, 295], dtype=torch.int32)
    x[295:] = NAN
    op, wgrad = vgpu_backend.op("grouped_matmul"), vgpu_backend.op("grouped_matmul_wgrad")
    got = op(x, w, ends, torch.float32)
    dy = torch.cat([integers(295, 72), torch.full((5, 72), NAN)]).bfloat16()
    for left, right in ((x, dy), (x.t().contiguous().t(), dy), (x, dy.t().contiguous().t())):
        dw = wgrad(left, right, ends, torch.float32)
        begin = 0
        for e, end in enumerate(ends.tolist()):
            rows = slice(begin, end)
            assert torch.equal(got[rows].double(), x[rows].double() @ w[e].double())
            assert torch.equal(dw[e].double(), x[rows].double().t() @ dy[rows].double())
            begin = end
    assert (got[295:] == 0).all()


@pytest.mark.parametrize("ends", [(7, 3), (-5, 900), (20, 12, 1 << 30)], ids=str)
def test_ends_that_lie_stay_within_the_tensors(ends, backend):
    """The virtual GPU reports every access outside them."""
    x, w = torch.randn(20, 16).to(BF16), torch.randn(len(ends), 16, 24).to(BF16)
    offsets = torch.tensor(ends, dtype=torch.int32)
    assert vgpu_backend.op("grouped_matmul")(x, w, offsets, BF16).isfinite().all()
    dw = vgpu_backend.op("grouped_matmul_wgrad")(x, torch.randn(20, 24).to(BF16), offsets, BF16)
    assert dw.isfinite().all()


def test_tile_and_layout_do_not_change_a_bit(backend):
    """A sum runs over k in order, whatever is around it."""
    a, b = torch.randn(300, 600).to(BF16), torch.randn(600, 300).to(BF16)
    op = vgpu_backend.op("matmul")
    whole = op(a[None], b[None], BF16, 1)[0]
    assert same_bits(op(a[None, 40:90], b[None], BF16, 1)[0], whole[40:90])
    for x, y in ((a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
        assert same_bits(op(x[None], y[None], BF16, 1)[0], whole)
