"""Tensor instructions one by one, on hand-written PTX, against models written from the PTX ISA's tables."""

import itertools

import numpy as np
import pytest
import torch

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

pytestmark = pytest.mark.timeout(60)

HEADER = ".version 8.8\n.target {arch}\n.address_size 64\n"


def run(body, args, *, arch="sm_90a", threads=32, declare="", smem=0, check=True):
    """Launches one block of a kernel `k` whose arguments are pointers %a0, %a1, ... and whose lane is %lane."""
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(args)))
    loads = "\n".join(f"ld.param.u64 %a{i}, [p{i}];" for i in range(len(args)))
    text = (
        HEADER.format(arch=arch)
        + f"""
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k({parameters})
{{
.reg .b64 %a<{len(args) + 1}>, %rd<100>;
.reg .b32 %r<600>, %lane;
.reg .b16 %h<40>;
.reg .pred %p<20>;
{declare}
{loads}
mov.u32 %lane, %tid.x;
{body}
ret;
}}
"""
    )
    return (
        vgpu.Device(arch, threads=1, check=check)
        .load_ptx(text)
        .launch("k", 1, threads, args, smem=smem)
    )


def lane_address(to, base, bytes_per_lane):
    return f"mad.wide.u32 {to}, %lane, {bytes_per_lane}, {base};\n"


# ---- mma.sync: every lane's registers are given and read as they are

TYPES = {
    "f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8, "f64": torch.float64,
}  # fmt: skip
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f64": 64}
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


def index_a(lane, register, element, m, bits):
    """(row, column) of an element of A, by the tables of the ISA (sections "Matrix Fragments for mma")."""
    g, t, per = lane // 4, lane % 4, max(32 // bits, 1)
    row = g + (8 * (register % 2) if m == 16 else 0)
    group = register // 2 if m == 16 else register
    return row, group * 4 * per + t * per + element


def index_b(lane, register, element, bits):
    g, t, per = lane // 4, lane % 4, max(32 // bits, 1)
    return register * 4 * per + t * per + element, g


def index_c(lane, i):
    """i-th element of a lane's accumulator."""
    return lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2


def random_matrix(kind, *shape):
    if kind in ("s8", "u8"):
        low, high = (-128, 128) if kind == "s8" else (0, 256)
        return torch.randint(low, high, shape, dtype=torch.int32).to(TYPES[kind])
    return torch.randn(shape).to(TYPES[kind])


def values(matrix):
    """As float64; tf32 drops the low 13 bits of a float."""
    if matrix.dtype == torch.float32:
        matrix = (matrix.view(torch.int32) & -8192).view(torch.float32)
    return matrix.double()


def pack_fragment(matrix, index, registers, bits, bit_view):
    """Registers (registers, 32 lanes) of a matrix."""
    raw = matrix.view(bit_view).numpy()
    per = max(32 // bits, 1)
    out = np.zeros((registers, 32, per), raw.dtype)
    for r, lane, e in itertools.product(range(registers), range(32), range(per)):
        out[r, lane, e] = raw[index(lane, r, e)]
    return torch.from_numpy(
        out.reshape(registers, -1).view(np.int64 if bits == 64 else np.int32).copy()
    )


BIT_VIEWS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


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
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
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


FOUR = "{%r0, %r1, %r2, %r3}"


@pytest.mark.parametrize("text", [
    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {FOUR}, {FOUR}, {{%r8, %r9}}, {FOUR};",
    f"mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {FOUR}, {FOUR}, {{%r8, %r9}}, {FOUR};",
    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {FOUR}, {{%r4, %r5}}, {{%r8, %r9}}, {FOUR};",
    f"mma.sync.aligned.m32n8k16.row.col.f32.f16.f16.f32 {FOUR}, {FOUR}, {{%r8, %r9}}, {FOUR};",
    "mma.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 {%r0, %r1, %r2, %r3}, "
    "{%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, {%r0, %r1, %r2, %r3}, {%r0, %r1, %r2, %r3};",
    "mma.sync.aligned.m8n8k8.row.col.f16.f16.f16.f16 {%r0}, {%r1}, {%r2}, {%r3};",
    "mma.sync.aligned.m16n8k0.row.col.f16.f16.f16.f16 {%r0, %r1}, {%r1}, {%r2}, {%r0, %r1};",
    "mma.sync.aligned;",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16;",
    "wgmma.mma_async.sync.aligned.m64n264k16.f32.bf16.bf16 {%r0}, %rd0, %rd1, %p0, 1, 1, 0, 0;",
    "cp.async.bulk.tensor;",
    "mbarrier.try_wait.parity.b64;",
    "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r0, %r1, %r2}, [%r3];",
    "cp.async.cg.shared.global [%r0], [%rd0], 8;",
    "setmaxnreg.inc.sync.aligned.u32 250;",
    "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%r0, %r1, %r2, %r3, %r4, %r5}, %rd0, %rd1, 1, 1, 1, 0, 0;",
    "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%rd0], 5, %r0;",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd0, {%r1}], [%r2];",
])  # fmt: skip
def test_what_does_not_exist_is_refused_before_anything_runs(text):
    with pytest.raises(vgpu.UnsupportedError, match="PTX line"):
        run(text, ())


# ---- ldmatrix, stmatrix, movmatrix


@pytest.mark.parametrize("transposed", [False, True], ids=["", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count, transposed):
    torch.manual_seed(count)
    matrices = torch.randint(-(2**15), 2**15, (4, 8, 8), dtype=torch.int16)
    order = torch.randperm(8 * count)  # where in shared memory each row lies
    fragments, back = (
        torch.zeros(count, 32, dtype=torch.int32),
        torch.zeros(32, 8, dtype=torch.int16),
    )
    rows = torch.zeros(32, 8, dtype=torch.int16)
    rows[order] = matrices[:count].reshape(-1, 8)
    where = torch.zeros(
        32, dtype=torch.int32
    )  # beyond the matrices' lanes the address must not matter
    where[: 8 * count] = (order * 16).int()
    where[8 * count :] = 1 << 22
    trans = ".trans" if transposed else ""
    names = "{" + ", ".join(f"%r{i}" for i in range(4)[:count]) + "}"
    body = lane_address("%rd0", "%a0", 16) + "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd0];\n"
    body += "mov.u32 %r20, dynamic; shl.b32 %r21, %lane, 4; add.u32 %r21, %r20, %r21;\n"
    body += "st.shared.v4.b32 [%r21], {%r10, %r11, %r12, %r13}; bar.warp.sync -1;\n"
    body += (
        lane_address("%rd1", "%a1", 4) + "ld.global.b32 %r22, [%rd1]; add.u32 %r22, %r22, %r20;\n"
    )
    body += f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {names}, [%r22];\n"
    body += lane_address("%rd2", "%a2", 4)
    body += "".join(f"st.global.b32 [%rd2+{128 * i}], %r{i};\n" for i in range(count))
    # back again with stmatrix, to a second copy in the same places
    body += "bar.warp.sync -1; mov.u32 %r23, 0; st.shared.v4.b32 [%r21], {%r23, %r23, %r23, %r23}; bar.warp.sync -1;\n"
    body += f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r22], {names}; bar.warp.sync -1;\n"
    body += "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r21];\n"
    body += lane_address("%rd3", "%a3", 16) + "st.global.v4.b32 [%rd3], {%r10, %r11, %r12, %r13};\n"
    run(body, (rows, where, fragments, back), smem=512)
    got = fragments.view(torch.int16).reshape(count, 32, 2)
    for j, lane, e in itertools.product(range(count), range(32), range(2)):
        row, column = lane // 4, 2 * (lane % 4) + e
        assert got[j, lane, e] == (
            matrices[j, column, row] if transposed else matrices[j, row, column]
        )
    assert torch.equal(back[: 8 * count], rows[: 8 * count])


def test_movmatrix():
    m = torch.randint(-(2**15), 2**15, (8, 8), dtype=torch.int16)
    out = torch.zeros_like(m)
    body = lane_address("%rd0", "%a0", 4) + lane_address("%rd1", "%a1", 4)
    body += "ld.global.b32 %r0, [%rd0];\nmovmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0;\nst.global.b32 [%rd1], %r1;\n"
    run(body, (m, out))
    assert torch.equal(out, m.T)


# ---- cp.async

COPY = """
mov.u32 %r0, dynamic; mad.lo.u32 %r1, %lane, 16, %r0;
mov.u32 %r2, 0x11111111; st.shared.v4.b32 [%r1], {{%r2, %r2, %r2, %r2}};
mad.wide.u32 %rd0, %lane, {bytes}, %a0;
{copy}
cp.async.commit_group;
{wait}
ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r1];
mad.wide.u32 %rd1, %lane, 16, %a1;
st.global.v4.b32 [%rd1], {{%r4, %r5, %r6, %r7}};
"""


@pytest.mark.parametrize("bytes_", [4, 8, 16])
@pytest.mark.parametrize("how", ["plain", "source size", "ignored"])
def test_cp_async(bytes_, how):
    source = torch.randint(0, 256, (32 * bytes_,), dtype=torch.uint8)
    out = torch.zeros(32, 16, dtype=torch.uint8)
    sizes = [bytes_] * 32
    copy = f"cp.async.ca.shared.global [%r1], [%rd0], {bytes_}"
    if how == "source size":
        sizes = [lane % (bytes_ + 1) for lane in range(32)]
        copy = f"rem.u32 %r3, %lane, {bytes_ + 1}; {copy}, %r3"
    elif how == "ignored":
        sizes = [bytes_ if lane % 3 else 0 for lane in range(32)]
        copy = f"rem.u32 %r3, %lane, 3; setp.eq.u32 %p0, %r3, 0; {copy}, %p0"
    run(
        COPY.format(bytes=bytes_, copy=copy + ";", wait="cp.async.wait_group 0;"),
        (source, out),
        smem=512,
    )
    for lane in range(32):
        want = torch.full((16,), 0x11, dtype=torch.uint8)
        want[:bytes_] = 0
        want[: sizes[lane]] = source[lane * bytes_ :][: sizes[lane]]
        assert torch.equal(out[lane], want), lane


def test_cp_async_of_size_zero_does_not_touch_its_source():
    out = torch.zeros(32, 16, dtype=torch.uint8)
    copy = "mov.u64 %rd0, 0; mov.u32 %r3, 0; cp.async.cg.shared.global [%r1], [%rd0], 16, %r3;"
    run(COPY.format(bytes=16, copy=copy, wait="cp.async.wait_all;"), (out, out), smem=512)
    assert (out == 0).all()


def test_cp_async_shows_a_missing_wait():
    source, out = torch.arange(512).to(torch.uint8), torch.zeros(32, 16, dtype=torch.uint8)
    copy = "cp.async.cg.shared.global [%r1], [%rd0], 16;"
    body = COPY.format(bytes=16, copy=copy, wait="cp.async.wait_group 1;")
    run(body, (source, out), smem=512, check=False)
    assert (out == 0x11).all()
    with pytest.raises(vgpu.AsyncError, match=r"cp\.async"):
        run(body, (source, out), smem=512)


def test_cp_async_groups_are_counted_per_thread():
    """Odd lanes commit an empty group more: for them wait_group 1 reaches the copy."""
    source, out = torch.arange(512).to(torch.uint8), torch.zeros(32, 16, dtype=torch.uint8)
    wait = "and.b32 %r9, %lane, 1; setp.eq.u32 %p0, %r9, 1; @%p0 cp.async.commit_group; cp.async.wait_group 1;"
    copy = "cp.async.cg.shared.global [%r1], [%rd0], 16;"
    run(COPY.format(bytes=16, copy=copy, wait=wait), (source, out), smem=512, check=False)
    assert torch.equal(out[1::2], source.reshape(32, 16)[1::2]) and (out[::2] == 0x11).all()


@pytest.mark.parametrize("copy, match", [
    ("add.u64 %rd0, %rd0, 496; cp.async.cg.shared.global [%r1], [%rd0], 16;", "out of bounds|past the end"),
    ("add.u64 %rd0, %rd0, 8; cp.async.cg.shared.global [%r1], [%rd0], 16;", "misaligned"),
    ("add.u32 %r1, %r1, 512; cp.async.cg.shared.global [%r1], [%rd0], 16;", "shared memory"),
    ("mov.u32 %r3, 17; cp.async.cg.shared.global [%r1], [%rd0], 16, %r3;", "source size 17"),
])  # fmt: skip
def test_cp_async_faults(copy, match):
    source, out = torch.zeros(512, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(vgpu.MemoryFault, match=match):
        run(COPY.format(bytes=16, copy=copy, wait=""), (source, out), smem=512)


# ---- mbarrier

ONE = "setp.eq.u32 %p9, %lane, 0;\nmov.u32 %r0, dynamic;\n"


def barrier_run(steps, threads=32):
    """Steps of lane 0 (`!step`: of all lanes) on the mbarrier at %r0; out[i] collects the i-th `-> register`."""
    out = torch.full((16,), -1, dtype=torch.int32)
    body, slot = ONE, 0
    for step in steps:
        guard = "" if step.startswith("!") else "@%p9 "
        text, _, result = step.lstrip("!").partition(" -> ")
        body += "".join(f"{guard}{part.strip()};\n" for part in text.split(";"))
        if result:
            if result.startswith("%p"):
                body += f"selp.u32 %r99, 1, 0, {result};\n"
                result = "%r99"
            body += f"@%p9 st.global.b32 [%a0+{4 * slot}], {result};\n"
            slot += 1
    run(body, (out,), smem=64, threads=threads)
    return out[:slot].tolist()


def test_mbarrier_phases_by_parity():
    test = "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r0], {}; -> %p1".replace("; ->", " ->")
    got = barrier_run([
        "mbarrier.init.shared::cta.b64 [%r0], 2",
        test.format(1), test.format(0),
        "mbarrier.arrive.shared::cta.b64 %rd1, [%r0]", test.format(0),
        "mbarrier.arrive.shared::cta.b64 _, [%r0]", test.format(0), test.format(1),
        "mbarrier.arrive.shared::cta.b64 _, [%r0], 2", test.format(1),
    ])  # fmt: skip
    assert got == [1, 0, 0, 1, 0, 1]


def test_mbarrier_tokens_and_pending_count():
    got = barrier_run([
        "mbarrier.init.shared::cta.b64 [%r0], 3",
        "mbarrier.arrive.shared::cta.b64 %rd1, [%r0]",
        "mbarrier.pending_count.b64 %r1, %rd1 -> %r1",
        "mbarrier.test_wait.shared::cta.b64 %p1, [%r0], %rd1 -> %p1",
        "mbarrier.arrive.noComplete.shared::cta.b64 %rd2, [%r0], 1",
        "mbarrier.pending_count.b64 %r1, %rd2 -> %r1",
        "mbarrier.arrive.shared::cta.b64 %rd2, [%r0]",
        "mbarrier.test_wait.shared::cta.b64 %p1, [%r0], %rd1 -> %p1",
    ])  # fmt: skip
    assert got == [3, 0, 2, 1]


def test_mbarrier_every_active_lane_arrives():
    got = barrier_run([
        "mbarrier.init.shared::cta.b64 [%r0], 32",
        "!bar.warp.sync -1",
        "!mbarrier.arrive.shared::cta.b64 _, [%r0]",
        "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r0], 0 -> %p1",
    ])  # fmt: skip
    assert got == [1]


def test_mbarrier_bytes_hold_a_phase_open_and_may_come_first():
    test = "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r0], {} -> %p1"
    got = barrier_run([
        "mbarrier.init.shared::cta.b64 [%r0], 1",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0], 64", test.format(0),
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r0], 48", test.format(0),
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r0], 16", test.format(0),
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r0], 32",  # before it is expected
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r0], 32", test.format(1),
        "mbarrier.arrive.shared::cta.b64 _, [%r0]", test.format(1),
    ])  # fmt: skip
    assert got == [0, 0, 1, 0, 1]


def test_mbarrier_arrive_drop_lowers_later_phases():
    test = "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r0], {} -> %p1"
    got = barrier_run([
        "mbarrier.init.shared::cta.b64 [%r0], 2",
        "mbarrier.arrive_drop.shared::cta.b64 _, [%r0]", test.format(0),
        "mbarrier.arrive.shared::cta.b64 _, [%r0]", test.format(0),
        "mbarrier.arrive.shared::cta.b64 _, [%r0]", test.format(1),
    ])  # fmt: skip
    assert got == [0, 1, 1]


INIT = "mbarrier.init.shared::cta.b64 [%r0], 1"


@pytest.mark.parametrize("steps, error, match", [
    (["mbarrier.arrive.shared::cta.b64 _, [%r0]"], "BarrierError", "no mbarrier"),
    (["mbarrier.init.shared::cta.b64 [%r0], 0"], "BarrierError", "count 0"),
    ([INIT, "mbarrier.arrive.shared::cta.b64 _, [%r0], 2"], "BarrierError", "more arrivals"),
    ([INIT, "mbarrier.inval.shared::cta.b64 [%r0]",
      "mbarrier.arrive.shared::cta.b64 _, [%r0]"], "BarrierError", "no mbarrier"),
    ([INIT, "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r0], 1048576"], "BarrierError",
     "transaction count"),
    ([INIT, "mbarrier.arrive.noComplete.shared::cta.b64 %rd1, [%r0], 1"], "BarrierError",
     "noComplete"),
    (["mbarrier.init.shared::cta.b64 [%r0+4], 1"], "MemoryFault", "misaligned"),
    ([INIT,
      "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r0], 0"], "DeadlockError", "0 of 1 arrivals"),
])  # fmt: skip
def test_mbarrier_faults(steps, error, match):
    with pytest.raises(getattr(vgpu, error), match=match):
        barrier_run(steps)


# ---- wgmma: operands in shared memory, laid out by an independent formula


def swizzled(address, width):
    return address ^ (address // 128 % (width // 16)) * 16


def k_major_address(r, byte, width, lbo, sbo):
    """Of byte `byte` (0..31) of row r of an operand; width 16: no swizzle."""
    if width == 16:
        return r % 8 * 16 + r // 8 * sbo + byte // 16 * lbo + byte % 16
    return r % 8 * width + r // 8 * sbo + byte


def mn_major_address(mn, k, width, lbo, sbo):
    if width == 16:
        return mn % 8 * 2 + mn // 8 * sbo + k % 8 * 16 + k // 8 * lbo
    per = width // 2
    return mn % per * 2 + mn // per * lbo + k % 8 * width + k // 8 * sbo


def fill_operand(shared, start, matrix, major, width, lbo, sbo):
    """Writes matrix (mn, k) into the bytes of shared memory that a descriptor of this layout reads."""
    raw = (
        matrix.contiguous().view(torch.uint8).numpy().reshape(matrix.shape[0], matrix.shape[1], -1)
    )
    size = raw.shape[2]
    for mn, k in np.ndindex(raw.shape[:2]):
        at = (
            k_major_address(mn, k * size, width, lbo, sbo)
            if major == "k"
            else mn_major_address(mn, k, width, lbo, sbo)
        )
        at = swizzled(start + at, width)
        shared[at : at + size] = raw[mn, k]


def descriptor(start, width, lbo, sbo):
    layout = {16: 0, 128: 1, 64: 2, 32: 3}[width]
    return (start >> 4) | (lbo >> 4) << 16 | (sbo >> 4) << 32 | layout << 62


BASE = 1024  # shared address of the dynamic array
WGMMA = [
    # types, n, (major, width) of A (None: registers), of B, negated, accumulate
    ("f32.bf16.bf16", 64, ("k", 128), ("k", 128), 1, True),
    ("f32.f16.f16", 8, ("k", 64), ("k", 32), 1, False),
    ("f32.f16.f16", 256, ("k", 32), ("k", 64), -1, True),
    ("f16.f16.f16", 24, ("k", 128), ("k", 128), 1, True),
    ("f32.bf16.bf16", 128, ("mn", 128), ("mn", 128), 1, True),
    ("f32.f16.f16", 64, ("mn", 64), ("mn", 32), 1, True),
    ("f32.f16.f16", 32, ("mn", 32), ("mn", 64), -1, False),
    ("f32.bf16.bf16", 64, ("k", 16), ("k", 16), 1, True),
    ("f32.bf16.bf16", 32, ("mn", 16), ("mn", 16), 1, True),
    ("f32.bf16.bf16", 64, None, ("k", 128), 1, True),
    ("f32.bf16.bf16", 64, None, ("mn", 128), 1, True),
    ("f32.tf32.tf32", 40, ("k", 128), ("k", 64), 1, True),
    ("f32.e4m3.e5m2", 64, ("k", 128), ("k", 128), 1, True),
    ("f32.e5m2.e5m2", 16, None, ("k", 32), 1, False),
    ("s32.s8.s8", 64, ("k", 64), ("k", 128), None, True),
    ("s32.u8.s8", 48, None, ("k", 128), None, True),
]  # fmt: skip


@pytest.mark.parametrize("types, n, a_layout, b_layout, scale, accumulate", WGMMA)
def test_wgmma(types, n, a_layout, b_layout, scale, accumulate):
    torch.manual_seed(n)
    acc, a_type, b_type = types.split(".")
    size = BITS[a_type] // 8
    k = 32 // size
    a, b = random_matrix(a_type, 64, k), random_matrix(b_type, n, k)
    acc_dtype = {"f32": torch.float32, "f16": torch.float16, "s32": torch.int32}[acc]
    c = (
        torch.randint(-99, 99, (64, n), dtype=torch.int32)
        if acc == "s32"
        else torch.randn(64, n).to(acc_dtype)
    )
    shared = np.zeros(BASE + 65536, np.uint8)

    def place(start, matrix, layout):
        major, width = layout
        mn = matrix.shape[0]
        if major == "k":
            lbo, sbo = (8 * mn * 2, 128) if width == 16 else (16, 8 * width)
        elif width == 16:
            lbo, sbo = mn // 8 * 128, 128
        else:
            lbo = (
                2 * 8 * width
            )  # between lines of `width` bytes along mn: two groups of 8 k in between
            sbo = 8 * width
        fill_operand(shared, start, matrix, major, width, lbo, sbo)
        return descriptor(start, width, lbo, sbo)

    at_a, at_b = BASE + 1024, BASE + 32768
    da = place(at_a, a, a_layout) if a_layout else 0
    db = place(at_b, b, b_layout)
    per = n // 8 * (2 if acc == "f16" else 4)  # registers of a thread
    flat = torch.zeros(
        128, n // 2, dtype=acc_dtype
    )  # accumulator elements of each thread, in order
    where = {}
    for thread, i in itertools.product(range(128), range(n // 2)):
        warp, lane = divmod(thread, 32)
        row, column = index_c(lane, i % 4)
        where[thread, i] = (16 * warp + row, column + i // 4 * 8)
        flat[thread, i] = c[where[thread, i]]
    fragment = torch.zeros(4, 128, dtype=torch.int32)
    if not a_layout:
        for warp in range(4):
            rows = a[16 * warp : 16 * warp + 16]
            fragment[:, 32 * warp : 32 * warp + 32] = pack_fragment(
                rows,
                lambda lane, r, e: index_a(lane, r, e, 16, 8 * size),
                4,
                8 * size,
                BIT_VIEWS[8 * size],
            )
    image = torch.from_numpy(shared[BASE:].copy())
    out = torch.zeros_like(flat)
    d = "{" + ", ".join(f"%r{100 + i}" for i in range(per)) + "}"
    operand_a = "%rd10" if a_layout else "{%r20, %r21, %r22, %r23}"
    tail = ""
    if scale is not None:
        tail += f", {scale}, 1"
    if size == 2:
        if a_layout:
            tail += f", {int(a_layout[0] == 'mn')}"
        tail += f", {int(b_layout[0] == 'mn')}"
    body = f"""
mov.u32 %r0, dynamic;
shl.b32 %r1, %lane, 4; add.u32 %r2, %r0, %r1; cvt.u64.u32 %rd1, %r1; add.u64 %rd1, %a0, %rd1;
mov.u32 %r3, 0;
fill:
ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd1];
st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
add.u32 %r2, %r2, 2048; add.u64 %rd1, %rd1, 2048; add.u32 %r3, %r3, 1;
setp.lt.u32 %p0, %r3, 32; @%p0 bra fill;
fence.proxy.async.shared::cta; bar.sync 0;
mad.wide.u32 %rd2, %lane, 4, %a1;
ld.global.b32 %r20, [%rd2]; ld.global.b32 %r21, [%rd2+512];
ld.global.b32 %r22, [%rd2+1024]; ld.global.b32 %r23, [%rd2+1536];
mad.wide.u32 %rd3, %lane, {4 * per}, %a2; mad.wide.u32 %rd4, %lane, {4 * per}, %a3;
{"".join(f"ld.global.b32 %r{100 + i}, [%rd3+{4 * i}];" for i in range(per))}
mov.u64 %rd10, {da}; mov.u64 %rd11, {db};
setp.{"eq" if accumulate else "ne"}.u32 %p1, %r3, 32;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types} {d}, {operand_a}, %rd11, %p1{tail};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{"".join(f"st.global.b32 [%rd4+{4 * i}], %r{100 + i};" for i in range(per))}
"""
    run(body, (image, fragment, flat, out), threads=128, smem=65536)
    got = torch.zeros(64, n, dtype=torch.float64)
    for (thread, i), at in where.items():
        got[at] = out[thread, i].double()
    want = (scale or 1) * (values(a) @ values(b).T)
    if accumulate:
        want += c.double()
    assert torch.equal(got, want.to(acc_dtype).double())


def test_wgmma_shows_a_missing_wait():
    """Without wait_group the accumulators keep what they were."""
    out = torch.zeros(128, 4)
    body = """
mov.u32 %r0, dynamic; and.b32 %r0, %r0, 0x3ffff; shr.u32 %r0, %r0, 4; cvt.u64.u32 %rd0, %r0;
or.b64 %rd0, %rd0, 0x800010000; mov.b32 %r1, 0f40A00000; mov.b32 %r2, %r1; mov.b32 %r3, %r1; mov.b32 %r4, %r1;
setp.ne.u32 %p1, %lane, %lane;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, %r2, %r3, %r4}, %rd0, %rd0, %p1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 1;
mad.wide.u32 %rd4, %lane, 16, %a0; st.global.v4.b32 [%rd4], {%r1, %r2, %r3, %r4};
"""
    run(body, (out,), threads=128, smem=8192, check=False)
    assert (out == 5).all()
    with pytest.raises(vgpu.UninitialisedError, match="wgmma"):
        run(body, (out,), threads=128, smem=8192)


def test_wgmma_operand_out_of_bounds():
    body = """
mov.u64 %rd0, 0x4000004000010FFF; setp.ne.u32 %p1, %lane, %lane;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, %r2, %r3, %r4}, %rd0, %rd0, %p1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""
    with pytest.raises(vgpu.MemoryFault, match="operand of wgmma"):
        run(body, (), threads=128, smem=2048)
