"""bf16 products with AMX, run in software (TRAINWRIGHT_CPU_BF16=amx-emulated): packing, blocking and order of sums are
those of a CPU that has it. Each program is a process, because the choice is made when the library is loaded."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from trainwright import info

ROOT = pathlib.Path(__file__).parents[2]
ISAS = [isa for isa in info.cpu_isas() if isa != "base"]

COMMON = """
import torch, trainwright as tw
assert "bf16=amx-emulated" in torch.ops.trainwright.build_info()
torch.manual_seed(0)
def product(a, b, **k):
    return tw.matmul(a, b, out_dtype=torch.float32, backend="cpu", **k)
"""

# The instruction, from its description: for 32 k at a time, the sums over even and odd k apart, added, and added to C.
# A product of two bf16 is exact in fp32, so that a fused multiply-add is an addition here.
BITS = """
def instruction(a, b):
    a, b = a.float(), b.float()
    K = a.shape[1]
    c = torch.zeros(a.shape[0], b.shape[1])
    for k0 in range(0, K, 32):
        half = [torch.zeros_like(c), torch.zeros_like(c)]
        for k in range(k0, min(k0 + 32, K)):
            half[k % 2] = half[k % 2] + a[:, k : k + 1] * b[k : k + 1]
        c = c + (half[0] + half[1])
    return c
for M, N, K in ((1, 1, 1), (16, 32, 32), (17, 33, 64), (33, 5, 545), (150, 70, 1026)):
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    want = instruction(a, b)
    for x in (a, a.t().contiguous().t()):
        for y in (b, b.t().contiguous().t()):
            assert torch.equal(product(x, y), want), (M, N, K)
    assert torch.equal(product(a[-1:], b), want[-1:])
    dense = torch.zeros(M, 3 * K, dtype=torch.bfloat16)[:, ::3].copy_(a)
    assert torch.equal(product(dense, b), want)
print("ok")
"""

SUBNORMAL = """
tiny, one = torch.full((1, 2), 2.0**-130).bfloat16(), torch.ones(2, 1).bfloat16()
assert product(tiny, (one * 2.0**20).bfloat16()).item() == 0  # a subnormal operand counts as 0
small = torch.full((1, 2), 2.0**-70).bfloat16()
assert product(small, (one * 2.0**-70).bfloat16()).item() == 0  # a subnormal result becomes 0
assert product(small, (one * 2.0**-50).bfloat16()).item() == 2.0**-119
inf = torch.full((3, 40), float("inf")).bfloat16()
assert product(inf, torch.ones(40, 35).bfloat16()).isposinf().all()  # what fills up a tile is 0 times 0
assert product(inf, torch.zeros(40, 35).bfloat16()).isnan().all()
assert torch.tensor(1e-39) * 1 != 0  # the thread's own mode is as before
print("ok")
"""

OPS = """
def integers(*shape):
    return torch.randint(-4, 5, shape).bfloat16()
x, w, r = integers(150, 70), integers(90, 70), integers(150, 90)
want = (x.double() @ w.double().t() + r.double()).bfloat16()
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    assert torch.equal(tw.linear(x, w, residual=r, backend="cpu"), want)
leaves = [t.clone().requires_grad_() for t in (x, w)]
tw.linear(*leaves, backend="cpu").backward(r)
assert torch.equal(leaves[0].grad, (r.double() @ w.double()).bfloat16())
assert torch.equal(leaves[1].grad, (r.double().t() @ x.double()).bfloat16())
ends = torch.tensor([0, 31, 32, 150], dtype=torch.int32)
experts = integers(4, 70, 35)
parts = [x[a:b].double() @ e.double() for a, b, e in zip([0, 0, 31, 32], ends.tolist(), experts)]
assert torch.equal(tw.grouped_matmul(x, experts, ends, backend="cpu"), torch.cat(parts).bfloat16())
assert torch.equal(product(x, w.t(), split_k=3), (x.double() @ w.double().t()).float())
print("ok")
"""


@pytest.mark.parametrize("isa", ISAS)
def test_emulated_amx(isa):
    """In one process of its own: the variables are read once."""
    variables = {"TRAINWRIGHT_CPU_BF16": "amx-emulated", "TRAINWRIGHT_CPU_ISA": isa}
    run = subprocess.run(
        [sys.executable, "-c", COMMON + BITS + SUBNORMAL + OPS],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == ["ok"] * 3, run.stderr


OBJECT = ROOT / "build/ninja/gemm.avx512.o"


@pytest.mark.skipif(
    shutil.which("objdump") is None or not OBJECT.exists(), reason="needs binutils and the build folder"
)  # fmt: skip
def test_the_instructions_are_there():
    """Two micro-kernels: with 32 rows four loads feed four products, with 16 rows three feed two; and the sums, in four
    tiles or two, are loaded once and stored once."""
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", OBJECT], capture_output=True, text=True, check=True
    ).stdout
    names = ("tdpbf16ps", "tileloadd", "tilestored")
    count = {name: len(re.findall(rf"\b{name}\b", code)) for name in names}
    assert count == {"tdpbf16ps": 6, "tileloadd": 13, "tilestored": 6}
    assert "ldtilecfg" in code and "tilerelease" in code
    operands = re.findall(r"tdpbf16ps (%tmm\d),(%tmm\d),(%tmm\d)", code)
    assert sorted(operands) == sorted(
        (f"%tmm{b}", f"%tmm{a}", f"%tmm{c}")
        for c, a, b in ((0, 4, 6), (1, 4, 7), (0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7))
    )
