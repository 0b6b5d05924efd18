"""nvcc's code for cp.async and TMA pipelines, wgmma and clusters on the virtual GPU, against float64 and TMA models."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numerics import vgpu_close

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

PTX = Path(__file__).parent / "ptx"
pytestmark = pytest.mark.timeout(120)


def load(name, arch):
    return vgpu.Device(arch, threads=2).load_ptx((PTX / f"{name}.ptx").read_text())


@pytest.fixture(scope="module")
def hopper():
    return load("tensor_sm90a", "sm_90a")


WARP_SPECIALISED = ["gemm_tma_wgmma", "gemm_tma_wgmma_elected", "gemm_tma_wgmma_cluster"]
reversed_or_not = pytest.mark.parametrize("reverse", [False, True], ids=["", "warps reversed"])


@reversed_or_not
@pytest.mark.parametrize("m, n, k", [(64, 64, 32), (200, 136, 168), (1, 8, 8)])
def test_gemm_with_cp_async_and_mma(m, n, k, reverse):
    torch.manual_seed(0)
    a, b, c = (
        torch.randn(m, k).bfloat16(),
        torch.randn(k, n).bfloat16(),
        torch.full((m, n), math.nan),
    )
    grid = (math.ceil(n / 64), math.ceil(m / 64))
    load("tensor_sm80", "sm_80").launch(
        "gemm_cp_async", grid, 128, (a, b, c, m, n, k), reverse_warps=reverse
    )
    x, y = a.double(), b.double()
    assert vgpu_close("bf16 accumulated in fp32", c, x @ y, x.abs() @ y.abs())


@reversed_or_not
@pytest.mark.parametrize("kernel", WARP_SPECIALISED)
@pytest.mark.parametrize("m, n, k", [(256, 64, 64), (256, 192, 320), (200, 72, 136)])
def test_warp_specialised_gemm(hopper, kernel, m, n, k, reverse):
    torch.manual_seed(0)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    c = torch.full((m, n), math.nan).bfloat16()
    rows_of_b = 32 if kernel.endswith("cluster") else 64
    maps = (
        vgpu.tensor_map(a, (128, 64), swizzle=128),
        vgpu.tensor_map(b, (rows_of_b, 64), swizzle=128),
        vgpu.tensor_map(c, (128, 64), swizzle=128),
    )
    grid = (math.ceil(n / 64), math.ceil(m / 256) * 2)
    hopper.launch(
        kernel,
        grid,
        384,
        (*maps, k),
        smem=3 * (128 + 64) * 128,
        memory=(a, b, c),
        reverse_warps=reverse,
    )
    want = a.double() @ b.double().T
    assert vgpu_close("bf16 matmul", c, want)


def test_bulk_copy_and_reduction(hopper):
    torch.manual_seed(0)
    x, y = torch.randn(4096), torch.randn(4096)
    want = y + 2 * x
    hopper.launch("bulk_axpy", 4, 128, (x, y))
    assert torch.equal(y, want)


def test_cp_async_that_arrives_at_an_mbarrier(hopper):
    torch.manual_seed(0)
    x, y = torch.randint(-9, 9, (7, 256)).float(), torch.zeros(256)
    hopper.launch("copies_arrive", 1, 128, (x, y, 7))
    assert torch.equal(y, x.sum(0))


def test_a_cluster_exchanges_values(hopper):
    x, y = torch.arange(1, 9, dtype=torch.int32), torch.zeros(8, 8, dtype=torch.int32)
    hopper.launch("exchange", 8, 32, (x, y))
    for block in range(8):
        first, rank = block // 4 * 4, block % 4
        neighbour = (rank + 1) % 4
        want = [10 * (first + i + 1) for i in range(4)] + [
            first + neighbour + 1,
            rank,
            neighbour,
            0,
        ]
        assert y[block].tolist() == want


# ---- boxes of TMA, byte by byte


def box_elements(shape, box, at, steps):
    """(index in the tensor or None, position in the dense box) of each element of a box."""
    extent = [math.ceil(b / s) for b, s in zip(box, steps)]
    extent[-1] = box[-1]  # the element stride of the innermost dimension does not count
    for position, i in enumerate(itertools.product(*map(range, extent))):
        index = [a + j * s for a, j, s in zip(at, i, (*steps[:-1], 1))]
        yield (tuple(index) if all(0 <= j < n for j, n in zip(index, shape)) else None), position


def swizzled(address, width):
    return address ^ (address // 128 % max(width // 16, 1)) * 16


BOXES = [
    # dtype, shape, box, (z, y, x), swizzle, element strides, NaN outside
    (torch.bfloat16, (3, 20, 64), (2, 8, 64), (0, 0, 0), 128, None, False),
    (torch.bfloat16, (3, 20, 72), (2, 8, 64), (2, 15, 40), 128, None, False),
    (torch.float16, (3, 20, 64), (1, 16, 32), (1, -5, -7), 64, None, True),
    (torch.float32, (2, 9, 32), (2, 8, 8), (-1, 3, 27), 32, None, True),
    (torch.float32, (2, 9, 32), (2, 8, 12), (0, 0, 30), 0, None, False),
    (torch.uint8, (2, 9, 48), (2, 16, 32), (0, -3, 25), 32, None, False),
    (torch.int64, (2, 9, 32), (1, 4, 16), (1, 7, 17), 128, None, False),
    (torch.int32, (5, 9, 32), (4, 8, 8), (-1, 0, 4), 0, (2, 3, 1), False),
    (torch.float64, (2, 3, 8), (2, 4, 2), (0, 1, 7), 0, None, True),
]  # fmt: skip


def tensor_of(dtype, shape):
    torch.manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 100, shape).to(dtype)


@pytest.mark.parametrize("dtype, shape, box, at, swizzle, steps, nan", BOXES)
def test_a_box_lies_in_shared_memory_as_the_map_says(
    hopper, dtype, shape, box, at, swizzle, steps, nan
):
    x = tensor_of(dtype, shape)
    raw, size = x.view(torch.uint8).numpy().reshape(*shape, -1), x.element_size()
    elements = list(box_elements(shape, box, at, steps or (1, 1, 1)))
    out = torch.zeros(len(elements) * size, dtype=torch.uint8)
    encoded = vgpu.tensor_map(x, box, swizzle=swizzle, element_strides=steps, fill_nan=nan)
    hopper.launch(
        "load_box_3d",
        1,
        64,
        (encoded, out, out.numel(), *at[::-1]),
        smem=out.numel() + 1024,
        memory=(x,),
    )
    outside = []
    for index, position in elements:
        first = position * size
        chunk = swizzled(first // 16 * 16, swizzle) + first % 16
        got = out.numpy()[chunk : chunk + size]
        if index is None:
            outside.append(got.tobytes())
        else:
            assert (got == raw[index]).all(), (index, position)
    if nan:
        assert (
            outside
            and np.isnan(
                torch.frombuffer(bytearray(b"".join(outside)), dtype=dtype).float().numpy()
            ).all()
        )
    else:
        assert not any(map(any, outside))


@pytest.mark.parametrize("kernel", ["store_box_3d", "add_box_3d"])
@pytest.mark.parametrize("dtype, shape, box, at, swizzle, steps, nan", BOXES)
def test_a_box_is_stored_clipped(hopper, kernel, dtype, shape, box, at, swizzle, steps, nan):
    reducible = (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
    )
    if kernel == "add_box_3d" and dtype not in reducible:
        pytest.skip("no reduction of bytes")
    x = tensor_of(dtype, shape)
    want, size = x.clone(), x.element_size()
    elements = list(box_elements(shape, box, at, steps or (1, 1, 1)))
    values = tensor_of(dtype, (len(elements),))
    image = torch.zeros(len(elements) * size, dtype=torch.uint8)
    for index, position in elements:
        first = position * size
        chunk = swizzled(first // 16 * 16, swizzle) + first % 16
        image[chunk : chunk + size] = values[position : position + 1].view(torch.uint8)
        if index is not None:
            want[index] = values[position] + (want[index] if kernel == "add_box_3d" else 0)
    encoded = vgpu.tensor_map(x, box, swizzle=swizzle, element_strides=steps, fill_nan=nan)
    hopper.launch(
        kernel,
        1,
        64,
        (encoded, image, image.numel(), *at[::-1]),
        smem=image.numel() + 1024,
        memory=(x,),
    )
    assert torch.equal(x, want)


@pytest.mark.parametrize("tensor, box, options, error, match", [
    (torch.zeros(8, 8), (4, 4, 4), {}, ValueError, "expected 2 numbers"),
    (torch.zeros(8, 6), (4, 4), {}, ValueError, "stride of 24 bytes"),
    (torch.zeros(8, 8), (4, 2), {}, ValueError, "lines of the box of 8 bytes"),
    (torch.zeros(8, 64), (4, 64), {"swizzle": 128}, ValueError, "lines of the box of 256 bytes"),
    (torch.zeros(8, 64), (4, 64), {"swizzle": 16}, ValueError, "swizzle"),
    (torch.zeros(8, 512), (4, 260), {}, ValueError, "box size 260"),
    (torch.zeros(8, 64), (0, 64), {}, ValueError, "positive"),
    (torch.zeros(8, 8, dtype=torch.int32), (4, 4), {"fill_nan": True}, ValueError, "NaN"),
    (torch.zeros(8, 8).T, (4, 4), {}, ValueError, "contiguous"),
    (torch.zeros(8, 8, dtype=torch.complex64), (4, 4), {}, TypeError, "complex64"),
    (torch.zeros(100)[1:33], (4,), {}, ValueError, "multiple of 16"),
])  # fmt: skip
def test_a_wrong_tensor_map_is_refused(tensor, box, options, error, match):
    if tensor.dim() == 2 and tensor.shape == (8, 8) and tensor.stride() == (1, 8):
        match = "last dimension must be contiguous"
    with pytest.raises(error, match=match):
        vgpu.tensor_map(tensor, box, **options)


def test_faults_of_tma_name_the_copy(hopper):
    x = torch.zeros(2, 9, 32)
    out = torch.zeros(512, dtype=torch.uint8)
    good = vgpu.tensor_map(x, (2, 8, 8))
    with pytest.raises(vgpu.MemoryFault, match="global memory") as error:
        hopper.launch(
            "load_box_3d", 1, 32, (good, out, 512, 0, 0, 0), smem=1024
        )  # x is no memory of the launch
    assert "cp.async.bulk.tensor" in error.value.instruction and error.value.lane == 0
    with pytest.raises(vgpu.MemoryFault, match="rank"):
        flat = vgpu.tensor_map(x.view(18, 32), (8, 8))
        hopper.launch("load_box_3d", 1, 32, (flat, out, 512, 0, 0, 0), smem=1024, memory=(x,))
    with pytest.raises(vgpu.MemoryFault, match="tensor map"):
        hopper.launch("load_box_3d", 1, 32, (bytes(128), out, 512, 0, 0, 0), smem=1024, memory=(x,))
    with pytest.raises(vgpu.DeadlockError, match="bytes outstanding"):
        hopper.launch(
            "load_box_3d", 1, 32, (good, out, 1024, 0, 0, 0), smem=1024, memory=(x,)
        )  # expects too much
    with pytest.raises(vgpu.MemoryFault, match="shared memory"):
        hopper.launch("load_box_3d", 1, 32, (good, out, 512, 0, 0, 0), smem=256, memory=(x,))
