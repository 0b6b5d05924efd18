"""Casts that round to nearest even everywhere.

Triton's interpreter cuts fp32 to bf16 off instead of rounding it, and cannot cast fp64 to bf16 at all; compiled
kernels do the former right in one instruction. `cast` gives the compiled result in both.
"""

import os

import triton
import triton.language as tl

INTERPRETING = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def cast(x, T: tl.constexpr):
    """x in dtype T, rounded to nearest even; fp64 to 16 bits goes through fp32, as in torch."""
    if x.dtype == tl.float64 and tl.float64 != T:
        x = x.to(tl.float32)
    if INTERPRETING and x.dtype == tl.float32 and tl.bfloat16 == T:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(T)
