"""Compiled Triton attention on the virtual GPU: what each kernel moves, and how.

test_triton.py runs this file in a process of its own, since it needs Triton's compiler (TRITON_INTERPRET=0).
"""

import os

import pytest
import torch
from trainwright import vgpu
from trainwright.kernels import flash_attention as kernels
from trainwright.kernels._attention_configs import look_up

ARCH = os.environ.get("VGPU_ARCH", "sm_80")
CAPABILITY = int(ARCH.removeprefix("sm_").rstrip("a"))
T, MOST_BYTES = 256, 1.05


def at_a_line(t):
    """A copy of t that begins at a cache line, as memory of a GPU's allocator does."""
    whole = torch.empty(t.nbytes + 128, dtype=torch.uint8)
    start = -whole.data_ptr() % 128
    return whole[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)


def counts(D, bias=None, p=0.0):
    """Counters by kernel of one forward and backward, a single head of T queries and keys; the second launches, of
    programs whose result was not finite, are left out."""
    device = vgpu.Device(ARCH, count=True, check=False)
    q, k, v, dout = (at_a_line(torch.randn(1, T, 1, D).bfloat16()) for _ in range(4))
    seed = torch.tensor(3) if p else None
    options = (None, None, None, bias, None, seed, 0, 0, D**-0.5, -1, -1, False, 0.0, p)
    with device:
        out, lse = kernels.flash_attention_fwd(q, k, v, *options)
        need = [True, True, True, False, bias is not None, False]
        kernels.flash_attention_bwd(dout, None, q, k, v, out, lse, *options, need)
    found = {}
    for kernel in device.counters:
        name = kernel.name.removeprefix("_flash_attention_").removesuffix("_kernel")
        found.setdefault(name, kernel)
    return found


@pytest.mark.parametrize("D", [64, 128])
def test_bytes_are_those_of_the_tiles(D):
    """Each program reads its rows once, and the rows across once per block of its own."""
    found = counts(D)
    tile = {kind: look_up(kind, CAPABILITY, 16, D, False) for kind in ("fwd", "dkv", "dq")}
    x, row = 2 * T * D, 4 * T  # bytes of q and of lse
    ideal = {
        "fwd": 2 * x + row + T // tile["fwd"][0] * 2 * x,
        "delta": 2 * x + row,
        "dkv": 4 * x + T // tile["dkv"][1] * (2 * x + 2 * row),
        "dq": 3 * x + 2 * row + T // tile["dq"][0] * 2 * x,
    }
    assert set(ideal) <= set(found)
    for name, expected in ideal.items():
        kernel = found[name]
        ratio = kernel.total.global_bytes / expected
        assert 0.999 <= ratio <= MOST_BYTES, f"{name}: {ratio:.4f} of ideal"
        assert kernel.total.sector_efficiency >= 0.98, name
        assert kernel.total.bank_conflicts == 0 and kernel.local_bytes == 0, name


def test_options_add_no_conflict_and_no_local_memory():
    bias = at_a_line(torch.randn(1, 1, T, T))
    for name, kernel in counts(64, bias, p=0.2).items():
        assert kernel.total.bank_conflicts == 0 and kernel.local_bytes == 0, name
