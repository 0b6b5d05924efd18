"""The checker: planted faults of each kind are found and named, and correct kernels pass. Asynchronous operations:
test_checker_async.py; kernels that lost a synchronisation: test_mutants.py."""

import pytest

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from checked import assert_found, run  # noqa: E402

# name: (exception, message, body, options of run). The faulty instruction is marked with // <-.
FAULTS = {
    "uninitialised": (
        vgpu.UninitialisedError,
        "a read at 0x400, which nobody has written",
        "ld.shared.u32 %r11, [%r5]; // <-",
        {},
    ),
    "uninitialised, partly": (
        vgpu.UninitialisedError,
        "a read at 0x408, which nobody has written",
        """@%p1 st.shared.v2.u32 [%r5], {%r1, %r1};
        @%p1 ld.shared.v4.u32 {%r11, %r12, %r13, %r14}, [%r5]; // <-""",
        {},
    ),
    "read after write, another warp": (
        vgpu.RaceError,
        "a read at 0x480 races with the write of warp 1, lane 0, at PTX line .* no barrier orders them",
        """st.shared.u32 [%r6], %r1;
        xor.b32 %r8, %r6, 128;
        bar.warp.sync -1;
        @!%p2 bra wait;
        bra.uni read;
        wait: bar.warp.sync -1;
        read: nanosleep.u32 1;
        ld.shared.u32 %r11, [%r8]; // <-""",
        {},
    ),
    "write after read": (
        vgpu.RaceError,
        "a write at 0x400 races with a read by warp 0, lane 0, which nothing orders",
        """st.shared.u32 [%r6], %r1;
        bar.sync 0;
        ld.shared.u32 %r11, [%r6];
        xor.b32 %r8, %r6, 128;
        nanosleep.u32 1;
        add.u32 %r11, %r11, 1;
        @!%p2 st.shared.u32 [%r8], %r11; // <-""",
        {},
    ),
    "write after write": (
        vgpu.RaceError,
        "a write at 0x400 races with the write of warp 0",
        """and.b32 %r8, %r4, 127;
        add.u32 %r8, %r8, %r5;
        st.shared.u32 [%r8], %r1; // <-""",
        {},
    ),
    "lanes of one warp": (
        vgpu.RaceError,
        "a read at 0x404 races with the write of another lane of this warp.*no bar.warp.sync",
        """st.shared.u32 [%r6], %r1;
        xor.b32 %r8, %r6, 4;
        ld.shared.u32 %r11, [%r8]; // <-""",
        {"threads": 32},
    ),
    "lanes of one warp, write after read": (
        vgpu.RaceError,
        "races with the read of another lane of this warp",
        """st.shared.u32 [%r6], %r1;
        bar.warp.sync -1;
        ld.shared.u32 %r11, [%r6];
        xor.b32 %r8, %r6, 4;
        st.shared.u32 [%r8], %r11; // <-""",
        {"threads": 32},
    ),
    "atomic before a plain read": (
        vgpu.RaceError,
        "a read at 0x400 races with the write of warp 1",
        """@%p1 st.shared.u32 [%r5], 0;
        bar.sync 0;
        @!%p2 atom.shared.add.u32 %r11, [%r5], 1;
        @!%p2 bra end;
        nanosleep.u32 1;
        ld.shared.u32 %r11, [%r5]; // <-
        end:""",
        {},
    ),
    "half words": (
        vgpu.RaceError,
        "a read at 0x402 races",
        """shl.b32 %r8, %r1, 1;
        add.u32 %r8, %r8, %r5;
        cvt.u16.u32 %h1, %r1;
        st.shared.u16 [%r8], %h1;
        xor.b32 %r8, %r8, 2;
        ld.shared.u16 %h2, [%r8]; // <-""",
        {},
    ),
    "named barrier of other warps": (
        vgpu.RaceError,
        "races with the write of warp 0",
        """@%p2 st.shared.u32 [%r6], %r1;
        bar.sync %r2, 32;
        xor.b32 %r8, %r6, 128;
        @!%p2 ld.shared.u32 %r11, [%r8]; // <-""",
        {},
    ),
    "out of bounds, shared": (
        vgpu.MemoryFault,
        "shared memory: read of 4 bytes at 0x400000 is out of bounds",
        "mov.u32 %r8, 4194304; ld.shared.u32 %r11, [%r8]; // <-",
        {},
    ),
    "out of bounds, global": (
        vgpu.MemoryFault,
        "global memory: write of 4 bytes .* past the end of an allocation of 4096 bytes",
        "st.global.u32 [%rd5+4092], %r1; // <-",
        {},
    ),
    "misaligned vector": (
        vgpu.MemoryFault,
        "shared memory: misaligned write of 8 bytes at 0x404",
        "@%p1 st.shared.v2.u32 [%r5+4], {%r1, %r1}; // <-",
        {},
    ),
    "barrier in divergent code": (
        vgpu.BarrierError,
        "divergent: lanes 0x1 wait here",
        """@!%p3 bra other;
        bar.sync 0; // <-
        other: bar.sync 1;""",
        {},
    ),
    "barrier with two counts": (
        vgpu.BarrierError,
        "barrier 1: this warp expects 96 threads, others that have arrived expect 64",
        """@%p2 bar.sync 1, 64;
        @!%p2 bar.sync 1, 96; // <-""",
        {"threads": 128},
    ),
    "barrier that a warp skips": (
        vgpu.DeadlockError,
        "barrier 1: 32 of 64 threads have arrived",
        "@%p2 bar.sync 1, 64; // <-",
        {"threads": 96},
    ),
    "global race, written by two blocks": (
        vgpu.RaceError,
        r"a write at .* races with the write of block \(0, 0, 0\)",
        "st.global.u32 [%rd5], %r10; // <-",
        {"check": "global", "grid": 2},
    ),
    "global race, read by another block": (
        vgpu.RaceError,
        r"a read at .* races with the write of block \(0, 0, 0\)",
        """setp.eq.u32 %p4, %r10, 0;
        @%p4 st.global.u32 [%rd5], 7;
        @!%p4 ld.global.u32 %r11, [%rd5]; // <-""",
        {"check": "global", "grid": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault(name):
    assert_found(*FAULTS[name])


# The same accesses with what they need, and idioms that are no races.
CORRECT = {
    "barrier between": """st.shared.u32 [%r6], %r1;
        bar.sync 0;
        xor.b32 %r8, %r6, 128;
        ld.shared.u32 %r11, [%r8];
        bar.sync 0;
        st.shared.u32 [%r8], %r11;""",
    "warp barrier between lanes": """st.shared.u32 [%r6], %r1;
        bar.warp.sync -1;
        xor.b32 %r8, %r6, 4;
        ld.shared.u32 %r11, [%r8];
        bar.warp.sync -1;
        st.shared.u32 [%r8], %r11;""",
    "two warps write the same value": """and.b32 %r8, %r4, 127;
        add.u32 %r8, %r8, %r5;
        st.shared.u32 [%r8], %r3;""",
    "atomics": """@%p1 st.shared.u32 [%r5], 0;
        bar.sync 0;
        atom.shared.add.u32 %r11, [%r5], 1;
        bar.sync 0;
        ld.shared.u32 %r11, [%r5];""",
    "producer arrives, consumer waits": """@!%p2 bra consumer;
        st.shared.u32 [%r6], %r1;
        bar.arrive 1, 64;
        bra.uni done;
        consumer: bar.sync 1, 64;
        xor.b32 %r8, %r6, 128;
        ld.shared.u32 %r11, [%r8];
        done:""",
    "flag with fences": """@%p1 st.shared.u32 [%r5+4], 0;
        bar.sync 0;
        @!%p2 bra consumer;
        @%p1 st.shared.u32 [%r5], 5;
        membar.cta;
        @%p1 st.volatile.shared.u32 [%r5+4], 1;
        bra.uni done;
        consumer: setp.eq.u32 %p5, %r1, 0;
        again: ld.volatile.shared.u32 %r11, [%r5+4];
        setp.ne.u32 %p5, %r11, 1;
        @%p5 bra again;
        membar.cta;
        ld.shared.u32 %r12, [%r5];
        done:""",
    "flag with release and acquire": """@%p1 st.shared.u32 [%r5+4], 0;
        bar.sync 0;
        @!%p2 bra consumer;
        @%p1 st.shared.u32 [%r5], 5;
        @%p1 st.release.cta.shared.u32 [%r5+4], 1;
        bra.uni done;
        consumer:
        again: ld.acquire.cta.shared.u32 %r11, [%r5+4];
        setp.ne.u32 %p5, %r11, 1;
        @%p5 bra again;
        ld.shared.u32 %r12, [%r5];
        done:""",
}  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CORRECT)
def test_correct_code_passes(name, reverse):
    run(CORRECT[name], reverse_warps=reverse)


def test_blocks_ordered_by_a_counter_pass():
    """The last block to arrive reads what the others wrote, as in a split reduction."""
    body = """cvt.u64.u32 %rd6, %r10;
        shl.b64 %rd6, %rd6, 2;
        add.u64 %rd6, %rd6, %rd1;
        @%p1 st.global.u32 [%rd6+4], %r10;
        membar.gl;
        @%p1 atom.global.add.u32 %r11, [%rd1], 1;
        setp.ne.u32 %p4, %r11, 3;
        @!%p1 bra done;
        @%p4 bra done;
        membar.gl;
        ld.global.u32 %r12, [%rd1+4];
        ld.global.u32 %r13, [%rd1+8];
        ld.global.u32 %r14, [%rd1+12];
        add.u32 %r12, %r12, %r13;
        add.u32 %r12, %r12, %r14;
        st.global.u32 [%rd1+64], %r12;
        done:"""
    assert run(body, check="global", grid=4)[16] == 0 + 1 + 2
    with pytest.raises(vgpu.RaceError, match="nothing orders the two blocks"):
        run(body.replace("membar.gl;", ""), check="global", grid=4)


def test_check_off_finds_only_what_the_core_finds():
    body = FAULTS["lanes of one warp"][2]
    run(body, check=False, threads=32)
    with pytest.raises(vgpu.MemoryFault):
        run(FAULTS["misaligned vector"][2], check=False)


@pytest.mark.parametrize("check", ["shared", 1, None])
def test_check_is_validated(check):
    with pytest.raises(ValueError, match="check: expected True, False, 'strict' or 'global'"):
        vgpu.Device("sm_80", check=check)
