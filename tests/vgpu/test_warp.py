"""Instructions that exchange data between lanes, and barriers between warps."""

import random

import pytest
import torch

pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from instruction import run
from trainwright import vgpu

FULL = 0xFFFFFFFF


def values(n=32, bits=32, seed=0):
    rng = random.Random(seed)
    return [rng.getrandbits(bits) for _ in range(n)]


# ---- shuffles


@pytest.mark.parametrize("width", [32, 16, 8, 2])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(mode, width):
    # c as the CUDA headers make it: the segments' mask, and the last (for up: the first) lane of a segment
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    a = values()
    for step in (0, 1, 2, 3, 7, 15, 31):
        got, inside = run(
            f"shfl.sync.{mode}.b32 {{d}}|{{e}}, {{a}}, {step}, {c}, -1;",
            [("b32", a)],
            ["b32", "pred"],
        )
        for lane in range(32):
            first = lane // width * width
            source = {
                "up": lane - step,
                "down": lane + step,
                "bfly": lane ^ step,
                "idx": first + step % width,
            }[mode]
            valid = first <= source < first + width if mode != "bfly" else source < first + width
            assert inside[lane] == valid, (lane, step)
            assert got[lane] == (a[source] if valid else a[lane]), (lane, step)


def test_shuffle_with_a_source_lane_for_each_lane():
    a, b = values(), [random.Random(3).randrange(64) for _ in range(32)]
    got = run("shfl.sync.idx.b32 {d}, {a}, {b}, 31, -1;", [("b32", a), ("b32", b)], ["b32"])[0]
    assert got == [a[x % 32] for x in b]


def test_predicated_shuffle_writes_active_lanes_only():
    a, p = values(), [i % 2 for i in range(32)]
    body = "mov.b32 {d}, 7; @{b} shfl.sync.idx.b32 {d}, {a}, 5, 31, 0xaaaaaaaa;"
    got = run(body, [("b32", a), ("pred", p)], ["b32"])[0]
    assert got == [a[5] if x else 7 for x in p]


# ---- votes


@pytest.mark.parametrize("bang", ["", "!"])
def test_vote(bang):
    patterns = [[0] * 32, [1] * 32, values(bits=1, seed=1), [1] * 31 + [0], [0] * 31 + [1]]
    for p in patterns:
        seen = [bool(x) != bool(bang) for x in p]
        for op, want in (
            ("all", all(seen)),
            ("any", any(seen)),
            ("uni", all(seen) or not any(seen)),
        ):
            got = run(f"vote.sync.{op}.pred {{d}}, {bang}{{a}}, -1;", [("pred", p)], ["pred"])[0]
            assert got == [int(want)] * 32
        got = run(f"vote.sync.ballot.b32 {{d}}, {bang}{{a}}, -1;", [("pred", p)], ["b32"])[0]
        assert got == [sum(x << i for i, x in enumerate(seen))] * 32


def test_ballot_of_a_part_of_the_warp():
    # Two groups with masks of their own, in one instruction.
    p, members = values(bits=1, seed=2), [0x0000FFFF] * 16 + [0xFFFF0000] * 16
    got = run("vote.sync.ballot.b32 {d}, {a}, {b};", [("pred", p), ("b32", members)], ["b32"])[0]
    ballot = sum(x << i for i, x in enumerate(p))
    assert got == [ballot & m for m in members]


@pytest.mark.parametrize("bits", [32, 64])
def test_match(bits):
    a = [random.Random(i).choice([3, 5, 1 << (bits - 1)]) for i in range(32)]
    got = run(f"match.any.sync.b{bits} {{d}}, {{a}}, -1;", [(f"b{bits}", a)], ["b32"])[0]
    assert got == [sum((x == y) << i for i, y in enumerate(a)) for x in a]
    for column, want in ((a, 0), ([9] * 32, FULL)):
        got, p = run(
            f"match.all.sync.b{bits} {{d}}|{{e}}, {{a}}, -1;",
            [(f"b{bits}", column)],
            ["b32", "pred"],
        )
        assert got == [want] * 32 and p == [int(want != 0)] * 32


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        ("add.u32", lambda v: sum(v)),
        ("add.s32", lambda v: sum(v)),
        ("min.u32", min),
        ("max.u32", max),
        ("min.s32", lambda v: min(v, key=lambda x: x - (x >> 31 << 32))),
        ("max.s32", lambda v: max(v, key=lambda x: x - (x >> 31 << 32))),
        ("and.b32", lambda v: v[0] & v[1] & v[2]),
        ("or.b32", lambda v: v[0] | v[1] | v[2]),
        ("xor.b32", lambda v: v[0] ^ v[1] ^ v[2]),
    ],
)
def test_redux(op, reference):
    a = values()
    if op[:3] in ("and", "or.", "xor"):  # three of the lanes, each with its bits
        members = 1 << 3 | 1 << 17 | 1 << 30
        body = "mov.b32 {d}, 0; @{b} redux.sync." + op + f" {{d}}, {{a}}, {members};"
        p = [members >> i & 1 for i in range(32)]
        got = run(body, [("b32", a), ("pred", p)], ["b32"])[0]
        want = reference([a[3], a[17], a[30]])
        assert got == [want if x else 0 for x in p]
    else:
        got = run(f"redux.sync.{op} {{d}}, {{a}}, -1;", [("b32", a)], ["b32"])[0]
        assert got == [reference(a) & FULL] * 32


def test_active_lanes_and_election():
    p = [int(i % 3 == 1) for i in range(32)]
    got = run("mov.b32 {d}, 0; @!{a} bra DONE; activemask.b32 {d}; DONE:", [("pred", p)], ["b32"])[
        0
    ]
    assert got == [0x92492492 if x else 0 for x in p]
    leader, elected = run("elect.sync {d}|{e}, -1;", [("pred", p)], ["b32", "pred"])
    assert leader == [0] * 32 and elected == [1] + [0] * 31


def test_lanes_must_be_in_their_own_mask():
    with pytest.raises(vgpu.BarrierError, match="not in its own member mask 0xfffffffe"):
        run("shfl.sync.idx.b32 {d}, {a}, 5, 31, 0xfffffffe;", [("b32", values())], ["b32"])


def test_a_named_lane_that_never_comes():
    p = [int(i < 16) for i in range(32)]
    body = "mov.b32 {d}, 0; @!{b} bra OTHER; shfl.sync.idx.b32 {d}, {a}, 5, 31, -1; bra DONE;"
    body += "OTHER: add.u32 {d}, {d}, 1; DONE:"
    with pytest.raises(vgpu.BarrierError, match="lanes 0xffff wait here for lanes 0xffff0000"):
        run(body, [("b32", values()), ("pred", p)], ["b32"])


# ---- barriers


def launch(body, block, out, *, reverse=False, smem=0, grid=1):
    text = f"""
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry k(.param .u64 out) {{
.reg .pred %p<4>; .reg .b32 %r<12>, %i, %w; .reg .b64 %rd<4>, %out;
.shared .align 4 .b32 fixed[1024];
ld.param.u64 %out, [out]; mov.u32 %i, %tid.x; shr.u32 %w, %i, 5;
mul.wide.u32 %rd0, %i, 4; add.s64 %out, %out, %rd0;
{body}
st.global.u32 [%out], %r0;
ret;
}}"""
    module = vgpu.Device("sm_90a", threads=1).load_ptx(text)
    module.launch("k", grid, block, (out,), reverse_warps=reverse, smem=smem)
    return out.tolist()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_named_barrier_hands_over(reverse):
    # Warp 0 produces and only arrives; warp 1 waits and consumes; warps 2 and 3 do not take part.
    body = """
    mov.u32 %r0, 0; setp.eq.u32 %p0, %w, 0; setp.eq.u32 %p1, %w, 1; and.b32 %r1, %i, 31; shl.b32 %r2, %r1, 2;
    mov.u32 %r3, fixed; add.u32 %r3, %r3, %r2;
    @!%p0 bra CONSUME;
    add.u32 %r4, %i, 100; st.shared.u32 [%r3], %r4; bar.arrive 3, 64; bra DONE;
    CONSUME: @!%p1 bra DONE;
    bar.sync 3, 64; ld.shared.u32 %r0, [%r3];
    DONE:"""
    out = launch(body, 128, torch.zeros(128, dtype=torch.int32), reverse=reverse)
    assert out == [0] * 32 + list(range(100, 132)) + [0] * 64


def test_barrier_reductions():
    body = """
    setp.lt.u32 %p0, %i, 70; bar.red.popc.u32 %r1, 0, %p0; bar.red.and.pred %p1, 0, %p0; bar.red.or.pred %p2, 0, !%p0;
    selp.u32 %r2, 1000, 0, %p1; selp.u32 %r3, 10000, 0, %p2; add.u32 %r0, %r1, %r2; add.u32 %r0, %r0, %r3;"""
    assert launch(body, 96, torch.zeros(96, dtype=torch.int32)) == [70 + 10000] * 96


def test_a_barrier_is_used_again_and_again():
    # Each round, warp r % 4 publishes; without the second barrier a fast warp would overwrite.
    body = """
    mov.u32 %r0, 0; mov.u32 %r1, 0;
    LOOP: and.b32 %r2, %r1, 3; setp.ne.u32 %p0, %r2, %w; @%p0 bra WAIT; st.shared.u32 [fixed], %r1;
    WAIT: bar.sync 0; ld.shared.u32 %r3, [fixed]; add.u32 %r0, %r0, %r3; barrier.sync.aligned 1;
    add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 100; @%p1 bra LOOP;"""
    for reverse in (False, True):
        assert (
            launch(body, 128, torch.zeros(128, dtype=torch.int32), reverse=reverse) == [4950] * 128
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 16;", "barrier 16 does not exist"),
        ("bar.sync 0, 33;", "thread count 33 is not a multiple of the warp size"),
        ("bar.sync 0, 256;", "waits for 256 threads, the block has 64"),
        ("bar.sync 0, 0;", "thread count of 0"),
        ("bar.sync %i;", "the lanes of the warp give different barriers"),
        ("setp.eq.u32 %p0, %w, 0; @%p0 bar.sync 1, 64; @!%p0 bar.sync 1, 32;", "others that have arrived expect 64"),
    ],
)  # fmt: skip
def test_barrier_misuse(body, message):
    with pytest.raises(vgpu.BarrierError) as error:
        launch(f"mov.u32 %r0, 0; {body}", 64, torch.zeros(64, dtype=torch.int32))
    assert message in str(error.value)


def test_barrier_sync_without_aligned_counts_lanes():
    # The halves of each warp arrive in different places.
    body = """
    mov.u32 %r0, 0; and.b32 %r1, %i, 1; setp.eq.u32 %p0, %r1, 0; @%p0 bra EVEN;
    st.shared.u32 [fixed], 41; barrier.sync 2; add.u32 %r0, %r0, 1; bra DONE;
    EVEN: barrier.sync 2; ld.shared.u32 %r0, [fixed]; add.u32 %r0, %r0, 1;
    DONE:"""
    assert launch(body, 64, torch.zeros(64, dtype=torch.int32)) == [42, 1] * 32


def test_an_aligned_barrier_under_a_guard_that_splits_the_warp():
    body = "mov.u32 %r0, 0; and.b32 %r1, %i, 31; setp.lt.u32 %p0, %r1, 7; @%p0 bar.sync 0;"
    with pytest.raises(vgpu.BarrierError, match="only lanes 0x7f of the warp's 0xffffffff execute"):
        launch(body, 64, torch.zeros(64, dtype=torch.int32))
    # A guard that is the same for the whole warp is fine.
    body = "mov.u32 %r0, 5; setp.lt.u32 %p0, %w, 1; @%p0 bar.sync 1, 32;"
    assert launch(body, 64, torch.zeros(64, dtype=torch.int32)) == [5] * 64
