"""Tiles and schedules of the matrix products, as data by architecture, operand and shape; no search at run time."""

import os
from dataclasses import dataclass

import torch
import triton

# The interpreter multiplies the bits of bf16 as integers; in fp32 the products are the same.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GROUP_M = 8  # rows of tiles that programs take together, so that what they read shares the L2 cache

# (kind, first architecture): BLOCK_M, BLOCK_N, BLOCK_K, warps, stages, programs that fit a multiprocessor at a time.
# "large" fills the registers of 8 warps with fp32 sums and leaves none for an epilogue; "fused" has one. Of sm_86 to
# sm_89 and sm_120 a block has 99 KiB of shared memory. "small": too few tiles for large ones. "anywhere": rows that do
# not start at 16-byte boundaries cannot be copied to shared memory asynchronously, so loads must fit in registers.
# "fp32" runs on the FMA units.
TILES = {
    ("large", 80): (128, 256, 64, 8, 3, 1),
    ("large", 86): (128, 128, 64, 8, 2, 1),
    ("large", 90): (128, 256, 64, 8, 3, 1),
    ("fused", 80): (128, 128, 64, 8, 3, 1),
    ("fused", 86): (128, 128, 64, 8, 2, 1),
    ("fused", 90): (128, 128, 64, 8, 3, 1),
    ("small", 80): (64, 64, 64, 4, 4, 2),
    ("small", 86): (64, 64, 64, 4, 3, 2),
    ("small", 90): (64, 64, 64, 4, 4, 2),
    ("anywhere", 80): (64, 64, 32, 8, 2, 2),
    ("fp32", 80): (64, 64, 32, 8, 2, 2),
}
ARCHS = (90, 86, 80)
# Stream-K pays for its workspace where the last wave of tiles would leave this share of the programs idle, in a product
# of at most so many waves, and with so many blocks of K for a program at least.
LEAST_IDLE, MOST_WAVES, LEAST_BLOCKS = 0.25, 6, 4


def architecture():
    """Of the current device; that of the smallest that has tensor descriptors in the interpreter."""
    if INTERPRETED:
        return 90
    arch = triton.runtime.driver.active.get_current_target().arch
    return int(arch) if isinstance(arch, int) else 80


def multiprocessors():
    if INTERPRETED:
        return 4
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["multiprocessor_count"]


def look_up(kind, arch):
    arch = 86 if arch >= 120 else arch
    return next(TILES[kind, a] for a in ARCHS if a <= arch and (kind, a) in TILES)


def kind_for(M, N, operand, aligned, fused, copies=1, programs=132):
    if operand == torch.float32:
        return "fp32"
    if not aligned:
        return "anywhere"
    if not fused and copies * triton.cdiv(M, 128) * triton.cdiv(N, 256) >= programs:
        return "large"
    return "fused" if copies * triton.cdiv(M, 128) * triton.cdiv(N, 128) >= programs // 2 else "small"  # fmt: skip


def constants(tile):
    BLOCK_M, BLOCK_N, BLOCK_K, warps, stages, _ = tile
    return {
        "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """`programs` compute the tiles before `whole` in turn; of the blocks of K of the others each takes the next `depth`
    (stream-K), 0 if there are none."""

    programs: int
    whole: int
    depth: int


def schedule_for(tiles, blocks, slots, persistent, stream=True):
    """For so many tiles of `blocks` blocks of K each, on a device that runs `slots` programs at a time. Programs that
    do not fetch the next tile while they finish one are as many as the tiles, if none is streamed."""
    rest = tiles % slots
    idle = (slots - rest) / slots
    if stream and rest and idle >= LEAST_IDLE and tiles // slots <= MOST_WAVES:
        depth = max(LEAST_BLOCKS, triton.cdiv(rest * blocks, slots))
        if depth < blocks:
            programs = slots if tiles > rest else triton.cdiv(rest * blocks, depth)
            return Schedule(programs, tiles - rest, depth)
    return Schedule(min(tiles, slots) if persistent else tiles, tiles, 0)
