"""The optimizer ops: every backend gives the bits of the torch reference, in every format, for any layout, thread count
and sharding."""

import pytest
import torch
import trainwright as tw
from numerics import backends_for_tests, same_bits

from optim.op_cases import NAMES, PRODUCT, SOME, make, pairs_of

SIZES = [0, 1, 7, 8, 9, 31, 33, 255, 256, 257, 4095, 4097]
BACKENDS = [(n, b) for n in NAMES for b in backends_for_tests(getattr(tw, n + "_")) if b != "torch"]


def same_values(x, y):
    """Bits, except that any NaN is as good as another."""
    if x.is_floating_point():
        x, y = (t.masked_fill(t.isnan(), float("nan")) for t in (x, y))
    return same_bits(x, y)


def assert_same(a, b):
    for i, (x, y) in enumerate(zip(a.results(), b.results(), strict=True)):
        count = (x != y).sum()
        assert same_values(x, y), f"{a.format}: result {i} differs in {count} of {x.numel()}"


def assert_nearly_same(a, b):
    """Up to the last bit of what is stored."""
    for x, y in zip(a.results(), b.results(), strict=True):
        if x.dtype == torch.int16:  # a remainder: the last bits
            continue
        rtol = {torch.float32: 1e-6, torch.float64: 1e-14}.get(x.dtype, 1e-2)
        atol = 1.0 if x.dtype in (torch.int8, torch.uint8) else rtol
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


def compare(case, backend, steps=2):
    """Bits; LAMB's norms are sums, taken in another order, and torch's square root of fp64 is not always rounded."""
    ours, reference = case.clone().run(backend, steps), case.clone().run("torch", steps)
    near = case.name == "lamb" or case.params[0].dtype == torch.float64
    (assert_nearly_same if near else assert_same)(ours, reference)


@pytest.mark.parametrize("master", ["none", "fp32", "split16"])
@pytest.mark.parametrize(("name", "backend"), [x for x in BACKENDS if x[1] == "cpu"])
def test_the_full_product_of_formats_has_the_bits_of_the_reference(name, backend, master):
    forms = [f for f in PRODUCT if f.master == master]
    assert len(forms) >= 24
    for form in forms:
        for lost in (True, False):  # counting them takes another path
            compare(make(name, [(3,), (0,), (300,)], form, lost=lost), backend)


@pytest.mark.parametrize("backend", [b for n, b in BACKENDS if n == "adamw" and b != "cpu"])
def test_every_two_properties_of_a_format(backend):
    forms = pairs_of(PRODUCT)
    assert 16 <= len(forms) <= 24
    for form in forms:
        compare(make("adamw", [(3,), (300,)], form, lost=False), backend, steps=1)


@pytest.mark.parametrize("form", SOME, ids=str)
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_every_size(name, backend, form):
    sizes = SIZES if backend == "cpu" else [0, 1, 9, 257]
    compare(make(name, [(n,) for n in sizes] + [()], form), backend)
