"""Number formats of the virtual GPU against exact rationals and against torch's casts."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

numbers = pytest.importorskip("trainwright._vgpu", reason="_vgpu is not built")

# exponent bits, mantissa bits, low bits of the register that do not count, has infinities
FORMATS = {
    "f16": (5, 10, 0, True),
    "bf16": (8, 7, 0, True),
    "e4m3": (4, 3, 0, False),
    "e5m2": (5, 2, 0, True),
    "tf32": (8, 10, 13, True),
    "f32": (8, 23, 0, True),
    "f64": (11, 52, 0, True),
}
NAN = {
    "f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F, "tf32": 0x7FFFFFFF, "f32": 0x7FFFFFFF,
    "f64": 2**63 - 1,
}  # fmt: skip
TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
MODES = ["rn", "rz", "rm", "rp", "rna"]


# ---- the reference: exact rationals


def sizes(fmt):
    exponent, mantissa, pad, has_infinity = FORMATS[fmt]
    sign = 1 << (exponent + mantissa + pad)
    infinity = ((1 << exponent) - 1) << (mantissa + pad)
    largest = infinity - (1 << pad) if has_infinity else sign - 2
    return exponent, mantissa, pad, sign, infinity if has_infinity else None, largest


def value(fmt, bits):
    """The number that the bits mean: a Fraction, or a float for infinities and NaN."""
    exponent, mantissa, pad, sign, infinity, largest = sizes(fmt)
    magnitude = bits & (sign - 1)
    if magnitude > largest:
        if magnitude != infinity:
            return math.nan
        return -math.inf if bits & sign else math.inf
    field, fraction = divmod(magnitude >> pad, 1 << mantissa)
    significand = fraction + (1 << mantissa if field else 0)
    x = significand * Fraction(2) ** (max(field, 1) - (2 ** (exponent - 1) - 1) - mantissa)
    return -x if bits & sign else x


def rounded(fmt, mode, x, satfinite=False, negative_zero=False):
    """The bits of the Fraction x in a format."""
    exponent, mantissa, pad, sign, infinity, largest = sizes(fmt)
    bias = 2 ** (exponent - 1) - 1
    negative = x < 0 or (x == 0 and negative_zero)
    a = abs(x)
    e = 1 - bias
    if a:
        e = a.numerator.bit_length() - a.denominator.bit_length()
        e -= a < Fraction(2) ** e
        e = max(e, 1 - bias)
    q, rest = divmod(a / Fraction(2) ** (e - mantissa), 1)
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and q % 2 == 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    result = (q + up) * Fraction(2) ** (e - mantissa)
    top = value(fmt, largest)
    if result > top:
        stay = satfinite or infinity is None or mode == "rz" or mode == ("rm", "rp")[negative]
        bits = largest if stay else infinity
    else:
        # A carry out of the significand moves into the exponent by itself.
        units = q + up - (1 << mantissa if q >= 1 << mantissa else 0)
        field = e + bias if q >= 1 << mantissa else 0
        bits = ((field << mantissa) + units) << pad
    return bits | (sign if negative else 0)


def samples(fmt, n, seed):
    """Bits of a format: the borders, then uniform over all bit patterns, then a band around one."""
    exponent, mantissa, pad, sign, infinity, largest = sizes(fmt)
    rng = np.random.default_rng(seed)
    one = ((1 << (exponent - 1)) - 1) << (mantissa + pad)
    unit = 1 << pad
    border = [0, unit, 1 << (mantissa + pad), (1 << (mantissa + pad)) - unit, one, largest]
    border += [infinity] if infinity else []
    border = [b | s for b in [*border, NAN[fmt]] for s in (0, sign)]
    uniform = rng.integers(0, 2 * sign, n, dtype=np.uint64)
    low = one - (8 << (mantissa + pad)) if exponent > 4 else 0
    near = rng.integers(low, one + (4 << (mantissa + pad)), n, dtype=np.uint64)
    near |= rng.integers(0, 2, n, dtype=np.uint64) * np.uint64(sign)
    tiny = rng.integers(0, 8 << (mantissa + pad), n, dtype=np.uint64)
    tiny |= rng.integers(0, 2, n, dtype=np.uint64) * np.uint64(sign)
    bits = np.concatenate([np.array(border, np.uint64), uniform, near, tiny])
    return bits & np.uint64(2**64 - unit)


def is_negative(fmt, bits):
    return bool(bits & sizes(fmt)[3])


def same(fmt, got, want, context):
    wrong = [(c, hex(int(g)), hex(w)) for c, g, w in zip(context, got, want) if int(g) != w]
    assert not wrong, (fmt, len(wrong), wrong[:5])


# ---- conversions


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f not in ("f32", "f64")])
def test_widen_is_exact(fmt):
    bits = np.arange(1 << 16 if fmt in ("f16", "bf16") else 1 << 8, dtype=np.uint64)
    if fmt == "tf32":
        bits = samples(fmt, 2000, 1)
    for b, x in zip(bits.tolist(), numbers.widen(fmt, bits).tolist()):
        want = value(fmt, b)
        if want != want:
            assert x != x, (fmt, hex(b))
        else:
            assert x == want and math.copysign(1, x) == (-1 if is_negative(fmt, b) else 1), hex(b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "f64"])
def test_narrow_rounds_as_the_mode_says(fmt, mode):
    rng = np.random.default_rng(7)
    numbers_of = numbers.widen(fmt, samples(fmt, 150, 3))
    numbers_of = numbers_of[np.isfinite(numbers_of)]
    step = np.array([2.0**-1, 2.0**-2, 2.0**-20, 0.0])
    # numbers of the format, midpoints between them and points just off either
    mantissa = FORMATS[fmt][1]
    x = (numbers_of[:, None] * (1 + step * 2.0**-mantissa)).ravel()
    x = np.concatenate(
        [x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf), x * 2.0**-3, x * 2.0**-150]
    )
    x = np.concatenate([x, rng.standard_normal(200) * 2.0 ** rng.integers(-160, 140, 200)])
    x = np.concatenate([x, [5e-324, -5e-324, 1e308, -1e308, 0.0, -0.0]])
    for satfinite in (False, True):
        got = numbers.narrow(fmt, mode, satfinite, x)
        want = [
            rounded(fmt, mode, Fraction(v), satfinite, math.copysign(1, v) < 0) for v in x.tolist()
        ]
        same(fmt, got, want, x.tolist())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "f64"])
def test_narrow_of_infinities_and_nan(fmt, mode):
    sign, infinity, largest = sizes(fmt)[3:]
    x = np.array([np.inf, -np.inf, np.nan, -np.nan])
    top = infinity or largest
    assert numbers.narrow(fmt, mode, False, x).tolist() == [top, top | sign, NAN[fmt], NAN[fmt]]
    want = [largest, largest | sign, NAN[fmt], NAN[fmt]]
    assert numbers.narrow(fmt, mode, True, x).tolist() == want


@pytest.mark.parametrize("fmt", TORCH)
def test_narrow_agrees_with_torch(fmt):
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    near = rng.standard_normal(200_000).astype(np.float32) * 4
    x = np.concatenate([bits.view(np.float32), near])
    x = x[np.isfinite(x)]
    if fmt == "e4m3":
        x = np.clip(x, -448, 448)  # PTX saturates, torch does not
    got = numbers.narrow(fmt, "rn", False, x)
    want = torch.from_numpy(x).to(TORCH[fmt]).view(torch.int16 if fmt[0] != "e" else torch.uint8)
    want = want.numpy().astype(np.uint64) & np.uint64(2 * sizes(fmt)[3] - 1)
    assert (got == want).all()


@pytest.mark.parametrize("mode", MODES[:4])
@pytest.mark.parametrize("fmt", ["f16", "bf16", "f32", "f64"])
def test_integers_to_numbers(fmt, mode):
    rng = np.random.default_rng(11)
    x = rng.integers(0, 2**64, 300, dtype=np.uint64) >> rng.integers(0, 64, 300, dtype=np.uint64)
    x = np.concatenate([x, np.array([0, 1, 2**53 + 1, 2**63, 2**64 - 1, 2**64 - 1025], np.uint64)])
    want = [rounded(fmt, mode, Fraction(v)) for v in x.tolist()]
    same(fmt, numbers.from_integer(fmt, mode, False, x), want, x.tolist())
    signed = x.view(np.int64).tolist()
    want = [rounded(fmt, mode, Fraction(v)) for v in signed]
    same(fmt, numbers.from_integer(fmt, mode, True, x), want, signed)


@pytest.mark.parametrize("mode", MODES[:4])
@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_numbers_to_integers(kind, mode):
    width = int(kind[1:])
    low, high = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if kind[0] == "s" else (0, 2**width - 1)
    x = [0.0, 0.5, 1.5, 2.5, -0.5, -1.5, -0.75, 0.75, 1e300, -1e300, math.inf, -math.inf]
    x += [float(low), float(high), high + 0.5, low - 0.5, float(low) * 1.001, 100.49, -100.51]
    x = np.array(x)
    how = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode]
    want = [
        (high if v > 0 else low) if math.isinf(v) else min(max(how(Fraction(v)), low), high)
        for v in x.tolist()
    ]
    got = [int(v) % 2**64 for v in numbers.to_integer(kind, mode, False, x)]
    assert got == [w % 2**64 for w in want]
    top = 1 << (width - 1)
    from32, from64 = (
        int(numbers.to_integer(kind, mode, wide, np.array([np.nan]))[0]) % 2**width
        for wide in (False, True)
    )
    assert (from32, from64) == (top if width == 64 else 0, top)


# ---- arithmetic


def exact(op, fmt, mode, a, b, c):
    """Bits of the operation on bits, by rationals; infinities and NaN by Python's floats."""
    x, y, z = value(fmt, a), value(fmt, b), value(fmt, c)
    neg = [is_negative(fmt, v) for v in (a, b, c)]
    operands = {"add": (x, y), "mul": (x, y), "div": (x, y), "fma": (x, y, z), "sqrt": (x,)}[op]
    if any(isinstance(v, float) for v in operands) or (op == "div" and y == 0):
        return special(op, fmt, operands, neg)
    if op == "sqrt":
        return exact_root(fmt, mode, x, neg[0])
    zero = False  # sign of a zero result
    if op == "add":
        result = x + y
        zero = zero_sum(mode, neg[0], neg[1], x == 0 and y == 0)
    elif op == "fma":
        result = x * y + z
        zero = zero_sum(mode, neg[0] != neg[1], neg[2], x * y == 0 and z == 0)
    else:
        result = x * y if op == "mul" else x / y
        zero = neg[0] != neg[1]
    return rounded(fmt, mode, result, negative_zero=zero)


def zero_sum(mode, a_negative, b_negative, both_zero):
    if both_zero and a_negative == b_negative:
        return a_negative
    return mode == "rm"


def special(op, fmt, operands, neg):
    """Results with an infinite or NaN operand, or a division by zero."""
    sign, infinity = sizes(fmt)[3:5]
    s = [-1.0 if n else 1.0 for n in neg]
    v = [math.copysign(abs(float(x)) if isinstance(x, float) else float(x != 0), si)
         for x, si in zip(operands, s)]  # fmt: skip
    if op == "div" and v[1] == 0:
        result = math.nan if v[0] == 0 or v[0] != v[0] else math.copysign(math.inf, v[0] * s[1])
    elif op == "sqrt":
        result = math.nan if v[0] < 0 or v[0] != v[0] else v[0]
    else:
        result = {
            "add": lambda: v[0] + v[1],
            "mul": lambda: v[0] * v[1],
            "div": lambda: v[0] / v[1],
            "fma": lambda: v[0] * v[1] + v[2],
        }[op]()
    if result != result:
        return NAN[fmt]
    assert math.isinf(result) or result == 0
    return (infinity if result else 0) | (sign if math.copysign(1, result) < 0 else 0)


def exact_root(fmt, mode, x, negative):
    if x == 0:
        return sizes(fmt)[3] if negative else 0
    if x < 0:
        return NAN[fmt]
    scale = (
        4**600
    )  # 600 bits below the point: the root of a number of a format is exact or irrational
    n = x * scale
    r = math.isqrt(n.numerator // n.denominator)
    inexact = Fraction(r * r) != n
    return rounded(fmt, mode, Fraction(2 * r + inexact, 2 * 2**600))


@pytest.mark.parametrize("mode", MODES[:4])
@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("op", ["add", "mul", "fma", "div", "sqrt"])
def test_arithmetic_is_exact_then_rounded(op, fmt, mode):
    a, b, c = (samples(fmt, 400, seed) for seed in (1, 2, 3))
    rng = np.random.default_rng(4)
    b, c = rng.permutation(b), rng.permutation(c)
    # and sums that nearly cancel: c close to -a*b, b close to -a
    sign = np.uint64(sizes(fmt)[3])
    if op == "fma":
        product = np.array([exact("mul", fmt, "rn", x, y, 0) for x, y in zip(a.tolist(), b.tolist())],
                           np.uint64)  # fmt: skip
        a, b, c = np.tile(a, 2), np.tile(b, 2), np.concatenate([c, product ^ sign])
    elif op == "add":
        close = a ^ sign ^ rng.integers(0, 8, a.size, dtype=np.uint64)
        a, b, c = np.tile(a, 2), np.concatenate([b, close]), np.tile(c, 2)
    got = numbers.arithmetic(op, fmt, mode, False, a, b, c)
    triples = list(zip(a.tolist(), b.tolist(), c.tolist()))
    want = [exact(op, fmt, mode, *t) for t in triples]
    same(fmt, got, want, [tuple(hex(v) for v in t) for t in triples])


@pytest.mark.parametrize("fmt", ["f32", "f16"])
@pytest.mark.parametrize("mode", MODES[:4])
def test_ftz_flushes_inputs_and_outputs(fmt, mode):
    a, b, c = (samples(fmt, 200, seed) for seed in (1, 2, 3))
    b, c = b[::-1].copy(), np.roll(c, 17)

    def flush(bits):
        _, mantissa, pad, sign, *_ = sizes(fmt)
        return bits & sign if (bits & (sign - 1)) < 1 << (mantissa + pad) else bits

    for op in ("add", "mul", "fma"):
        got = numbers.arithmetic(op, fmt, mode, True, a, b, c)
        triples = list(zip(a.tolist(), b.tolist(), c.tolist()))
        want = [flush(exact(op, fmt, mode, *(flush(v) for v in t))) for t in triples]
        same(fmt, got, want, triples)


# ---- modifiers


@pytest.mark.parametrize("fmt", ["f16", "bf16", "f32", "tf32", "e4m3", "e5m2"])
def test_relu_and_sat(fmt):
    bits = samples(fmt, 300, 9)
    relu, sat = (numbers.modifier(name, fmt, bits).tolist() for name in ("relu", "sat"))
    for b, r, s in zip(bits.tolist(), relu, sat):
        x = value(fmt, b)
        if x != x:
            assert (r, s) == (NAN[fmt], 0)
        else:
            assert value(fmt, r) == max(x, 0) and not is_negative(fmt, r)
            assert value(fmt, s) == min(max(x, 0), 1) and not is_negative(fmt, s)


def test_min_and_max():
    def pick(largest, nan_wins, a, b):
        x = numbers.extreme(largest, nan_wins, a, b)
        return "nan" if x != x else str(x)

    nan = math.nan
    assert [pick(True, False, *p) for p in ((1, 2), (-0.0, 0.0), (nan, 3), (3, nan), (nan, nan))] == [
        "2.0", "0.0", "3.0", "3.0", "nan"]  # fmt: skip
    assert [pick(False, False, *p) for p in ((1, 2), (0.0, -0.0), (nan, 3), (3, nan), (nan, nan))] == [
        "1.0", "-0.0", "3.0", "3.0", "nan"]  # fmt: skip
    assert [pick(w, True, *p) for w in (True, False) for p in ((nan, 3), (3, nan))] == ["nan"] * 4
