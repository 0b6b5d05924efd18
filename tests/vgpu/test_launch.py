"""Launching kernels on the virtual GPU: arguments, bounds, checks. Each .cu file in ptx/ says how its PTX was made."""

from pathlib import Path

import pytest
import torch

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

PTX = Path(__file__).parent / "ptx"


@pytest.fixture(scope="module")
def module():
    return vgpu.Device("sm_80").load_ptx((PTX / "vector_add.ptx").read_text())


def test_vector_add(module):
    x, y, out = torch.randn(1000), torch.randn(1000), torch.empty(1000)
    report = module.launch("vector_add", 4, 256, (x, y, out, 1000))
    assert torch.equal(out, x + y)
    # 22 instructions; in the last warp 24 of the lanes leave by a `ret` of their own.
    assert report.warp_instructions == 32 * 22 + 1


@pytest.mark.parametrize("grid", [1, 3, 50])
@pytest.mark.parametrize("reverse", [False, True])
def test_block_reduce(module, grid, reverse):
    x, out = torch.arange(5000.0), torch.zeros(1)
    module.launch("block_reduce", grid, 256, (x, out, 5000), reverse_warps=reverse)
    assert out.item() == 5000 * 4999 / 2


def test_raw_addresses_need_memory(module):
    x, y, out = torch.ones(64), torch.ones(64), torch.zeros(64)
    args = (x.data_ptr(), y.data_ptr(), out.data_ptr(), 64)
    with pytest.raises(vgpu.MemoryFault, match="out of bounds"):
        module.launch("vector_add", 1, 64, args)
    module.launch("vector_add", 1, 64, args, memory=[(x.data_ptr(), 256), y, out])
    assert torch.equal(out, torch.full((64,), 2.0))


def test_out_of_bounds_names_the_place(module):
    x, y, out = torch.ones(40), torch.ones(64), torch.zeros(64)
    with pytest.raises(
        vgpu.MemoryFault, match="past the end of an allocation of 160 bytes"
    ) as error:
        module.launch("vector_add", 1, 64, (x, y, out, 64))
    fault = error.value
    assert (fault.kernel, fault.block, fault.warp, fault.lane) == ("vector_add", (0, 0, 0), 1, 8)
    assert fault.address == x.data_ptr() + 160
    assert fault.instruction.startswith("ld.global.f32")
    assert fault.source_line == 5 and fault.source_file.endswith("vector_add.cu")
    assert "thread (40, 0, 0)" in str(fault)


def test_a_view_bounds_the_access(module):
    whole = torch.ones(128)
    with pytest.raises(vgpu.MemoryFault):
        module.launch("vector_add", 1, 64, (whole[:32], whole[64:], torch.zeros(64), 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "nothing"}, "no kernel nothing in this module; it has: vector_add, block_reduce"),
        ({"args": (1, 2, 3)}, "expected 4 arguments, got 3"),
        ({"args": (1, 2, 3, 4.0)}, "argument 3: expected an int for .u32"),
        ({"args": (1, 2, 3, 1 << 32)}, "does not fit .u32"),
        ({"args": (1, 2, 3, "4")}, "argument 3: expected a tensor, int, float or bytes, got str"),
        ({"args": (1, 2, 3, torch.zeros(1))}, "argument 3: a tensor needs a pointer parameter"),
        (
            {"args": (torch.zeros(1, device="meta"), 2, 3, 4)},
            "expected a CPU tensor, got one on meta",
        ),
        ({"block": 1025}, "more than 1024 threads"),
        ({"block": (32, 33)}, "more than 1024 threads"),
        ({"block": 0}, "block: expected positive ints"),
        ({"grid": (1, 2, 3, 4)}, "grid: expected one to three numbers"),
        ({"grid": (1, 65536)}, "exceeds 65535"),
        ({"smem": 300_000}, "bytes of shared memory, at most"),
        ({"smem": -1}, "smem: expected a non-negative int"),
        ({"cluster": 2}, "is not a multiple of the cluster"),
        ({"grid": 32, "cluster": 32}, "at most 16 blocks"),
        ({"grid": (1 << 30, 4), "cluster": (1 << 30, 4)}, "at most 16 blocks"),  # 2^32
    ],
)
def test_launch_errors(module, change, message):
    call = {"name": "vector_add", "grid": 1, "block": 32, "args": (0, 0, 0, 0)} | change
    with pytest.raises(vgpu.LaunchError) as error:
        module.launch(**call)
    assert message in str(error.value)


def test_device_checks_the_architecture():
    text = (PTX / "vector_add.ptx").read_text()
    with pytest.raises(ValueError, match="arch: expected sm_80"):
        vgpu.Device("sm_70")
    with pytest.raises(vgpu.UnsupportedError, match="PTX for sm_90 does not run on sm_80"):
        vgpu.Device("sm_80").load_ptx(text.replace(".target sm_80", ".target sm_90"))
    with pytest.raises(vgpu.UnsupportedError, match="PTX for sm_90a does not run on sm_90"):
        vgpu.Device("sm_90").load_ptx(text.replace(".target sm_80", ".target sm_90a"))
    assert vgpu.Device("sm_90a").load_ptx(text).kernels == ["vector_add", "block_reduce"]


def test_three_dimensional_launches():
    text = """
.version 9.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out) {
.reg .b32 %r<20>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y; mov.u32 %r6, %ntid.z;
mov.u32 %r7, %ctaid.x; mov.u32 %r8, %ctaid.y; mov.u32 %r9, %ctaid.z;
mov.u32 %r10, %nctaid.x; mov.u32 %r11, %nctaid.y;
mad.lo.u32 %r12, %r3, %r5, %r2; mad.lo.u32 %r12, %r12, %r4, %r1;
mad.lo.u32 %r13, %r9, %r11, %r8; mad.lo.u32 %r13, %r13, %r10, %r7;
mul.lo.u32 %r14, %r4, %r5; mul.lo.u32 %r14, %r14, %r6; mad.lo.u32 %r13, %r13, %r14, %r12;
mul.wide.u32 %rd2, %r13, 4; add.s64 %rd2, %rd2, %rd1;
mov.u32 %r15, %laneid; mov.u32 %r16, %warpid; mad.lo.u32 %r15, %r16, 32, %r15;
mad.lo.u32 %r15, %r13, 1000, %r15; st.global.u32 [%rd2], %r15; ret;
}"""
    grid, block = (3, 2, 4), (5, 3, 7)
    threads, blocks = 5 * 3 * 7, 3 * 2 * 4
    out = torch.zeros(threads * blocks, dtype=torch.int32)
    vgpu.Device("sm_80", threads=2).load_ptx(text).launch("k", grid, block, (out,))
    # element n is written by thread n % threads of its block: warp and lane count the threads x first
    assert out.tolist() == [1000 * n + n % threads for n in range(threads * blocks)]
