"""Test session set-up: Triton runs in its interpreter, on CPU tensors; two threads, as on the smallest CI machine."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest
import torch
import vgpu_backend

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    """Tests with the parameter "vgpu" run CUDA kernels on the virtual GPU; the first one in a process loads them."""
    if "vgpu" in getattr(getattr(item, "callspec", None), "params", {}).values():
        if vgpu_backend.reason() != "ok":
            pytest.skip(f"CUDA kernels on the virtual GPU: {vgpu_backend.reason()}")
        vgpu_backend.install()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
