"""Counts that are known exactly from how a kernel is written."""

import pathlib

import pytest
import torch
from trainwright import vgpu
from trainwright.vgpu.__main__ import main

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"


def kernel(body, *, parameters="p, q", registers="", name="k"):
    declared = ", ".join(f".param .u64 {p.strip()}" for p in parameters.split(","))
    return f"""{HEADER}
.visible .entry {name}({declared}) {{
  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b64 %d<16>; .reg .f32 %f<64>; {registers}
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r4, %r2, %r3, %r1;
  ld.param.u64 %d1, [p]; ld.param.u64 %d2, [q];
{body}
  ret;
}}
"""


def launch(text, grid, block, *args, **device):
    d = vgpu.Device("sm_80", count=True, **device)
    d.load_ptx(text).launch("k", grid, block, args)
    return d.counters["k"]


# Element i of a load at p + step * i, stored densely.
STRIDED = """
  mul.wide.u32 %d3, %r4, {step}; add.s64 %d3, %d1, %d3; ld.global.{type} %{r}5, [%d3];
  mul.wide.u32 %d4, %r4, {bytes}; add.s64 %d4, %d2, %d4; st.global.{type} [%d4], %{r}5;
"""


def aligned(n, dtype=torch.float32):
    """Zeros that begin at a sector."""
    whole = torch.zeros(n * dtype.itemsize + 32, dtype=torch.uint8)
    start = -whole.data_ptr() % 32
    return whole[start : start + n * dtype.itemsize].view(dtype)


@pytest.mark.parametrize("check", [False, True])
def test_a_coalesced_copy_moves_n_bytes_in_n_over_32_sectors(check):
    k = launch(kernel(STRIDED.format(step=4, type="f32", bytes=4, r="f")), 4, 128, aligned(512), aligned(512),
               check=check)  # fmt: skip
    for traffic in (k.load, k.store):
        assert (traffic.requests, traffic.bytes, traffic.sectors) == (16, 2048, 64)
    assert k.sector_efficiency == 1 and k.sectors_per_request == 4 and k.global_bytes == 4096
    assert (k.footprint_read, k.footprint_written) == (2048, 2048)
    assert k.lane_efficiency == 1 and k.launches == 1
    assert k.warp_instructions == 16 * 13 and k.thread_instructions == 512 * 13
    assert k.mix == {
        "integer": 16 * 5,
        "move": 16 * 3,
        "constant_memory": 16 * 2,
        "global_memory": 16 * 2,
        "control": 16,
    }


@pytest.mark.parametrize(
    ("step", "type", "efficiency", "sectors"), [(8, "f32", 0.5, 8), (16, "f32", 0.25, 16), (32, "f32", 0.125, 32),
                                                (64, "f32", 0.125, 32), (2, "u16", 1.0, 2), (0, "f32", 0.125, 1)],
)  # fmt: skip
def test_strides_waste_sectors(step, type, efficiency, sectors):
    size = {"f32": 4, "u16": 2}[type]
    register = {"f32": "f", "u16": "h"}[type]
    body = STRIDED.format(step=step, type=type, bytes=size, r=register)
    load = launch(kernel(body), 1, 32, aligned(1024), aligned(64)).load
    assert load.efficiency == efficiency and load.sectors == sectors and load.requests == 1


def test_a_misaligned_start_costs_one_more_sector():
    body = STRIDED.format(step=4, type="f32", bytes=4, r="f")
    load = launch(kernel(body), 1, 32, aligned(64)[1:], aligned(64)).load
    assert load.sectors == 5 and load.bytes == 128 and load.efficiency == 0.8


def test_inactive_lanes_neither_move_bytes_nor_count():
    body = "setp.lt.u32 %p1, %r1, 8; @!%p1 ret;" + STRIDED.format(
        step=4, type="f32", bytes=4, r="f"
    )
    k = launch(kernel(body), 1, 64, aligned(64), aligned(64))
    assert (k.load.requests, k.load.bytes, k.load.sectors) == (1, 32, 1)
    rows = {r.text.split(" ")[0]: r.counts for r in k.instructions}
    assert (
        rows["ld.global.f32"].warp_instructions == 1
        and rows["ld.global.f32"].thread_instructions == 8
    )


def test_a_footprint_counts_a_sector_once():
    body = "mov.u32 %r4, %r1;" + STRIDED.format(step=4, type="f32", bytes=4, r="f")
    k = launch(kernel(body), 8, 32, aligned(32), aligned(32), check=False)
    assert k.load.bytes == 8 * 128 and k.footprint_read == 128 and k.footprint_written == 128


def test_atomics_count_as_stores():
    k = launch(kernel("red.global.add.u32 [%d1], 1;"), 2, 32, aligned(8), aligned(8))
    assert (k.store.requests, k.store.bytes, k.store.sectors, k.load.requests) == (2, 8, 2, 0)
    assert (k.footprint_read, k.footprint_written) == (32, 32) and k.mix["atomic"] == 2


# ---- shared memory


def shared(store, load, row_bytes, type="f32", register="f"):
    """Each lane writes at `store` and reads at `load`: byte offsets as PTX that leaves them in %r10 and %r11."""
    return kernel(
        f"""{store} {load}
  mov.u32 %r12, tile; add.u32 %r10, %r10, %r12; add.u32 %r11, %r11, %r12;
  mov.{type.replace("f32", "b32")} %{register}6, 0; st.shared.{type} [%r10], %{register}6;
  bar.sync 0; ld.shared.{type} %{register}7, [%r11];""",
        registers=f".shared .align 16 .b8 tile[{row_bytes * 32}];",
    )


@pytest.mark.parametrize(("row", "conflicts"), [(128, 31), (132, 0), (136, 1), (64, 15), (256, 31)])
def test_a_transpose_conflicts_unless_its_rows_are_padded(row, conflicts):
    """Warp w stores row w and loads column w: 32 words, `row` bytes apart."""
    text = shared(
        f"shr.u32 %r20, %r1, 5; and.b32 %r21, %r1, 31; mul.lo.u32 %r10, %r20, {row}; mad.lo.u32 %r10, %r21, 4, %r10;",
        f"mul.lo.u32 %r11, %r21, {row}; mad.lo.u32 %r11, %r20, 4, %r11;",
        max(row, 128),
    )
    # Rows of 64 bytes overlap; the check for races would rightly complain.
    k = launch(text, 1, 1024, aligned(8), aligned(8), check=False)
    assert k.shared_requests == 64 and k.shared_ideal == 64
    assert k.bank_conflicts == 32 * conflicts
    by_text = {r.text.split(" ")[0]: r.counts.bank_conflicts for r in k.instructions}
    assert by_text["st.shared.f32"] == 0 and by_text["ld.shared.f32"] == 32 * conflicts
    assert k.barriers == 32


@pytest.mark.parametrize(("step", "wavefronts"), [(0, 1), (4, 1), (8, 2), (128, 32), (12, 1)])
def test_wavefronts_of_words(step, wavefronts):
    text = shared(f"mul.lo.u32 %r10, %r1, {step};", "mov.u32 %r11, %r10;", max(step, 4))
    k = launch(text, 1, 32, aligned(8), aligned(8), check=False)
    assert k.shared_wavefronts == 2 * wavefronts and k.shared_ideal == 2


@pytest.mark.parametrize(("type", "bytes", "groups"), [("v2.f32", 8, 2), ("v4.f32", 16, 4)])
def test_wide_accesses_are_served_in_parts(type, bytes, groups):
    registers = {8: "{%f1, %f2}", 16: "{%f1, %f2, %f3, %f4}"}[bytes]
    for step, factor in ((bytes, 1), (2 * bytes, 2)):
        text = kernel(
            f"mul.lo.u32 %r10, %r1, {step}; mov.u32 %r12, tile; add.u32 %r10, %r10, %r12;"
            f"st.shared.{type} [%r10], {registers};",
            registers=".shared .align 16 .b8 tile[2048];",
        )
        k = launch(text, 1, 32, aligned(8), aligned(8))
        assert (k.shared_wavefronts, k.shared_ideal) == (groups * factor, groups)


# ---- work


def test_flops_of_arithmetic():
    body = "fma.rn.f32 %f1, %f2, %f3, %f4; add.f32 %f5, %f1, %f2; neg.f32 %f7, %f1; " \
           "setp.lt.u32 %p1, %r1, 40; @!%p1 mul.f32 %f6, %f1, %f2;"  # fmt: skip
    k = launch(kernel(body), 3, 48, aligned(8), aligned(8))
    assert k.flops == {"f32": 3 * (48 * 3 + 8)} and k.tensor_flops == 0


def mma(type, m, n, k, a, b, c, accumulator="f32"):
    def registers(name, count):
        return "{" + ", ".join(f"%{name}{10 + i}" for i in range(count)) + "}"

    d = registers("f" if accumulator == "f32" else "r", c)
    return f"mma.sync.aligned.m{m}n{n}k{k}.row.col.{accumulator}.{type}.{type}.{accumulator} " \
           f"{d}, {registers('r', a)}, {registers('r', b)}, {d};"  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind", "flops"),
    [
        (mma("bf16", 16, 8, 16, 4, 2, 4), "tensor f16", 2 * 16 * 8 * 16),
        (mma("f16", 16, 8, 8, 2, 1, 4), "tensor f16", 2 * 16 * 8 * 8),
        (mma("tf32", 16, 8, 8, 4, 2, 4), "tensor tf32", 2 * 16 * 8 * 8),
        (mma("s8", 16, 8, 32, 4, 2, 4, "s32"), "tensor i8", 2 * 16 * 8 * 32),
    ],
)
def test_flops_of_tensor_cores(text, kind, flops):
    k = launch(kernel(text), 3, 64, aligned(8), aligned(8))
    assert k.flops == {kind: 6 * flops} and k.tensor_flops == 6 * flops and k.mix["tensor"] == 6


# ---- by source line, over launches, and what is refused


def test_counts_by_source_line():
    text = (pathlib.Path(__file__).parent / "ptx/vector_add.ptx").read_text()
    d = vgpu.Device("sm_80", count=True)
    module = d.load_ptx(text)
    x = aligned(256)
    for _ in range(2):
        module.launch("vector_add", 1, 256, (x, x, x, 256))
    k = d.counters["vector_add"]
    assert k.launches == 2
    (at,) = [line for line in k.lines if k.lines[line].global_bytes]
    assert at[0].endswith("vector_add.cu") and k.lines[at].global_bytes == 2 * 3 * 1024
    assert sum(c.warp_instructions for c in k.lines.values()) == k.warp_instructions
    assert d.counters.total.global_bytes == k.global_bytes
    d.counters.clear()
    assert len(d.counters) == 0
    with pytest.raises(KeyError, match="no launch of vector_add was counted; there are: none"):
        d.counters["vector_add"]


def test_variants_of_a_kernel_are_kept_apart():
    d = vgpu.Device("sm_80", count=True)
    for body in ("", "bar.sync 0;"):
        d.load_ptx(kernel(body)).launch("k", 1, 32, (aligned(8), aligned(8)))
    assert [k.barriers for k in d.counters] == [0, 1]
    with pytest.raises(KeyError, match="2 compiled variants of k were launched"):
        d.counters["k"]


def test_a_waiting_barrier_counts_once():
    """Warp 0 comes to the barrier long before warp 1, which spins first."""
    body = """setp.lt.u32 %p1, %r1, 32; @%p1 bra WAIT; mov.u32 %r5, 0;
LOOP: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 5000; @%p2 bra LOOP;
WAIT: bar.sync 0;"""
    k = launch(kernel(body), 1, 64, aligned(8), aligned(8))
    assert k.barriers == 2


def test_a_device_that_does_not_count_says_so():
    with pytest.raises(
        vgpu.VgpuError, match=r"does not count; make it Device\('sm_80', count=True\)"
    ):
        _ = vgpu.Device("sm_80").counters


# ---- bounds


def test_the_bound_is_that_of_the_scarcest_resource():
    body = STRIDED.format(step=4, type="f32", bytes=4, r="f")
    k = launch(kernel(body), 64, 256, aligned(1 << 14), aligned(1 << 14))
    bound = k.bound("H100")
    assert bound.limited_by == "DRAM (each sector once)"
    assert bound.total_us == pytest.approx(2 * (1 << 16) / 3.35e12 * 1e6)
    assert str(bound).startswith("bound: no faster than 0.0391 us on H100 SXM, by DRAM")
    assert k.bound("H200").total_us == pytest.approx(bound.total_us * 3350 / 4800)
    with pytest.raises(ValueError, match="gpu: expected A100, H100, H200, B200, got 'T4'"):
        k.bound("T4")


def test_occupancy_by_hand():
    from trainwright.vgpu.counters import Assembled, Shape, _occupancy, _parse_report, preset

    # 128 registers x 32 lanes = 4096 a warp: 16 warps of 65536. 8 warps a block: 2 blocks.
    o = _occupancy(Shape(1, 256, 0), Assembled(128, 0, 0), preset("H100"))
    assert (o.warps, o.limit, o.limited_by, o.fraction) == (16, 64, "registers", 0.25)
    # 100 KiB + 1 KiB: two blocks of 4 warps in 228 KiB, one in 164 KiB.
    for gpu, warps in (("H100", 8), ("A100", 4)):
        o = _occupancy(Shape(1, 128, 100 << 10), Assembled(32, 0, 0), preset(gpu))
        assert (o.warps, o.limited_by) == (warps, "shared memory")
    assert _occupancy(Shape(1, 32, 0), Assembled(16, 0, 0), preset("H100")).limited_by == "blocks"
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 4096 bytes smem, 368 bytes cmem[0]
"""
    assert _parse_report(report) == {"k": Assembled(40, 4096, 20)}


# ---- the command

VECTOR_ADD = str(pathlib.Path(__file__).parent / "ptx/vector_add.ptx")
ADD = [VECTOR_ADD, "--kernel", "vector_add", "--block", "32"]


def test_profile_prints_a_table_and_writes_a_picture(tmp_path, capsys):
    picture = tmp_path / "p.png"
    status = main(["profile", VECTOR_ADD, "--kernel", "vector_add", "--grid", "4", "--block", "256", "--picture",
                   str(picture), "--gpu", "H200", "--args", "f32:1024", "f32:1024", "f32:1024", "1024"])  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0 and picture.read_bytes()[:4] == b"\x89PNG"
    for text in (
        "12.3 kB in 384 sectors: 100.0% of their bytes",
        "no faster than",
        "on H200 SXM",
        "vector_add.cu:5",
    ):
        assert text in out, out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "target: expected FILE.ptx or MODULE:FUNCTION, got 'nothing'"),
        (["nothing.ptx"], "No such file"),
        (["no.such.module:run"], "No module named 'no'"),
        (["math:pi"], "expected a function without arguments that launches kernels, got float"),
        ([VECTOR_ADD], "has vector_add, block_reduce: name one"),
        ([VECTOR_ADD, "--kernel", "vector_add"], "--block: vector_add does not say"),
        ([VECTOR_ADD, "--kernel", "none", "--block", "32"], "no kernel none in this module"),
        ([*ADD, "--args", "f3:4"], "expected a number or TYPE:COUNT, got 'f3:4'"),
        ([*ADD, "--args", "1"], "expected 4 arguments, got 1"),
    ],
)  # fmt: skip
def test_profile_says_what_is_wrong(arguments, message, capsys):
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sides_meet_again_in_a_loop_that_the_kernel_ends_with():
    body = """
  mov.u32 %r5, 0; setp.eq.u32 %p1, %r1, 0; mul.wide.u32 %d3, %r1, 4; add.s64 %d4, %d2, %d3;
LOOP:
  @%p1 bra SKIP;
  add.u32 %r6, %r6, 1;
SKIP:
  st.global.u32 [%d4], %r5;
  add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 3; @%p2 bra LOOP;
"""
    k = launch(kernel(body), 1, 64, aligned(64), aligned(64))
    assert k.store.requests == 3 * 2 and k.sector_efficiency == 1
