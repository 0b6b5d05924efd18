"""Philox4x32-10: the published vectors, and the same bits from C++ and Triton."""

import pytest
import torch
import triton
import triton.language as tl
from trainwright import _host
from trainwright.kernels import _tl

MAX = 0xFFFFFFFFFFFFFFFF
# (seed, block, stream), output: "kat_vectors" of Random123, Salmon et al. The key is (seed low, seed high), the counter
# (block low, block high, stream low, stream high).
PUBLISHED = [
    ((0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MAX, MAX, MAX), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "words"), PUBLISHED)
def test_cpp_gives_the_published_vectors(counter, words):
    assert _host.philox(*counter) == words


@triton.jit
def _philox_kernel(out_ptr, uniform_ptr, seed, first, stream, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, c, d = _tl.philox_block(seed, first + i, stream)
    tl.store(out_ptr + 4 * i, a.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 4 * i + 1, b.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 4 * i + 2, c.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 4 * i + 3, d.to(tl.int32, bitcast=True))
    tl.store(uniform_ptr + i, _tl.uniform01(a))


@pytest.mark.parametrize(
    ("seed", "first", "stream"),
    [
        (0, 0, 0),
        (1234567, 5, 3),
        (-1, 0xFFFFFFF8, 1 << 40),  # a negative seed; blocks that cross 2^32; a stream past 2^32
        (0x123456789ABCDEF, 1 << 45, 0xFFFFFFFF),
    ],
)
def test_triton_has_the_bits_of_cpp(seed, first, stream):
    n = 16
    out, uniform = torch.empty(n, 4, dtype=torch.int32), torch.empty(n)
    _philox_kernel[(1,)](out, uniform, seed, first, stream, N=n)
    want = [_host.philox(seed & MAX, first + i, stream) for i in range(n)]
    assert [[w & 0xFFFFFFFF for w in row] for row in out.tolist()] == [list(row) for row in want]
    assert uniform.tolist() == [_host.uniform01(row[0]) for row in want]


def test_uniform01_is_in_range():
    assert _host.uniform01(0) == 0.0
    assert _host.uniform01(0xFFFFFFFF) == 1.0 - 2.0**-24
