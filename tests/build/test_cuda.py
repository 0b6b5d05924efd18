"""The CUDA module compiles and links with nvcc alone: no GPU and no CUDA build of torch are needed for it."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """_C_cuda for sm_80 and sm_90a. The CPU objects of the normal build are used again."""
    folder = tmp_path_factory.mktemp("cuda")
    env = {**os.environ, "TRAINWRIGHT_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "8.0;9.0a"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((folder / "trainwright/_build_info.json").read_text())
    assert record["built"] == ["_C", "_C_cuda"] and record["cuda_archs"] == "8.0;9.0a"
    return folder / "trainwright/_C_cuda.abi3.so"


def cuobjdump(*arguments):
    """Of the toolkit, or of Triton, which brings its own."""
    spec = importlib.util.find_spec("triton")
    bundled = pathlib.Path(spec.origin).parent / "backends/nvidia/bin" if spec else None
    path = os.pathsep.join([os.environ["PATH"], *([str(bundled)] if bundled else [])])
    tool = shutil.which("cuobjdump", path=path)
    if tool is None:
        pytest.skip("needs cuobjdump, of the CUDA toolkit or of Triton")
    env = {**os.environ, "PATH": path}  # it calls nvdisasm
    done = subprocess.run([tool, *arguments], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_links_against_any_torch(library):
    """Torch is reached through its stable C functions only."""
    listing = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    undefined = re.findall(r"^\s+U (\S+)", listing.stdout, re.M)
    assert not [s for s in undefined if re.match(r"_Z\w*N[KVRO]*(2at|3c10|5torch)", s)]
    assert [s for s in undefined if s.startswith("cuda")], "no CUDA runtime?"
    assert re.search(r" T PyInit__C_cuda$", listing.stdout, re.M)
    for arch in (b"sm_80", b"sm_90a"):
        assert arch in library.read_bytes()


def test_no_kernel_spills(library):
    usage = cuobjdump("-res-usage", library)
    rows = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert len(rows) > 300
    assert not [r for r in rows if int(r[2]) or int(r[3])]


ARCHITECTURES = ("80", "90a", "100a", "120")
# The others are in the library above, for two architectures.
FILES = ["adam", "adamw", "bucket_pack", "cross_entropy", "glu", "grad_norm", "int8_wire", "lamb", "layer_norm",
         "linear", "lion", "rmsprop", "rope", "sgd"]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_no_kernel_of_a_file_spills_on_any_architecture(name, tmp_path):
    """As ptxas reports it, from the kernels alone."""
    torch_include = pathlib.Path(torch.__file__).parent / "include"
    fused = "build: no fused multiply-add" not in (ROOT / f"csrc/cuda/{name}.cu").read_text()
    command = [
        "nvcc", "-std=c++17", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda",
        f"-fmad={str(fused).lower()}",
        "-Icsrc", "-Icsrc/include", f"-I{sysconfig.get_path('include')}", f"-isystem={torch_include}",
        f"-isystem={torch_include}/torch/csrc/api/include", "-DTORCH_TARGET_VERSION=0x020b000000000000",
        "-DPy_LIMITED_API=0x030a0000", "-DUSE_CUDA", "-Xptxas", "-v", "-cubin", f"csrc/cuda/{name}.cu",
    ]  # fmt: skip
    for arch in ARCHITECTURES:
        output = [f"-arch=sm_{arch}", "-o", tmp_path / "kernels.cubin"]
        done = subprocess.run([*command, *output], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = re.findall(
            r"Compiling entry function '(\w+)'.*?"
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            done.stderr,
            re.S,
        )
        assert len(rows) == done.stderr.count("Compiling entry function")
        assert not [(arch, *r) for r in rows if any(map(int, r[1:]))]


# Part of a kernel's name -> accesses of 16 bytes that its code must hold at least: loads, stores. One for each operand,
# or several where a thread has several packs.
WIDE = {
    "norm_fwd_kernelINS_7RmsNormENS_4bf16ELi8ELi1E": (2, 2),
    "norm_fwd_kernelINS_7RmsNormENS_4bf16ELi8ELi2E": (4, 4),
    "norm_bwd_kernelINS_7RmsNormENS_4bf16ELi8ELi2E": (6, 6),
    "norm_bwd_kernelINS_7RmsNormENS_4bf16ELi8ELi0E": (3, 3),
    "norm_fwd_kernelINS_9LayerNormENS_4bf16ELi8ELi2E": (4, 4),
    "norm_bwd_kernelINS_9LayerNormENS_4bf16ELi8ELi1E": (3, 5),
    "norm_bwd_kernelINS_9LayerNormEfLi4ELi2E": (6, 6),
    "glu_fwd_kernelINS_4bf16ENS_3dev4SiluELi8E": (2, 1),
    "glu_bwd_kernelINS_4bf16ENS_3dev4GeluELi8E": (3, 2),
    "rope_kernelINS_4bf16ELi8E": (4, 4),
    "linear_bwd_kernelINS_4bf16E": (2, 1),
    "cross_entropy_rows_kernelINS_4bf16ELb0E": (5, 0),
    "cross_entropy_grad_kernelINS_4bf16ELb0E": (4, 4),
    "optimizer_kernelINS_9AdamWRuleEfLb0E": (10, 8),
    "optimizer_kernelINS_9AdamWRuleEfLb1E": (10, 8),
    "lamb_moments_kernelIfLb0E": (8, 4),
    "lamb_apply_kernelIfLb0E": (6, 2),
    "bucket_pack_kernelINS_4bf16EfE": (2, 1),
    "bucket_unpack_kernelINS_4bf16EfE": (1, 1),
    "ordered_sum_kernelINS_4bf16E": (2, 1),
    "grad_stats_kernelINS_4bf16ELNS_5PowerE0E": (1, 0),
    "grad_scale_kernelINS_4bf16E": (1, 1),
}


def test_kernels_move_16_bytes_at_a_time(library):
    """And none of them touches local memory or adds floats in whatever order they come."""
    functions = re.split(r"Function : ", cuobjdump("-sass", library))[1:]
    code = [(text.split(maxsplit=1)[0], text) for text in functions]
    # BAR.RED is a vote of the block, __syncthreads_or, and no access to memory; INC counts blocks that are done.
    bad = re.compile(r"(?<!BAR\.)\b(LDL|STL|RED|ATOM|ATOMG)\b(?!\.E\.INC\b)")
    assert not [n for n, text in code if bad.search(text)]
    for kernel, (loads, stores) in WIDE.items():
        found = [text for name, text in code if kernel in name]
        assert len(found) == 2, f"{kernel}: {len(found)} instances, one per architecture expected"
        for text in found:
            got = tuple(
                len(re.findall(rf"\b{op}\.E\.(?:\w+\.)*128", text)) for op in ("LDG", "STG")
            )
            assert got[0] >= loads and got[1] >= stores, (kernel, got, (loads, stores))
