"""Every Triton kernel compiles ahead of time for sm_80, sm_90 and sm_100: no spills, the instructions it is meant for.

Each kernels/<op>.py lists its configurations in `AOT`: (kernel, {argument: type}, {constexpr: value}, warps, [PTX
patterns]), and compile options if it has any, with "archs", the architectures it is meant for; in `AOT_RARE` more,
for the long run. A type "i32:16" is a multiple of 16. A pattern may start with an
architecture and a colon ("90:wgmma"); without one it holds for all.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

KERNELS = pathlib.Path(__file__).parents[2] / "kernels"
FILES = sorted(p.stem for p in KERNELS.glob("*.py") if not p.stem.startswith("_"))

# Runs in its own process: the interpreter replaces the compiler when TRITON_INTERPRET=1.
COMPILE = """
import importlib, json, os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

module = importlib.import_module("trainwright.kernels." + sys.argv[1])
rows = []
for number, (kernel, types, constants, warps, patterns, *options) in enumerate(getattr(module, sys.argv[2])):
    signature = {name: types.get(name, "constexpr").split(":")[0] for name in kernel.arg_names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
                 if types.get(n, "").startswith("*") or types.get(n, "").endswith(":16")}
    chosen = {"num_warps": warps, **(options[0] if options else {})}
    for arch in chosen.pop("archs", (80, 90, 100)):
        source = ASTSource(kernel, signature, constants, attrs=divisible)
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=chosen)
        ptx = built.asm["ptx"]
        target = re.search(r"\\.target (sm_\\w+)", ptx).group(1)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            report = subprocess.run([get_ptxas(arch).path, "-v", "--gpu-name", target, file.name, "-o", os.devnull],
                                    capture_output=True, text=True, check=True).stderr
        spills = sum(int(n) for n in re.findall(r"(\\d+) bytes spill", report))
        missing = [p for p in patterns if (p.split(":")[0] == str(arch) or not p[:2].isdigit())
                   and not re.search(p.split(":", 1)[1] if p[:2].isdigit() else p, ptx)]
        rows.append({"kernel": kernel.__name__, "config": number, "arch": arch, "spill_bytes": spills,
                     "missing": missing})
print(json.dumps(rows))
"""


RARE = sorted(
    p.stem for p in KERNELS.glob("*.py") if "AOT_RARE" in p.read_text() and p.stem in FILES
)


@pytest.mark.parametrize(
    ("op", "rows"),
    [(op, "AOT") for op in FILES]
    + [pytest.param(op, "AOT_RARE", marks=pytest.mark.slow) for op in RARE],
)
@pytest.mark.timeout(600)
def test_compiles_without_spills(op, rows):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, op, rows], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    built = json.loads(result.stdout.splitlines()[-1])
    assert built, f"kernels/{op}.py lists no configuration in {rows}"
    faults = [r for r in built if r["spill_bytes"] or r["missing"]]
    assert not faults, faults
