"""How the optimizers store floats in fewer bits: csrc/include/trainwright/state_format.h in Triton, bit for bit.

Elements lie in tiles (rows, STATE_BLOCK), so that a row of a tile is what shares a scale.
"""

import triton
import triton.language as tl
from trainwright.kernels._cast import cast
from trainwright.kernels._tl import philox_block
from trainwright.ops import _optimizer_formats as formats

_UNIT, _FULL = tl.constexpr(formats.BLOCK8_UNIT), tl.constexpr(formats.BLOCK8_FULL)
_FULL_BITS = tl.constexpr(0x3F7C0000)
_SIGNED_ROOT, _UNSIGNED_ROOT = (
    tl.constexpr(formats.SIGNED_ROOT),
    tl.constexpr(formats.UNSIGNED_ROOT),
)
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number


@triton.jit
def sqrt_rn(x):
    """The correctly rounded square root; tl.sqrt of fp32 is approximate."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def div_rn(x, y):
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


# ---- random numbers


@triton.jit
def stochastic_words(
    seed, first, step, ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUADS: tl.constexpr
):
    """The random words of elements first ... first + ROWS * COLUMNS - 1. QUADS: `first` is a multiple of 4, so that
    one call of Philox serves four neighbours."""
    if QUADS:
        block = (first >> 2) + tl.arange(0, ROWS * COLUMNS // 4)
        a, b, c, d = philox_block(seed, block, step.to(tl.int64))
        words = tl.join(tl.join(a, c), tl.join(b, d))  # [block, word >> 1, word & 1]
        return tl.reshape(words, (ROWS, COLUMNS))
    else:
        index = first + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        a, b, c, d = philox_block(seed, index >> 2, step.to(tl.int64))
        upper = (index & 2) != 0
        return tl.where((index & 1) != 0, tl.where(upper, d, b), tl.where(upper, c, a))


@triton.jit
def _state_noise(words, SIGNED: tl.constexpr):
    return words >> 16 if SIGNED else (words >> 24) | ((words >> 8) & 0xFF00)


# ---- 16 bits


@triton.jit
def bf16_stochastic(x, noise):
    bits = tl.where(x == x, _bits(x) + noise, _bits(x) | 0x400000)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp16_stochastic(x, noise):
    normal = _float((_bits(x) + (noise >> 3)) & 0xFFFFE000)
    magnitude = tl.abs(x)
    tiny = magnitude < 6.103515625e-05
    scaled = tl.where(tiny, magnitude * 16777216.0, 0.0)
    low = tl.floor(scaled)
    up = tl.where(noise.to(tl.float32) < (scaled - low) * 65536.0, 1.0, 0.0)
    small = _float(_bits((low + up) * 5.9604644775390625e-08) | (_bits(x) & 0x80000000))
    return tl.where(x == x, tl.where(tiny, small, normal), x).to(tl.float16)


@triton.jit
def split16_join(parameter, remainder):
    """The fp32 master of a bf16 parameter and its int16 remainder."""
    return _float(
        _bits(parameter.to(tl.float32)) + remainder.to(tl.int32).to(tl.uint32, bitcast=True)
    )


@triton.jit
def split16(master):
    """(bf16 parameter, int16 remainder)."""
    bits = tl.where(master == master, _bits(master), 0x7FC00000)
    parameter = ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return parameter, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def round_parameter(x, words, P: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC and tl.bfloat16 == P:
        return bf16_stochastic(x, words & 0xFFFF)
    elif STOCHASTIC and tl.float16 == P:
        return fp16_stochastic(x, words & 0xFFFF)
    else:
        return cast(x, P)


# ---- states


@triton.jit
def bf16_state(x, words, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr):
    return bf16_stochastic(x, _state_noise(words, SIGNED)) if STOCHASTIC else cast(x, tl.bfloat16)


@triton.jit
def _inverse_root(code, SIGNED: tl.constexpr):
    """What has the root `code`, a whole float that is not negative; 0 for 0, whose bits would wrap."""
    if SIGNED:
        return _float((tl.maximum(_bits(code), _SIGNED_ROOT) - _SIGNED_ROOT) << 1)
    else:
        return _float((tl.maximum(_bits(code), _UNSIGNED_ROOT) - _UNSIGNED_ROOT) << 2)


@triton.jit
def block8_value(code, scale, SIGNED: tl.constexpr):
    """fp32 values of a tile of codes."""
    w = code.to(tl.float32)
    unit = (scale * _UNIT)[:, None]
    if SIGNED:
        y = _inverse_root(tl.abs(w), SIGNED)
        return _float(_bits(y) | (_bits(w) & 0x80000000)) * unit
    else:
        return _inverse_root(w, SIGNED) * unit


@triton.jit
def block8_encode(x, words, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """(codes, scales) of a tile of fp32 values."""
    magnitude = tl.abs(x)
    # As integers magnitudes have the same order, with NaN above infinity.
    top = tl.max(magnitude.to(tl.int32, bitcast=True), axis=1)
    largest = top.to(tl.float32, bitcast=True)
    scale = tl.where(largest > 8.0779356694631609e-28, largest, 8.0779356694631609e-28)  # 2^-90
    scale = tl.where(largest == 0.0, 0.0, scale)
    scale = tl.where(top < 0x7F800000, scale, float("nan"))
    filled = scale > 0.0
    full = tl.full(scale.shape, _FULL, tl.float32)
    inverse = tl.where(filled, tl.div_rn(full, tl.where(filled, scale, 1.0)), 0.0)
    y = tl.minimum(_bits(magnitude * inverse[:, None]), _FULL_BITS)  # NaN is above it
    w = _float((y >> 1) + _SIGNED_ROOT if SIGNED else (y >> 2) + _UNSIGNED_ROOT)
    if STOCHASTIC:
        w = tl.floor(w)
        a, b = _inverse_root(w, SIGNED), _inverse_root(w + 1.0, SIGNED)
        noise = _state_noise(words, SIGNED).to(tl.float32)
        w = tl.where(noise * (b - a) < (_float(y) - a) * 65536.0, w + 1.0, w)
    code = _bits(w + _TO_WHOLE).to(tl.int32) - 0x4B400000
    if SIGNED:
        return tl.where(_bits(x) >> 31 != 0, -code, code).to(tl.int8), scale
    else:
        return tl.maximum(code, tl.minimum(_bits(x), 1).to(tl.int32)).to(tl.uint8), scale
