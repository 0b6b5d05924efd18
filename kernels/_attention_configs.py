"""Tiles of the attention kernels, as data; no search at run time.

A tile is (block of queries, block of keys, warps, stages of the pipeline): the largest whose accumulators and operands
stay in registers without spills. Below sm_90, and from sm_120 on, it also fits the 99 KiB of shared memory that the
smallest of those architectures have.
"""

import os

import torch
import triton
from trainwright.kernels._attention_tiles import ALIBI, BIAS, DROPOUT, SINKS, SOFTCAP

EXTRAS = sum(option.value for option in (SOFTCAP, ALIBI, BIAS, SINKS, DROPOUT))

# (kernel, first architecture, bits of an element, padded head dim[, causal or not]): tile. "fwd+" and so on: for calls
# with options of the score, which want registers. fp32 runs on FMA units, whose operands are whole rows in registers:
# there every block compares positions (`EDGES`), and from a head dim of 128 on dk and dv multiply slices of columns. Of
# dk's spills 12 to 56 bytes are left, for which ptxas stays below the registers that it may use.
TILES = {
    ("fwd", 80, 16, 64): (128, 64, 4, 3),
    ("fwd", 80, 16, 128): (64, 64, 4, 2),
    ("fwd", 80, 16, 256): (64, 32, 8, 2),
    ("fwd", 80, 16, 512): (32, 32, 8, 1),
    ("fwd", 90, 16, 64): (128, 64, 8, 3),
    ("fwd", 90, 16, 128, True): (128, 64, 8, 2),
    ("fwd", 90, 16, 128, False): (128, 128, 8, 2),
    ("fwd", 90, 16, 256): (128, 32, 8, 2),
    ("fwd+", 80, 16, 64): (64, 64, 4, 2),
    ("fwd+", 80, 16, 128): (64, 64, 4, 2),
    ("fwd+", 90, 16, 128): (128, 64, 8, 2),
    ("dkv", 80, 16, 64): (32, 128, 8, 2),
    ("dkv", 80, 16, 128): (32, 64, 8, 2),
    ("dkv", 80, 16, 256): (32, 32, 8, 1),
    ("dkv", 80, 16, 512): (32, 16, 8, 1),
    ("dkv", 90, 16, 64): (64, 128, 8, 2),
    ("dkv", 90, 16, 128): (32, 128, 8, 2),
    ("dkv", 100, 16, 64): (32, 128, 8, 2),
    ("dkv", 100, 16, 128): (16, 64, 8, 2),
    ("dkv+", 80, 16, 64): (16, 64, 4, 2),
    ("dkv+", 80, 16, 128): (16, 64, 8, 2),
    ("dq", 80, 16, 64): (64, 64, 4, 2),
    ("dq", 80, 16, 128): (128, 32, 8, 2),
    ("dq", 80, 16, 256): (64, 16, 8, 2),
    ("dq", 80, 16, 512): (32, 16, 8, 1),
    ("dq", 90, 16, 64): (128, 64, 8, 2),
    ("dq", 90, 16, 128): (128, 64, 8, 2),
    ("dq+", 80, 16, 64): (64, 32, 4, 2),
    ("dq+", 80, 16, 128): (64, 32, 8, 2),
    ("dq+", 90, 16, 128): (128, 32, 8, 2),
    ("dq+", 100, 16, 128): (64, 32, 8, 2),
    ("dbias", 80, 16, 64): (64, 32, 8, 2),
    ("dbias", 80, 16, 128): (64, 32, 8, 2),
    ("dbias", 80, 16, 256): (32, 32, 4, 2),
    ("dbias", 80, 16, 512): (16, 16, 4, 1),
    ("fwd", 80, 32, 64): (32, 32, 4, 1),
    ("fwd", 80, 32, 128): (32, 32, 8, 1),
    ("fwd", 80, 32, 256): (32, 16, 8, 1),
    ("fwd", 80, 32, 512): (16, 16, 8, 1),
    ("dkv", 80, 32, 64): (16, 32, 8, 1),
    ("dkv", 80, 32, 128): (16, 16, 8, 1),
    ("dkv", 80, 32, 256): (16, 16, 8, 1),
    ("dkv", 80, 32, 512): (16, 16, 8, 1),
    ("dq", 80, 32, 64): (32, 32, 8, 1),
    ("dq", 80, 32, 128): (32, 16, 8, 1),
    ("dq", 80, 32, 256): (16, 16, 8, 1),
    ("dq", 80, 32, 512): (16, 16, 8, 1),
    ("dbias", 80, 32, 64): (32, 32, 8, 1),
    ("dbias", 80, 32, 128): (32, 16, 8, 1),
    ("dbias", 80, 32, 256): (16, 16, 8, 1),
    ("dbias", 80, 32, 512): (16, 16, 8, 1),
}  # fmt: skip
# The tile of the second launch, across what its programs walk: small, since `clean` wants registers.
FIX = {"fwd": {"BN": 16}, "dkv": {"BM": 16}, "dq": {"BN": 16}}


def padded(D):
    """The head dim of a tile: `tl.dot` wants a power of two, at least 16."""
    return max(16, triton.next_power_of_2(D))


def _interpreting():
    return os.environ.get("TRITON_INTERPRET") == "1"


def architecture():
    return 80 if _interpreting() else int(triton.runtime.driver.active.get_current_target().arch)


def look_up(kernel, arch, bits, D, causal):
    """The most special row: options, then the architecture, then the mask. sm_120 has the shared memory of sm_86."""
    arch = arch if arch < 120 else 80
    for name in (kernel, kernel.rstrip("+")):
        for first in (100, 90, 80):
            for key in ((name, first, bits, D, causal), (name, first, bits, D)):
                if first <= arch and key in TILES:
                    return TILES[key]
    raise KeyError((kernel, arch, bits, D, causal))


def tile_of(kernel, call):
    """Constants of a kernel's launch, for a call's arguments."""
    D, Dv, dtype = call["D"], call["Dv"], call["dtype"]
    if call["O"] & EXTRAS:
        kernel += "+"
    BD, BDV = padded(D), padded(Dv)
    bits = 8 * dtype.itemsize
    BM, BN, warps, stages = look_up(kernel, architecture(), bits, max(64, BD, BDV), call["causal"])
    upcast = dtype == torch.bfloat16 and _interpreting()
    return {
        "BM": BM, "BN": BN, "BD": BD, "BDV": BDV, "EVEN_D": BD == D, "EVEN_DV": Dv == BDV,
        "PRECISION": "upcast" if upcast else "ieee", "STAGES": stages, "num_warps": warps,
    }  # fmt: skip
