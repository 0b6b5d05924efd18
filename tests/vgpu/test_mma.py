"""mma.sync, on hand-written PTX: every lane's registers are given and read as they are."""

import itertools

import pytest
import torch
from numerics import vgpu_close

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from fragments import (  # noqa: E402
    BIT_VIEWS,
    BITS,
    index_a,
    index_b,
    index_c,
    lane_address,
    pack_fragment,
    random_matrix,
    run,
    values,
)

pytestmark = pytest.mark.timeout(60)

MMA = [
    ("m16n8k16", "f32", "f16", "f16"), ("m16n8k8", "f32", "f16", "f16"), ("m16n8k16", "f16", "f16", "f16"),
    ("m16n8k16", "f32", "bf16", "bf16"), ("m16n8k8", "f32", "bf16", "bf16"), ("m16n8k8", "f32", "tf32", "tf32"),
    ("m16n8k4", "f32", "tf32", "tf32"), ("m16n8k32", "f32", "e4m3", "e4m3"), ("m16n8k32", "f32", "e5m2", "e4m3"),
    ("m16n8k32", "s32", "s8", "s8"), ("m16n8k32", "s32", "u8", "s8"), ("m16n8k16", "s32", "s8", "u8"),
    ("m8n8k16", "s32", "u8", "u8"), ("m8n8k4", "f64", "f64", "f64"), ("m16n8k8", "f64", "f64", "f64"),
    ("m16n8k16", "f64", "f64", "f64"),
]  # fmt: skip


def shape_of(name):
    m, rest = name[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


@pytest.mark.parametrize("shape, acc, a_type, b_type", MMA, ids=lambda v: v)
def test_mma_sync(shape, acc, a_type, b_type):
    torch.manual_seed(0)
    m, n, k = shape_of(shape)
    bits = BITS[a_type]
    width = 4 * max(32 // bits, 1)
    a, b = random_matrix(a_type, m, k), random_matrix(b_type, k, n)
    acc_dtype = {
        "f32": torch.float32,
        "f16": torch.float16,
        "s32": torch.int32,
        "f64": torch.float64,
    }[acc]
    c = (
        torch.randint(-1000, 1000, (m, n), dtype=torch.int32)
        if acc == "s32"
        else torch.randn(m, n).to(acc_dtype)
    )
    view = BIT_VIEWS[bits]
    na, nb = m // 8 * (k // width), k // width
    fa = pack_fragment(a, lambda lane, r, e: index_a(lane, r, e, m, bits), na, bits, view)
    fb = pack_fragment(b, lambda lane, r, e: index_b(lane, r, e, bits), nb, bits, view)
    elements = m * n // 32
    if acc == "f16":
        fc = pack_fragment(
            c, lambda lane, r, e: index_c(lane, 2 * r + e), elements // 2, 16, torch.int16
        )
    else:
        fc = torch.stack(
            [torch.stack([c[index_c(lane, i)] for lane in range(32)]) for i in range(elements)]
        )
    out = torch.zeros_like(fc)
    wide_ab, wide_c = bits == 64, acc == "f64"

    def registers(name, first, count, wide):
        return [f"%{'rd' if wide else 'r'}{first + i}" for i in range(count)], 8 if wide else 4

    body = ""
    groups = []
    for base, first, count, wide in (
        ("%a0", 10, na, wide_ab),
        ("%a1", 30, nb, wide_ab),
        ("%a2", 40, len(fc), wide_c),
    ):
        names, size = registers(base, first, count, wide)
        body += lane_address("%rd0", base, size)
        for i, name in enumerate(names):
            body += f"ld.global.b{8 * size} {name}, [%rd0+{i * 32 * size}];\n"
        groups.append("{" + ", ".join(names) + "}")
    d, size = registers("d", 60, len(fc), wide_c)
    body += f"mma.sync.aligned.{shape}.row.col.{acc}.{a_type}.{b_type}.{acc} " \
            f"{{{', '.join(d)}}}, {groups[0]}, {groups[1]}, {groups[2]};\n"  # fmt: skip
    body += lane_address("%rd0", "%a3", size)
    for i, name in enumerate(d):
        body += f"st.global.b{8 * size} [%rd0+{i * 32 * size}], {name};\n"
    run(body, (fa, fb, fc, out), arch="sm_90a")
    got = torch.zeros(m, n, dtype=torch.float64)
    flat = (
        out.view(torch.float16).reshape(-1, 32, 2).permute(0, 2, 1).reshape(-1, 32)
        if acc == "f16"
        else out
    )
    for i, lane in itertools.product(range(elements), range(32)):
        got[index_c(lane, i)] = flat[i, lane].double()
    want = c.double() + values(a) @ values(b)
    if acc == "s32":
        assert torch.equal(got, want)
    elif acc == "f64":
        assert vgpu_close("fp64 mma", got, want)
    else:
        assert torch.equal(got, want.to(acc_dtype).double())  # exact, then rounded once


def test_mma_s32_wraps_or_saturates():
    a = torch.full((4, 32), 0x7F7F7F7F, dtype=torch.int32)
    c = torch.full((4, 32), 2**31 - 5, dtype=torch.int32)
    for modifier, want in (("", 2**31 - 5 + 127 * 127 * 32 - 2**32), (".satfinite", 2**31 - 1)):
        out = torch.zeros_like(c)
        body = (
            lane_address("%rd0", "%a0", 4)
            + lane_address("%rd1", "%a1", 4)
            + lane_address("%rd2", "%a2", 4)
        )
        body += "ld.global.b32 %r0, [%rd0]; ld.global.b32 %r1, [%rd1];\n"
        body += f"mma.sync.aligned.m16n8k32.row.col{modifier}.s32.s8.s8.s32 {{%r2, %r3, %r4, %r5}}, " \
                "{%r0, %r0, %r0, %r0}, {%r0, %r0}, {%r1, %r1, %r1, %r1};\n"  # fmt: skip
        body += "".join(f"st.global.b32 [%rd2+{128 * i}], %r{2 + i};\n" for i in range(4))
        run(body, (a, c, out))
        assert (out == want).all()
