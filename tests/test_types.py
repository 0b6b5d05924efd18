"""The 16-bit floats of trainwright/types.h against torch, over every bit pattern."""

import struct

import numpy as np
import pytest
import torch
from trainwright import _host

DTYPES = {
    torch.bfloat16: (_host.bf16_bits_to_float, _host.float_to_bf16_bits),
    torch.float16: (_host.f16_bits_to_float, _host.float_to_f16_bits),
}


def bits_of(x):
    return x.view(torch.int16).to(torch.int32) & 0xFFFF


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widening_is_exact(dtype):
    widen, _ = DTYPES[dtype]
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    want = every.float()
    got = torch.tensor([widen(i) for i in range(1 << 16)])
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan].view(torch.int32), want[~nan].view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrowing_rounds_to_nearest_even(dtype):
    """Each 16-bit value, the middle between neighbours, where overflow begins, and one bit to either side of them."""
    _, narrow = DTYPES[dtype]
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = every[every.isfinite()].unique()
    middle = (finite[1:] + finite[:-1]) / 2  # exact in fp32
    overflow = finite[-1:] + (finite[-1:] - finite[-2:-1]) / 2
    bits = torch.cat([every, middle, overflow, -overflow]).view(torch.int32)
    values = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    values = torch.cat([values, torch.from_numpy(random.view(np.float32))])
    want = values.to(dtype)
    got = torch.tensor([narrow(v) for v in values.tolist()], dtype=torch.int32)
    nan = want.isnan()
    assert torch.equal(got[~nan], bits_of(want)[~nan])
    as_floats = got[nan].to(torch.int16).view(dtype)
    assert as_floats.isnan().all()


def test_nan_payloads_stay_nan():
    """A NaN whose upper bits are zero must not become infinity when it is cut to 16 bits."""
    nan = struct.unpack("f", struct.pack("I", 0x7F800001))[0]
    assert _host.float_to_bf16_bits(nan) & 0x7FFF > 0x7F80
    assert _host.float_to_f16_bits(nan) & 0x7FFF > 0x7C00
