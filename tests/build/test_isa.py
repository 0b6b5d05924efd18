"""The CPU kernels of every instruction set: the same results, and no instruction that an older CPU lacks."""

import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from trainwright import info

pytestmark = pytest.mark.timeout(600)
ROOT = pathlib.Path(__file__).parents[2]
OBJECTS = sorted((ROOT / "build/ninja").glob("*.base.o"))

# The self-check of every op, as lists of numbers.
RUN = """
import json, torch, trainwright as tw
from trainwright import dispatch, info
results = {"isa": info.chosen_isa()}
for op, check in dispatch.self_checks().items():
    if dispatch.backends_of(op).get("cpu") == "ok":
        torch.manual_seed(0)
        tensors = check("cpu", torch.device("cpu"))
        results[op] = [t.detach().double().flatten().tolist() for t in tensors]
print(json.dumps(results))
"""


def run(isa):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TRAINWRIGHT_CPU_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_all_instruction_sets_agree():
    """Sums may be grouped by another width, so not to the bit: to a few units in the last place of fp32; inf is inf."""
    isas = info.cpu_isas()
    results = [run(isa) for isa in isas]
    assert [r.pop("isa") for r in results] == isas
    assert len(results[0]) >= 5
    for isa, result in zip(isas[1:], results[1:]):
        for op, tensors in results[0].items():
            assert len(result[op]) == len(tensors)
            for a, b in zip(tensors, result[op]):
                scale = max((abs(v) for v in a if math.isfinite(v)), default=0.0)
                agree = (x == y or abs(x - y) <= 4e-6 * scale for x, y in zip(a, b))
                assert all(agree), f"{isa}: {op}"


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


needs_objects = pytest.mark.skipif(
    shutil.which("objdump") is None or not OBJECTS, reason="needs binutils and the build folder"
)


@needs_objects
@pytest.mark.parametrize("path", OBJECTS, ids=lambda p: p.stem)
def test_base_objects_hold_no_avx(path):
    """%ymm, %zmm and VEX-coded instructions (v...) would stop a CPU without AVX."""
    code = output_of("objdump", "-d", "--no-show-raw-insn", path)
    found = re.findall(r"^\s*[0-9a-f]+:\s+(v[a-z]\w+\s.*|.*%[yz]mm\d.*)$", code, re.M)
    found = [line for line in found if not line.startswith(("verr", "verw"))]
    assert not found, found[:5]


def defined(path):
    lines = [line.split() for line in output_of("nm", "--defined-only", path).splitlines()]
    return {name for _, kind, name in lines if kind in "TVWu"}


@needs_objects
@pytest.mark.parametrize("path", OBJECTS, ids=lambda p: p.stem)
def test_instruction_sets_share_no_symbol(path):
    """A function of one name in two variants would be merged by the linker: one copy, maybe AVX-512, for both."""
    for isa in ("avx2", "avx512"):
        sibling = path.with_name(path.name.replace(".base.", f".{isa}."))
        if sibling.exists():
            assert not defined(path) & defined(sibling)
