"""The checker: planted faults of each kind are found and named, correct kernels pass, and a kernel that lost one of its
synchronisation instructions is noticed."""

import functools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

PTX = Path(__file__).parent / "ptx"

HEADER = """.version 8.5
.target {target}
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 in)
{{
  .reg .pred %p<8>;
  .reg .b32 %r<32>;
  .reg .b64 %rd<8>;
  .reg .f32 %f<8>;
  .shared .align 1024 .b8 tile[16384];
  .shared .align 8 .b8 bar[64];
  ld.param.u64 %rd1, [out];
  ld.param.u64 %rd2, [in];
  mov.u32 %r1, %tid.x;
  shr.u32 %r2, %r1, 5;          // warp
  and.b32 %r3, %r1, 31;         // lane
  shl.b32 %r4, %r1, 2;
  mov.u32 %r5, tile;
  add.u32 %r6, %r5, %r4;        // &tile[thread]
  mov.u32 %r7, bar;
  mov.u32 %r10, %ctaid.x;
  cvt.u64.u32 %rd3, %r4;
  add.u64 %rd4, %rd2, %rd3;     // &in[thread]
  add.u64 %rd5, %rd1, %rd3;     // &out[thread]
  setp.eq.u32 %p1, %r1, 0;      // thread 0
  setp.eq.u32 %p2, %r2, 0;      // warp 0
  setp.eq.u32 %p3, %r3, 0;      // lane 0
{body}
  ret;
}}
"""


def run(body, *, arch="sm_80", check=True, threads=64, grid=1, marked=None, **options):
    """Runs a body in which in (4096 bytes) and out (4096 bytes) are tensors of int32. `marked`: a body has one line
    with // <-, where the fault has to be."""
    text = HEADER.format(target=arch, body=body)
    device = vgpu.Device(arch, check=check, threads=1)
    out, data = torch.zeros(1024, dtype=torch.int32), torch.arange(1024, dtype=torch.int32)
    device.load_ptx(text).launch("k", grid, threads, (out, data), **options)
    return out


def line_of_mark(arch, body):
    text = HEADER.format(target=arch, body=body)
    return 1 + text[: text.index("// <-")].count("\n")


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


LOAD = """@%p1 mbarrier.init.shared.b64 [%r7], 1;
        fence.proxy.async;
        bar.sync 0;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 256;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd2], 256, [%r7];
        """
WAIT = """again: mbarrier.try_wait.parity.shared.b64 %p5, [%r7], 0;
        @!%p5 bra again;
        """
STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r5], 256;"
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd6, %rd6, 0, 1, 1, 0, 0;"
# 64 rows of 128 bytes for wgmma, and their descriptor in %rd6.
OPERANDS = """shl.b32 %r8, %r1, 6;
        add.u32 %r8, %r8, %r5;
        st.shared.v4.u32 [%r8], {0, 0, 0, 0};
        st.shared.v4.u32 [%r8+16], {0, 0, 0, 0};
        st.shared.v4.u32 [%r8+32], {0, 0, 0, 0};
        st.shared.v4.u32 [%r8+48], {0, 0, 0, 0};
        fence.proxy.async;
        bar.sync 0;
        shr.u32 %r9, %r5, 4;
        cvt.u64.u32 %rd6, %r9;
        or.b64 %rd6, %rd6, 4611686293305360384;
        """
COPY = "cp.async.ca.shared.global [%r6], [%rd4], 4;"
HOPPER = {"arch": "sm_90a"}
WARPGROUP = {"arch": "sm_90a", "threads": 128}

FAULTS |= {
    "cp.async without its wait": (
        vgpu.AsyncError,
        "a read at 0x400 while an asynchronous write to it is under way, issued by warp 0, lane 0",
        COPY + "cp.async.commit_group; ld.shared.u32 %r11, [%r6]; // <-",
        {},
    ),
    "cp.async waits for another group": (
        vgpu.AsyncError,
        "nothing has waited for it",
        COPY + "cp.async.commit_group; cp.async.wait_group 1; ld.shared.u32 %r11, [%r6]; // <-",
        {},
    ),
    "cp.async is overtaken by a store": (
        vgpu.AsyncError,
        "a write at 0x400 while an asynchronous write",
        COPY + "st.shared.u32 [%r6], 1; // <-",
        {},
    ),
    "cp.async of another thread, without a barrier": (
        vgpu.RaceError,
        "races with the write of another lane of this warp",
        COPY + "cp.async.wait_all; xor.b32 %r8, %r6, 4; ld.shared.u32 %r11, [%r8]; // <-",
        {},
    ),
    "bulk copy read without a wait": (
        vgpu.AsyncError,
        "a read at 0x400 while an asynchronous write to it is under way",
        LOAD + "bar.sync 0; ld.shared.u32 %r11, [%r6]; // <-",
        HOPPER,
    ),
    "bulk copy, wrong parity": (
        vgpu.AsyncError,
        "a read at 0x400 while an asynchronous write to it is under way",
        LOAD + "bar.sync 0;" + WAIT.replace("], 0;", "], 1;") + "ld.shared.u32 %r11, [%r6]; // <-",
        HOPPER,
    ),
    "bulk copy over a generic write without a proxy fence": (
        vgpu.RaceError,
        "an asynchronous write at 0x400 needs a fence.proxy.async after the generic write of warp 0",
        "@%p1 st.shared.u32 [%r5], 1;" + LOAD.replace("fence.proxy.async;", "")[:-9] + "// <-",
        HOPPER,
    ),
    "bulk copy over what another warp still reads": (
        vgpu.RaceError,
        "an asynchronous write at .* races with a read by warp 1",
        """st.shared.u32 [%r6], 1;
        bar.sync 0;
        ld.shared.u32 %r11, [%r6];
        """ + LOAD.replace("bar.sync 0;", "bar.warp.sync -1; nanosleep.u32 1;")[:-9] + "// <-",
        HOPPER,
    ),
    "bulk copy announces too many bytes": (
        vgpu.DeadlockError,
        "16 bytes outstanding",
        LOAD.replace("_, [%r7], 256", "_, [%r7], 272") + WAIT.replace("0;", "0; // <-", 1),
        HOPPER,
    ),
    "bulk copy that nobody waits for": (
        vgpu.AsyncError,
        "the block has ended while this asynchronous load still writes",
        LOAD[:-9] + "// <-",
        HOPPER,
    ),
    "bulk store without a proxy fence": (
        vgpu.RaceError,
        "an asynchronous read at 0x400 needs a fence.proxy.async after the generic write of warp 0, lane 0",
        "st.shared.u32 [%r6], 1; bar.sync 0;" + STORE + "// <-",
        HOPPER,
    ),
    "bulk store of what nobody wrote": (
        vgpu.UninitialisedError,
        "an asynchronous read at 0x400, which nobody has written",
        STORE + "// <-",
        HOPPER,
    ),
    "bulk store overtaken by a store": (
        vgpu.AsyncError,
        "a write at 0x400 while an asynchronous operation of warp 0 still reads it",
        "st.shared.u32 [%r6], 1; fence.proxy.async; bar.sync 0;" + STORE + """
        cp.async.bulk.commit_group;
        @%p1 st.shared.u32 [%r6], 2; // <-""",
        HOPPER,
    ),
    "bulk store that nobody waits for": (
        vgpu.AsyncError,
        "the block has ended while this asynchronous store still reads",
        "st.shared.u32 [%r6], 1; fence.proxy.async; bar.sync 0;" + STORE + "// <-",
        HOPPER,
    ),
    "mbarrier used before its initialisation is ordered": (
        vgpu.RaceError,
        "nothing orders that after its initialisation by warp 0",
        """@%p1 mbarrier.init.shared.b64 [%r7], 64;
        bar.warp.sync -1;
        nanosleep.u32 1;
        @!%p2 mbarrier.arrive.shared.b64 _, [%r7]; // <-""",
        HOPPER,
    ),
    "mbarrier that was never initialised": (
        vgpu.BarrierError,
        "no mbarrier has been initialised",
        "@%p1 mbarrier.arrive.shared.b64 _, [%r7]; // <-",
        HOPPER,
    ),
    "mbarrier with too many arrivals": (
        vgpu.BarrierError,
        "",
        """@%p1 mbarrier.init.shared.b64 [%r7], 1;
        @%p1 mbarrier.arrive.noComplete.shared.b64 %rd6, [%r7], 2; // <-""",
        HOPPER,
    ),
    "wgmma accumulator read in flight": (
        vgpu.AsyncError,
        "a register is read while a wgmma.mma_async uses it",
        OPERANDS + "wgmma.fence.sync.aligned;" + WGMMA + """
        wgmma.commit_group.sync.aligned;
        add.f32 %f5, %f0, %f1; // <-
        wgmma.wait_group.sync.aligned 0;""",
        WARPGROUP,
    ),
    "wgmma accumulator written after its fence": (
        vgpu.AsyncError,
        "a register of this wgmma.mma_async was written, and no wgmma.fence has come since",
        OPERANDS + "wgmma.fence.sync.aligned; mov.f32 %f0, 0f00000000;" + WGMMA + "// <-",
        WARPGROUP,
    ),
    "wgmma accumulator computed after its fence": (
        vgpu.AsyncError,
        "a register of this wgmma.mma_async was written, and no wgmma.fence has come since",
        OPERANDS + "wgmma.fence.sync.aligned; add.f32 %f0, %f0, %f0;" + WGMMA + "// <-",
        WARPGROUP,
    ),
    "wgmma accumulator copied from what was computed after its fence": (
        vgpu.AsyncError,
        "a register of this wgmma.mma_async was written, and no wgmma.fence has come since",
        OPERANDS + "wgmma.fence.sync.aligned; add.f32 %f4, %f5, %f5; mov.f32 %f6, %f4;"
        "mov.f32 %f0, %f6;" + WGMMA + "// <-",
        WARPGROUP,
    ),
    "wgmma accumulator partly copied": (
        vgpu.AsyncError,
        "a register of this wgmma.mma_async was written, and no wgmma.fence has come since",
        OPERANDS + "wgmma.fence.sync.aligned; add.f32 %f0, %f5, %f5; @%p3 mov.f32 %f0, %f6;"
        + WGMMA + "// <-",
        WARPGROUP,
    ),
    "wgmma accumulator copied after its fence, strictly": (
        vgpu.AsyncError,
        "a register of this wgmma.mma_async was written, and no wgmma.fence has come since",
        OPERANDS + "wgmma.fence.sync.aligned; mov.f32 %f0, %f5;" + WGMMA + "// <-",
        WARPGROUP | {"check": "strict"},
    ),
    "wgmma accumulator copied in flight": (
        vgpu.AsyncError,
        "a register is read while a wgmma.mma_async uses it",
        OPERANDS + "wgmma.fence.sync.aligned;" + WGMMA + """
        wgmma.commit_group.sync.aligned;
        mov.f32 %f5, %f0; // <-
        wgmma.wait_group.sync.aligned 0;""",
        WARPGROUP,
    ),
    "wgmma operand overwritten by a warp that has not waited": (
        vgpu.RaceError,
        "races with a read by a wgmma of warps 0-3: this warp has not waited for it",
        OPERANDS + "wgmma.fence.sync.aligned;" + WGMMA + """
        wgmma.commit_group.sync.aligned;
        @%p2 bra waits;
        nanosleep.u32 1;
        st.shared.u32 [%r6], 1; // <-
        waits: wgmma.wait_group.sync.aligned 0;""",
        WARPGROUP | {"reverse_warps": True},
    ),
    "wgmma that one warp does not issue": (
        vgpu.DeadlockError,
        "warp 0 has issued a wgmma.mma_async that another warp of its warpgroup has not",
        OPERANDS + "wgmma.fence.sync.aligned; setp.eq.u32 %p4, %r2, 3; @%p4 bra.uni none;" + WGMMA + """
        wgmma.commit_group.sync.aligned;
        none: wgmma.wait_group.sync.aligned 0; // <-""",
        WARPGROUP,
    ),
    "wgmma operand overwritten in flight": (
        vgpu.AsyncError,
        "while an asynchronous operation of warps 0-3 still reads it",
        OPERANDS + "wgmma.fence.sync.aligned;" + WGMMA + """
        wgmma.commit_group.sync.aligned;
        st.shared.u32 [%r6], 1; // <-""",
        WARPGROUP,
    ),
    "wgmma operand without a proxy fence": (
        vgpu.RaceError,
        "needs a fence.proxy.async after the generic write",
        OPERANDS.replace("fence.proxy.async;", "") + "wgmma.fence.sync.aligned;" + WGMMA + "// <-",
        WARPGROUP,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault(name):
    kind, message, body, options = FAULTS[name]
    body = body.replace("%h1", "%rs1").replace("%h2", "%rs2")
    if "%rs" in body:
        body = ".reg .b16 %rs<4>;\n" + body
    with pytest.raises(kind, match=re.compile(message, re.S)) as error:
        run(body, **options)
    fault = error.value
    assert fault.kernel == "k" and fault.block[1:] == (0, 0) and fault.warp >= 0
    assert fault.ptx_line == line_of_mark(options.get("arch", "sm_80"), body)
    assert f"PTX line {fault.ptx_line}" in str(fault)
    if re.match("k: (shared|global) memory", str(fault)):
        assert fault.address is not None
        assert fault.lane >= 0 or fault.instruction.startswith("wgmma")  # wgmma is of no lane


# The same accesses with what they need, and idioms that are no races.
CORRECT_HOPPER = {
    "bulk copy in and out": LOAD + WAIT + """ld.shared.u32 %r11, [%r6];
        add.u32 %r11, %r11, 1;
        @%p2 st.shared.u32 [%r6], %r11;
        fence.proxy.async;
        bar.sync 0;
        """ + STORE + """
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        bar.sync 0;
        st.shared.u32 [%r6], 0;""",
    "cp.async": COPY + """cp.async.wait_all;
        bar.sync 0;
        xor.b32 %r8, %r6, 4;
        ld.shared.u32 %r11, [%r8];""",
    "fence by the issuer": "st.shared.u32 [%r6], 1; bar.sync 0; fence.proxy.async;" + STORE + """
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;""",
}  # fmt: skip
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


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CORRECT_HOPPER)
def test_correct_asynchronous_code_passes(name, reverse):
    run(CORRECT_HOPPER[name], arch="sm_90a", reverse_warps=reverse)


WGMMA_WAITED = (
    WGMMA
    + """
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        add.f32 %f5, %f0, %f1;
        bar.sync 0;
        st.shared.u32 [%r6], 1;"""
)
CORRECT_WGMMA = {
    "fenced": "wgmma.fence.sync.aligned;",
    # LLVM sinks the copy of a value that several registers hold; the assembler removes it.
    "copied after the fence": """add.f32 %f5, %f6, %f6;
        wgmma.fence.sync.aligned;
        mov.f32 %f0, %f5;
        mov.f32 %f1, %f0;""",
    "written, fenced, then partly copied": """add.f32 %f0, %f5, %f5;
        wgmma.fence.sync.aligned;
        @%p3 mov.f32 %f0, %f6;""",
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT_WGMMA)
def test_wgmma_passes(name):
    run(OPERANDS + CORRECT_WGMMA[name] + WGMMA_WAITED, **WARPGROUP)


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


# ---- mutation: a kernel without one of its synchronisation instructions

SYNCHRONISES = re.compile(
    r"(?:@!?%\w+\s+)?\b(?:bar\.sync|bar\.arrive|bar\.warp\.sync|barrier\.\w|cp\.async\.(?:bulk\.)?(?:wait|commit)"
    r"|cp\.async\.mbarrier|fence|membar|wgmma\.(?:fence|commit|wait)|mbarrier\.\w)[^;]*;"
)


def mutants(text, kernel):
    """(the instruction, the text without it) for each of a kernel; a wait for an mbarrier succeeds instead."""
    start = text.index(f".entry {kernel}(")
    end = text.find(".entry", start + 1)
    for m in SYNCHRONISES.finditer(text, start, end if end > 0 else len(text)):
        instead = ""
        if waits := re.search(r"(?:try|test)_wait\S*\s+(%?\w+)\s*,", m[0]):
            instead = f"setp.eq.u32 {waits[1]}, 0, 0;"
        yield m[0], text[: m.start()] + instead + text[m.end() :]


def close(got, want):
    return bool(((got.double() - want).abs() <= 2**-8 * want.abs() + 2e-3).all())


def matmul_operands(m, n, k, transposed=False):
    torch.manual_seed(0)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(*((n, k) if transposed else (k, n))).bfloat16()
    return a, b, a.double() @ (b.double().T if transposed else b.double())


def run_block_reduce(module):
    x, out = torch.arange(2000.0), torch.zeros(1)
    module.launch("block_reduce", 2, 256, (x, out, 2000))
    return out.item() == 2000 * 1999 / 2


def run_gemm_cp_async(module):
    a, b, want = matmul_operands(64, 64, 200)
    c = torch.full((64, 64), float("nan"))
    module.launch("gemm_cp_async", (1, 1), 128, (a, b, c, 64, 64, 200))
    return close(c, want)


def run_gemm_tma(module, kernel="gemm_tma_wgmma", rows_of_b=64):
    a, b, want = matmul_operands(256, 64, 576, transposed=True)
    c = torch.full((256, 64), float("nan")).bfloat16()
    boxes = ((a, 128), (b, rows_of_b), (c, 128))
    maps = [vgpu.tensor_map(x, (rows, 64), swizzle=128) for x, rows in boxes]
    module.launch(kernel, (1, 2), 384, (*maps, 576), smem=3 * 192 * 128, memory=(a, b, c))
    return close(c, want)


def run_gemm_tma_elected(module):
    return run_gemm_tma(module, "gemm_tma_wgmma_elected")


def run_gemm_tma_cluster(module):
    return run_gemm_tma(module, "gemm_tma_wgmma_cluster", 32)


def run_bulk_axpy(module):
    torch.manual_seed(0)
    x, y = torch.randn(1024), torch.randn(1024)
    want = y + 2 * x
    module.launch("bulk_axpy", 1, 128, (x, y))
    return torch.equal(y, want)


def run_copies_arrive(module):
    torch.manual_seed(0)
    x, y = torch.randint(-9, 9, (7, 256)).float(), torch.zeros(256)
    module.launch("copies_arrive", 1, 128, (x, y, 7))
    return torch.equal(y, x.sum(0))


def run_exchange(module):
    x, y = torch.arange(1, 5, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
    module.launch("exchange", 4, 32, (x, y))
    rows = [[10, 20, 30, 40, (b + 1) % 4 + 1, b, (b + 1) % 4, 0] for b in range(4)]
    return y.tolist() == rows


INIT_FENCE = (
    "a barrier follows; Triton emits none at all, so its absence is no rule that can be held"
)
REDUNDANT_WGMMA_FENCE = "nothing has touched the registers since the wait of the turn before"
LAST_RELEASE = "frees a stage that nobody fills again, behind the unrolled loop"
EPILOGUE_BARRIER = "the rows that a warp overwrites in the epilogue were read by that warp alone"
FIRST_TURN = (
    "the first turn of a producer waits for nothing, and the copy of this loop has no second"
)
# For each kernel: where its text is, how it is run, and the instructions whose loss is not noticed: how many
# and why; then, of how many of them the loss breaks a rule and should have been noticed.
NVCC = {
    "block_reduce": ("vector_add", run_block_reduce, {}),
    "gemm_cp_async": ("tensor_sm80", run_gemm_cp_async, {}),
    "bulk_axpy": ("tensor_sm90a", run_bulk_axpy, {}),
    "copies_arrive": (
        "tensor_sm90a",
        run_copies_arrive,
        {"mbarrier.try_wait.parity.shared::cta.b64": (2, FIRST_TURN)},
    ),
    "exchange": (
        "tensor_sm90a",
        run_exchange,
        {"fence.mbarrier_init.release.cluster": (1, INIT_FENCE)},
    ),
    "gemm_tma_wgmma": (
        "tensor_sm90a",
        run_gemm_tma,
        {
            "fence.mbarrier_init.release.cluster": (1, INIT_FENCE),
            "wgmma.fence.sync.aligned": (4, REDUNDANT_WGMMA_FENCE),
            "mbarrier.arrive.shared::cta.b64": (1, LAST_RELEASE),
            "bar.sync": (1, EPILOGUE_BARRIER),
        },
    ),
    "gemm_tma_wgmma_elected": (
        "tensor_sm90a",
        run_gemm_tma_elected,
        {
            "fence.mbarrier_init.release.cluster": (1, INIT_FENCE),
            "wgmma.fence.sync.aligned": (4, REDUNDANT_WGMMA_FENCE),
            "mbarrier.arrive.shared::cta.b64": (1, LAST_RELEASE),
            "bar.sync": (1, EPILOGUE_BARRIER),
        },
    ),
    "gemm_tma_wgmma_cluster": (
        "tensor_sm90a",
        run_gemm_tma_cluster,
        {
            "fence.mbarrier_init.release.cluster": (1, INIT_FENCE),
            "wgmma.fence.sync.aligned": (4, REDUNDANT_WGMMA_FENCE),
            "mbarrier.arrive.shared::cluster.b64": (2, LAST_RELEASE),
            "bar.sync": (1, EPILOGUE_BARRIER),
        },
    ),
}


def count_unnoticed(text, kernel, arch, run_it):
    """How many mutants there are, and by opcode those that neither raise nor change the result."""
    device = vgpu.Device(arch, threads=1)
    assert run_it(device.load_ptx(text))  # as it is: the right result, and no false alarm
    total, unnoticed = 0, Counter()
    for instruction, mutant in mutants(text, kernel):
        total += 1
        try:
            same = run_it(device.load_ptx(mutant))
        except vgpu.Fault:
            continue
        if same:
            unnoticed[re.sub(r"^@!?%\w+\s+", "", instruction).split()[0].rstrip(";")] += 1
    return total, unnoticed


def check_table(total, unnoticed, table):
    allowed = {opcode: count for opcode, (count, *_) in table.items()}
    assert all(n <= allowed.get(opcode, 0) for opcode, n in unnoticed.items()), unnoticed
    missed = sum(entry[2] for entry in table.values() if len(entry) == 3)
    return total - sum(unnoticed.values()), missed


def test_mutants_of_nvcc_kernels():
    noticed = missed = 0
    for kernel, (file, run_it, table) in NVCC.items():
        arch = "sm_90a" if file.endswith("90a") else "sm_80"
        counts = count_unnoticed((PTX / f"{file}.ptx").read_text(), kernel, arch, run_it)
        n, m = check_table(*counts, table)
        noticed, missed = noticed + n, missed + m
    assert noticed >= 125 and noticed >= 0.95 * (noticed + missed)


def run_attention(k, module):
    torch.manual_seed(0)
    q, key, v = (torch.randn(192, 64).bfloat16() for _ in range(3))
    want = ((q.double() @ key.double().T * 0.125).softmax(-1) @ v.double())[:64]
    out, lse = torch.zeros(192, 64).bfloat16(), torch.zeros(192)
    module.launch(k.name, 1, 128, (q, key, v, out, lse, 192, 0.125, 0, 0), smem=k.shared)
    return bool(((out[:64].double() - want).abs() < 2e-2).all())


def run_descriptor_matmul(k, module):
    a, b, want = matmul_operands(64, 64, 256)
    c = torch.zeros(64, 64).bfloat16()
    scratch = torch.zeros(k.scratch + 128, dtype=torch.uint8)
    scratch = scratch[-scratch.data_ptr() % 128 :] if k.scratch else 0
    module.launch(k.name, 1, 128, (a, b, c, 64, 64, 256, scratch, 0), smem=k.shared)
    return close(c, want)


ATTENTION = (
    (
        *((n, "*bf16") for n in ("q", "k", "v", "out")),
        ("lse", "*fp32"),
        ("S", "i32"),
        ("scale", "fp32"),
    ),
    (("CAUSAL", False), ("D", 64), ("BM", 64), ("BN", 32)),
)
MATMUL = (
    tuple((n, "*bf16") for n in "abc") + tuple((n, "i32") for n in "MNK"),
    (("BM", 64), ("BN", 64), ("BK", 64)),
)
DUPLICATE = "others nearby order the same accesses; without all of them it is noticed"
MAP = "missed: how a tensor map is built and handed over is not followed"
TRITON = {
    ("attention", "sm_80"): (ATTENTION, run_attention, {"bar.sync": (1, DUPLICATE)}),
    ("attention", "sm_90a"): (
        ATTENTION,
        run_attention,
        {"bar.sync": (3, DUPLICATE + "; or a wait for wgmma does, which is of the whole block")},
    ),
    ("matmul_descriptor", "sm_80"): (MATMUL, run_descriptor_matmul, {}),
    ("matmul_descriptor", "sm_90a"): (
        MATMUL,
        run_descriptor_matmul,
        {
            "bar.sync": (17, DUPLICATE + "; but the one before mbarrier.inval is missed", 1),
            "bar.warp.sync": (3, MAP, 3),
            "fence.proxy.tensormap::generic.acquire.gpu": (3, MAP, 3),
            "cp.async.bulk.commit_group": (3, "an empty group: no bulk copy is under way"),
            "cp.async.bulk.wait_group.read": (3, "an empty group: no bulk copy is under way"),
            "mbarrier.inval.shared::cta.b64": (3, "the block ends, and uses the place no more"),
        },
    ),
}


def test_mutants_of_triton_kernels():
    pytest.importorskip("triton")
    from vgpu import triton_kernels as kernels

    noticed = missed = 0
    for (kernel, arch), ((types, constants), run_it, table) in TRITON.items():
        k = kernels.compiled(kernel, int(arch[3:5]), types, constants)
        counts = count_unnoticed(k.ptx, k.name, arch, functools.partial(run_it, k))
        n, m = check_table(*counts, table)
        noticed, missed = noticed + n, missed + m
    assert noticed >= 40 and missed <= 7


def test_barriers_that_are_redundant_one_by_one_are_noticed_together():
    pytest.importorskip("triton")
    from vgpu import triton_kernels as kernels

    (types, constants), run_it, _ = TRITON["matmul_descriptor", "sm_90a"]
    k = kernels.compiled("matmul_descriptor", 90, types, constants)
    text = re.sub(r"\bbar\.sync[^;]*;", "", k.ptx)
    with pytest.raises(vgpu.RaceError):
        run_it(k, vgpu.Device("sm_90a", threads=1).load_ptx(text))
