"""Test session set-up: Triton runs in its interpreter, on CPU tensors; two threads, as on the smallest CI machine.

TRAINWRIGHT_TEST_DEVICE=cuda (tests/gpu/run.sh) runs the tables of the ops on a GPU instead: tensors are made there,
and of all tests only those remain that name a backend.
"""

import os

os.environ.setdefault("TRAINWRIGHT_TEST_DEVICE", "cpu")
os.environ.setdefault(
    "TRITON_INTERPRET", "1" if os.environ["TRAINWRIGHT_TEST_DEVICE"] == "cpu" else "0"
)
os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest
import torch
import vgpu_backend

ON_GPU = os.environ["TRAINWRIGHT_TEST_DEVICE"] == "cuda"
torch.set_num_threads(2)
if ON_GPU:
    torch.set_default_device("cuda")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def names_a_backend(item):
    return "backend" in getattr(getattr(item, "callspec", None), "params", {})


def pytest_runtest_setup(item):
    """Tests with the parameter "vgpu" run CUDA kernels on the virtual GPU; the first one in a process loads them."""
    if "vgpu" in getattr(getattr(item, "callspec", None), "params", {}).values():
        if vgpu_backend.reason() != "ok":
            pytest.skip(f"CUDA kernels on the virtual GPU: {vgpu_backend.reason()}")
        vgpu_backend.install()


def pytest_collection_modifyitems(config, items):
    # The longest first, so that no process waits for the other at the end.
    items.sort(key=lambda item: "vgpu/test_triton.py" not in item.nodeid)
    if ON_GPU:
        other = [i for i in items if "gpu" not in i.keywords and not names_a_backend(i)]
        items[:] = [i for i in items if i not in other]
        config.hook.pytest_deselected(items=other)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
