"""How the optimizers store floats in fewer bits, in plain torch: the specification of
csrc/include/trainwright/state_format.h, bit for bit. That header says what the formats are."""

from __future__ import annotations

import torch
from torch import Tensor

STATE_BLOCK = 256  # elements of the whole parameter that share a scale
NO_MASTER, FP32_MASTER, SPLIT16_MASTER = 0, 1, 2
FULL_STATE, BF16_STATE, INT8_STATE = 0, 1, 2
BLOCK8_FULL = 63 / 64  # what the largest of a block becomes before the root
BLOCK8_UNIT = 1.0158730158730159  # 1 / that, as fp32
SIGNED_ROOT, UNSIGNED_ROOT = 0x43000000 - (0x3F800000 >> 1), 0x43800000 - (0x3F800000 >> 2)
MASK32 = 0xFFFFFFFF


def bits_of(x: Tensor) -> Tensor:
    """The bits of fp32 values, as int64."""
    return x.contiguous().view(torch.int32).to(torch.int64) & MASK32


def from_bits(bits: Tensor) -> Tensor:
    """fp32 values from their bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded for fp32, as in every kernel; torch's own on the CPU is not (nor is this for fp64)."""
    return x.double().sqrt().to(x.dtype)


# ---- random numbers


def stochastic_words(seed: int, first: int, count: int, step: Tensor) -> Tensor:
    """(count,) int64 below 2^32: the Philox4x32-10 words of elements first ... first + count - 1 in step `step`."""
    index = torch.arange(first, first + count, device=step.device)
    block, stream = index >> 2, step.to(torch.int64).reshape(())
    c0, c1 = block & MASK32, block >> 32
    c2, c3 = (stream & MASK32).expand_as(block), (stream >> 32).expand_as(block)
    k0, k1 = seed & MASK32, seed >> 32 & MASK32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # may wrap to a negative number: bits are right
        c0, c1, c2, c3 = (
            (p1 >> 32 & MASK32) ^ c1 ^ k0,
            p1 & MASK32,
            (p0 >> 32 & MASK32) ^ c3 ^ k1,
            p0 & MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return torch.stack([c0, c1, c2, c3], 1).gather(1, (index & 3).unsqueeze(1)).squeeze(1)


def parameter_noise(words: Tensor) -> Tensor:
    return words & 0xFFFF


def state_noise(words: Tensor, signed: bool) -> Tensor:
    return words >> 16 if signed else (words >> 24) | (words >> 8 & 0xFF00)


# ---- 16 bits


def bf16_stochastic(x: Tensor, noise: Tensor) -> Tensor:
    """fp32 to bf16, up with the probability that makes the mean right. noise: 16 random bits per element."""
    bits = bits_of(x)
    high = torch.where(x.isnan(), (bits >> 16) | 0x40, (bits + noise) >> 16)
    return from_bits(high << 16).to(torch.bfloat16)


def fp16_stochastic(x: Tensor, noise: Tensor) -> Tensor:
    bits = bits_of(x)
    normal = from_bits((bits + (noise >> 3)) & 0xFFFFE000)
    tiny = x.abs() < 2.0**-14
    scaled = torch.where(tiny, x.abs() * 2.0**24, 0.0)
    low = scaled.floor()
    up = (noise.float() < (scaled - low) * 65536.0).float()
    small = ((low + up) * 2.0**-24).copysign(x)
    return torch.where(x.isnan(), x, torch.where(tiny, small, normal)).to(torch.float16)


def split16_join(p: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter and its int16 remainder."""
    return from_bits(((bits_of(p.float())) + remainder.to(torch.int64)) & MASK32)


def split16(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 parameter (nearest, ties away from zero) and the int16 remainder of an fp32 master."""
    bits = torch.where(master.isnan(), 0x7FC00000, bits_of(master))
    low = bits & 0xFFFF
    remainder = torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16)
    return from_bits((bits + 0x8000) & 0xFFFF0000).to(torch.bfloat16), remainder


# ---- 8 bits with a scale per block


def scale_count(numel: int) -> int:
    return -(-numel // STATE_BLOCK)


def _per_element(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(STATE_BLOCK)[:numel]


def _inverse_root(code: Tensor, signed: bool) -> Tensor:
    """What has the root `code` (whole fp32 numbers), with its sign."""
    shift, root = (1, SIGNED_ROOT) if signed else (2, UNSIGNED_ROOT)
    y = from_bits((bits_of(code.abs()) - root).clamp(min=0) << shift)
    return torch.where(code < 0, -y, y)


def int8_decode(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 values of int8 (signed) or uint8 (never negative) codes, in the codes' shape."""
    unit = _per_element(scales * BLOCK8_UNIT, codes.numel()).view(codes.shape)
    return _inverse_root(codes.float(), codes.dtype == torch.int8) * unit


def int8_encode(x: Tensor, signed: bool, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes of fp32 values in x's shape, and their scales. noise: 16 random bits per element, or None for nearest."""
    flat = x.reshape(-1)
    n = flat.numel()
    padded = torch.zeros(scale_count(n) * STATE_BLOCK, device=x.device)
    padded[:n] = flat.abs()
    largest = padded.view(-1, STATE_BLOCK).amax(1)
    scales = torch.where(largest == 0, 0.0, largest.clamp(min=2.0**-90))
    scales = torch.where(largest.isfinite(), scales, float("nan"))
    quotient = (
        torch.full_like(scales, BLOCK8_FULL) / scales
    )  # a number / tensor would take the reciprocal
    y = flat.abs() * _per_element(torch.where(scales > 0, quotient, 0.0), n)
    y = torch.where(y < BLOCK8_FULL, y, BLOCK8_FULL)
    shift, root = (1, SIGNED_ROOT) if signed else (2, UNSIGNED_ROOT)
    code = from_bits((bits_of(y) >> shift) + root)
    if noise is None:
        code = code.round()
    else:  # up with the probability that makes the mean of y right
        code = code.floor()
        a, b = _inverse_root(code, signed), _inverse_root(code + 1.0, signed)
        code = code + (noise.float() * (b - a) < (y - a) * 65536.0).float()
    if signed:
        return code.copysign(flat).to(torch.int8).view(x.shape), scales
    return torch.where((flat != 0) & (code < 1), 1.0, code).to(torch.uint8).view(x.shape), scales
