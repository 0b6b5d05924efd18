"""What a step of the CUDA optimizers costs, counted on the virtual GPU (sm_80), against the bytes of its operands, each
read or written once. For every row

    global bytes <= 1.01 ideal   sector efficiency >= 0.99   bank conflicts = 0

Filling the table is part of it. Spills: tests/build/test_cuda.py.
"""

import pytest
import torch
import vgpu_backend
from optim.op_cases import Format, make
from trainwright import vgpu

FP32, BF16 = torch.float32, torch.bfloat16
N = 1 << 18
FORMATS = {  # label -> format, bytes per parameter of AdamW
    "fp32": (Format(), 28),
    "bf16, fp32 master": (Format(BF16, BF16, "fp32"), 28),
    "bf16, fp32 master and gradient": (Format(BF16, FP32, "fp32"), 30),
    "all bf16": (Format(BF16, BF16, "none", "bf16"), 14),
    "bf16, split16, fp32 state": (Format(BF16, BF16, "split16"), 26),
    "split16, bf16 state": (Format(BF16, BF16, "split16", "bf16"), 18),
    "fp32, int8 state": (Format(FP32, FP32, "none", "int8"), 16 + 4 / 64),
    "bf16, int8 state": (Format(BF16, BF16, "none", "int8"), 10 + 4 / 64),
    "bf16, int8 state, stochastic": (Format(BF16, BF16, "none", "int8", True), 10 + 4 / 64),
    "all bf16, stochastic": (Format(BF16, BF16, "none", "bf16", True), 14),
}
OTHERS = {  # op -> flags, bytes per parameter in fp32
    "adamw": (1, 36),  # AMSGrad
    "adam": (0, 28),
    "sgd": (1, 20),
    "rmsprop": (3, 36),
    "lion": (0, 20),
    "lamb": (0, 40),
}


@pytest.fixture
def counters():
    """What the kernels of a test do."""
    runtime = vgpu_backend.runtime()
    usual, counting = runtime.device, vgpu.Device("sm_80", count=True)
    runtime.attach(counting, vgpu_backend.properties())
    yield counting.counters
    runtime.attach(usual, vgpu_backend.properties())


def check(counters, label, case, ideal):
    counters.clear()
    case.run("vgpu")
    total = counters.total
    ratio = total.global_bytes / (N * ideal)
    touched = sum(k.footprint_bytes for k in counters) / (N * ideal)
    print(
        f"{label}: {ratio * ideal:.3f} B/parameter, {ratio:.4f} of ideal, sectors {total.sector_efficiency:.4f}"
    )
    assert touched >= 0.999, f"ideal counts {1 / touched:.3f} of what is there"
    assert ratio <= 1.01 and total.sector_efficiency >= 0.99 and total.bank_conflicts == 0


@pytest.mark.parametrize("backend", ["vgpu"])
@pytest.mark.parametrize("label", FORMATS)
def test_adamw_moves_its_operands_once(label, backend, counters):
    form, ideal = FORMATS[label]
    check(counters, label, make("adamw", [(N,)], form, flags=0, lost=False), ideal)


@pytest.mark.parametrize("backend", ["vgpu"])
@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_move_their_operands_once(name, backend, counters):
    flags, ideal = OTHERS[name]
    check(counters, name, make(name, [(N,)], Format(), flags=flags, lost=False), ideal)


@pytest.mark.parametrize("backend", ["vgpu"])
def test_lamb_moves_40_bytes_and_its_sums(backend, counters):
    """What another parameter costs where the table is read already: of a tensor this small 32 bytes for each unit of
    1024 elements, of a large one for each of 8192 (tests/optim/test_large.py)."""
    moved = []
    for n in (N, 2 * N):
        counters.clear()
        make("lamb", [(n,)], Format(), flags=0, lost=False).run("vgpu")
        moved.append(counters.total.global_bytes)
    assert (moved[1] - moved[0]) / N <= 40 + 32 / 1024 + 0.001
