"""mbarriers: phases, tokens, bytes and faults."""

import pytest
import torch

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from fragments import run  # noqa: E402

pytestmark = pytest.mark.timeout(60)

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
