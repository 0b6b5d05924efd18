"""Programs that nvcc compiled, unmodified on the virtual GPU: what stands in for libcudart, and how it fails."""

import ctypes
from pathlib import Path

import pytest
import torch
import vgpu_backend

if vgpu_backend.reason() == "ok":  # pytestmark skips the file otherwise
    from trainwright.vgpu import MemoryFault
    from trainwright.vgpu.cudart import load_program

PROGRAM = Path(__file__).with_name("cudart_program.cu")
NOT_SUPPORTED, INVALID_VALUE, INVALID_CONFIGURATION, LAUNCH_FAILURE, NO_IMAGE = 801, 1, 9, 719, 209

pytestmark = pytest.mark.skipif(vgpu_backend.reason() != "ok", reason=vgpu_backend.reason())


def compile_program(folder, *flags):
    library = folder / "program.so"
    command = [
        "nvcc",
        "-std=c++17",
        "-shared",
        "-cudart",
        "none",
        "-Xcompiler",
        "-fPIC",
        *flags,
        PROGRAM,
    ]
    command += ["-o", library, vgpu_backend.BUILD / "libtw_cudart.so"]
    vgpu_backend.compile_with(command)
    loaded = load_program(library)
    loaded.message.restype = ctypes.c_char_p
    loaded.run_scale.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int)
    loaded.run_reverse.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_bool)
    loaded.properties.argtypes = loaded.memory.argtypes = (ctypes.c_void_p,)
    loaded.tensor_map.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return loaded


@pytest.fixture(scope="module")
def runtime():
    return vgpu_backend.runtime()


@pytest.fixture(scope="module")
def program(runtime, tmp_path_factory):
    flags = ("-gencode", "arch=compute_80,code=compute_80", "--no-compress")
    return compile_program(tmp_path_factory.mktemp("cudart"), *flags)


@pytest.fixture(autouse=True)
def _error_is_read(program):
    """The last error stays until somebody reads it: no test leaves its own to the next."""
    yield
    program.cudaGetLastError()


def test_a_program_runs(program):
    out = torch.full((200,), float("nan"))
    assert program.run_scale(out.data_ptr(), 200, 10.0, 7) == 0
    assert torch.equal(out, 10.0 * torch.tensor([1.0, 2.0, 3.0]).repeat(67)[:200] + 7)


def test_watch_sees_each_launch(program, runtime):
    seen, out = [], torch.empty(3)
    runtime.watch = lambda name, report: seen.append((name, report.warp_instructions))
    try:
        assert program.run_scale(out.data_ptr(), 3, 1.0, 0) == 0
    finally:
        runtime.watch = None
    assert [("scale" in name, n > 10) for name, n in seen] == [(True, True)]


def test_an_access_past_an_allocation_fails_the_launch(program, runtime):
    assert program.run_past_the_end(40) == LAUNCH_FAILURE
    message = program.message(LAUNCH_FAILURE)
    assert b"MemoryFault" in message and b"scale" in message
    assert isinstance(runtime.fault, MemoryFault)
    assert program.run_scale(torch.empty(3).data_ptr(), 3, 1.0, 0) == 0, "the next launch works"


def test_dynamic_shared_memory_above_48_kib_wants_to_be_asked_for(program):
    x = torch.arange(20000, dtype=torch.int32)
    assert program.run_reverse(x.data_ptr(), 20000, False) == INVALID_VALUE
    assert b"cudaFuncAttributeMaxDynamicSharedMemorySize" in program.message(INVALID_VALUE)
    assert program.run_reverse(x.data_ptr(), 20000, True) == 0
    assert torch.equal(x, torch.arange(19999, -1, -1, dtype=torch.int32))
    too_many = torch.zeros(50000, dtype=torch.int32)
    assert program.run_reverse(too_many.data_ptr(), 50000, True) == INVALID_VALUE


@pytest.mark.parametrize(("grid", "threads"), [(0, 32), (1, 0), (1, 1025)])
def test_impossible_launches(program, grid, threads):
    assert program.run_with(grid, threads) == INVALID_CONFIGURATION
    assert b"grid or block" in program.message(INVALID_CONFIGURATION)


def test_properties_are_those_of_the_device(program, runtime):
    out = (ctypes.c_int * 4)()
    assert program.properties(out) == 0
    assert list(out) == [80, vgpu_backend.MULTIPROCESSORS, 166912, vgpu_backend.MULTIPROCESSORS]


def test_memory_functions(program):
    out = (ctypes.c_int * 4)()
    assert program.memory(out) == 0
    assert list(out) == [INVALID_VALUE, 12, 1, 1]


@pytest.mark.parametrize("backend", ["vgpu"])
def test_an_op_does_not_report_the_error_of_an_earlier_call(program, backend):
    assert (
        program.elapsed_time() == NOT_SUPPORTED and program.cudaPeekAtLastError() == NOT_SUPPORTED
    )
    assert vgpu_backend.op("grad_stats")([torch.ones(3)], 2.0).tolist() == [3.0, 0.0]


def test_what_is_missing_says_so(program):
    assert program.elapsed_time() == NOT_SUPPORTED
    assert b"cudaEventElapsedTime is not supported" in program.message(NOT_SUPPORTED)
    found = ctypes.c_bool()
    assert program.entry_point(b"cuMemCreate", ctypes.byref(found)) == NOT_SUPPORTED
    assert not found.value and b"cuMemCreate" in program.message(NOT_SUPPORTED)


def test_tensor_maps_are_encoded_and_checked(program):
    x = torch.zeros(16, 64)
    assert program.tensor_map(x.data_ptr(), 16, 8) == 0
    assert program.tensor_map(x.data_ptr() + 4, 16, 8) == INVALID_VALUE
    assert b"cuTensorMapEncodeTiled" in program.message(INVALID_VALUE)
    assert program.tensor_map(x.data_ptr(), 16, 257) == INVALID_VALUE


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("-gencode", "arch=compute_80,code=compute_80"), b"compressed"),
        (("-gencode", "arch=compute_80,code=sm_80", "--no-compress"), b"machine code only"),
        (("-gencode", "arch=compute_90,code=compute_90", "--no-compress"), b"no PTX for sm_80"),
    ],
    ids=["compressed", "machine code", "newer"],
)
def test_code_that_cannot_run_here(runtime, tmp_path, flags, text):
    program = compile_program(tmp_path, *flags)
    assert program.run_with(1, 32) == NO_IMAGE
    assert text in program.message(NO_IMAGE)
