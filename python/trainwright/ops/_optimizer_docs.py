"""What the docstrings of the optimizer ops share. Where one has a name in braces, `documented` puts its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

TEXTS = {
    "tensors": """\
params: fp32, bf16, fp16 or fp64 in any mix; any strides without overlap. Updated in place; nothing outside
    a view is touched.
grads: same shapes; any of those dtypes, any strides. Not modified.""",
    "state": """\
fp32 (fp64 for fp64
    parameters) or bf16 of the parameters' shapes, any strides; or int8 codes (uint8 where never negative),
    contiguous, with `scales`""",
    "steps": "steps: 0-d fp64 tensors on the parameters' device, raised by one.",
    "options": """\
masters: for each parameter None, an fp32 tensor that holds its exact value, or (bf16 only) the int16 remainder
    of that value; the parameter receives its rounding. bf16 and fp16 parameters only.
scales: for int8 state, per state name the fp32 scales of each parameter, one per 256 elements.
stochastic_rounding, seed: round states, and parameters without a master, up or down at random so that the mean
    is right; the bits depend on (seed, element, step) alone.
offsets: index of each tensor's first element in the whole parameter, if it is a shard of one.
control: (2,) fp64 on the device: the gradient multiplier (clip coefficient / loss scale), and a flag: non-zero
    skips the step and leaves every tensor, step counts included, as it is.
lost: (2,) fp64 on the device, raised by the number of elements whose update was not zero, and of those whose
    stored value did not move.
backend: None, "cpu", "cuda", "triton" or "torch".""",
    "errors and numerics": """\
Raises:
    TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
    trainwright.BackendError: no backend can run the call.

Numerics: elements in fp32 (fp64 for fp64 parameters), each operation rounded by itself; the scalars they share in
fp64; what is stored in fewer bits is rounded once. The same bits for any thread count, layout and backend.""",
}


def documented(function: F) -> F:
    """Complete the function's docstring: a text takes the indentation of the line that names it."""

    def text(match: re.Match[str]) -> str:
        indent, before, name = match.groups()
        lines = TEXTS[name].split("\n")
        return indent + before + lines[0] + "".join(f"\n{indent}{x}" if x else "\n" for x in lines[1:])  # fmt: skip

    if function.__doc__ is not None:  # it is None under python -OO
        named = re.compile(rf"^( *)(.*)\{{({'|'.join(TEXTS)})\}}", re.MULTILINE)
        function.__doc__ = named.sub(text, function.__doc__)
    return function
