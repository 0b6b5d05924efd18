"""Integer instructions of the virtual GPU against Python's integers."""

import random

import pytest

pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

from instruction import run

EDGES = {
    bits: [0, 1, 2, 3, 31, 32, 33, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1]
    for bits in (16, 32, 64)
}  # fmt: skip


def operands(bits, count, n=300, seed=0):
    """Every pair of edge values, then random ones of every length."""
    rng = random.Random(seed)
    rows = [[a, b, rng.getrandbits(bits)] for a in EDGES[bits] for b in EDGES[bits]]
    rows += [[rng.getrandbits(rng.randint(1, bits)) for _ in range(3)] for _ in range(n)]
    return [[row[i] & ((1 << bits) - 1) for row in rows] for i in range(count)]


def signed(x, bits):
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def as_type(x, kind):
    return signed(x, int(kind[1:])) if kind[0] == "s" else x & ((1 << int(kind[1:])) - 1)


def divide(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def clamp(x, bits):
    return max(-(1 << (bits - 1)), min(x, (1 << (bits - 1)) - 1))


def check(body, kinds, reference, result, values=None, bits=None):
    """Runs the instruction on typed operands and compares with reference(*operands), wrapped to the result."""
    bits = bits or [int(kind[1:]) for kind in kinds]
    values = values or [operands(b, 3, seed=i)[i % 3] for i, b in enumerate(bits)]
    got = run(body, [(f"b{b}", v) for b, v in zip(bits, values)], [result])[0]
    width = 1 if result == "pred" else int(result[1:])
    for row, g in zip(zip(*values), got):
        typed = [as_type(x, kind) for x, kind in zip(row, kinds)]
        want = int(reference(*typed)) & ((1 << width) - 1)
        assert g == want, (body, [hex(x) for x in row], hex(g), hex(want))


ALL = ["u16", "s16", "u32", "s32", "u64", "s64"]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "op", ["add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max", "sad", "mad.lo", "mad.hi"]
)
def test_arithmetic(op, kind):
    bits = int(kind[1:])
    references = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul.lo": lambda a, b: a * b,
        "mul.hi": lambda a, b: a * b >> bits,
        "div": lambda a, b: divide(a, b) if b else -1,
        "rem": lambda a, b: a - divide(a, b) * b if b else a,
        "min": min,
        "max": max,
        "sad": lambda a, b, c: abs(a - b) + c,
        "mad.lo": lambda a, b, c: a * b + c,
        "mad.hi": lambda a, b, c: (a * b >> bits) + c,
    }
    third = ", {c}" if op in ("sad", "mad.lo", "mad.hi") else ""
    count = 3 if third else 2
    values = operands(bits, count)
    check(
        f"{op}.{kind} {{d}}, {{a}}, {{b}}{third};",
        [kind] * count,
        references[op],
        f"b{bits}",
        values,
    )


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind):
    bits = int(kind[1:])
    a, b = operands(bits, 2)
    check(
        f"mul.wide.{kind} {{d}}, {{a}}, {{b}};",
        [kind] * 2,
        lambda a, b: a * b,
        f"b{2 * bits}",
        [a, b],
    )
    c = operands(64, 3)[2][: len(a)]
    c = [x & ((1 << 2 * bits) - 1) for x in (c * 2)[: len(a)]]
    kinds = [kind, kind, f"{kind[0]}{2 * bits}"]
    check(
        f"mad.wide.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
        kinds,
        lambda a, b, c: a * b + c,
        f"b{2 * bits}",
        [a, b, c],
    )


@pytest.mark.parametrize(
    ("body", "kinds", "reference"),
    [
        ("add.sat.s32 {d}, {a}, {b};", ["s32"] * 2, lambda a, b: clamp(a + b, 32)),
        ("sub.sat.s32 {d}, {a}, {b};", ["s32"] * 2, lambda a, b: clamp(a - b, 32)),
        ("mad.hi.sat.s32 {d}, {a}, {b}, {c};", ["s32"] * 3, lambda a, b, c: clamp((a * b >> 32) + c, 32)),
        ("min.relu.s32 {d}, {a}, {b};", ["s32"] * 2, lambda a, b: max(0, min(a, b))),
        ("max.relu.s32 {d}, {a}, {b};", ["s32"] * 2, lambda a, b: max(0, a, b)),
        ("neg.s16 {d}, {a};", ["s16"], lambda a: -a),
        ("neg.s32 {d}, {a};", ["s32"], lambda a: -a),
        ("neg.s64 {d}, {a};", ["s64"], lambda a: -a),
        ("abs.s16 {d}, {a};", ["s16"], abs),
        ("abs.s32 {d}, {a};", ["s32"], abs),
        ("abs.s64 {d}, {a};", ["s64"], abs),
        ("not.b16 {d}, {a};", ["u16"], lambda a: ~a),
        ("not.b64 {d}, {a};", ["u64"], lambda a: ~a),
        ("cnot.b32 {d}, {a};", ["u32"], lambda a: a == 0),
        ("and.b16 {d}, {a}, {b};", ["u16"] * 2, lambda a, b: a & b),
        ("or.b32 {d}, {a}, {b};", ["u32"] * 2, lambda a, b: a | b),
        ("xor.b64 {d}, {a}, {b};", ["u64"] * 2, lambda a, b: a ^ b),
        ("mul24.lo.u32 {d}, {a}, {b};", ["u32"] * 2, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
        ("mul24.hi.s32 {d}, {a}, {b};", ["s32"] * 2, lambda a, b: signed(a, 24) * signed(b, 24) >> 16),
        ("mad24.lo.s32 {d}, {a}, {b}, {c};", ["s32"] * 3, lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
        ("brev.b32 {d}, {a};", ["u32"], lambda a: int(f"{a:032b}"[::-1], 2)),
        ("brev.b64 {d}, {a};", ["u64"], lambda a: int(f"{a:064b}"[::-1], 2)),
    ],
)  # fmt: skip
def test_one_type(body, kinds, reference):
    bits = int(kinds[0][1:])
    check(body, kinds, reference, f"b{bits}", operands(bits, len(kinds)))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_clamp_at_the_width(bits):
    a = operands(bits, 1)[0]
    counts = [0, 1, bits - 1, bits, bits + 1, 255, 256, 0x80000000, 0xFFFFFFFF]
    a, n = zip(*[(x, c) for x in a[:60] for c in counts])
    rows = [list(a), list(n)]
    far = 2 * bits
    kinds = [f"b{bits}", "b32"]
    for op, kind, reference in [
        (f"shl.b{bits}", f"u{bits}", lambda a, n: a << min(n, far)),
        (f"shr.u{bits}", f"u{bits}", lambda a, n: a >> min(n, far)),
        (f"shr.s{bits}", f"s{bits}", lambda a, n: a >> min(n, far)),
    ]:
        check(f"{op} {{d}}, {{a}}, {{b}};", [kind, "u32"], reference, kinds[0], rows)


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(mode):
    a, b = operands(32, 2)
    n = [[0, 1, 5, 31, 32, 33, 64, 0xFFFFFFFF][i % 8] for i in range(len(a))]

    def amount(n):
        return n & 31 if mode == "wrap" else min(n, 32)

    for side, reference in (
        ("l", lambda a, b, n: (b << 32 | a) << amount(n) >> 32),
        ("r", lambda a, b, n: (b << 32 | a) >> amount(n)),
    ):
        check(
            f"shf.{side}.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};",
            ["u32"] * 3,
            reference,
            "b32",
            [a, b, n],
        )


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_bits(bits):
    a = operands(bits, 1)[0]
    check(f"popc.b{bits} {{d}}, {{a}};", [f"u{bits}"], lambda a: a.bit_count(), "b32", [a])
    check(f"clz.b{bits} {{d}}, {{a}};", [f"u{bits}"], lambda a: bits - a.bit_length(), "b32", [a])

    def top(a):
        return (~a if a < 0 else a).bit_length() - 1

    for kind in (f"u{bits}", f"s{bits}"):
        check(f"bfind.{kind} {{d}}, {{a}};", [kind], top, "b32", [a])
        shift = f"bfind.shiftamt.{kind} {{d}}, {{a}};"
        check(shift, [kind], lambda a: bits - 1 - top(a) if top(a) >= 0 else -1, "b32", [a])


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    bits = int(kind[1:])
    rng = random.Random(3)
    n = 600
    a, b = [[rng.getrandbits(bits) for _ in range(n)] for _ in range(2)]
    position = [rng.choice([0, 1, 7, bits - 1, bits, bits + 3, 255, 256 + 4]) for _ in range(n)]
    length = [rng.choice([0, 1, 5, 16, bits - 1, bits, bits + 1, 255, 256]) for _ in range(n)]

    def extract(x, p, n):  # the definition, bit by bit
        p, n = p & 255, n & 255
        sign = x >> min(p + n - 1, bits - 1) & 1 if kind[0] == "s" and n else 0
        return sum((x >> p + i & 1 if i < n and p + i < bits else sign) << i for i in range(bits))

    def insert(x, y, p, n):
        p, n = p & 255, n & 255
        for i in range(n):
            if p + i < bits:
                y = y & ~(1 << p + i) | (x >> i & 1) << p + i
        return y

    check(
        f"bfe.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
        [f"u{bits}", "u32", "u32"],
        extract,
        f"b{bits}",
        [a, position, length],
    )
    check(f"bfi.b{bits} {{d}}, {{a}}, {{b}}, {{c}}, {{x}};", [f"u{bits}", f"u{bits}", "u32", "u32"], insert, f"b{bits}",
          [a, b, position, length])  # fmt: skip


def test_masks_and_extension():
    a, b = operands(32, 2)
    a, b = [x % 40 for x in a], [x % 40 for x in b]
    ones = lambda n: (1 << n) - 1  # noqa: E731
    check(
        "bmsk.clamp.b32 {d}, {a}, {b};",
        ["u32"] * 2,
        lambda a, b: ones(min(b, 32)) << min(a, 32),
        "b32",
        [a, b],
    )
    check(
        "bmsk.wrap.b32 {d}, {a}, {b};",
        ["u32"] * 2,
        lambda a, b: ones(b & 31) << (a & 31),
        "b32",
        [a, b],
    )
    x = operands(32, 1)[0]
    n = [i % 40 for i in range(len(x))]
    check(
        "szext.clamp.u32 {d}, {a}, {b};",
        ["u32"] * 2,
        lambda x, n: x & ones(min(n, 32)),
        "b32",
        [x, n],
    )
    extend = lambda x, n: signed(x, n) if n else 0  # noqa: E731
    check(
        "szext.clamp.s32 {d}, {a}, {b};",
        ["u32"] * 2,
        lambda x, n: extend(x & ones(min(n, 32)), min(n, 32)),
        "b32",
        [x, n],
    )


def test_lop3_is_any_function_of_three_bits():
    a, b, c = [0xF0F0F0F0] * 128, [0xCCCCCCCC] * 128, [0xAAAAAAAA] * 128
    for table in range(0, 256, 5):
        got = run(
            f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};",
            [("b32", a), ("b32", b), ("b32", c)],
            ["b32"],
        )[0]
        assert got[0] == table * 0x01010101, table


def test_byte_permutation():
    a, b, c = operands(32, 3, n=600)

    def permute(a, b, selector):
        pool = (b << 32 | a).to_bytes(8, "little")
        out = []
        for i in range(4):
            pick = selector >> 4 * i & 15
            byte = pool[pick & 7]
            out.append((255 if byte & 128 else 0) if pick & 8 else byte)
        return int.from_bytes(bytes(out), "little")

    check("prmt.b32 {d}, {a}, {b}, {c};", ["u32"] * 3, permute, "b32", [a, b, c])
    # The modes as the ISA's table has them: the byte numbers of d, highest first, for c = 0, 1, 2, 3.
    modes = {
        "f4e": ["3210", "4321", "5432", "6543"], "b4e": ["5670", "6701", "7012", "0123"],
        "rc8": ["0000", "1111", "2222", "3333"], "ecl": ["3210", "3211", "3222", "3333"],
        "ecr": ["0000", "1110", "2210", "3210"], "rc16": ["1010", "3232", "1010", "3232"],
    }  # fmt: skip
    for mode, table in modes.items():
        check(f"prmt.b32.{mode} {{d}}, {{a}}, {{b}}, {{c}};", ["u32"] * 3,
              lambda a, b, c, table=table: permute(a, b, int(table[c & 3], 16)), "b32", [a, b, c])  # fmt: skip


@pytest.mark.parametrize("types", ["u32.u32", "u32.s32", "s32.u32", "s32.s32"])
def test_dot_products_of_bytes(types):
    a, b, c = operands(32, 3)
    sa, sb = (t[0] == "s" for t in types.split("."))

    def part(x, i, bits, is_signed):
        x = x >> bits * i & ((1 << bits) - 1)
        return signed(x, bits) if is_signed else x

    def dot(n, bits, first=0):
        return lambda a, b, c: (
            c + sum(part(a, i, bits, sa) * part(b, first + i, 8, sb) for i in range(n))
        )

    for op, reference in (("dp4a", dot(4, 8)), ("dp2a.lo", dot(2, 16)), ("dp2a.hi", dot(2, 16, 2))):
        check(f"{op}.{types} {{d}}, {{a}}, {{b}}, {{c}};", ["u32"] * 3, reference, "b32", [a, b, c])


def test_nth_set_bit():
    mask = operands(32, 1)[0]
    base = [(7 * i) % 33 for i in range(len(mask))]
    offset = [(i % 9 - 4) & 0xFFFFFFFF for i in range(len(mask))]
    offset[7::10] = [1 << 31] * len(offset[7::10])  # the one that has no negative

    def find(mask, base, offset):
        if base > 31:
            return -1
        if offset == 0:
            return base if mask >> base & 1 else -1
        at = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [i for i in at if mask >> i & 1]
        return found[abs(offset) - 1] if len(found) >= abs(offset) else -1

    check("fns.b32 {d}, {a}, {b}, {c};", ["u32", "u32", "s32"], find, "b32", [mask, base, offset])


# ---- carry chains


def test_carry_chains_add_and_subtract_64_bits_by_halves():
    a, b = operands(64, 2, n=600)
    split = "mov.b64 {{%r0, %r1}}, {a}; mov.b64 {{%r2, %r3}}, {b};"
    for op, reference in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        body = (
            f"{split} {op}.cc.u32 %r4, %r0, %r2; {op}c.cc.u32 %r5, %r1, %r3; {op}c.u32 %r6, 0, 0;"
        )
        body += "mov.b64 {d}, {{%r4, %r5}}; mov.b32 {e}, %r6;"
        got, carry = run(body, [("b64", a), ("b64", b)], ["b64", "b32"])
        for x, y, g, c in zip(a, b, got, carry):
            exact = reference(x, y)
            assert g == exact % 2**64 and signed(c, 32) == exact >> 64, (op, hex(x), hex(y))


def test_carry_chains_multiply_64_by_64_bits():
    a, b = operands(64, 2, n=600)
    body = """mov.b64 {{%r0, %r1}}, {a}; mov.b64 {{%r2, %r3}}, {b};
    mul.lo.u32 %r4, %r0, %r2;           mul.hi.u32 %r5, %r0, %r2;
    mad.lo.cc.u32 %r5, %r0, %r3, %r5;   madc.hi.u32 %r6, %r0, %r3, 0;
    mad.lo.cc.u32 %r5, %r1, %r2, %r5;   madc.hi.cc.u32 %r6, %r1, %r2, %r6;  addc.u32 %r7, 0, 0;
    mad.lo.cc.u32 %r6, %r1, %r3, %r6;   madc.hi.u32 %r7, %r1, %r3, %r7;
    mov.b64 {d}, {{%r4, %r5}}; mov.b64 {e}, {{%r6, %r7}};"""
    low, high = run(body, [("b64", a), ("b64", b)], ["b64", "b64"])
    for x, y, g, h in zip(a, b, low, high):
        assert h << 64 | g == x * y, (hex(x), hex(y))
    # The same with 64-bit limbs: the upper half of a 128-bit sum of two products.
    body = "mad.lo.cc.u64 {d}, {a}, {b}, {b}; madc.hi.u64 {e}, {a}, {b}, {a};"
    low, high = run(body, [("b64", a), ("b64", b)], ["b64", "b64"])
    for x, y, g, h in zip(a, b, low, high):
        assert h << 64 | g == (x * y + y + (x << 64)) % 2**128, (hex(x), hex(y))


# ---- comparisons


@pytest.mark.parametrize("kind", ALL)
def test_setp(kind):
    bits = int(kind[1:])
    a, b = operands(bits, 2)
    b = [x if i % 3 else y for i, (x, y) in enumerate(zip(b, a))]
    references = {
        "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    }  # fmt: skip
    if kind[0] == "u":
        references |= {
            "lo": references["lt"],
            "ls": references["le"],
            "hi": references["gt"],
            "hs": references["ge"],
        }
    for op, reference in references.items():
        check(f"setp.{op}.{kind} {{d}}, {{a}}, {{b}};", [kind] * 2, reference, "pred", [a, b])


@pytest.mark.parametrize("boolean", ["and", "or", "xor"])
@pytest.mark.parametrize("bang", ["", "!"])
def test_setp_with_two_results_and_a_third_operand(boolean, bang):
    a, b = operands(32, 2)
    c = [i % 2 for i in range(len(a))]
    combine = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}[
        boolean
    ]
    p, q = run(f"setp.lt.{boolean}.u32 {{d}}|{{e}}, {{a}}, {{b}}, {bang}{{c}};", [("b32", a), ("b32", b), ("pred", c)],
               ["pred", "pred"])  # fmt: skip
    for x, y, z, got_p, got_q in zip(a, b, c, p, q):
        third = bool(z) != bool(bang)
        assert (got_p, got_q) == (combine(x < y, third), combine(x >= y, third))


def test_predicates_are_data():
    a, b = [0, 0, 1, 1] * 40, [0, 1, 0, 1] * 40
    for op, reference in (
        ("and", lambda a, b: a & b),
        ("or", lambda a, b: a | b),
        ("xor", lambda a, b: a ^ b),
    ):
        assert run(f"{op}.pred {{d}}, {{a}}, {{b}};", [("pred", a), ("pred", b)], ["pred"])[0] == [
            reference(x, y) for x, y in zip(a, b)
        ]
    assert run("not.pred {d}, {a};", [("pred", a)], ["pred"])[0] == [1 - x for x in a]
    assert run("mov.pred {d}, -1; mov.pred {e}, 0;", [("pred", a)], ["pred", "pred"]) == [
        [1] * 160,
        [0] * 160,
    ]
    assert run(
        "@{a} mov.pred {d}, {b}; @!{a} not.pred {d}, {b};", [("pred", a), ("pred", b)], ["pred"]
    )[0] == [y if x else 1 - y for x, y in zip(a, b)]


def test_set_slct_and_selp():
    a, b = operands(32, 2)
    check("set.lt.u32.s32 {d}, {a}, {b};", ["s32"] * 2, lambda a, b: -(a < b), "b32", [a, b])
    check(
        "set.ge.f32.u32 {d}, {a}, {b};",
        ["u32"] * 2,
        lambda a, b: 0x3F800000 * (a >= b),
        "b32",
        [a, b],
    )
    check(
        "slct.u32.s32 {d}, {a}, {b}, {c};",
        ["u32", "u32", "s32"],
        lambda a, b, c: a if c >= 0 else b,
        "b32",
        operands(32, 3),
    )
    for bits in (16, 32, 64):
        a, b = operands(bits, 2)
        c = [i % 2 for i in range(len(a))]
        got = run(
            f"selp.b{bits} {{d}}, {{a}}, {{b}}, {{c}};",
            [(f"b{bits}", a), (f"b{bits}", b), ("pred", c)],
            [f"b{bits}"],
        )[0]
        assert got == [x if z else y for x, y, z in zip(a, b, c)]


def test_vector_moves():
    a = operands(64, 1)[0]
    got = run("mov.b64 {{%r0, %r1}}, {a}; mov.b64 {d}, {{%r1, %r0}};", [("b64", a)], ["b64"])[0]
    assert got == [(x << 32 | x >> 32) % 2**64 for x in a]
    got = run(
        "mov.b64 {{%rs0, %rs1, %rs2, %rs3}}, {a}; mov.b64 {d}, {{%rs3, %rs2, %rs1, %rs0}};",
        [("b64", a)],
        ["b64"],
    )[0]
    assert got == [sum((x >> 16 * i & 0xFFFF) << 16 * (3 - i) for i in range(4)) for x in a]
    got = run("mov.b64 {{_, %r1}}, {a}; mov.b32 {d}, %r1;", [("b64", a)], ["b32"])[0]
    assert got == [x >> 32 for x in a]


# ---- conversions


@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_conversions(source):
    bits = max(int(source[1:]), 16)
    a = operands(bits, 1)[0]
    for to in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        register = max(int(to[1:]), 32)
        check(
            f"cvt.{to}.{source} {{d}}, {{a}};",
            [f"u{bits}"],
            lambda x, to=to: as_type(as_type(x, source), to),
            f"b{register}",
            [a],
        )
        top = (1 << int(to[1:]) - (to[0] == "s")) - 1
        bottom = -top - 1 if to[0] == "s" else 0
        check(f"cvt.sat.{to}.{source} {{d}}, {{a}};", [f"u{bits}"],
              lambda x, top=top, bottom=bottom: max(bottom, min(as_type(x, source), top)), f"b{register}",
              [a])  # fmt: skip


def test_cvt_pack():
    a, b, c = operands(32, 3)
    sat = lambda x, lo, hi: max(lo, min(x, hi))  # noqa: E731
    check("cvt.pack.sat.u16.s32 {d}, {a}, {b};", ["s32"] * 2,
          lambda a, b: sat(a, 0, 65535) << 16 | sat(b, 0, 65535), "b32", [a, b])  # fmt: skip

    def bytes_(a, b, c):
        return (c & 0xFFFF) << 16 | (sat(a, -128, 127) & 255) << 8 | sat(b, -128, 127) & 255

    check(
        "cvt.pack.sat.s8.s32.b32 {d}, {a}, {b}, {c};",
        ["s32", "s32", "u32"],
        bytes_,
        "b32",
        [a, b, c],
    )
