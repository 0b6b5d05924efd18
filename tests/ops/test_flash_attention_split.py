"""Few queries and many keys: dividing the keys (CUDA, Triton) changes no answer, nor does what else is in the call."""

import pytest
import torch
import trainwright as tw
from attention_cases import (
    BACKENDS,
    COMPILED,
    NAN,
    OPTIONS,
    backends_taking,
    dtype_for,
    dtypes_of,
    option_inputs,
    options_used,
    qkv,
    reference,
    with_lse,
)
from numerics import check_reference, same_bits

KERNELS = [b for b in COMPILED if b != "torch"]
TRITON = [b for b in BACKENDS if b == "triton"]  # in the slow interpreter: fewer cases
KEYS = 512  # in a piece, as csrc/include/trainwright/flash_attention.h has it
# id: (B, Tq, Tk, H, G, D, Dv), options
CASES = {
    "one query": ((2, 1, 1100, 8, 2, 64, 64), {"causal": True}),
    "one key more than a piece": ((1, 16, KEYS + 1, 4, 1, 32, 32), {"causal": True}),
    "the last keys of one query alone": ((1, 2, 2 * KEYS + 1, 1, 1, 16, 16), {"causal": True}),
    "odd head dims": ((1, 5, 1300, 6, 2, 45, 75), {}),
    "head dim 128": ((1, 3, 700, 4, 4, 128, 128), {"causal": True}),
    "head dim 256": ((1, 3, 1030, 2, 1, 256, 256), {}),
    "window": ((1, 4, 2000, 2, 1, 16, 16), {"causal": True, "window": (700, 0)}),
    "window, pieces that one query does not see": ((1, 30, 1100, 2, 1, 16, 16), {"window": (20, 505)}),
    "top-left": ((1, 60, 1100, 1, 1, 16, 16), {"window": (-1, 500), "causal_align": "top-left"}),
    "scale below 0": ((1, 2, 600, 2, 2, 16, 16), {"scale": -0.7}),
    "scale 0": ((1, 2, 600, 2, 2, 16, 16), {"scale": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "backend"),
    [(c, b) for c in CASES for b in KERNELS] + [("one key more than a piece", b) for b in TRITON],
)
def test_matches_reference(case, backend):
    shape, options = CASES[case]
    inputs = qkv(*shape, dtype_for(backend))
    check_reference(with_lse, reference, inputs, options, backend=backend)


@pytest.mark.parametrize(
    ("case", "backend"),
    [(c, b) for c in OPTIONS for b in backends_taking(*options_used(c), among=KERNELS)],
)
def test_options(case, backend):
    inputs = option_inputs(case, 2, 3, 1100, 4, 2, 16, 16, dtypes_of(backend)[-1])
    near_the_last_keys = {"causal_align": "bottom-right"}  # as in decoding
    options = OPTIONS[case][0] | near_the_last_keys
    check_reference(with_lse, reference, inputs, options, backend=backend)


@pytest.mark.parametrize("backend", KERNELS)
def test_a_batch_is_its_sequences(backend):
    """Bit for bit; of a packed one, below, some are split and others are not."""
    dtype = dtype_for(backend)
    q, k, v = qkv(3, 2, 1100, 4, 2, 32, 32, dtype).values()
    out, lse = tw.flash_attention(q, k, v, causal=True, return_lse=True, backend=backend)
    for b in range(3):
        one = [x[b : b + 1] for x in (q, k, v)]
        alone = tw.flash_attention(*one, causal=True, return_lse=True, backend=backend)
        assert same_bits(out[b], alone[0][0]) and same_bits(lse[b], alone[1][0])


LENGTHS = [(1, 1100), (40, 600), (3, 40), (0, 700), (5, 0), (32, 513)]
FEW = [(1, 600), (0, 520), (3, 40), (5, 0), (2, 513)]


@pytest.mark.parametrize(
    ("backend", "lengths", "H", "G", "left"),
    [(b, LENGTHS, 4, 2, 900) for b in KERNELS] + [(b, FEW, 2, 1, 560) for b in TRITON],
)
def test_a_packed_batch_is_its_sequences(backend, lengths, H, G, left):
    starts = [torch.tensor([0, *n]).cumsum(0).int() for n in zip(*lengths)]
    totals = (sum(n) for n in zip(*lengths))
    q, k, v = qkv(1, *totals, H, G, 32, 32, dtype_for(backend)).values()
    options = {"window": (left, 0), "sinks": torch.randn(H), "return_lse": True, "backend": backend}
    out, lse = tw.flash_attention_varlen(q[0], k[0], v[0], *starts, **options)
    for rows, keys in zip(starts[0].unfold(0, 2, 1).tolist(), starts[1].unfold(0, 2, 1).tolist()):
        one = [x[:, slice(*r)] for x, r in ((q, rows), (k, keys), (v, keys))]
        alone = tw.flash_attention(*one, **options)
        assert same_bits(out[slice(*rows)], alone[0][0]), rows
        assert same_bits(lse[:, slice(*rows)], alone[1][0]), rows


@pytest.mark.parametrize(
    "backend", [b for b in KERNELS + TRITON if b != "cpu"]
)  # whose sums it reorders
def test_nan_reaches_those_who_see_it(backend):
    q, k, v = qkv(1, 3, 1100, 4, 2, 32, 32, dtype_for(backend)).values()
    clean = tw.flash_attention(q, k, v, causal=True, backend=backend)
    v[0, 1098, 0, 5] = NAN  # the last two queries see it
    out = tw.flash_attention(q, k, v, causal=True, backend=backend)
    seen = torch.zeros_like(out, dtype=torch.bool)
    seen[:, 1:, :2, 5] = True
    assert torch.equal(out.isnan(), seen)
    if backend != "triton":  # which computes a block with a NaN again, in smaller steps
        assert torch.equal(out[~seen], clean[~seen])
