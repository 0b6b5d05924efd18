"""Compiled Triton on the virtual GPU: usual kernels, the driver, and the ops' own cases.

The interpreter that the other tests use replaces Triton's compiler for a whole process, so these run in others.
"""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ARCHS = ["sm_80", "sm_90a"]


def run(arch, *arguments):
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "VGPU_ARCH": arch,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("arch", ARCHS)
def test_usual_kernels_and_driver(arch):
    run(arch, "tests/vgpu/compiled_triton.py")


# The shared tables of the ops, with every check on. Left out: the compiler fuses multiplications and additions in each
# variant of a kernel as it likes, so a gradient alone need not have the bits of the one among all.
OPS = ["rms_norm", "layer_norm", "rope", "glu", "grad_norm"]


@pytest.mark.parametrize("arch", ARCHS)
def test_ops(arch):
    files = [f"tests/ops/test_{op}.py" for op in OPS]
    run(arch, "-p", "vgpu_triton", *files, "-k", "triton and not one_gradient_alone")
