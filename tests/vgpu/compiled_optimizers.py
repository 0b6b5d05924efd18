"""Compiled Triton optimizers and bucket ops on the virtual GPU: what they move, and how many launches they need.

test_triton.py runs this file in a process of its own, since it needs Triton's compiler (TRITON_INTERPRET=0).
"""

import os

import pytest
import torch
from numerics import same_bits, vgpu_close
from optim.op_cases import PRODUCT, Format, make
from trainwright import vgpu
from trainwright.ops import int8_wire
from trainwright.ops.bucket_pack import PACK_OPS, SUM_OPS, UNPACK_OPS

ARCH = os.environ.get("VGPU_ARCH", "sm_90a")
N = 1 << 18  # chunks of programs that do as much as those of a large tensor
F32, BF16 = torch.float32, torch.bfloat16


def counters(case, monkeypatch, **device):
    """Runs the case; counts by kernel."""
    address_of, found = torch.Tensor.data_ptr, {}
    monkeypatch.setattr(
        torch.Tensor, "data_ptr", lambda t: found.setdefault(id(t), t) is t and address_of(t)
    )
    d = vgpu.Device(ARCH, count=True, **device)
    monkeypatch.setattr(d, "_memory", found.values())
    with d:
        case.run("triton")
    return d.counters


def at_a_sector(t):
    """A copy of t that begins at a sector, as memory of a GPU's allocator does."""
    whole = torch.empty(t.nbytes + 32, dtype=torch.uint8)
    start = -whole.data_ptr() % 32
    return whole[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)


def large(name, form, flags=0):
    case = make(name, [(N,)], form, flags=flags, lost=False)
    for tensors in (case.params, case.grads, case.masters, case.states):
        tensors[:] = [at_a_sector(t) for t in tensors]
    return case


@pytest.fixture
def full_chunks(monkeypatch):
    """A few programs that do what each of thousands does in a large tensor."""
    import trainwright.kernels._optimizer as driver

    monkeypatch.setattr(driver, "PROGRAMS", 1)


BOUNDS = [
    ("adamw", Format(F32, F32), 0, 28),
    ("adamw", Format(F32, F32), 7, 36),  # AMSGrad
    ("adamw", Format(BF16, BF16, "fp32"), 0, 28),
    ("adamw", Format(BF16, BF16, "split16"), 0, 26),
    ("adamw", Format(BF16, BF16, "split16", "bf16", True), 0, 18),
    ("adamw", Format(BF16, BF16, "none", "bf16", True), 0, 14),
    ("adamw", Format(BF16, BF16, "none", "int8", True), 0, 10 + 4 * 4 / 256),
    ("adamw", Format(F32, F32, "none", "int8"), 0, 16 + 4 * 4 / 256),
    ("lion", Format(F32, F32), 0, 20),
    ("sgd", Format(F32, F32), 1, 20),
    ("sgd", Format(F32, F32), 0, 12),
    ("rmsprop", Format(F32, F32), 0, 20),
    ("lamb", Format(F32, F32), 0, 40),
]


@pytest.mark.parametrize(("name", "form", "flags", "bound"), BOUNDS, ids=str)
def test_bytes_are_those_of_the_formats_in_whole_sectors(
    name, form, flags, bound, monkeypatch, full_chunks
):
    kernels = counters(large(name, form, flags), monkeypatch, check=False)
    total = sum(k.global_bytes for k in kernels)
    sectors = sum(k.global_sectors for k in kernels)
    print(f"{name} {form}: {total / N:.4f} B of {bound}, sectors {total / (32 * sectors):.4f}")
    assert total / N <= bound + 0.025, f"{total / N:.4f} bytes, bound {bound}"
    assert total / (32 * sectors) >= 0.99, f"{total / (32 * sectors):.4f}"
    assert sum(k.local_bytes for k in kernels) == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", PRODUCT, ids=str)
def test_every_format_moves_its_operands_once(form, monkeypatch, full_chunks):
    case = large("adamw", form)
    moved = [*(2 - (form.master == "fp32")) * case.params, *case.grads]
    moved += 2 * [*case.masters, *case.states]
    ideal = sum(t.nbytes for t in moved)
    kernels = counters(case, monkeypatch, check=False)
    total = sum(k.global_bytes for k in kernels)
    sectors = sum(k.global_sectors for k in kernels)
    print(f"{form}: {total / ideal:.4f} of ideal, sectors {total / (32 * sectors):.4f}")
    assert total <= 1.01 * ideal and total / (32 * sectors) >= 0.99
    assert sum(k.local_bytes for k in kernels) == 0


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_one_launch_for_all_tensors_and_groups(name, monkeypatch):
    sizes = [(4 * (j % 7),) for j in range(300)] + [(0,), (1300 * 4,)]  # many without elements
    case = make(name, sizes, Format(F32, F32), flags=0)
    row = case.hyper[0]
    case.hyper = torch.stack([row * (1 + 0.5 * j / len(sizes)) for j in range(len(sizes))])
    case.hyper[:, 1:3] = row[1:3]
    case.spec = [s | j << 8 for j, s in enumerate(case.spec)]
    for j, step in enumerate(case.steps):
        step.fill_(j)
    want = case.clone().run("torch")
    kernels = counters(case, monkeypatch)
    launches = sorted((k.name, k.launches) for k in kernels)
    twice = [("_rate_kernel", 1), ("_step_kernel", 1)] * (name == "lamb")
    assert launches == [("_prepare_kernel", 1), *twice, ("_step_kernel", 1)]
    for ours, reference in zip(case.results(), want.results(), strict=True):
        if name == "lamb":
            assert vgpu_close("lamb of many", ours, reference)
        else:
            assert same_bits(ours, reference)


class Call:
    """What `counters` runs."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def run(self, backend):
        self.function["triton"](*self.arguments)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("op", ["pack", "add", "unpack", "sum"])
def test_bucket_ops_move_their_data_once(op, dtype, monkeypatch):
    """One read and one write of a bucket, one read more when adding; W reads and one write of a sum in rank order.

    Beside them a program reads a few numbers of its table, a sector each.
    """
    n, size = 1 << 17, dtype.itemsize
    grads = [at_a_sector(torch.randn(n).to(dtype)) for _ in range(2)]
    flat, slots = at_a_sector(torch.zeros(2 * n)), [0, n, 2 * n]
    call, ideal = {
        "pack": (Call(PACK_OPS, flat, grads, slots, 0.5, None, False), 2 * n * (size + 4)),
        "add": (Call(PACK_OPS, flat, grads, slots, 0.5, None, True), 2 * n * (size + 8)),
        "unpack": (Call(UNPACK_OPS, flat, grads, slots[:2], 0.5, None), 2 * n * (size + 4)),
        "sum": (Call(SUM_OPS, flat[:n], grads, 0.5, None), n * (2 * size + 4)),
    }[op]
    kernels = counters(call, monkeypatch, check=False)
    total = sum(k.global_bytes for k in kernels)
    sectors = sum(k.global_sectors for k in kernels)
    print(f"{op} {dtype}: {total / ideal:.4f} of ideal, sectors {total / (32 * sectors):.4f}")
    assert 0.999 <= total / ideal <= 1.02
    assert total / (32 * sectors) >= 0.94
    assert sum(k.local_bytes for k in kernels) == 0


@pytest.mark.parametrize("op", ["encode", "sum"])
def test_the_int8_wire_moves_its_data_once(op, monkeypatch):
    """Codes, a step for 64 of them, values and errors; beside them the sum reads the addresses of its rows. A warp of
    the sum reads two steps at a time, 8 bytes of a sector, beside 128 codes."""
    n = 1 << 17
    x, error, out = (at_a_sector(torch.randn(n)) for _ in range(3))
    rows = [at_a_sector(torch.zeros(n + n // 16, dtype=torch.uint8)) for _ in range(4)]
    call, ideal = {
        "encode": (Call(int8_wire.ENCODE_OPS, rows[0], error, x, 0.5), n * 13 + n // 16),
        "sum": (Call(int8_wire.SUM_OPS, out, rows, 0.5), 4 * (n + n // 16) + 4 * n),
    }[op]
    kernels = counters(call, monkeypatch, check=False)
    total = sum(k.global_bytes for k in kernels)
    sectors = sum(k.global_sectors for k in kernels)
    print(f"int8 {op}: {total / ideal:.4f} of ideal, sectors {total / (32 * sectors):.4f}")
    assert 0.999 <= total / ideal <= 1.02
    assert total / (32 * sectors) >= {"encode": 0.98, "sum": 0.89}[op]
    assert sum(k.local_bytes for k in kernels) == 0
