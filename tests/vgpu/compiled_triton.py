"""Usual Triton kernels, compiled and run on the virtual GPU, against torch; and the driver that does it.

test_triton.py runs this file in a process of its own, since it needs Triton's compiler (TRITON_INTERPRET=0).
"""

import math
import os

import pytest
import torch
import triton
import triton.language as tl
from numerics import vgpu_close
from trainwright import vgpu
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_kernels import attention, matmul, matmul_descriptor, matmul_host_descriptor

ARCH = os.environ.get("VGPU_ARCH", "sm_90a")
OTHER = {"sm_80": "sm_90a", "sm_90a": "sm_80"}[ARCH]


@pytest.fixture
def device():
    with vgpu.Device(ARCH) as d:
        yield d


# ---- element by element, and rows


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=mask) + tl.load(y_ptr + i, mask=mask), mask=mask)


@pytest.mark.parametrize("n", [1, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_vector_add(device, n, dtype):
    x, y = (torch.randn(n) * 100).to(dtype), (torch.randn(n) * 100).to(dtype)
    out = torch.empty_like(x)
    add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, BLOCK=256)
    assert torch.equal(out, x + y)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, stride, rows, C, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * stride + c, mask=c < C, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * stride + c, e / tl.sum(e, axis=0), mask=c < C)


def test_softmax(device):
    x = torch.randn(7, 1000)
    out = torch.empty_like(x)
    softmax_kernel[(3,)](x, out, x.stride(0), 7, 1000, BLOCK=1024, num_warps=8)
    assert vgpu_close("softmax", out, x.double().softmax(1))


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * C + c, mask=c < C, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / C
    d = tl.where(c < C, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(d * d, axis=0) / C + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    w, b = tl.load(w_ptr + c, mask=c < C), tl.load(b_ptr + c, mask=c < C)
    tl.store(y_ptr + row * C + c, (d * rstd * w + b).to(y_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def layer_norm_weight_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, lock_ptr, C, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw of each row, added to that of its group under a lock: programs wait for each other."""
    row = tl.program_id(0)
    group = row % GROUPS
    c = tl.arange(0, BLOCK)
    mask = c < C
    x = tl.load(x_ptr + row * C + c, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * C + c, mask=mask, other=0.0).to(tl.float32)
    part = dy * (x - tl.load(mean_ptr + row)) * tl.load(rstd_ptr + row)
    at = dw_ptr + group * C + c
    while tl.atomic_cas(lock_ptr + group, 0, 1) == 1:
        pass
    tl.store(at, part + tl.load(at, mask=mask), mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + group, 0)


def test_layer_norm(device):
    N, C = 7, 1008
    x, w, b, dy = torch.randn(N, C).bfloat16(), torch.randn(C), torch.randn(C), torch.randn(N, C)
    y, mean, rstd = torch.empty_like(x), torch.empty(N), torch.empty(N)
    layer_norm_kernel[(N,)](x, w, b, y, mean, rstd, C, 1e-5, BLOCK=1024)
    wide = x.double()
    want = torch.nn.functional.layer_norm(wide, (C,), w.double(), b.double(), 1e-5)
    assert vgpu_close("bf16 layer norm", y, want)
    dw, lock = torch.zeros(2, C), torch.zeros(2, dtype=torch.int32)
    layer_norm_weight_kernel[(N,)](dy, x, mean, rstd, dw, lock, C, GROUPS=2, BLOCK=1024)
    normed = (wide - wide.mean(1, True)) / (wide.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    assert vgpu_close("layer norm weights", dw.sum(0), (dy.double() * normed).sum(0))


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, i) > p
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, tl.where(keep, x / (1 - p), 0.0), mask=i < n)


def philox(seed, offsets):
    """First word of Philox 4x32-10 for each counter."""
    words = [
        offsets.to(torch.int64),
        *(torch.zeros(len(offsets), dtype=torch.int64) for _ in range(3)),
    ]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        # Python ints: the products have 64 bits, unsigned.
        ab = (
            [int(w) * 0xD2511F53 for w in words[0].tolist()],
            [int(w) * 0xCD9E8D57 for w in words[2].tolist()],
        )
        high = [torch.tensor([v >> 32 for v in m]) for m in ab]
        low = [torch.tensor([v & 0xFFFFFFFF for v in m]) for m in ab]
        words = [high[1] ^ words[1] ^ key[0], low[1], high[0] ^ words[3] ^ key[1], low[0]]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words[0]


def test_dropout_draws_philox(device):
    n, p, seed = 777, 0.3, 123
    x = torch.rand(n) + 1
    out = torch.empty(n)
    dropout_kernel[(4,)](x, out, n, p, seed, BLOCK=256)
    word = philox(seed, torch.arange(n))
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word)
    uniform = torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10
    assert torch.equal(out != 0, uniform > p)
    assert vgpu_close("dropout", out, torch.where(uniform > p, x / (1 - p), 0))


# ---- scans, sorts, atomics, functions


@triton.jit
def collective_kernel(x_ptr, sums_ptr, sorted_ptr, counts_ptr, best_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(x_ptr + i)
    tl.store(sums_ptr + i, tl.cumsum(x, 0))
    tl.store(sorted_ptr + i, tl.sort(x))
    tl.store(counts_ptr + tl.arange(0, 16), tl.histogram(x, 16))
    tl.store(best_ptr, tl.argmax(x, 0))


def test_scan_sort_histogram_argmax(device):
    x = torch.randint(0, 16, (64,), dtype=torch.int32)
    x[57] = 15
    x[:57].clamp_(max=14)
    sums, ordered, counts = (
        torch.empty_like(x),
        torch.empty_like(x),
        torch.empty(16, dtype=torch.int32),
    )
    best = torch.empty(1, dtype=torch.int32)
    collective_kernel[(1,)](x, sums, ordered, counts, best, B=64)
    assert torch.equal(sums, x.cumsum(0).int()) and torch.equal(ordered, x.sort()[0])
    assert torch.equal(counts, x.bincount(minlength=16).int()) and best.item() == 57


@triton.jit
def functions_kernel(x_ptr, out_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.sin(x))
    tl.store(out_ptr + B + i, tl.erf(x))
    tl.store(out_ptr + 2 * B + i, tl.log(tl.abs(x) + 1))
    tl.store(out_ptr + 3 * B + i, tl.sqrt_rn(tl.abs(x)))


def test_functions(device):
    x = torch.linspace(-30, 30, 128)
    out = torch.empty(4, 128)
    functions_kernel[(1,)](x, out, B=128)
    wide = x.double()
    want = torch.stack([wide.sin(), wide.erf(), wide.abs().log1p(), wide.abs().sqrt()])
    assert vgpu_close("sin, erf, log, sqrt", out, want)


@triton.jit
def count_kernel(x_ptr, total_ptr, largest_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < n, other=0)
    tl.atomic_add(total_ptr + i % 3, x, mask=i < n)
    tl.atomic_max(largest_ptr, tl.max(x, 0))


def test_atomics_between_programs(device):
    x = torch.randint(0, 1000, (1000,), dtype=torch.int32)
    total, largest = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    count_kernel[(8,)](x, total, largest, 1000, B=128)
    assert torch.equal(total, torch.stack([x[k::3].sum() for k in range(3)]).int())
    assert largest.item() == x.max().item()


# ---- tensor cores


def counted(k, launch):
    """The result of launch() on a device that counts, and the counters of the one kernel."""
    device = vgpu.Device(ARCH, count=True)
    with device:
        launch()
    (counters,) = device.counters
    assert counters.name == k
    return counters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matmul_and_its_flops(dtype):
    M, N, K = 128, 64, 96
    a, b, c = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype), torch.empty(M, N)
    k = counted(
        "matmul", lambda: matmul[(2, 1)](a, b, c, M, N, K, False, False, tl.float32, 64, 64, 32)
    )
    if dtype == torch.float32:  # tf32: the low 13 bits do not count
        a, b = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b))
    assert vgpu_close("short matmul", c, a.double() @ b.double())
    tensor = {kind: n for kind, n in k.flops.items() if kind.startswith("tensor")}
    assert tensor == {"tensor tf32" if dtype == torch.float32 else "tensor f16": 2 * M * N * K}
    assert k.store.bytes == 4 * M * N and k.footprint_written == 4 * M * N


@pytest.mark.parametrize("host", [False, True])
def test_matmul_through_descriptors(host):
    M, N, K = 100, 72, 80  # tiles at the edges are partial
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    c = torch.full((M, N), torch.nan, dtype=torch.bfloat16)
    grid, tiles = (2, 2), (64, 64, 32)
    if host:
        maps = [
            TensorDescriptor.from_tensor(t, box)
            for t, box in ((a, [64, 32]), (b, [32, 64]), (c, [64, 64]))
        ]
        k = counted(
            "matmul_host_descriptor", lambda: matmul_host_descriptor[grid](*maps, K, *tiles)
        )
    else:
        k = counted("matmul_descriptor", lambda: matmul_descriptor[grid](a, b, c, M, N, K, *tiles))
    want = a.double() @ b.double()
    assert vgpu_close("bf16 matmul", c, want)
    assert k.store.bytes >= 2 * M * N and k.tensor_flops == 2 * 128 * 128 * 96


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention(device, causal):
    S, D = 144, 64
    q, k, v = (torch.randn(S, D).bfloat16() for _ in range(3))
    out, lse = torch.empty(S, D, dtype=torch.bfloat16), torch.empty(S)
    attention[(triton.cdiv(S, 64),)](q, k, v, out, lse, S, D**-0.5, causal, D, 64, 32)
    score = q.double() @ k.double().T * D**-0.5
    if causal:
        score = score.masked_fill(torch.ones(S, S).tril().logical_not(), -torch.inf)
    assert vgpu_close("bf16 attention", out, score.softmax(1) @ v.double())
    assert vgpu_close("lse in base 2", lse, score.logsumexp(1) / math.log(2))


# ---- arguments


@triton.jit
def arguments_kernel(out_ptr, pair, b, h, d, flag, small, one, long, nothing, B: tl.constexpr):
    i = tl.arange(0, B)
    base, step = pair
    value = tl.load(base + i * step).to(tl.float64) + b + h + d + small + one + long
    if nothing is not None:
        value = value * 0
    if flag:
        value = -value
    tl.store(out_ptr + i, value)


def test_every_kind_of_argument(device):
    x, out = torch.arange(64, dtype=torch.float32), torch.empty(16, dtype=torch.float64)
    arguments_kernel[(1,)](out, (x, 3), 1.5, 0.25, 2.0, True, -7, 1, 1 << 40, None, B=16)
    assert torch.equal(out, -(x[:48:3].double() + 1.5 + 0.25 + 2 - 7 + 1 + (1 << 40)))


def test_grids_of_up_to_three_dimensions(device):
    for grid in [(4,), (2, 2), (1, 2, 2)]:
        out = torch.zeros(4, dtype=torch.int32)
        where_kernel[grid](out)
        where_kernel[(0,)](out)  # no program
        assert out.tolist() == [1, 1, 1, 1]


@triton.jit
def where_kernel(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.atomic_add(out_ptr + at, 1)


# ---- autotuning, hooks, errors


def test_autotuned_with_one_configuration(device):
    tuned = triton.autotune([triton.Config({"BLOCK": 128}, num_warps=2)], key=["n"])(add_kernel)
    x, out = torch.randn(500), torch.empty(500)
    tuned[lambda meta: (triton.cdiv(500, meta["BLOCK"]),)](x, x, out, 500)
    assert torch.equal(out, x + x)


def test_autotuning_among_several_is_refused(device):
    configs = [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})]
    tuned = triton.autotune(configs, key=["n"])(add_kernel)
    x = torch.randn(500)
    with pytest.raises(vgpu.VgpuError, match="has no clock, so it cannot choose between"):
        tuned[(4,)](x, x, torch.empty(500), 500)


def test_launch_hooks(device):
    seen = []
    enter, leave = (lambda m: seen.append(("in", m.get()["name"]))), (lambda m: seen.append("out"))
    triton.knobs.runtime.launch_enter_hook.add(enter)
    triton.knobs.runtime.launch_exit_hook.add(leave)
    try:
        x = torch.randn(64)
        add_kernel[(1,)](x, x, torch.empty(64), 64, BLOCK=64)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(enter)
        triton.knobs.runtime.launch_exit_hook.remove(leave)
    assert seen == [("in", "add_kernel"), "out"]


def test_what_is_not_a_cpu_tensor_is_refused(device):
    x = torch.randn(64)
    with pytest.raises(
        vgpu.LaunchError, match="add_kernel: argument y_ptr: expected a CPU tensor, got one on meta"
    ):
        add_kernel[(1,)](x, torch.empty(64, device="meta"), x, 64, BLOCK=64)


def test_faults_name_the_source_line(device):
    x = torch.randn(64)
    with pytest.raises(
        vgpu.MemoryFault, match="past the end of an allocation of 256 bytes"
    ) as error:
        add_kernel[(1,)](x, x, x, 65, BLOCK=128)
    first = add_kernel.starting_line_number
    assert error.value.source_file.endswith("compiled_triton.py")
    assert first < error.value.source_line <= first + 4


def test_memory_behind_a_table_must_be_named(device):
    x = torch.arange(8, dtype=torch.float32)
    table, out = torch.tensor([x.data_ptr()]), torch.empty(8)
    with pytest.raises(vgpu.MemoryFault):
        table_kernel[(1,)](table, out)
    with device.memory(x):
        table_kernel[(1,)](table, out)
    assert torch.equal(out, x)
    with pytest.raises(vgpu.MemoryFault):
        table_kernel[(1,)](table, out)


@triton.jit
def table_kernel(table_ptr, out_ptr):
    i = tl.arange(0, 8)
    tl.store(out_ptr + i, tl.load(tl.load(table_ptr).to(tl.pointer_type(tl.float32)) + i))


def test_the_context_ends_as_it_began():
    active = triton.runtime.driver._active
    backends = dict(triton.backends.backends)
    x, out = torch.randn(64), torch.empty(64)
    with vgpu.Device(ARCH):
        kernel = add_kernel[(1,)](x, x, out, 64, BLOCK=64)
        with (
            pytest.raises(vgpu.VgpuError, match=f"does not nest: one of {ARCH} is active"),
            vgpu.Device(ARCH),
        ):
            pass
        add_kernel[(1,)](x, x, out, 64, BLOCK=64)  # the outer one still is
    assert triton.runtime.driver._active is active and triton.backends.backends == backends
    with pytest.raises(vgpu.LaunchError, match="launched outside of"):
        kernel.run(1, 1, 1, 0, kernel.function, None, None, None, None, x, x, out, 64, 64)
    with pytest.raises(ZeroDivisionError), vgpu.Device(ARCH):
        raise ZeroDivisionError
    assert triton.runtime.driver._active is active


def test_two_architectures_in_one_process():
    x, out = torch.randn(64), torch.empty(64)
    targets = []
    for arch in (ARCH, OTHER, ARCH):
        out.zero_()
        with vgpu.Device(arch):
            targets.append(add_kernel[(1,)](x, x, out, 64, BLOCK=64).metadata.target.arch)
        assert torch.equal(out, x + x)
    assert targets == [int(a[3:5]) for a in (ARCH, OTHER, ARCH)]


def test_a_kernel_of_a_later_architecture_is_refused():
    x, out = torch.randn(64), torch.empty(64)
    with vgpu.Device("sm_90a"):
        kernel = add_kernel[(1,)](x, x, out, 64, BLOCK=64)
    with (
        vgpu.Device("sm_80"),
        pytest.raises(vgpu.UnsupportedError, match=r"add_kernel: .+sm_90a does not run on sm_80"),
    ):
        kernel[(1, 1, 1)](x, x, out, 64, 64)
    with pytest.raises(vgpu.VgpuError, match="use sm_90a"), vgpu.Device("sm_90"):
        pass


def test_needs_no_assembler(device, monkeypatch, tmp_path):
    """Compiled with Triton's ptxas out of reach."""

    def no_tool(path):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(triton.knobs.NvidiaTool, "from_path", no_tool)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, out = torch.randn(96), torch.empty(96)
    double_kernel[(1,)](x, out)
    assert torch.equal(out[:32], 2 * x[:32])


@triton.jit
def double_kernel(x_ptr, out_ptr):
    i = tl.arange(0, 32)
    tl.store(out_ptr + i, 2 * tl.load(x_ptr + i))
