"""Moves of matrices and cp.async, on hand-written PTX; and what is refused before anything runs."""

import itertools

import pytest
import torch

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from fragments import lane_address, run  # noqa: E402

pytestmark = pytest.mark.timeout(60)

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
