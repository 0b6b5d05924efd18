"""Triton kernels that use the tensor instructions, and their way from source to a launch on the virtual GPU."""

import atexit
import functools
import math
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}  # fmt: skip


@triton.jit
def matmul(a, b, c, M, N, K, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, ACC: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """c (M, N) = a (M, K) b (K, N), one tile of c for each program; either operand may be stored transposed."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=ACC)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        at_a = row[:, None] + k[None, :] * M if A_TRANSPOSED else row[:, None] * K + k[None, :]
        at_b = (
            column[None, :] * K + k[:, None] if B_TRANSPOSED else k[:, None] * N + column[None, :]
        )
        left = tl.load(a + at_a, mask=(row[:, None] < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + at_b, mask=(k[:, None] < K) & (column[None, :] < N), other=0.0)
        acc = tl.dot(left, right, acc, out_dtype=ACC)
    inside = (row[:, None] < M) & (column[None, :] < N)
    tl.store(c + row[:, None] * N + column[None, :], acc, mask=inside)


@triton.jit
def matmul_descriptor(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The same through tensor descriptors that the kernel makes itself; c in the type of its pointer."""
    a_tiles = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    b_tiles = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    c_tiles = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    row = tl.program_id(0) * BM
    column = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_tiles.load([row, k]), b_tiles.load([k, column]), acc)
    c_tiles.store([row, column], acc.to(c.dtype.element_ty))


@triton.jit
def matmul_host_descriptor(
    a_tiles, b_tiles, c_tiles, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """The same through descriptors made by the host."""
    row = tl.program_id(0) * BM
    column = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_tiles.load([row, k]), b_tiles.load([k, column]), acc)
    c_tiles.store([row, column], acc.to(tl.bfloat16))


@triton.jit
def attention(q, k, v, out, lse, S, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
              BN: tl.constexpr):  # fmt: skip
    """One head of attention with a running softmax: out (S, D) = softmax(scale q k^T) v, lse (S) in base 2."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    queries = tl.load(q + row[:, None] * D + d[None, :], mask=row[:, None] < S, other=0.0)
    high = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    end = tl.minimum(S, (tl.program_id(0) + 1) * BM) if CAUSAL else S
    for start in range(0, end, BN):
        column = start + tl.arange(0, BN)
        keys = tl.load(k + column[None, :] * D + d[:, None], mask=column[None, :] < S, other=0.0)
        score = tl.dot(queries, keys) * (scale * 1.4426950408889634)
        keep = column[None, :] < S
        if CAUSAL:
            keep = keep & (column[None, :] <= row[:, None])
        score = tl.where(keep, score, float("-inf"))
        higher = tl.maximum(high, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(high - higher)
        values = tl.load(v + column[:, None] * D + d[None, :], mask=column[:, None] < S, other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        high = higher
    tl.store(out + row[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty),
             mask=row[:, None] < S)  # fmt: skip
    tl.store(lse + row, high + tl.log2(total), mask=row < S)


# ---- compilation: in a process of its own, because the test session has Triton in its interpreter


@dataclass(frozen=True)
class Compiled:
    ptx: str
    name: str
    shared: int  # bytes of dynamic shared memory
    scratch: int  # bytes of global memory for each program


def compile_here(kernel, capability, types, constants, warps, stages, blocks):
    signature = dict(types) | {name: "constexpr" for name, _ in constants}
    values = {name: getattr(tl, v) if isinstance(v, str) else v for name, v in constants}
    source = ASTSource(globals()[kernel], signature, values)
    options = {"num_warps": warps, "num_stages": stages, "num_ctas": blocks}
    k = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(
        k.asm["ptx"], k.metadata.name, k.metadata.shared, k.metadata.global_scratch_size
    )


def serve():
    """Requests on standard input, answers on standard output, as pickles."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Triton prints must not get between them
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = compile_here(*request)
        except Exception as error:
            answer = RuntimeError(f"{request[0]}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


@functools.cache
def compiler():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-c", "from vgpu import triton_kernels; triton_kernels.serve()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    atexit.register(process.communicate)
    return process


@functools.cache
def compiled(kernel, capability, types, constants, warps=4, stages=3, blocks=1):
    """A kernel of this file for an architecture. types: ((name, type), ...) as ASTSource has them; constants: ((name,
    value), ...), where a string names a type of triton.language; blocks: of a cluster, for each program."""
    process = compiler()
    pickle.dump((kernel, capability, types, constants, warps, stages, blocks), process.stdin)
    process.stdin.flush()
    answer = pickle.load(process.stdout)
    if isinstance(answer, Exception):
        raise answer
    return answer


def type_of(value):
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def launch(device, kernel, grid, args, constants, *, warps=4, stages=3, blocks=1, **options):
    """Compiles a kernel for the device's architecture and runs it; args: (name, value) of those that are no constants.
    Returns the compiled kernel and the launch's report."""
    types = tuple((name, type_of(value)) for name, value in args.items())
    capability = int(device.arch[3:5])
    k = compiled(kernel, capability, types, tuple(constants.items()), warps, stages, blocks)
    # Each program has its own part of the scratch memory, aligned to 128 bytes.
    scratch = torch.zeros(blocks * math.prod(grid) * k.scratch + 128, dtype=torch.uint8)
    hidden = (scratch[-scratch.data_ptr() % 128 :] if k.scratch else 0, 0)
    module = device.load_ptx(k.ptx)
    report = module.launch(
        k.name,
        (blocks * grid[0], *grid[1:]),
        32 * warps,
        (*args.values(), *hidden),
        smem=k.shared,
        cluster=blocks,
        **options,
    )
    return k, report
