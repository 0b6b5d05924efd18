"""The CUDA module compiles and links with nvcc alone: no GPU and no CUDA build of torch are needed for it."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_links_against_any_torch(tmp_path):
    """The CPU objects of the normal build are used again. Torch is reached through its stable C functions only."""
    env = {**os.environ, "TRAINWRIGHT_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "8.0;9.0a"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((tmp_path / "trainwright/_build_info.json").read_text())
    assert record["built"] == ["_C", "_C_cuda"] and record["cuda_archs"] == "8.0;9.0a"

    library = tmp_path / "trainwright/_C_cuda.abi3.so"
    listing = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    undefined = re.findall(r"^\s+U (\S+)", listing.stdout, re.M)
    assert not [s for s in undefined if re.match(r"_Z\w*N[KVRO]*(2at|3c10|5torch)", s)]
    assert [s for s in undefined if s.startswith("cuda")], "no CUDA runtime?"
    assert re.search(r" T PyInit__C_cuda$", listing.stdout, re.M)
    for arch in (b"sm_80", b"sm_90a"):
        assert arch in library.read_bytes()
