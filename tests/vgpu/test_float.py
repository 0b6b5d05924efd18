"""Floating-point instructions of the virtual GPU: rounding against exact rationals, formats by their definition."""

import math
import random
from fractions import Fraction

import pytest
import torch
from numerics import vgpu_close

pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from instruction import run
from test_number import NAN, exact, is_negative, rounded, samples, sizes, value

BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
MODES = ["rn", "rz", "rm", "rp"]


def columns(fmt, n=60, count=3):
    lists = [samples(fmt, n, seed).tolist() for seed in range(count)]
    for i, column in enumerate(lists):
        random.Random(i).shuffle(column)
    return lists


def flush(fmt, bits):
    _, mantissa, pad, sign, *_ = sizes(fmt)
    return bits & sign if (bits & (sign - 1)) < 1 << (mantissa + pad) else bits


def compare(body, inputs, results, wants):
    got = run(body, inputs, [results])[0]
    wrong = [
        (body, [hex(v[i]) for _, v in inputs], hex(g), hex(w))
        for i, (g, w) in enumerate(zip(got, wants))
        if g != w
    ]
    assert not wrong, (len(wrong), wrong[:4])


def check(body, fmt, reference, count, inputs=None):
    """One number a lane, all of format fmt; reference(*bits) gives bits."""
    inputs = inputs or columns(fmt)[:count]
    kind = f"b{BITS[fmt]}"
    compare(body, [(kind, v) for v in inputs], kind, [reference(*row) for row in zip(*inputs)])


def check_pair(body, fmt, reference, count):
    """Two numbers a lane."""
    low, high = columns(fmt, count=6)[:count], columns(fmt, count=6)[3 : 3 + count]
    inputs = [("b32", [h << 16 | x for x, h in zip(*pair)]) for pair in zip(low, high)]
    wants = [reference(*h) << 16 | reference(*x) for x, h in zip(zip(*low), zip(*high))]
    compare(body, inputs, "b32", wants)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", ["f32", "f64"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma", "div", "sqrt", "rcp"])
def test_rounding(op, fmt, mode):
    sign = sizes(fmt)[3]
    one = {"f32": 0x3F800000, "f64": 0x3FF0000000000000}[fmt]
    references = {
        "add": (2, lambda a, b: exact("add", fmt, mode, a, b, 0)),
        "sub": (2, lambda a, b: exact("add", fmt, mode, a, b ^ sign, 0)),
        "mul": (2, lambda a, b: exact("mul", fmt, mode, a, b, 0)),
        "div": (2, lambda a, b: exact("div", fmt, mode, a, b, 0)),
        "fma": (3, lambda a, b, c: exact("fma", fmt, mode, a, b, c)),
        "sqrt": (1, lambda a: exact("sqrt", fmt, mode, a, 0, 0)),
        "rcp": (1, lambda a: exact("div", fmt, mode, one, a, 0)),
    }
    count, reference = references[op]
    operands = ", ".join(["{a}", "{b}", "{c}"][:count])
    check(f"{op}.{mode}.{fmt} {{d}}, {operands};", fmt, reference, count)
    if fmt == "f32":

        def flushed(*bits):
            return flush(fmt, reference(*(flush(fmt, x) for x in bits)))

        check(f"{op}.{mode}.ftz.{fmt} {{d}}, {operands};", fmt, flushed, count)


def saturate(fmt, bits):
    x = value(fmt, bits)
    return 0 if x != x or is_negative(fmt, bits) else min(bits, rounded(fmt, "rn", Fraction(1)))


def relu(fmt, bits):
    x = value(fmt, bits)
    return NAN[fmt] if x != x else 0 if is_negative(fmt, bits) else bits


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("op", "after"),
    [
        ("fma", ".relu"),
        *[(op, after) for op in ("add", "sub", "mul", "fma") for after in ("", ".sat")],
    ],
)
def test_sixteen_bits(op, fmt, after):
    sign = 0x8000
    references = {
        "add": (2, lambda a, b: exact("add", fmt, "rn", a, b, 0)),
        "sub": (2, lambda a, b: exact("add", fmt, "rn", a, b ^ sign, 0)),
        "mul": (2, lambda a, b: exact("mul", fmt, "rn", a, b, 0)),
        "fma": (3, lambda a, b, c: exact("fma", fmt, "rn", a, b, c)),
    }
    count, plain = references[op]

    def reference(*bits):
        r = plain(*bits)
        return saturate(fmt, r) if after == ".sat" else relu(fmt, r) if after == ".relu" else r

    operands = ", ".join(["{a}", "{b}", "{c}"][:count])
    check(f"{op}.rn{after}.{fmt} {{d}}, {operands};", fmt, reference, count)
    check_pair(f"{op}.rn{after}.{fmt}x2 {{d}}, {operands};", fmt, reference, count)


def test_saturation_of_f32():
    a, b = columns("f32")[:2]
    check(
        "add.sat.f32 {d}, {a}, {b};",
        "f32",
        lambda a, b: saturate("f32", exact("add", "f32", "rn", a, b, 0)),
        2,
        [a, b],
    )
    check("cvt.sat.f32.f32 {d}, {a};", "f32", lambda a: saturate("f32", a), 1, [a])
    check(
        "cvt.ftz.f32.f32 {d}, {a};",
        "f32",
        lambda a: flush("f32", a) if value("f32", a) == value("f32", a) else NAN["f32"],
        1,
        [a],
    )


@pytest.mark.parametrize("fmt", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max(op, fmt):
    def pick(a, b):
        x, y = value(fmt, a), value(fmt, b)
        if x == y:
            return a if is_negative(fmt, a) == (op == "min") else b
        return a if (x < y) == (op == "min") else b

    def drop_nan(a, b):
        x, y = value(fmt, a), value(fmt, b)
        if x != x:
            return b if y == y else NAN[fmt]
        return a if y != y else pick(a, b)

    def keep_nan(a, b):
        return (
            NAN[fmt]
            if value(fmt, a) != value(fmt, a) or value(fmt, b) != value(fmt, b)
            else pick(a, b)
        )

    check(f"{op}.{fmt} {{d}}, {{a}}, {{b}};", fmt, drop_nan, 2)
    if fmt == "f64":
        return
    check(f"{op}.NaN.{fmt} {{d}}, {{a}}, {{b}};", fmt, keep_nan, 2)

    def xorsign(a, b):
        sign = sizes(fmt)[3]
        return drop_nan(a & (sign - 1), b & (sign - 1)) | (a ^ b) & sign

    check(f"{op}.xorsign.abs.{fmt} {{d}}, {{a}}, {{b}};", fmt, xorsign, 2)
    if fmt in ("f16", "bf16"):
        check_pair(f"{op}.{fmt}x2 {{d}}, {{a}}, {{b}};", fmt, drop_nan, 2)
        check_pair(f"{op}.NaN.{fmt}x2 {{d}}, {{a}}, {{b}};", fmt, keep_nan, 2)


def test_signs():
    for fmt, bits in BITS.items():
        sign = 1 << (bits - 1)
        check(f"neg.{fmt} {{d}}, {{a}};", fmt, lambda a, sign=sign: a ^ sign, 1)
        check(f"abs.{fmt} {{d}}, {{a}};", fmt, lambda a, sign=sign: a & (sign - 1), 1)
        if bits == 16:
            check_pair(f"neg.{fmt}x2 {{d}}, {{a}};", fmt, lambda a: a ^ 0x8000, 1)
        else:  # the sign of the first, the magnitude of the second
            check(
                f"copysign.{fmt} {{d}}, {{a}}, {{b}};",
                fmt,
                lambda a, b, sign=sign: a & sign | b & (sign - 1),
                2,
            )
    check("abs.ftz.f32 {d}, {a};", "f32", lambda a: flush("f32", a) & 0x7FFFFFFF, 1)


@pytest.mark.parametrize("fmt", ["f32", "f64"])
def test_testp(fmt):
    smallest = 1 << sizes(fmt)[1]
    sign = sizes(fmt)[3]
    kinds = {
        "finite": lambda x, b: not isinstance(x, float),
        "infinite": lambda x, b: isinstance(x, float) and math.isinf(x),
        "number": lambda x, b: x == x,
        "notanumber": lambda x, b: x != x,
        "normal": lambda x, b: not isinstance(x, float) and b & (sign - 1) >= smallest,
        "subnormal": lambda x, b: 0 < b & (sign - 1) < smallest,
    }
    a = columns(fmt)[0]
    for kind, test in kinds.items():
        compare(
            f"testp.{kind}.{fmt} {{d}}, {{a}};",
            [(f"b{BITS[fmt]}", a)],
            "pred",
            [int(test(value(fmt, b), b)) for b in a],
        )


COMPARISONS = {
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y and x == x and y == y, "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y, "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
}  # fmt: skip


@pytest.mark.parametrize("fmt", ["f32", "f64", "f16", "bf16"])
def test_comparisons(fmt):
    a, b = columns(fmt)[:2]
    b = [x if i % 4 == 0 else y for i, (x, y) in enumerate(zip(a, b))]
    pairs = [(value(fmt, x), value(fmt, y)) for x, y in zip(a, b)]
    unordered = [x != x or y != y for x, y in pairs]
    wants = {op: [f(*p) for p in pairs] for op, f in COMPARISONS.items()}
    wants |= {f"{op}u": [u or w for u, w in zip(unordered, want)] for op, want in wants.items()}
    wants |= {"num": [not u for u in unordered], "nan": unordered}
    kind = f"b{BITS[fmt]}"
    for op, want in wants.items():
        compare(
            f"setp.{op}.{fmt} {{d}}, {{a}}, {{b}};",
            [(kind, a), (kind, b)],
            "pred",
            [int(w) for w in want],
        )
    if fmt == "f32":
        flushed = [(value(fmt, flush(fmt, x)), value(fmt, flush(fmt, y))) for x, y in zip(a, b)]
        want = [int(COMPARISONS["lt"](*p)) for p in flushed]
        compare("setp.lt.ftz.f32 {d}, {a}, {b};", [(kind, a), (kind, b)], "pred", want)
        compare(
            "set.lt.f32.f32 {d}, {a}, {b};",
            [(kind, a), (kind, b)],
            "b32",
            [0x3F800000 * w for w in wants["lt"]],
        )
    if fmt in ("f16", "bf16"):
        rolled = a[1:] + a[:1], b[1:] + b[:1]
        packed = [("b32", [h << 16 | x for x, h in zip(v, r)]) for v, r in zip((a, b), rolled)]
        low = [int(w) for w in wants["ltu"]]
        got = run(f"setp.ltu.{fmt}x2 {{d}}|{{e}}, {{a}}, {{b}};", packed, ["pred", "pred"])
        assert got == [low, low[1:] + low[:1]]


# ---- approximate functions: as near as the host's float functions


@pytest.mark.parametrize("op", ["ex2", "lg2", "sin", "cos", "tanh", "rsqrt", "sqrt", "rcp"])
def test_approximations(op):
    functions = {
        "ex2": lambda x: 2.0**x if x < 1000 else math.inf,
        "lg2": lambda x: math.log2(x) if x > 0 else -math.inf if x == 0 else math.nan,
        "sin": math.sin, "cos": math.cos, "tanh": math.tanh,
        "rsqrt": lambda x: x**-0.5 if x > 0 else math.inf if x == 0 else math.nan,
        "sqrt": lambda x: x**0.5 if x >= 0 else math.nan, "rcp": lambda x: 1 / x if x else math.inf,
    }  # fmt: skip
    x = torch.cat(
        [
            torch.randn(200) * 4,
            torch.rand(100) * 1e-3,
            torch.rand(100) * 100,
            torch.tensor([0.0, 1.0]),
        ]
    )
    bits = [b & 0xFFFFFFFF for b in x.view(torch.int32).tolist()]
    for ftz in ("", ".ftz"):
        if op == "tanh" and ftz:
            continue
        got = run(f"{op}.approx{ftz}.f32 {{d}}, {{a}};", [("b32", bits)], ["b32"])[0]
        for xi, g in zip(x.tolist(), got):
            y, want = value("f32", g), functions[op](xi)
            if math.isnan(want):
                assert g == NAN["f32"]
            else:
                assert vgpu_close(f"approx{ftz}.f32", float(y), want), (op, xi)


def test_approximations_of_special_values():
    infinity, minus, nan = 0x7F800000, 0x80000000, 0x7FFFFFFF
    cases = {
        "ex2": [(infinity, infinity), (infinity | minus, 0), (nan, nan), (minus, 0x3F800000)],
        "lg2": [
            (infinity, infinity),
            (0, infinity | minus),
            (minus, infinity | minus),
            (0xBF800000, nan),
        ],
        "rsqrt": [(0, infinity), (minus, infinity | minus), (infinity, 0), (0xBF800000, nan)],
        "rcp": [(0, infinity), (minus, infinity | minus), (infinity, 0)],
        "sin": [(infinity, nan), (minus, minus)],
        "cos": [(infinity, nan), (minus, 0x3F800000)],
        "tanh": [(infinity, 0x3F800000), (infinity | minus, 0xBF800000)],
    }
    for op, rows in cases.items():
        compare(
            f"{op}.approx.f32 {{d}}, {{a}};",
            [("b32", [a for a, _ in rows])],
            "b32",
            [w for _, w in rows],
        )


@pytest.mark.parametrize(("fmt", "step"), [("f16", 2.0**-10), ("bf16", 2.0**-7)])
def test_sixteen_bit_functions(fmt, step):
    x = torch.randn(200) * 2
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[fmt]
    bits = [b & 0xFFFF for b in x.to(dtype).view(torch.int16).tolist()]
    for op, function in (("ex2", lambda v: 2.0**v), ("tanh", math.tanh)):
        got = run(
            f"{op}.approx.{'ftz.' if fmt == 'bf16' and op == 'ex2' else ''}{fmt} {{d}}, {{a}};",
            [("b16", bits)],
            ["b16"],
        )[0]
        for b, g in zip(bits, got):
            assert float(value(fmt, g)) == pytest.approx(function(float(value(fmt, b))), rel=step)


def test_reciprocals_of_f64_start_newton_iterations():
    # The compilers refine rcp.approx.ftz.f64: the seed must have about 20 good bits and no low word.
    x = samples("f64", 100, 5).tolist()
    for op, function in (("rcp", lambda v: 1 / v), ("rsqrt", lambda v: v**-0.5)):
        normal = [
            b
            for b in x
            if 1 << 52 < b & (1 << 63) - 1 < 0x7FD << 52 and not (op == "rsqrt" and b >> 63)
        ]
        got = run(f"{op}.approx.ftz.f64 {{d}}, {{a}};", [("b64", normal)], ["b64"])[0]
        for b, g in zip(normal, got):
            assert g & 0xFFFFFFFF == 0
            assert float(value("f64", g)) == pytest.approx(
                function(float(value("f64", b))), rel=2.0**-18
            )


# ---- conversions


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("to", "source"),
    [("f32", "f64"), ("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64")],
)
def test_narrowing(to, source, mode):
    a = columns(source, n=150)[0]
    # and numbers near those of the target
    near = [b for b in columns(to)[0] if not isinstance(value(to, b), float)]
    a += [
        rounded(source, "rn", value(to, b) * (1 + Fraction(k, 3 << sizes(to)[1])))
        for b in near
        for k in (0, 1, 2)
    ]

    def reference(bits):
        x = value(source, bits)
        if x != x:
            return NAN[to]
        if isinstance(x, float):
            return sizes(to)[4] | (sizes(to)[3] if x < 0 else 0)
        return rounded(to, mode, x, negative_zero=is_negative(source, bits))

    wants = [reference(b) for b in a]
    inputs = [(f"b{BITS[source]}", a)]
    compare(f"cvt.{mode}.{to}.{source} {{d}}, {{a}};", inputs, f"b{BITS[to]}", wants)
    if source == "f32" and mode in ("rn", "rz"):
        compare(
            f"cvt.{mode}.relu.{to}.{source} {{d}}, {{a}};",
            inputs,
            f"b{BITS[to]}",
            [relu(to, w) for w in wants],
        )
        b = a[1:] + a[:1]
        pair = [("b32", a), ("b32", b)]  # the first operand goes to the high half
        want = [w << 16 | v for w, v in zip(wants, wants[1:] + wants[:1])]
        compare(f"cvt.{mode}.{to}x2.f32 {{d}}, {{a}}, {{b}};", pair, "b32", want)


@pytest.mark.parametrize(
    ("to", "source"),
    [("f64", "f32"), ("f32", "f16"), ("f32", "bf16"), ("f64", "f16"), ("f64", "bf16")],
)
def test_widening(to, source):
    a = columns(source, n=200)[0]

    def reference(bits):
        x = value(source, bits)
        if x != x:
            return NAN[to]
        if isinstance(x, float):
            return sizes(to)[4] | (sizes(to)[3] if x < 0 else 0)
        return rounded(to, "rn", x, negative_zero=is_negative(source, bits))

    compare(
        f"cvt.{to}.{source} {{d}}, {{a}};",
        [(f"b{BITS[source]}", a)],
        f"b{BITS[to]}",
        [reference(b) for b in a],
    )


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_fp8(fmt):
    a = columns("f32", n=150)[0]
    a += [
        rounded("f32", "rn", value(fmt, b) * Fraction(k, 8))
        for b in range(127 if fmt == "e4m3" else 124)
        for k in (7, 8, 9)
    ]

    def reference(bits, source="f32"):
        x = value(source, bits)
        if x != x:
            return NAN[fmt]
        if isinstance(x, float):
            return sizes(fmt)[5] | (0x80 if x < 0 else 0)
        return rounded(fmt, "rn", x, satfinite=True, negative_zero=is_negative(source, bits))

    wants = [reference(x) for x in a]
    rolled = wants[1:] + wants[:1]
    inputs = [("b32", a), ("b32", a[1:] + a[:1])]
    body = f"cvt.rn.satfinite.{fmt}x2.f32 {{d}}, {{a}}, {{b}};"
    compare(body, inputs, "b16", [h << 8 | x for h, x in zip(wants, rolled)])
    halves = columns("f16", n=150)[0]
    packed = [("b32", [h << 16 | x for h, x in zip(halves, halves[1:] + halves[:1])])]
    wants = [reference(x, "f16") for x in halves]
    compare(
        f"cvt.rn.satfinite.{fmt}x2.f16x2 {{d}}, {{a}};",
        packed,
        "b16",
        [h << 8 | x for h, x in zip(wants, wants[1:] + wants[:1])],
    )
    every = [("b16", [b << 8 | (b * 7 + 3) % 256 for b in range(256)])]

    def wide(b):
        x = value(fmt, b)
        if x != x:
            return NAN["f16"]
        if isinstance(x, float):
            return 0x7C00 | (b & 0x80) << 8
        return rounded("f16", "rn", x, negative_zero=is_negative(fmt, b))

    want = [wide(v >> 8) << 16 | wide(v & 255) for v in every[0][1]]
    compare(f"cvt.rn.f16x2.{fmt}x2 {{d}}, {{a}};", every, "b32", want)


def test_tf32():
    a = [b for b in columns("f32", n=300)[0] if not isinstance(value("f32", b), float)]
    compare("cvt.rna.tf32.f32 {d}, {a};", [("b32", a)], "b32",
            [rounded("tf32", "rna", value("f32", b), negative_zero=is_negative("f32", b)) for b in a])  # fmt: skip


@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("to", ["f16", "bf16", "f32", "f64"])
def test_integers_to_floats(to, source):
    bits = int(source[1:])
    rng = random.Random(2)
    a = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    a += [rng.getrandbits(rng.randint(1, bits)) for _ in range(120)]
    numbers = [x - (1 << bits) if source[0] == "s" and x >> (bits - 1) else x for x in a]
    for mode in MODES:
        want = [rounded(to, mode, Fraction(x)) for x in numbers]
        compare(
            f"cvt.{mode}.{to}.{source} {{d}}, {{a}};",
            [(f"b{max(bits, 16)}", a)],
            f"b{BITS[to]}",
            want,
        )


@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("to", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_floats_to_integers_saturate(to, source):
    width = int(to[1:])
    top = (1 << (width - (to[0] == "s"))) - 1
    bottom = -top - 1 if to[0] == "s" else 0
    a = columns(source, n=100)[0]
    a += [rounded(source, "rn", Fraction(k, 2)) for k in range(-9, 10)]
    a += [rounded(source, "rn", Fraction(edge) + k) for edge in (top, bottom) for k in (-1, 0, 1)]
    rounding = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    register = max(width, 32)

    def reference(b, mode):
        x = value(source, b)
        if x != x:
            result = 1 << (width - 1) if width == 64 or source == "f64" else 0
        elif isinstance(x, float):
            result = top if x > 0 else bottom
        else:
            result = max(bottom, min(rounding[mode](x), top))
        if to[0] == "s" and result >> (width - 1) & 1:  # extended in a wider register
            result |= -1 << width
        return result & ((1 << register) - 1)

    for mode in rounding:
        want = [reference(b, mode) for b in a]
        compare(
            f"cvt.{mode}.{to}.{source} {{d}}, {{a}};",
            [(f"b{BITS[source]}", a)],
            f"b{register}",
            want,
        )


@pytest.mark.parametrize("fmt", ["f32", "f64", "f16"])
def test_rounding_to_integral_values(fmt):
    a = columns(fmt, n=100)[0] + [
        rounded(fmt, "rn", Fraction(k, 4), negative_zero=k == 0) for k in range(-20, 20)
    ]
    functions = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}

    def reference(b, function):
        x = value(fmt, b)
        if isinstance(x, float):
            return NAN[fmt] if x != x else b
        return rounded(fmt, "rn", Fraction(function(x)), negative_zero=is_negative(fmt, b))

    for mode, function in functions.items():
        want = [reference(b, function) for b in a]
        compare(
            f"cvt.{mode}.{fmt}.{fmt} {{d}}, {{a}};", [(f"b{BITS[fmt]}", a)], f"b{BITS[fmt]}", want
        )
