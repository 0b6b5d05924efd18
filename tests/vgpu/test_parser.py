"""The PTX parser: what it accepts, what its errors say, and that no text crashes it."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

PTX = Path(__file__).parent / "ptx"
HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"
DEVICE = vgpu.Device("sm_90a", threads=1)


def kernel(body, parameters=""):
    return f"{HEADER}.visible .entry k({parameters}) {{\n{body}\n}}"


def load(body, parameters=""):
    module = DEVICE.load_ptx(kernel(body, parameters))
    module.decode("k")
    return module


def result(body):
    """The 32-bit value that lane 0 leaves in %r."""
    import torch

    out = torch.zeros(1, dtype=torch.int32)
    text = (
        ".reg .b32 %r; .reg .b64 %out; ld.param.u64 %out, [out];\n"
        + body
        + "\nst.global.b32 [%out], %r; ret;"
    )
    load(text, ".param .u64 out").launch("k", 1, 1, (out,))
    return out.item() & 0xFFFFFFFF


# ---- the language


def test_scopes_hide_registers_and_labels():
    # The same label in two scopes, and a register that hides another.
    body = """
    mov.u32 %r, 0;
    { .reg .b32 %r1; .reg .pred p; mov.u32 %r1, 3;
    again: add.u32 %r, %r, 10; sub.u32 %r1, %r1, 1; setp.ne.u32 p, %r1, 0; @p bra again; }
    { .reg .b32 %r1; .reg .pred p; mov.u32 %r1, 2;
    again: { .reg .b32 %r1; mov.u32 %r1, 100; add.u32 %r, %r, %r1; }
    sub.u32 %r1, %r1, 1; setp.ne.u32 p, %r1, 0; @p bra again; }
    """
    assert result(body) == 230


@pytest.mark.parametrize(
    ("literal", "want"),
    [
        ("42", 42), ("-1", 2**32 - 1), ("0x1F", 31), ("0X1fU", 31), ("017", 15), ("0b101", 5), ("7U", 7),
        ("~0", 2**32 - 1),
        ("0f3F800000", 0x3F800000), ("0F3f800000", 0x3F800000), ("-0f3F800000", 0xBF800000), ("1.5", 0x3FC00000),
        ("-2.5e-1", 0xBE800000), ("0d3FF0000000000000", 0x3F800000), ("WARP_SZ", 32), ("0xFFFFFFFFFFFFFFFF", 2**32 - 1),
    ],
)  # fmt: skip
def test_literals(literal, want):
    assert result(f"mov.b32 %r, {literal};") == want


def test_addresses_and_comments():
    body = """
    .shared .align 8 .b8 buffer[64]; /* a comment
    over lines; */ .reg .b32 %a, %r<4>; // and one to the end
    mov.u32 %a, buffer; mov.u32 %r1, 7;
    st.shared.u32 [buffer+8], %r1; st.shared.v2.u32 [ %a + 16 ], {%r1, 5};
    ld.shared.u32 %r2, [%a+8]; ld.shared.v2.u32 {_, %r3}, [buffer + 24 + -8];
    mad.lo.u32 %r, %r2, 100, %r3;
    """
    assert result(body) == 705


def test_families_and_vectors():
    assert (
        result(".reg .b16 %h<3>; mov.b16 %h2, 5; mov.b16 %h0, 1; mov.b32 %r, {%h2, %h0};")
        == 0x10005
    )


def test_initialised_variables_and_relocations():
    text = (
        HEADER
        + """
    .global .align 4 .u32 table[4] = {1, 0x20, 3};
    .const .align 8 .b8 bytes[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    .global .align 8 .u64 pointers[2] = {table, generic(table)+4};
    .visible .entry k(.param .u64 out) {
      .reg .b32 %r<5>; .reg .b64 %rd<4>;
      ld.param.u64 %rd1, [out];
      ld.global.u64 %rd2, [pointers+8]; ld.u32 %r1, [%rd2];
      ld.const.u32 %r2, [bytes+4];
      ld.global.u32 %r3, [table+12];
      add.u32 %r1, %r1, %r3; st.global.v2.u32 [%rd1], {%r1, %r2}; ret;
    }"""
    )
    import torch

    out = torch.zeros(2, dtype=torch.int32)
    module = DEVICE.load_ptx(text)
    module.launch("k", 1, 1, (out,))
    assert out.tolist() == [0x20, 0x08070605]
    assert module.variable("table")[1] == 16


def test_parameters_have_their_natural_alignment():
    import torch

    text = (
        HEADER
        + """
    .visible .entry k(.param .u8 a, .param .u16 b, .param .align 8 .b8 s[12], .param .f32 c, .param .u64 out) {
      .reg .b32 %r<4>; .reg .b16 %h<3>; .reg .b64 %rd; .reg .f32 %f;
      ld.param.u64 %rd, [out]; ld.param.u8 %h1, [a]; ld.param.u16 %h2, [b];
      cvt.u32.u16 %r1, %h1; cvt.u32.u16 %r2, %h2;
      ld.param.u32 %r3, [s+8]; ld.param.f32 %f, [c];
      st.global.v4.b32 [%rd], {%r1, %r2, %r3, %f}; ret;
    }"""
    )
    out = torch.zeros(4, dtype=torch.int32)
    module = DEVICE.load_ptx(text)
    module.launch("k", 1, 1, (200, 40000, bytes(8) + b"\x07\0\0\0", 1.0, out))
    assert out.tolist() == [200, 40000, 7, 0x3F800000]


def test_compiler_output_parses():
    for file in sorted(PTX.glob("*.ptx")):
        text = file.read_text()
        module = DEVICE.load_ptx(text)
        assert module.kernels == re.findall(r"\.entry (\w+)", text)


# ---- errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no .version"),
        (".version 9.0\n", "no .target"),
        (HEADER + "nonsense", "line 4: expected a module-level directive, got 'nonsense'"),
        (HEADER + "/* no end", "line 4: comment without end"),
        (HEADER + '.file 1 "no end', "string without end"),
        (HEADER + "§", "unexpected byte"),
        (HEADER + ".address_size 32", "only 64-bit"),
        (kernel("add.u32 %r1, %r2 %r3;"), "line 5: expected ',' or ';', got '%r3'"),
        (kernel("mov.u32 %r, 0x;"), "number without digits"),
        (kernel("mov.u32 %r, 09;"), "wrong digit"),
        (kernel("mov.u32 %r, 0f12;"), "too few hexadecimal digits"),
        (kernel("mov.u32 %r, 12ab;"), "malformed number"),
        (kernel("mov.u32 %r, 99999999999999999999;"), "more than 64 bits"),
        (kernel("@%p bra L;"), "guard '%p' is not a predicate register"),
        (kernel("L: L: ret;"), "label L is defined twice"),
        (kernel(".reg .b99 %r;"), "expected a register type"),
        (kernel(".shared .b8 x[99999999999];"), "variable x is too large"),
        (kernel(".shared .align 3 .b8 x[4];"), "alignment is not a power of two"),
        (kernel("{" * 100), "nested too deeply"),
        (kernel("mov.u32 %r, " + "{" * 100), "nested too deeply"),
        (kernel("ret;")[:-1], "expected an instruction, got the end of the text"),
        (kernel("ret;") + kernel("ret;")[len(HEADER) :], "kernel k is defined twice"),
    ],
)
def test_syntax_errors_name_the_line(text, message):
    with pytest.raises(vgpu.PtxSyntaxError) as error:
        DEVICE.load_ptx(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
            "unsupported instruction: tcgen05",
        ),
        ("add.f32.u32 %r1, %r2, %r3;", "PTX line 6: .u32 is not supported here: add.f32.u32"),
        ("add.u32 %rd1, %r2, %r3;", "%rd1 has 64 bits, expected 32"),
        ("add.u32 %r1, %r2;", "expected 3 operands, got 2"),
        ("add.u32 7, %r2, %r3;", "the destination is not a register"),
        ("bra NOWHERE;", "label is not defined: bra NOWHERE"),
        ("mov.u32 %r1, %no_such_register;", "special register %no_such_register is not supported"),
        ("mov.u32 %r1, nothing;", "'nothing' is not declared"),
        ("ld.global.u32 %r1, [%r2];", "an address in this memory has 64 bits"),
        ("ld.param.u32 %r1, [p+8];", "outside of the kernel's parameters"),
        ("st.const.u32 [%rd1], %r1;", "constant memory is read-only"),
        (
            "call.uni (%r1), other, (%r2);",
            "call of 'other': functions that are not inlined are not supported",
        ),
        ("shfl.bfly.b32 %r1, %r2, 1, 31;", "expected 5 operands"),
        ("mov.f32.f32.f32 %r1, %r2;", "is not supported here"),
        ("atom.global.mul.u32 %r1, [%rd1], %r2;", "this operation on this type is not supported"),
    ],
)
def test_unsupported_code_is_refused_before_it_runs(body, message):
    registers = ".reg .b32 %r<5>; .reg .b64 %rd<5>; .reg .pred %p<3>;\n"
    module = DEVICE.load_ptx(kernel(registers + body, ".param .u64 p"))
    with pytest.raises(vgpu.UnsupportedError) as error:
        module.launch("k", 1, 1, (0,))
    assert message in str(error.value) and "PTX line 6" in str(error.value)


# ---- no text crashes it


def attempt(text):
    try:
        module = DEVICE.load_ptx(text)
        for name in module.kernels:
            module.decode(name)
    except vgpu.VgpuError:
        pass


WORDS = [
    ".version", "9.0", ".target", "sm_90a", ".address_size", "64", ".visible", ".entry", ".func", ".extern",
    "k", "(", ")", "{", "}", "[", "]", ";", ",", ":", "|", "@", "!", "<", ">", "=", "+", "-", "~", ".param",
    ".u64", ".b8", ".align", "8", ".reg", ".pred", "%p", "%r", "%r<3>", "%r1", ".shared", ".global",
    ".const", ".local", "x", ".loc", ".file", ".section", ".pragma", '"text"', "1", "0", "4294967296",
    "18446744073709551615", "0f3f800000", "mov.u32", "ld.global.v4.u32", "st.shared.f32", "bra", "brx.idx",
    "ret", "L", "add.u32", "cvt.rn.bf16x2.f32", "setp.lt.and.f32", "%tid.x", "_", ".branchtargets",
    ".maxntid", "call.uni", "generic", "bar.sync", "shfl.sync.bfly.b32", "selp.b32", "atom.global.add.f32",
    ".v2", "\n", "//", "/*", "*/", "::",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=60))
def test_any_words(words):
    attempt(" ".join(words))
    attempt(kernel(" ".join(words)))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text(text):
    attempt(text)
    attempt(kernel(text))


SOURCE = (PTX / "vector_add.ptx").read_text()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_real_ptx_with_damage(data):
    lines = SOURCE.split("\n")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        kind = data.draw(st.sampled_from(["drop", "double", "swap", "cut", "insert"]))
        if kind == "drop":
            lines[at] = ""
        elif kind == "double":
            lines[at] = f"{lines[at]}\n{lines[at]}"
        elif kind == "swap":
            other = data.draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == "cut":
            lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
        else:
            word = data.draw(st.sampled_from(WORDS))
            column = data.draw(st.integers(0, len(lines[at])))
            lines[at] = f"{lines[at][:column]} {word} {lines[at][column:]}"
    attempt("\n".join(lines))
