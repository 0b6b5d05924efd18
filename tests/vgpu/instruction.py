"""Runs one PTX instruction on arrays of operands, for the tests of the scalar instructions."""

from __future__ import annotations

import torch
from trainwright import vgpu

WIDTHS = {"b8": 8, "b16": 16, "b32": 32, "b64": 64, "pred": 32}


def kernel(body: str, sources: list[str], results: list[str]) -> str:
    """PTX of a kernel that loads {a}, {b}, ... of the `sources` types, runs `body` and stores {d}, {e}, ...

    Each operand array has 8 bytes an element; a predicate is 0 or 1.
    """
    names = {"abcxyz"[i]: kind for i, kind in enumerate(sources)}
    outputs = {"def"[i]: kind for i, kind in enumerate(results)}
    pointers = "".join(f", .param .u64 p_{name}" for name in [*names, *outputs])
    declare = "".join(
        f".reg .{kind} %{name};\n"
        + (f".reg .b32 %{name}_bits;\n" if kind == "pred" else "")
        + (f".reg .b16 %{name}_bits;\n" if kind == "b8" else "")
        for name, kind in [*names.items(), *outputs.items()]
    )
    lines = []
    for name, kind in names.items():
        lines.append(f"ld.param.u64 %p, [p_{name}]; add.s64 %p, %p, %offset;")
        if kind == "pred":
            lines.append(f"ld.global.b32 %{name}_bits, [%p]; setp.ne.u32 %{name}, %{name}_bits, 0;")
        else:
            lines.append(f"ld.global.{kind} %{name}, [%p];")
    lines.append(body.format(**{n: f"%{n}" for n in [*names, *outputs]}))
    for name, kind in outputs.items():
        lines.append(f"ld.param.u64 %p, [p_{name}]; add.s64 %p, %p, %offset;")
        if kind == "pred":
            lines.append(f"selp.u32 %{name}_bits, 1, 0, %{name}; st.global.b32 [%p], %{name}_bits;")
        else:
            lines.append(f"st.global.{kind} [%p], %{name};")
    return f"""
.version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u32 n{pointers}) {{
.reg .pred %skip, %q; .reg .b32 %i, %n, %block, %r<8>; .reg .b64 %p, %offset, %rd<8>; .reg .b16 %rs<8>;
{declare}
mov.u32 %i, %tid.x; mov.u32 %block, %ctaid.x; mad.lo.u32 %i, %block, 128, %i;
ld.param.u32 %n, [n]; setp.ge.u32 %skip, %i, %n; @%skip bra END;
mul.wide.u32 %offset, %i, 8;
{chr(10).join(lines)}
END: ret;
}}"""


def run(
    body: str, sources: dict[str, list[int]] | list[tuple[str, list[int]]], results: list[str]
) -> list[list[int]]:
    """The results, as lists of unsigned integers.

    Args:
        body: PTX with {a}, {b}, ... for the sources and {d}, {e}, ... for the results.
        sources: (type, values) of each operand; type b8 to b64 or pred.
        results: types.
    """
    pairs = list(sources.items()) if isinstance(sources, dict) else sources
    n = len(pairs[0][1])
    tensors = [torch.tensor([_signed(v) for v in values], dtype=torch.int64) for _, values in pairs]
    out = [torch.zeros(n, dtype=torch.int64) for _ in results]
    text = kernel(body, [kind for kind, _ in pairs], results)
    module = vgpu.Device("sm_90a", threads=1).load_ptx(text)
    module.launch("k", (n + 127) // 128, 128, (n, *tensors, *out))
    return [[v & ((1 << WIDTHS[kind]) - 1) for v in t.tolist()] for kind, t in zip(results, out)]


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
