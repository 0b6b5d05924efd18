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


@pytest.mark.parametrize("arch", ARCHS)
def test_attention_moves_what_its_tiles_say(arch):
    run(arch, "tests/vgpu/compiled_attention.py", "-m", "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_attention_of_any_alignment_and_head_dim(arch):
    run(arch, "tests/vgpu/compiled_attention.py", "-m", "slow")


@pytest.mark.parametrize("arch", ARCHS)
def test_optimizers_move_what_their_formats_say(arch):
    run(arch, "tests/vgpu/compiled_optimizers.py", "-m", "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_format_of_the_optimizers_moves_its_operands_once():
    run("sm_90a", "tests/vgpu/compiled_optimizers.py", "-m", "slow")


@pytest.mark.parametrize("arch", ARCHS)
def test_products_move_what_their_tiles_say(arch):
    run(arch, "tests/vgpu/compiled_products.py")


# The shared tables of the ops, with every check on: of each op what reaches every kernel and branch in one dtype, and
# where the code differs by dtype, others. All of it: tests/vgpu_triton.py.
REFERENCE = "matches_reference and bfloat16"
PARTS = {
    "ops/test_rms_norm.py": f"{REFERENCE} or any_layout or nan",
    "ops/test_layer_norm.py": f"{REFERENCE} or any_layout or one_gradient_alone",
    "ops/test_rope.py": f"{REFERENCE} or only_one_output or fused_projection",
    "ops/test_glu.py": f"{REFERENCE} or one_gradient_alone or special_gates or halves",
    "ops/test_cross_entropy.py": f"{REFERENCE} or (several and float32) or zero_weight",
    "ops/test_linear_cross_entropy.py": f"{REFERENCE} or (plain and float32)",
    "ops/test_linear.py": f"{REFERENCE} or (float32 and (plain or tall)) or everything or gradients",
    "ops/test_matmul.py": "reference and bfloat16 and (parts or (batch and not no))",
    "ops/test_grouped_matmul.py": REFERENCE,
    "ops/test_flash_attention.py": f"{REFERENCE} or (causal-float32) or (all and once) or masked_slots",
    "ops/test_flash_attention_varlen.py": "all and once",
    "ops/test_bucket_pack.py": "(layout_and_dtype and (float32-bfloat16 or bfloat16-float32))"
    " or (one_bad_element and float16) or (rank_order and bfloat16)",
    "ops/test_int8_wire.py": "triton",
    "ops/test_grad_norm.py": "triton",
    "ops/test_newton_schulz.py": "bfloat16 and (reference and (13 or 33) or batch)",
    "optim/test_muon.py": "(fp64 and bfloat16-bfloat16) or (bits_of_the_reference and bfloat16)",
    "optim/test_muon_state.py": "skipped and later",
    "optim/test_ops.py": "adamw or split16",
    "optim/test_large.py": "triton",
    "optim/test_op_arguments.py": "(adamw and (layout or shards)) or (lamb and groups)",
    "optim/test_adamw.py": "(fp64 and (float32-float32 or bfloat16-bfloat16 or float32-float64))"
    " or (bfloat16 and clipping)",
}  # fmt: skip


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a"])
def test_ops(arch):
    files = [f"tests/{file}" for file in PARTS]
    parts = [f"({pathlib.Path(file).name} and ({part}))" for file, part in PARTS.items()]
    run(arch, "-p", "vgpu_triton", *files, "-k", f"triton and ({' or '.join(parts)})")
