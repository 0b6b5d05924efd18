"""What Triton's compiler makes of matmul and attention, run on the virtual GPU: sm_80 (cp.async, ldmatrix, mma.sync)
and sm_90 (TMA, mbarrier, wgmma, stmatrix), against float64."""

import math

import pytest
import torch
from numerics import vgpu_close

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")
pytest.importorskip("triton")

from vgpu import triton_kernels as kernels  # noqa: E402

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["sm_80", "sm_90a"])
def device(request):
    return vgpu.Device(request.param, threads=2)


def operands(dtype, m, n, k):
    torch.manual_seed(0)
    if dtype in (torch.int8, torch.uint8):
        low, high = (-128, 128) if dtype is torch.int8 else (0, 256)
        return (torch.randint(low, high, s, dtype=torch.int32).to(dtype) for s in ((m, k), (k, n)))
    return torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)


def named(a, b, c, m, n, k):
    return {"a": a, "b": b, "c": c, "M": m, "N": n, "K": k}


def exactly(x):
    """As float64; a tensor core drops the low 13 bits of a float."""
    if x.dtype == torch.float32:
        x = (x.view(torch.int32) & -8192).view(torch.float32)
    return x.double()


MATMULS = [
    # type, accumulator, result, transposed a, b
    (torch.bfloat16, "float32", torch.float32, False, False),
    (torch.float16, "float32", torch.float32, False, False),
    (torch.float16, "float16", torch.float16, False, False),
    (torch.float32, "float32", torch.float32, False, False),
    (torch.int8, "int32", torch.int32, False, False),
    (torch.float8_e5m2, "float32", torch.float32, False, False),
    (torch.float8_e4m3fn, "float32", torch.float32, False, False),
    (torch.float64, "float64", torch.float64, False, False),
    (torch.bfloat16, "float32", torch.float32, True, False),
    (torch.bfloat16, "float32", torch.float32, False, True),
    (torch.float16, "float32", torch.float32, True, True),
    (torch.float32, "float32", torch.float32, True, True),
]  # fmt: skip


def test_strict_check_sees_halves_unpacked_before_their_wait():
    """Triton's code for f16 accumulators, which the other checks let pass as the assembler copes with it."""
    a, b = operands(torch.float16, 64, 64, 64)
    c = torch.zeros(64, 64, dtype=torch.float16)
    constants = {
        "A_TRANSPOSED": False,
        "B_TRANSPOSED": False,
        "ACC": "float16",
        "BM": 64,
        "BN": 64,
        "BK": 64,
    }
    arguments = ((1, 1), named(a, b, c, 64, 64, 64), constants)
    kernels.launch(vgpu.Device("sm_90a"), "matmul", *arguments)
    with pytest.raises(vgpu.AsyncError, match=r"wgmma\.wait_group must come first"):
        kernels.launch(vgpu.Device("sm_90a", check="strict"), "matmul", *arguments)


@pytest.mark.parametrize("dtype, acc, result, a_transposed, b_transposed", MATMULS)
def test_matmul(device, dtype, acc, result, a_transposed, b_transposed):
    if device.arch == "sm_80" and dtype is torch.float8_e4m3fn:
        pytest.skip("sm_80 has no e4m3")
    m, n, k = 208, 128, 160
    a, b = operands(dtype, m, n, k)
    c = torch.zeros(m, n, dtype=result)
    stored = [x.T.contiguous() if t else x for x, t in ((a, a_transposed), (b, b_transposed))]
    constants = {
        "A_TRANSPOSED": a_transposed, "B_TRANSPOSED": b_transposed, "ACC": acc, "BM": 64, "BN": 64,
        "BK": 32 if dtype is torch.float64 else 64,
    }  # fmt: skip
    compiled, _ = kernels.launch(device, "matmul", (4, 2), named(*stored, c, m, n, k), constants)
    x, y = exactly(a), exactly(b)
    kind = {
        torch.int8: "integers",
        torch.float32: "tf32 accumulated in fp32",
        torch.float64: "fp64 accumulated in fp64",
    }.get(dtype, "fp16 accumulated in fp16" if acc == "float16" else "bf16 accumulated in fp32")
    assert vgpu_close(kind, c, x @ y, x.abs() @ y.abs())
    instruction = (
        "mma.sync" if device.arch == "sm_80" or dtype is torch.float64 else "wgmma.mma_async"
    )
    assert instruction in compiled.ptx


@pytest.mark.parametrize("reverse", [False, True], ids=["", "warps reversed"])
@pytest.mark.parametrize("warps, tile", [(4, 64), (8, 128)])
def test_matmul_with_more_warps(device, warps, tile, reverse):
    a, b = operands(torch.bfloat16, 144, 144, 96)
    c = torch.zeros(144, 144)
    constants = {
        "A_TRANSPOSED": False,
        "B_TRANSPOSED": False,
        "ACC": "float32",
        "BM": tile,
        "BN": tile,
        "BK": 32,
    }
    grid = (math.ceil(144 / tile), math.ceil(144 / tile))
    kernels.launch(
        device,
        "matmul",
        grid,
        named(a, b, c, 144, 144, 96),
        constants,
        warps=warps,
        reverse_warps=reverse,
    )
    assert vgpu_close("fp32 matmul", c, a.double() @ b.double())


@pytest.mark.parametrize("reverse", [False, True], ids=["", "warps reversed"])
@pytest.mark.parametrize("tile", [64, 128])
def test_matmul_through_device_made_descriptors(device, tile, reverse):
    m, n, k = 208, 144, 160  # partial tiles in every direction
    a, b = operands(torch.bfloat16, m, n, k)
    c = torch.zeros(m, n, dtype=torch.bfloat16)
    grid = (math.ceil(m / tile), math.ceil(n / tile))
    constants = {"BM": tile, "BN": tile, "BK": 64}
    compiled, _ = kernels.launch(
        device,
        "matmul_descriptor",
        grid,
        named(a, b, c, m, n, k),
        constants,
        reverse_warps=reverse,
    )
    want = a.double() @ b.double()
    assert vgpu_close("bf16 matmul", c, want)
    assert ("cp.async.bulk.tensor" in compiled.ptx) == (device.arch == "sm_90a")


def test_matmul_by_clusters_of_two_blocks():
    device = vgpu.Device("sm_90a", threads=2)
    m, n, k = 208, 144, 160
    a, b = operands(torch.bfloat16, m, n, k)
    c = torch.zeros(m, n, dtype=torch.bfloat16)
    constants = {"BM": 128, "BN": 128, "BK": 64}
    args = named(a, b, c, m, n, k)
    kernels.launch(device, "matmul_descriptor", (2, 2), args, constants, blocks=2)
    want = a.double() @ b.double()
    assert vgpu_close("bf16 matmul", c, want)


def test_matmul_through_host_made_descriptors():
    device = vgpu.Device("sm_90a", threads=2)
    m, n, k = 208, 144, 160
    a, b = operands(torch.bfloat16, m, n, k)
    c = torch.zeros(m, n, dtype=torch.bfloat16)
    tile = "tensordesc<bf16[64, 64]>"
    types = (("a_tiles", tile), ("b_tiles", tile), ("c_tiles", tile), ("K", "i32"))
    constants = (("BM", 64), ("BN", 64), ("BK", 64))
    compiled = kernels.compiled("matmul_host_descriptor", 90, types, constants, 4, 3)
    # A descriptor becomes the tensor map, its shape and its strides.
    arguments = []
    for tensor in (a, b, c):
        arguments += [
            vgpu.tensor_map(tensor, (64, 64), swizzle=128),
            *tensor.shape,
            *tensor.stride(),
        ]
    module = device.load_ptx(compiled.ptx)
    module.launch(compiled.name, (4, 3), 128, (*arguments, k, 0, 0), smem=compiled.shared,
                  memory=(a, b, c))  # fmt: skip
    want = a.double() @ b.double()
    assert vgpu_close("bf16 matmul", c, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_attention(device, causal, dtype):
    s, d = 208, 64
    torch.manual_seed(0)
    q, k, v = (torch.randn(s, d).to(dtype) for _ in range(3))
    out, lse = torch.zeros(s, d, dtype=dtype), torch.zeros(s)
    constants = {"CAUSAL": causal, "D": d, "BM": 64, "BN": 64}
    args = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "S": s, "scale": d**-0.5}
    kernels.launch(device, "attention", (4,), args, constants)
    score = q.double() @ k.double().T * d**-0.5
    if causal:
        score = score.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), -math.inf)
    want, kind = score.softmax(-1) @ v.double(), f"{kernels.NAMES[dtype]} attention of values"
    assert vgpu_close(kind, out, want, v.double().abs().max())
    assert vgpu_close("lse", lse.double() * math.log(2), score.logsumexp(-1))
