"""Mutation: a kernel that lost one of its synchronisation instructions is noticed."""

import functools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from numerics import vgpu_close

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

PTX = Path(__file__).parent / "ptx"

SYNCHRONISES = re.compile(
    r"(?:@!?%\w+\s+)?\b(?:bar\.sync|bar\.arrive|bar\.warp\.sync|barrier\.\w|cp\.async\.(?:bulk\.)?(?:wait|commit)"
    r"|cp\.async\.mbarrier|fence|membar|wgmma\.(?:fence|commit|wait)|mbarrier\.\w)[^;]*;"
)


def mutants(text, kernel):
    """(the instruction, the text without it) for each of a kernel; a wait for an mbarrier succeeds instead."""
    start = text.index(f".entry {kernel}(")
    end = text.find(".entry", start + 1)
    for m in SYNCHRONISES.finditer(text, start, end if end > 0 else len(text)):
        instead = ""
        if waits := re.search(r"(?:try|test)_wait\S*\s+(%?\w+)\s*,", m[0]):
            instead = f"setp.eq.u32 {waits[1]}, 0, 0;"
        yield m[0], text[: m.start()] + instead + text[m.end() :]


def matmul_operands(m, n, k, transposed=False):
    torch.manual_seed(0)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(*((n, k) if transposed else (k, n))).bfloat16()
    return a, b, a.double() @ (b.double().T if transposed else b.double())


def run_block_reduce(module):
    x, out = torch.arange(2000.0), torch.zeros(1)
    module.launch("block_reduce", 2, 256, (x, out, 2000))
    return out.item() == 2000 * 1999 / 2


def run_gemm_cp_async(module):
    a, b, want = matmul_operands(64, 64, 200)
    c = torch.full((64, 64), float("nan"))
    module.launch("gemm_cp_async", (1, 1), 128, (a, b, c, 64, 64, 200))
    return vgpu_close("bf16 matmul", c, want)


def run_gemm_tma(module, kernel="gemm_tma_wgmma", rows_of_b=64):
    a, b, want = matmul_operands(256, 64, 576, transposed=True)
    c = torch.full((256, 64), float("nan")).bfloat16()
    boxes = ((a, 128), (b, rows_of_b), (c, 128))
    maps = [vgpu.tensor_map(x, (rows, 64), swizzle=128) for x, rows in boxes]
    module.launch(kernel, (1, 2), 384, (*maps, 576), smem=3 * 192 * 128, memory=(a, b, c))
    return vgpu_close("bf16 matmul", c, want)


def run_gemm_tma_elected(module):
    return run_gemm_tma(module, "gemm_tma_wgmma_elected")


def run_gemm_tma_cluster(module):
    return run_gemm_tma(module, "gemm_tma_wgmma_cluster", 32)


def run_bulk_axpy(module):
    torch.manual_seed(0)
    x, y = torch.randn(1024), torch.randn(1024)
    want = y + 2 * x
    module.launch("bulk_axpy", 1, 128, (x, y))
    return torch.equal(y, want)


def run_copies_arrive(module):
    torch.manual_seed(0)
    x, y = torch.randint(-9, 9, (7, 256)).float(), torch.zeros(256)
    module.launch("copies_arrive", 1, 128, (x, y, 7))
    return torch.equal(y, x.sum(0))


def run_exchange(module):
    x, y = torch.arange(1, 5, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
    module.launch("exchange", 4, 32, (x, y))
    rows = [[10, 20, 30, 40, (b + 1) % 4 + 1, b, (b + 1) % 4, 0] for b in range(4)]
    return y.tolist() == rows


INIT_FENCE = (
    "a barrier follows; Triton emits none at all, so its absence is no rule that can be held"
)
REDUNDANT_WGMMA_FENCE = "nothing has touched the registers since the wait of the turn before"
LAST_RELEASE = "frees a stage that nobody fills again, behind the unrolled loop"
EPILOGUE_BARRIER = "the rows that a warp overwrites in the epilogue were read by that warp alone"
FIRST_TURN = (
    "the first turn of a producer waits for nothing, and the copy of this loop has no second"
)
# For each kernel: where its text is, how it is run, and the instructions whose loss is not noticed: how many, and why
# nothing depends on them. A loss that breaks a rule and is missed has no place here.
NVCC = {
    "block_reduce": ("vector_add", run_block_reduce, {}),
    "gemm_cp_async": ("tensor_sm80", run_gemm_cp_async, {}),
    "bulk_axpy": ("tensor_sm90a", run_bulk_axpy, {}),
    "copies_arrive": (
        "tensor_sm90a",
        run_copies_arrive,
        {"mbarrier.try_wait.parity.shared::cta.b64": (2, FIRST_TURN)},
    ),
    "exchange": (
        "tensor_sm90a",
        run_exchange,
        {"fence.mbarrier_init.release.cluster": (1, INIT_FENCE)},
    ),
    "gemm_tma_wgmma": (
        "tensor_sm90a",
        run_gemm_tma,
        {
            "fence.mbarrier_init.release.cluster": (1, INIT_FENCE),
            "wgmma.fence.sync.aligned": (4, REDUNDANT_WGMMA_FENCE),
            "mbarrier.arrive.shared::cta.b64": (1, LAST_RELEASE),
            "bar.sync": (1, EPILOGUE_BARRIER),
        },
    ),
    "gemm_tma_wgmma_elected": (
        "tensor_sm90a",
        run_gemm_tma_elected,
        {
            "fence.mbarrier_init.release.cluster": (1, INIT_FENCE),
            "wgmma.fence.sync.aligned": (4, REDUNDANT_WGMMA_FENCE),
            "mbarrier.arrive.shared::cta.b64": (1, LAST_RELEASE),
            "bar.sync": (1, EPILOGUE_BARRIER),
        },
    ),
    "gemm_tma_wgmma_cluster": (
        "tensor_sm90a",
        run_gemm_tma_cluster,
        {
            "fence.mbarrier_init.release.cluster": (1, INIT_FENCE),
            "wgmma.fence.sync.aligned": (4, REDUNDANT_WGMMA_FENCE),
            "mbarrier.arrive.shared::cluster.b64": (2, LAST_RELEASE),
            "bar.sync": (1, EPILOGUE_BARRIER),
        },
    ),
}


def count_unnoticed(text, kernel, arch, run_it):
    """How many mutants there are, and by opcode those that neither raise nor change the result."""
    device = vgpu.Device(arch, threads=1)
    assert run_it(device.load_ptx(text))  # as it is: the right result, and no false alarm
    total, unnoticed = 0, Counter()
    for instruction, mutant in mutants(text, kernel):
        total += 1
        try:
            same = run_it(device.load_ptx(mutant))
        except vgpu.Fault:
            continue
        if same:
            unnoticed[re.sub(r"^@!?%\w+\s+", "", instruction).split()[0].rstrip(";")] += 1
    return total, unnoticed


def check_table(total, unnoticed, table):
    """How many were noticed; none is missed beyond those of the table."""
    allowed = {opcode: count for opcode, (count, _) in table.items()}
    assert all(n <= allowed.get(opcode, 0) for opcode, n in unnoticed.items()), unnoticed
    return total - sum(unnoticed.values())


def test_mutants_of_nvcc_kernels():
    noticed = 0
    for kernel, (file, run_it, table) in NVCC.items():
        arch = "sm_90a" if file.endswith("90a") else "sm_80"
        counts = count_unnoticed((PTX / f"{file}.ptx").read_text(), kernel, arch, run_it)
        noticed += check_table(*counts, table)
    assert noticed >= 125


def run_attention(k, module, warps):
    """All of a sequence, and an empty one."""
    torch.manual_seed(0)
    rows = 16 * warps
    q, key, v = (torch.randn(192, 64).bfloat16() for _ in range(3))
    want = ((q.double() @ key.double().T * 0.125).softmax(-1) @ v.double())[:rows]
    out, lse = torch.zeros(192, 64).bfloat16(), torch.zeros(192)
    for S in (192, 0):
        args = (q, key, v, out, lse, S, 0.125, 0, 0)
        module.launch(k.name, 1, 32 * warps, args, smem=k.shared)
    return vgpu_close("bf16 attention", out[:rows], want)


def run_descriptor_matmul(k, module, warps):
    a, b, want = matmul_operands(64, 64, 256)
    c = torch.zeros(64, 64).bfloat16()
    scratch = torch.zeros(k.scratch + 128, dtype=torch.uint8)
    scratch = scratch[-scratch.data_ptr() % 128 :] if k.scratch else 0
    args = (a, b, c, 64, 64, 256, scratch, 0)
    module.launch(k.name, 1, 32 * warps, args, smem=k.shared)
    return vgpu_close("bf16 matmul", c, want)


def attention(rows):
    pointers = [(n, "*bf16") for n in ("q", "k", "v", "out")]
    types = (*pointers, ("lse", "*fp32"), ("S", "i32"), ("scale", "fp32"))
    return types, (("CAUSAL", False), ("D", 64), ("BM", rows), ("BN", 32))


MATMUL = (
    tuple((n, "*bf16") for n in "abc") + tuple((n, "i32") for n in "MNK"),
    (("BM", 64), ("BN", 64), ("BK", 64)),
)
ONE_WARPGROUP = (
    "orders the reads of a wgmma before the stores of the next tile; the wait of any warp does that already where the "
    "block is one warpgroup, since a wgmma is one operation of it. With two warpgroups, below, both are noticed"
)
DUPLICATE = (
    "several barriers in a row, or around what warp 0 alone does, order the same accesses; without all of them it is "
    "noticed, below"
)
NO_GROUP = "an empty group: no bulk copy is under way"
# (kernel, architecture, warps)
TRITON = {
    ("attention", "sm_80", 4): (attention(64), run_attention, {}),
    ("attention", "sm_90a", 4): (attention(64), run_attention, {"bar.sync": (2, ONE_WARPGROUP)}),
    ("attention", "sm_90a", 8): (attention(128), run_attention, {}),
    ("matmul_descriptor", "sm_80", 4): (MATMUL, run_descriptor_matmul, {}),
    ("matmul_descriptor", "sm_90a", 4): (
        MATMUL,
        run_descriptor_matmul,
        {
            "bar.sync": (17, DUPLICATE),
            "cp.async.bulk.commit_group": (3, NO_GROUP),
            "cp.async.bulk.wait_group.read": (3, NO_GROUP),
            "mbarrier.inval.shared::cta.b64": (3, "the block ends, and uses the place no more"),
        },
    ),
}


def triton_kernel(key):
    pytest.importorskip("triton")
    from vgpu import triton_kernels as kernels

    kernel, arch, warps = key
    (types, constants), run_it, table = TRITON[key]
    k = kernels.compiled(kernel, int(arch[3:5]), types, constants, warps)
    return k, functools.partial(run_it, k, warps=warps), table


def test_mutants_of_triton_kernels():
    noticed = 0
    for key in TRITON:
        k, run_it, table = triton_kernel(key)
        noticed += check_table(*count_unnoticed(k.ptx, k.name, key[1], run_it), table)
    assert noticed >= 60


def test_barriers_that_are_redundant_one_by_one_are_noticed_together():
    k, run_it, _ = triton_kernel(("matmul_descriptor", "sm_90a", 4))
    text = re.sub(r"\bbar\.sync[^;]*;", "", k.ptx)
    with pytest.raises(vgpu.RaceError):
        run_it(vgpu.Device("sm_90a", threads=1).load_ptx(text))
