"""The checker on asynchronous operations: cp.async, bulk copies, mbarriers, tensor maps and wgmma."""

import pytest

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from checked import LLVM, assert_found, run  # noqa: E402

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
# The same, copied from the tensor `in`.
COPIED_OPERANDS = """shl.b32 %r8, %r1, 6;
        add.u32 %r8, %r8, %r5;
        cvt.u64.u32 %rd7, %r1;
        shl.b64 %rd7, %rd7, 5;
        add.u64 %rd7, %rd7, %rd2;
        cp.async.cg.shared.global [%r8], [%rd7], 16;
        cp.async.cg.shared.global [%r8+16], [%rd7+16], 16;
        cp.async.cg.shared.global [%r8+32], [%rd7], 16;
        cp.async.cg.shared.global [%r8+48], [%rd7+16], 16;
        cp.async.wait_all;
        """ + OPERANDS[OPERANDS.index("fence.proxy.async;") :]
# A tensor map, zero but for its fields, is made in shared memory and handed over at the start of `out`.
MAP = """st.shared.u32 [%r6], 0;
        bar.warp.sync -1;
        @%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r5], %rd2;
        @%p1 tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r5], 0;
        @%p1 tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r5], 0, 32;
        @%p1 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r5], 0, 32;
        @%p1 tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%r5], 0, 1;
        @%p1 tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r5], 2;
        bar.warp.sync -1;
        @%p2 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r5], 128;
        """
ACQUIRE = "@%p2 fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;"
USE_MAP = """@%p1 mbarrier.init.shared.b64 [%r7], 1;
        fence.proxy.async;
        bar.sync 0;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 128;
        @%p1 cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r5+128], [%rd1, {0}], [%r7];
        """
COPY = "cp.async.ca.shared.global [%r6], [%rd4], 4;"
HOPPER = {"arch": "sm_90a"}
WARPGROUP = {"arch": "sm_90a", "threads": 128}

# name: (exception, message, body, options of run). The faulty instruction is marked with // <-.
FAULTS = {
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
    "mbarrier invalidated while others may use it": (
        vgpu.RaceError,
        "nothing orders this after its last use by warp 1",
        """@%p1 mbarrier.init.shared.b64 [%r7], 64;
        bar.sync 0;
        mbarrier.arrive.shared.b64 _, [%r7];
        """ + WAIT + "nanosleep.u32 1; @%p1 mbarrier.inval.shared.b64 [%r7]; // <-",
        HOPPER,
    ),
    "mbarrier initialised again while others may use it": (
        vgpu.RaceError,
        "nothing orders this after its last use by warp 1",
        """@%p1 mbarrier.init.shared.b64 [%r7], 64;
        bar.sync 0;
        mbarrier.arrive.shared.b64 _, [%r7];
        """ + WAIT + "nanosleep.u32 1; @%p1 mbarrier.init.shared.b64 [%r7], 32; // <-",
        HOPPER,
    ),
    "tensor map of which another lane wrote a part": (
        vgpu.RaceError,
        "a read at 0x404 races with the write of another lane of this warp",
        MAP.replace("bar.warp.sync -1;", "", 1).replace("[%r5], %rd2;", "[%r5], %rd2; // <-"),
        HOPPER,
    ),
    "tensor map used without an acquire": (
        vgpu.RaceError,
        "warp 0 wrote it at PTX line .* and no fence.proxy.tensormap::generic.acquire",
        MAP + USE_MAP[:-9] + "// <-",
        HOPPER,
    ),
    "tensor map acquired by a warp that nothing orders": (
        vgpu.RaceError,
        "warp 0 wrote it at PTX line .* and no fence.proxy.tensormap::generic.acquire",
        MAP + "bar.sync 0;" + ACQUIRE.replace("@%p2", "@!%p2") + USE_MAP.replace("bar.sync 0;", "")[:-9] + "// <-",
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
    "wgmma operand of cp.async without a proxy fence": (
        vgpu.RaceError,
        "needs a fence.proxy.async after the generic write",
        COPIED_OPERANDS.replace("fence.proxy.async;", "") + "wgmma.fence.sync.aligned;" + WGMMA + "// <-",
        WARPGROUP,
    ),
    "wgmma operand of cp.async without a proxy fence, strictly": (
        vgpu.RaceError,
        "needs a fence.proxy.async after the generic write",
        COPIED_OPERANDS.replace("fence.proxy.async;", "") + "wgmma.fence.sync.aligned;" + WGMMA + "// <-",
        WARPGROUP | {"check": "strict", "compiler": LLVM},
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
    assert_found(*FAULTS[name])


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
    "tensor map": MAP + ACQUIRE + USE_MAP + WAIT + "@%p2 ld.shared.u32 %r11, [%r6+128];",
    "tensor map acquired by another warp": MAP + "bar.sync 0;" + ACQUIRE.replace("@%p2", "@!%p2")
    + USE_MAP + WAIT + "@%p2 ld.shared.u32 %r11, [%r6+128];",
    "mbarrier invalidated": """@%p1 mbarrier.init.shared.b64 [%r7], 64;
        bar.sync 0;
        mbarrier.arrive.shared.b64 _, [%r7];
        """ + WAIT + """bar.sync 0;
        @%p1 mbarrier.inval.shared.b64 [%r7];""",
    "fence by the issuer": "st.shared.u32 [%r6], 1; bar.sync 0; fence.proxy.async;" + STORE + """
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;""",
}  # fmt: skip


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


def test_wgmma_of_copied_operands_passes():
    """With a proxy fence; or without, as Triton 3.6 has it."""
    run(COPIED_OPERANDS + CORRECT_WGMMA["fenced"] + WGMMA_WAITED, **WARPGROUP)
    unfenced = COPIED_OPERANDS.replace("fence.proxy.async;", "")
    run(unfenced + CORRECT_WGMMA["fenced"] + WGMMA_WAITED, compiler=LLVM, **WARPGROUP)
