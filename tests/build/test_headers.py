"""Every header under include/ compiles alone, with g++ and with nvcc, and knows nothing of torch."""

import pathlib
import re
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.timeout(600)
INCLUDE = pathlib.Path(__file__).parents[2] / "csrc/include"
HEADERS = sorted(p.relative_to(INCLUDE).as_posix() for p in INCLUDE.glob("trainwright/*.h"))
CUDA_HEADERS = sorted(p.relative_to(INCLUDE).as_posix() for p in INCLUDE.glob("trainwright/*.cuh"))
CXX = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unused-function"]
ISAS = {"base": [], "avx2": ["-mavx2", "-mfma", "-mf16c"]}


def for_cpu_only(header):
    """Headers built on the vector layer or on threads have nothing to say to nvcc."""
    base = ("trainwright/vec.h", "trainwright/parallel.h")
    includes = re.findall(r'#include "(.+?)"', (INCLUDE / header).read_text())
    return header in base or any(i in base or for_cpu_only(i) for i in includes)


@pytest.mark.parametrize("header", HEADERS + CUDA_HEADERS)
def test_includes_nothing_of_torch(header):
    text = (INCLUDE / header).read_text()
    includes = re.findall(r'#\s*include\s*[<"](.+?)[>"]', text)
    allowed = r"torch/headeronly/" if header.endswith("types.h") else r"\0"
    foreign = [i for i in includes if re.match(r"ATen|c10|torch|pybind11|Python", i)]
    assert not [i for i in foreign if not re.match(allowed, i)]
    assert not re.search(r"\b(at|c10|torch)::", text)


@pytest.mark.parametrize("header", HEADERS)
def test_compiles_alone_with_gcc(header, tmp_path):
    """Included first and twice, without the vector extensions of any instruction set and with those of AVX2."""
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{header}"\n#include "{header}"\n')
    for isa, flags in ISAS.items():
        command = [*CXX, *flags, f"-DTW_CPU_ISA={isa}", f"-I{INCLUDE}", "-fsyntax-only", source]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{isa}: {done.stderr}"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_compile_alone_with_nvcc(tmp_path):
    """One compilation for all headers, each in a translation unit of its own."""
    files = []
    for header in [h for h in HEADERS if not for_cpu_only(h)] + CUDA_HEADERS:
        files.append(tmp_path / f"{pathlib.Path(header).stem}.cu")
        files[-1].write_text(f'#include "{header}"\n')
    command = ["nvcc", "-std=c++17", "-arch=sm_80", "--expt-relaxed-constexpr", f"-I{INCLUDE}"]
    command += ["--ptx", "--threads", "2", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
