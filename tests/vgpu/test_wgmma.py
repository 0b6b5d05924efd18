"""wgmma, on hand-written PTX: operands in shared memory, laid out by an independent formula."""

import itertools

import numpy as np
import pytest
import torch

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from fragments import BIT_VIEWS, BITS, index_a, index_c, pack_fragment, random_matrix, run, values  # noqa: E402

pytestmark = pytest.mark.timeout(60)


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
