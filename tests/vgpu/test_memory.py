"""Memory of the virtual GPU: spaces, widths, bounds, atomics."""

import random
from fractions import Fraction

import pytest
import torch

pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from instruction import run
from test_number import rounded, value
from trainwright import vgpu


def launch(
    body,
    args,
    *,
    parameters=".param .u64 p",
    block=32,
    grid=1,
    smem=0,
    threads=1,
    arch="sm_90a",
    **options,
):
    text = f"""
.version 9.0
.target {arch}
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry k({parameters}) {{
.reg .pred %q<4>; .reg .b32 %r<12>, %i; .reg .b64 %rd<12>, %p; .reg .b16 %h<4>;
.shared .align 4 .b32 fixed[64];
.local .align 8 .b8 mine[48];
ld.param.u64 %p, [p]; mov.u32 %i, %tid.x; mov.u32 %r11, %ctaid.x; mov.u32 %r10, %ntid.x;
mad.lo.u32 %r10, %r11, %r10, %i;
mul.wide.u32 %rd0, %r10, 4; add.s64 %rd0, %rd0, %p;
{body}
ret;
}}"""
    return (
        vgpu.Device(arch, threads=threads)
        .load_ptx(text)
        .launch("k", grid, block, args, smem=smem, **options)
    )


def i32(n):
    return torch.zeros(n, dtype=torch.int32)


@pytest.mark.parametrize(
    ("type_", "register", "want"),
    [
        ("u8", "b16", 0x00F1), ("s8", "b16", 0xFFF1), ("u8", "b32", 0xF1), ("s8", "b32", 0xFFFFFFF1),
        ("s8", "b64", 2**64 - 15),
        ("u16", "b16", 0x82F1), ("u16", "b32", 0x82F1), ("s16", "b32", 0xFFFF82F1), ("s16", "b64", 2**64 - 0x7D0F),
        ("b16", "b32", 0x82F1), ("u32", "b32", 0x937482F1), ("s32", "b64", 0xFFFFFFFF937482F1),
        ("u32", "b64", 0x937482F1),
        ("b64", "b64", 0xA5B6C7D8937482F1),
    ],
)  # fmt: skip
def test_loads_extend(type_, register, want):
    body = ".shared .align 8 .b64 place[32]; mov.u32 %r1, place; mov.u32 %r2, %tid.x; shl.b32 %r2, %r2, 3;"
    body += f"add.u32 %r1, %r1, %r2; st.shared.b64 [%r1], {{a}}; ld.shared.{type_} {{d}}, [%r1];"
    assert run(body, [("b64", [0xA5B6C7D8937482F1] * 32)], [register])[0] == [want] * 32


@pytest.mark.parametrize(("type_", "bits"), [("u8", 8), ("b16", 16), ("b32", 32)])
def test_stores_keep_the_neighbours(type_, bits):
    out = torch.full((32,), -1, dtype=torch.int64)
    launch(
        f"mul.wide.u32 %rd1, %i, 8; add.s64 %rd1, %rd1, %p; st.global.{type_} [%rd1+{bits // 8}], %r10;",
        (out,),
    )
    mask = ((1 << bits) - 1) << bits
    assert [v & (2**64 - 1) for v in out.tolist()] == [
        (2**64 - 1) & ~mask | i << bits & mask for i in range(32)
    ]


def test_vectors():
    out = torch.arange(128, dtype=torch.int32)
    body = """shl.b32 %r1, %i, 4; cvt.u64.u32 %rd1, %r1; add.s64 %rd1, %rd1, %p;
    ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1]; st.global.v4.b32 [%rd1], {%r5, %r4, %r3, %r2};
    ld.global.v2.b64 {%rd2, %rd3}, [%rd1]; st.global.v2.b64 [%rd1], {%rd3, %rd2};"""
    launch(body, (out,))
    # the words of each lane in reverse, then its halves exchanged
    assert torch.equal(
        out, torch.arange(128, dtype=torch.int32).view(32, 4)[:, [1, 0, 3, 2]].flatten()
    )


def test_generic_addresses_reach_every_space():
    out = i32(32)
    body = """
    mov.u64 %rd1, fixed; cvta.shared.u64 %rd1, %rd1; mov.u64 %rd2, mine; cvta.local.u64 %rd2, %rd2;
    shl.b32 %r1, %i, 2; cvt.u64.u32 %rd3, %r1; add.s64 %rd1, %rd1, %rd3;
    st.u32 [%rd1], %i; st.u32 [%rd2+8], 100; bar.sync 0;
    xor.b32 %r2, %r1, 124; mov.u32 %r3, fixed; add.u32 %r3, %r3, %r2; ld.shared.u32 %r4, [%r3];
    cvta.to.local.u64 %rd4, %rd2; ld.local.u32 %r5, [%rd4+8]; add.u32 %r4, %r4, %r5;
    // half of the lanes read shared, half global memory, in one instruction
    st.global.u32 [%rd0], 7; and.b32 %r6, %i, 1; setp.eq.u32 %q0, %r6, 0; selp.b64 %rd5, %rd1, %rd0, %q0;
    ld.u32 %r7, [%rd5]; mad.lo.u32 %r4, %r7, 1000, %r4;
    isspacep.shared %q1, %rd1; isspacep.local %q2, %rd2; isspacep.global %q3, %rd0;
    and.pred %q1, %q1, %q2; and.pred %q1, %q1, %q3;
    isspacep.shared %q2, %rd0; not.pred %q2, %q2; and.pred %q1, %q1, %q2; @!%q1 mov.u32 %r4, 0;
    st.global.u32 [%rd0], %r4;"""
    launch(body, (out,))
    assert out.tolist() == [31 - i + 100 + 1000 * (7 if i % 2 else i) for i in range(32)]


def test_dynamic_shared_memory_starts_where_swizzles_expect_it():
    out = i32(32)
    launch(
        "mov.u32 %r1, dynamic; st.shared.u32 [%r1+124], 5; and.b32 %r1, %r1, 1023; st.global.u32 [%rd0], %r1;",
        (out,),
        smem=128,
    )
    assert out.tolist() == [0] * 32


# ---- faults


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.u32 [%rd0+4], %i;", "write of 4 bytes .* past the end of an allocation of 128 bytes"),
        ("ld.global.u32 %r1, [%rd0+-4];", "read of 4 bytes .* 4 bytes before an allocation of 128 bytes"),
        ("ld.global.v2.u32 {%r1, %r2}, [%p+124];", "misaligned read of 8 bytes"),
        ("add.s64 %p, %p, 120; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%p];", "misaligned read of 16 bytes"),
        ("ld.global.u16 %h1, [%rd0+1];", "misaligned read of 2 bytes"),
        ("mov.u64 %rd1, 0; ld.global.u32 %r1, [%rd1+16];", "a null pointer"),
        ("atom.global.add.u32 %r1, [%p+128], 1;", "global memory: atomic of 4 bytes"),
        ("mov.u32 %r1, fixed; ld.shared.u32 %r2, [%r1+256];", "shared memory: read .* out of bounds: the block has"),
        ("ld.shared.u32 %r2, [16];", "shared memory: read of 4 bytes at 0x10 is out of bounds"),
        ("mov.u32 %r1, fixed; st.shared.u32 [%r1+2], %i;", "shared memory: misaligned write"),
        ("mov.u64 %rd1, mine; ld.local.u32 %r1, [%rd1+48];", "local memory: .* offset 0x30 is out .* a thread has 48"),
        ("st.shared::cluster.u32 [0x05000400], %i;", "the cluster has 1 block"),
        ("ld.u64 %rd1, [%p+124];", "misaligned read of 8 bytes"),
    ],
)  # fmt: skip
def test_memory_faults(body, message):
    with pytest.raises(vgpu.MemoryFault, match=message) as error:
        launch(body, (i32(32),))
    assert error.value.ptx_line > 0 and error.value.block == (0, 0, 0) and error.value.lane >= 0


def test_the_first_lane_that_is_wrong_is_named():
    with pytest.raises(vgpu.MemoryFault) as error:
        launch("setp.ge.u32 %q0, %i, 20; @%q0 st.global.u32 [%rd0+4096], %i;", (i32(32),), block=64)
    assert (error.value.warp, error.value.lane) == (0, 20)


def test_constants_and_parameters_are_read_only():
    text = """
.version 9.0
.target sm_80
.address_size 64
.const .align 4 .u32 table[4] = {1, 2, 3, 4};
.visible .entry k(.param .u64 p) {
.reg .b64 %rd<3>;
mov.u64 %rd1, table; cvta.const.u64 %rd1, %rd1; st.u32 [%rd1], 5; ret;
}"""
    module = vgpu.Device("sm_80").load_ptx(text)
    with pytest.raises(vgpu.MemoryFault, match="read-only"):
        module.launch("k", 1, 1, (0,))
    for address in ("mov.b64 %rd1, p;", "mov.b32 %r1, p; cvt.u64.u32 %rd1, %r1;"):  # Triton 3.9
        body = (
            address + "cvta.param.u64 %rd1, %rd1; ld.u64 %rd2, [%rd1]; setp.eq.u64 %q0, %rd2, %p;"
        )
        body += "@%q0 st.u32 [%rd1], 1;"
        with pytest.raises(vgpu.MemoryFault, match="read-only"):
            launch(body, (i32(32),))


def test_trap_and_assertions():
    with pytest.raises(vgpu.TrapError, match="trap") as error:
        launch("setp.eq.u32 %q0, %i, 9; @%q0 trap;", (i32(32),))
    assert error.value.lane == 9
    text = """
.version 9.0
.target sm_80
.address_size 64
.extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
.global .align 1 .b8 text[6] = {110, 32, 62, 32, 51, 0};
.visible .entry k() {
.reg .pred %p; .reg .b32 %r; .reg .b64 %rd;
mov.u32 %r, %tid.x; mov.u64 %rd, text; setp.ne.u32 %p, %r, 3; @%p bra DONE;
{ .param .b64 a; st.param.b64 [a], %rd; .param .b32 c; st.param.b32 [c], %r; .param .b64 f; st.param.b64 [f], 0;
call.uni __assertfail, (a, a, c, a, f); }
DONE: ret;
}"""
    with pytest.raises(
        vgpu.TrapError, match="assertion failed: n > 3 \\(n > 3:3, n > 3\\)"
    ) as error:
        vgpu.Device("sm_80").load_ptx(text).launch("k", 1, 32)
    assert error.value.lane == 3


# ---- atomics


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(
    ("op", "reference"),
    [
        ("add.u32", lambda old, b: old + b), ("add.u64", lambda old, b: old + b), ("min.s32", min), ("max.u32", max),
        ("min.u64", min), ("max.s64", max), ("and.b32", lambda old, b: old & b), ("or.b32", lambda old, b: old | b),
        ("xor.b64", lambda old, b: old ^ b), ("exch.b32", lambda old, b: b), ("exch.b64", lambda old, b: b),
        ("inc.u32", lambda old, b: 0 if old >= b else old + 1),
        ("dec.u32", lambda old, b: b if old == 0 or old > b else old - 1),
    ],
)  # fmt: skip
def test_atomics_return_the_old_value(op, reference, space):
    bits = op[-2:]
    b = [random.Random(i).randrange(1000) for i in range(32)]
    place = torch.tensor([500], dtype=torch.int64)
    address = "%rd8" if space == "global" else "counter"
    text = f"""
.version 9.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 place, .param .u64 out) {{
.reg .b64 %rd<10>; .reg .b32 %r<4>; .shared .align 8 .b8 counter[8];
ld.param.u64 %rd1, [in]; ld.param.u64 %rd8, [place]; ld.param.u64 %rd3, [out];
mov.u32 %r1, %tid.x; mul.wide.u32 %rd4, %r1, 8;
add.s64 %rd1, %rd1, %rd4; add.s64 %rd3, %rd3, %rd4;
mov.u64 %rd7, 500; st.shared.b64 [counter], %rd7; bar.sync 0;
ld.global.b{bits} %{"r2" if bits == "32" else "rd5"}, [%rd1];
atom.{space}.{op} %{"r3" if bits == "32" else "rd6"}, [{address}], %{"r2" if bits == "32" else "rd5"};
st.global.b{bits} [%rd3], %{"r3" if bits == "32" else "rd6"}; ret;
}}"""
    out = torch.zeros(32, dtype=torch.int64)
    vgpu.Device("sm_80").load_ptx(text).launch("k", 1, 32, (torch.tensor(b), place, out))
    old = 500
    for x, got in zip(b, out.tolist()):
        assert got == old
        old = reference(old, x)
    if space == "global":
        assert place.item() == old


def test_compare_and_swap():
    place, out = i32(1), i32(32)
    body = """atom.global.cas.b32 %r1, [%p], %i, 77;
    mul.wide.u32 %rd1, %i, 4; ld.param.u64 %rd2, [q]; add.s64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r1;"""
    launch(body, (place, out), parameters=".param .u64 p, .param .u64 q")
    assert place.item() == 77 and out.tolist() == [0] + [77] * 31


def test_float_atomics():
    x = torch.tensor([1.5, 2.0**-140])
    body = "and.b32 %r1, %i, 1; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd1, %p;"
    body += "red.global.add.f32 [%rd1], 0f00000001;"
    launch(body, (x,))
    # In global memory subnormals are flushed, in shared memory not.
    assert x.tolist() == [1.5, 0.0]
    y = torch.zeros(1)
    body = (
        "st.shared.u32 [fixed], 0; bar.sync 0; red.shared.add.f32 [fixed], 0f00000001; bar.sync 0;"
    )
    body += "ld.shared.u32 %r1, [fixed]; st.global.u32 [%p], %r1;"
    launch(body, (y,))
    assert y.view(torch.int32).item() == 32
    z = torch.zeros(1, dtype=torch.float64)
    launch("mov.f64 %rd1, 0d3FE0000000000000; red.global.add.f64 [%p], %rd1;", (z,))
    assert z.item() == 16.0


@pytest.mark.parametrize(("fmt", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_sixteen_bit_and_vector_atomics(fmt, dtype):
    x = torch.zeros(8, dtype=dtype)
    one = {"f16": 0x3C00, "bf16": 0x3F80}[fmt]
    launch(f"mov.b16 %h1, {one}; atom.global.add.noftz.{fmt} %h2, [%p], %h1;"
           f"mov.b32 %r1, {{%h1, %h1}}; red.global.add.noftz.{fmt}x2 [%p+4], %r1;", (x,))  # fmt: skip
    assert x.tolist() == [32, 0, 32, 32, 0, 0, 0, 0]
    y = torch.zeros(4)
    launch("red.global.add.v4.f32 [%p], {0f3F800000, 0f40000000, 0f40400000, 0f40800000};", (y,))
    assert y.tolist() == [32, 64, 96, 128]


@pytest.mark.parametrize("threads", [1, 4])
def test_atomics_between_blocks(threads):
    place = torch.zeros(2, dtype=torch.int32)
    launch(
        "red.global.add.u32 [%p], 1; red.global.max.u32 [%p+4], %r10;",
        (place,),
        grid=50,
        block=128,
        threads=threads,
    )
    assert place.tolist() == [6400, 6399]


def test_f32_sums_are_rounded_like_the_ISA_says():
    rng = random.Random(0)
    values = [rng.getrandbits(31) % 0x7F000000 for _ in range(32)]
    total = torch.zeros(1)
    text_args = torch.tensor(values, dtype=torch.int32)
    launch("ld.global.b32 %r1, [%rd0]; ld.param.u64 %rd1, [q]; red.global.add.f32 [%rd1], %r1;", (text_args, total),
           parameters=".param .u64 p, .param .u64 q")  # fmt: skip
    want = Fraction(0)
    for v in values:
        term = value("f32", v) if v >= 0x00800000 else Fraction(0)
        want = value("f32", rounded("f32", "rn", want + term))
    assert Fraction(total.item()) == want
