"""A pytest plugin: the op tests' backend "triton" compiles its kernels and runs them on the virtual GPU.

    VGPU_ARCH=sm_90a PYTHONPATH=tests pytest -p vgpu_triton tests/ops -k triton

Without it that backend runs in Triton's interpreter, which shares neither compiler nor memory model with a GPU.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"

import pytest
import torch
from trainwright import dispatch, vgpu

device = vgpu.Device(os.environ.get("VGPU_ARCH", "sm_80"))
# The two questions by which ops decide whether "triton" takes CPU tensors.
dispatch.triton_reason = lambda: "ok"
dispatch.interpreting = lambda: True

address_of = torch.Tensor.data_ptr
addressed: dict[int, torch.Tensor] = {}


def data_ptr(tensor: torch.Tensor) -> int:
    """What a table of addresses holds, somebody has asked a tensor for."""
    addressed.setdefault(id(tensor), tensor)
    return address_of(tensor)


@pytest.fixture(autouse=True)
def _on_the_virtual_gpu(monkeypatch):
    addressed.clear()
    monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
    monkeypatch.setattr(device, "_memory", addressed.values())
    with device:
        yield
