"""The vector functions of csrc/include/trainwright/vec_math.h against the C library in double."""

import math

import numpy as np
import pytest
import torch

host = pytest.importorskip("trainwright._host")

SMALLEST_NORMAL = 2.0**-126


def exact(function, x):
    with np.errstate(all="ignore"):
        x = torch.from_numpy(x.astype(np.float64))
        return {
            "exp": lambda: x.exp(),
            "log": lambda: x.log(),
            "tanh": lambda: x.tanh(),
            "sigmoid": lambda: x.sigmoid(),
            # torch's fp64 erfc keeps its relative accuracy in the tail.
            "cdf": lambda: torch.special.erfc(x * -math.sqrt(0.5)) / 2,
            "pdf": lambda: torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi),
        }[function]().numpy()


def every_float(step):
    """Each `step`th float, of both signs, infinities and NaN included."""
    bits = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([bits.view(np.float32), np.float32([0.0, -0.0, np.inf, -np.inf, np.nan])])


def ulps(got, want):
    """Error in units in the last place of `want`; what is below the smallest normal number may be 0."""
    special = ~np.isfinite(want) | (np.abs(want) > np.finfo(np.float32).max)
    with np.errstate(over="ignore"):
        assert np.array_equal(got[special], want[special].astype(np.float32), equal_nan=True)
    tiny = ~special & (np.abs(want) < SMALLEST_NORMAL)
    assert (np.abs(got[tiny]) <= SMALLEST_NORMAL).all()
    normal = ~special & ~tiny
    unit = np.exp2(np.floor(np.log2(np.abs(want[normal]))) - 23)
    return np.abs(got[normal] - want[normal]) / unit


@pytest.mark.parametrize(
    ("function", "limit"),
    [("exp", 1.1), ("log", 0.8), ("tanh", 2.5), ("sigmoid", 2.4), ("cdf", 4.1), ("pdf", 2.7)],
)
def test_within_a_few_units_in_the_last_place_of_every_float(function, limit):
    x = every_float(2503)
    assert ulps(host.vec_math(function, x), exact(function, x)).max() <= limit


def test_signs_and_ends():
    assert np.signbit(host.vec_math("tanh", np.float32([-0.0]))[0])
    tanh, cdf = (host.vec_math(f, np.float32([-np.inf, np.inf])) for f in ("tanh", "cdf"))
    assert tanh.tolist() == [-1.0, 1.0] and cdf[0] < SMALLEST_NORMAL and cdf[1] == 1.0
    log = host.vec_math("log", np.float32([0.0, -0.0, -1.0, 1e-45, 1.0]))
    assert log[:2].tolist() == [-np.inf, -np.inf] and np.isnan(log[2]) and log[4] == 0.0
    assert log[3] == np.float32(math.log(np.float32(1e-45)))
