"""What kernels share: jit functions, and what their launchers choose."""

import torch
import triton
import triton.language as tl


@triton.jit
def philox_block(seed, block, stream):
    """The four random words of elements 4*block .. 4*block+3 of a stream: those of trainwright/philox.h, bit for bit.

    `seed`, `block` and `stream` are 64-bit (a tensor or a scalar each); the result is four uint32 tensors.
    """
    # Adding to a zero of the block's shape makes every counter word as large as the block.
    block = tl.cast(block, tl.uint64)
    stream = tl.cast(stream, tl.uint64) + (block ^ block)
    return tl.philox(
        seed,
        (block & 0xFFFFFFFF).to(tl.uint32),
        (block >> 32).to(tl.uint32),
        (stream & 0xFFFFFFFF).to(tl.uint32),
        (stream >> 32).to(tl.uint32),
    )


@triton.jit
def uniform01(bits):
    """Uniform in [0, 1) with 24 bits, exact in fp32."""
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-8


def acc_type(*dtypes):
    """Triton's type for sums over elements of these torch dtypes."""
    return tl.float64 if torch.float64 in dtypes else tl.float32


def whole_row(C):
    """Launch options of a program that holds a row of C elements in its registers."""
    block = triton.next_power_of_2(max(C, 1))
    return {"BLOCK_C": block, "num_warps": min(16, max(1, block // 512))}
