"""8-bit states: what a code means, how near it is, and that rounding at random has the right mean."""

import pytest
import torch
from trainwright.ops import _optimizer_formats as formats

BLOCK = formats.STATE_BLOCK
SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
TOP = {True: 127, False: 255}
POWER = {True: 2, False: 4}


def values_of_codes(signed, scale=1.0):
    """Of codes 0 ... TOP."""
    codes = torch.arange(TOP[signed] + 1).to(torch.int8 if signed else torch.uint8)
    return formats.int8_decode(codes, torch.tensor([scale]))


@SIGNED
def test_every_code_survives_a_round_trip_and_they_are_in_order(signed):
    values = values_of_codes(signed, 3.0)
    assert values[0] == 0 and (values.diff() > 0).all()
    assert values[-1].item() == pytest.approx(3.0, rel=2**-22)
    for sign in (1, -1) if signed else (1,):
        codes, _ = formats.int8_encode(sign * values, signed, None)
        assert codes.tolist() == [sign * i for i in range(TOP[signed] + 1)]


@SIGNED
def test_steps_are_about_those_of_the_exact_root(signed):
    """The lines through a root: 1.5 times its relative steps at most for a square root, 1.75 times for a fourth."""
    values = values_of_codes(signed).double()
    c = torch.arange(TOP[signed] + 2, dtype=torch.float64)
    exact = (c / TOP[signed]) ** POWER[signed]
    ours, theirs = values.diff()[8:] / values[8:-1], exact.diff()[8:-1] / exact[8:-2]
    assert (ours <= {True: 1.5, False: 1.75}[signed] * theirs * 1.01).all()
    assert values.diff().max() == pytest.approx(1 / 63, rel=1e-5)


@SIGNED
def test_the_nearest_code_is_taken(signed):
    """Over ten decades below the largest of the block, where codes are above those whose neighbours differ in size."""
    g = torch.Generator().manual_seed(0)
    x = 10.0 ** (-10 * torch.rand(400 * BLOCK, generator=g))
    x.view(-1, BLOCK)[:, 7] = 1.0
    values = values_of_codes(signed)
    codes, scales = formats.int8_encode(x, signed, None)
    i = codes.long()
    error, gap = (formats.int8_decode(codes, scales) - x).abs(), values.diff()
    below, above = gap[(i - 1).clamp(min=0)], gap[i.clamp(max=TOP[signed] - 1)]
    half = torch.where(values[i] < x, above, below) / 2
    large = i >= 4 if signed else i >= 8
    assert large.sum() > 20000 and (error <= half * (1 + 1e-4))[large].all()
    assert (error <= torch.maximum(below, above))[~large].all()


def test_code_0_is_exactly_0_and_no_second_moment_above_0_gets_it():
    x = torch.tensor([1.0, 0.0, 1e-38, 1e-44, 1e-9] + [0.0] * (BLOCK - 5))
    codes, scale = formats.int8_encode(x, False, None)
    assert torch.equal(codes != 0, x != 0) and formats.int8_decode(codes, scale)[1] == 0
    noise = torch.zeros(BLOCK, dtype=torch.int64)
    assert torch.equal(formats.int8_encode(x, False, noise)[0] != 0, x != 0)
    assert formats.int8_decode(*formats.int8_encode(torch.zeros(300), True, None)).eq(0).all()


@SIGNED
@pytest.mark.parametrize("value", [0.7, 0.013, 0.0021, 1e-4])
def test_the_mean_over_all_random_numbers_is_the_value(signed, value):
    x = torch.full((65536,), value)
    x[::BLOCK] = 1.0  # the scale
    decoded = formats.int8_decode(*formats.int8_encode(x, signed, torch.arange(65536)))
    others = torch.arange(65536) % BLOCK != 0
    values = values_of_codes(signed)
    above = int((values > value).nonzero()[0])
    assert set(decoded[others].tolist()) <= {values[above - 1].item(), values[above].item()}
    step = (values[above] - values[above - 1]).item()
    assert abs(decoded[others].double().mean().item() - value) < step / 128
