"""Calls of device functions that the compiler has not inlined."""

from pathlib import Path

import pytest
import torch
from numerics import vgpu_close

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

PTX = Path(__file__).parent / "ptx"


@pytest.fixture(scope="module")
def module():
    return vgpu.Device("sm_80").load_ptx((PTX / "calls.ptx").read_text())


def test_pow_of_the_maths_library(module):
    n = 500
    x = torch.rand(n, dtype=torch.float64) * 10
    y = torch.rand(n, dtype=torch.float64) * 20
    out = torch.empty(n, dtype=torch.float64)
    module.launch("power", 4, 128, (x, y, out, n))
    assert vgpu_close("fp64 pow", out, x**y + y**2.5)


def test_functions_with_early_returns_loops_and_local_memory(module):
    def digits(n, base):
        if not 2 <= base <= 36:
            return -1
        places = []
        while n > 0:
            n, digit = divmod(n, base)
            places.append(digit)
        value = 0
        for digit in reversed(places):
            value = value * 100 + digit
        return (value + 2**63) % 2**64 - 2**63

    def both(n, base):
        return digits(n, base) if n % 3 == 0 else digits(n, base) + digits(n + 1, base)

    n = torch.randint(0, 5000, (96,), dtype=torch.int32)
    base = torch.randint(0, 40, (96,), dtype=torch.int32)
    base[base == 2] = 7  # more than nine digits do not fit
    base[base == 3] = 8
    out = torch.empty(96, dtype=torch.int64)
    module.launch("call_twice", 1, 96, (n, base, out))
    want = [both(a, b) - (digits(a, 10) if a % 2 else 0) for a, b in zip(n.tolist(), base.tolist())]
    assert out.tolist() == want


def call_text(body, function):
    return f"""
.version 9.0
.target sm_80
.address_size 64
.visible .func (.param .b32 result) f(.param .b32 a) {{
.reg .b32 %r<4>; .reg .pred %p;
ld.param.b32 %r1, [a];
{function}
st.param.b32 [result], %r1;
ret;
}}
.visible .entry k(.param .u64 out) {{
.reg .b32 %r<4>; .reg .b64 %rd<3>; .reg .pred %p;
ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
setp.lt.u32 %p, %r1, 10; mov.u32 %r2, 7;
{{ .param .b32 x; .param .b32 y; st.param.b32 [x], %r1; st.param.b32 [y], %r2;
{body}
ld.param.b32 %r2, [y]; }}
st.global.b32 [%rd1], %r2; ret;
}}"""


def test_a_guarded_call():
    out = torch.zeros(32, dtype=torch.int32)
    text = call_text(
        "@%p call (y), f, (x);", "setp.eq.u32 %p, %r1, 3; @%p ret; add.u32 %r1, %r1, 100;"
    )
    vgpu.Device("sm_80").load_ptx(text).launch("k", 1, 32, (out,))
    want = [i + 100 if i < 10 else 7 for i in range(32)]
    want[3] = 7  # returned before it stored
    assert out.tolist() == want


@pytest.mark.parametrize(
    ("body", "function", "message"),
    [
        ("call (y), f, (x, x);", "", "wrong number of parameters"),
        ("call (y), g, (x);", "", "call of 'g'"),
        ("call (y), f, (x);", "{ .param .b32 z; call (z), f, (z); }", "recursive function f"),
    ],
)
def test_calls_that_are_refused(body, function, message):
    module = vgpu.Device("sm_80").load_ptx(call_text(body, function))
    with pytest.raises(vgpu.UnsupportedError, match=message):
        module.decode("k")
