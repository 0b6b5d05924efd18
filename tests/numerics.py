"""The one owner of tolerances, and the checks that every op goes through.

Rule: the error of our op against an fp64 reference is at most twice the error of plain torch computing the same thing
in the same dtype, plus a floor: two units in the last place of the largest value (plain torch may be exact by luck) and
four of 1.0 in the accumulator's dtype (terms that cancel). In fp64 the reference rounds as much as the op does, and the
floor is sixteen units.

An op under test is a callable `op(**tensors, **options, backend=...)`; its reference is
`reference(**tensors, **options)` in plain torch, good for any floating dtype. Inputs are a dict name -> tensor;
floating tensors are differentiated unless named in `no_grad`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import trainwright as tw
from torch import Tensor

Inputs = dict[str, Tensor]
FLOOR_ULPS = 2.0
FP64_FLOOR_ULPS = 16.0
CANCELLATION_ULPS = 4.0
MODEL_FACTOR = 1e-5
FACTOR = 2.0


def outputs_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [r for r in result if isinstance(r, Tensor)]


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Copies in `dtype` (integers and bools as they are), strides kept."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def run(
    function: Callable[..., Any], inputs: Inputs, options: dict[str, Any], no_grad: tuple[str, ...] = (),
    upstream: list[Tensor] | None = None,
) -> tuple[list[Tensor], dict[str, Tensor | None], list[Tensor]]:  # fmt: skip
    """Forward and backward. Returns outputs, gradients by input name, and the upstream gradients used."""
    leaves = {
        k: v.detach().requires_grad_(v.is_floating_point() and k not in no_grad)
        for k, v in inputs.items()
    }
    outs = outputs_of(function(**leaves, **options))
    pairs = [o for o in outs if o.requires_grad]
    if upstream is None:
        generator = torch.Generator(outs[0].device).manual_seed(1)
        upstream = [
            torch.randn(o.shape, generator=generator, device=o.device, dtype=torch.float64)
            for o in pairs
        ]
    wanted = {k: v for k, v in leaves.items() if v.requires_grad}
    grads: dict[str, Tensor | None] = {}
    if pairs and wanted:
        got = torch.autograd.grad(
            pairs,
            list(wanted.values()),
            [u.to(o.dtype) for u, o in zip(upstream, pairs)],
            allow_unused=True,
        )
        grads = dict(zip(wanted, got))
    return [o.detach() for o in outs], grads, upstream


def assert_within_rule(name: str, ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Our error <= FACTOR x plain torch's + FLOOR_ULPS ulp of the largest value; NaN and inf in the same places."""
    assert ours.shape == exact.shape, (
        f"{name}: shape {tuple(ours.shape)}, expected {tuple(exact.shape)}"
    )
    assert ours.dtype == plain.dtype, f"{name}: dtype {ours.dtype}, expected {plain.dtype}"
    a, p, e = ours.double(), plain.double(), exact.double()
    odd = ~torch.isfinite(e)
    assert torch.equal(torch.nan_to_num(a[odd], 7.0), torch.nan_to_num(e[odd], 7.0)), (
        f"{name}: NaN or inf differ"
    )
    a, p, e = a[~odd], p[~odd], e[~odd]
    if not e.numel():
        return
    ours_error = (a - e).abs().max().item()
    plain_error = torch.nan_to_num((p - e).abs(), 0.0).max().item()
    # The reference of an fp64 op is no more exact than the op: both round every term of their sums.
    floor_ulps = FP64_FLOOR_ULPS if ours.dtype == torch.float64 else FLOOR_ULPS
    floor = floor_ulps * torch.finfo(ours.dtype).eps * e.abs().max().item()
    # Sums of terms of order 1 that cancel keep the error of the accumulator.
    floor += (
        CANCELLATION_ULPS
        * torch.finfo(torch.float64 if ours.dtype == torch.float64 else torch.float32).eps
    )
    limit = FACTOR * plain_error + floor
    assert ours_error <= limit, (
        f"{name}: error {ours_error:.3g}, limit {limit:.3g} (plain torch {plain_error:.3g})"
    )


def assert_same_model(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Logits or gradients of one fp32 model computed in two ways: they differ by the noise of its layers, measured by
    the norm, as single elements cancel."""
    difference = (ours.double() - theirs.double()).norm().item()
    limit = MODEL_FACTOR * theirs.double().norm().item()
    assert difference <= limit, f"{name}: differs by {difference:.3g} in norm, limit {limit:.3g}"


def check_reference(
    op: Callable[..., Any], reference: Callable[..., Any], inputs: Inputs, options: dict[str, Any] | None = None,
    *, backend: str | None = None, no_grad: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Outputs and every gradient within the rule; inputs unchanged; a second run has the same bits."""
    options = options or {}
    before = {k: v.clone() for k, v in inputs.items()}
    # The exact answer starts from the inputs as rounded to the dtype under test.
    exact, exact_grads, upstream = run(reference, cast(inputs, torch.float64), options, no_grad)
    dtype = next(v.dtype for v in inputs.values() if v.is_floating_point())
    upstream = [u.to(dtype).double() for u in upstream]
    exact, exact_grads, _ = run(reference, cast(inputs, torch.float64), options, no_grad, upstream)
    plain, plain_grads, _ = run(reference, inputs, options, no_grad, upstream)
    ours, grads, _ = run(op, inputs, {**options, "backend": backend}, no_grad, upstream)
    again, grads_again, _ = run(op, inputs, {**options, "backend": backend}, no_grad, upstream)
    assert len(ours) == len(exact), f"{len(ours)} outputs, expected {len(exact)}"
    for i, (o, p, e) in enumerate(zip(ours, plain, exact)):
        assert_within_rule(f"output {i}", o, p, e)
        assert same_bits(o, again[i]), f"output {i}: two runs differ"
    for name, e in exact_grads.items():
        o, p = grads[name], plain_grads[name]
        assert (o is None) == (e is None), f"gradient of {name}: {o} against {e}"
        if o is not None and e is not None and p is not None:
            assert o.dtype == inputs[name].dtype, f"gradient of {name}: dtype {o.dtype}"
            assert_within_rule(f"gradient of {name}", o, p, e)
            assert same_bits(o, grads_again[name]), f"gradient of {name}: two runs differ"
    for name, value in before.items():
        assert same_bits(value, inputs[name]), f"{name} was modified"


# The kernels that test the virtual GPU itself: (relative, absolute) error against an answer in fp64. A tensor core adds
# 8 to 32 products at a time and rounds once: up to K / 8 roundings of the accumulator's type, of all products' sizes.
VGPU_ERROR = {
    "bf16 accumulated in fp32": (2**-22, 0.0),  # and fp16, fp8
    "fp16 accumulated in fp16": (2**-9, 0.0),
    "tf32 accumulated in fp32": (2**-21, 0.0),
    "fp64 accumulated in fp64": (2**-50, 0.0),
    "integers": (0.0, 0.0),
    "fp64 mma": (1e-14, 1e-14),
    "bf16 matmul": (2**-8, 1e-4),  # half a unit of the result, beside those of the accumulator
    "fp32 matmul": (1e-5, 1e-4),
    "short matmul": (0.0, 2e-5),
    "bf16 attention": (0.0, 1e-2),
    "bf16 attention of values": (
        2**-7,
        0.0,
    ),  # half a unit for P, of the row's largest value, and for the result
    "fp16 attention of values": (2**-10, 0.0),
    "lse": (0.0, 2e-6),
    "lse in base 2": (0.0, 2e-5),
    "softmax": (0.0, 3e-8),
    "bf16 layer norm": (2**-8, 1e-6),
    "layer norm weights": (0.0, 2e-5),
    "dropout": (0.0, 1e-6),
    "sin, erf, log, sqrt": (0.0, 1e-6),
    "fp64 pow": (1e-14, 0.0),
    "approx.f32": (2**-22, 1e-45),
    "approx.ftz.f32": (2**-22, 2**-126),
    "norm of many": (1e-6, 0.0),
    "squares of many": (1e-12, 0.0),
    "adamw of many": (1e-6, 1e-7),
    "lamb of many": (1e-6, 1e-6),
}


def vgpu_close(kind: str, got: Any, want: Any, magnitude: Any = None) -> bool:
    """Whether got is near want everywhere, by VGPU_ERROR[kind]; relative to `magnitude` if that is given."""
    return _close(VGPU_ERROR[kind], got, want, magnitude)


def _close(error: tuple[float, float], got: Any, want: Any, magnitude: Any = None) -> bool:
    relative, absolute = error
    # as_tensor without a dtype would round a Python float to fp32
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    size = want.abs() if magnitude is None else magnitude
    return bool(((got == want) | ((got - want).abs() <= relative * size + absolute)).all())


# Sharded against whole: (relative, absolute) difference of fp32 results whose sums are associated otherwise.
PARALLEL_ERROR = {
    "vocabulary loss": (2e-6, 1e-6),
    "vocabulary gradient, float32": (1e-5, 1e-7),
    "vocabulary gradient, bfloat16": (1e-2, 1e-4),
    "tied gradient": (1e-5, 1e-6),
    "sharded gradient": (1e-5, 1e-6),
    "training loss": (1e-5, 0.0),  # of every one of 50 steps
    "training gradient norm": (1e-4, 0.0),
    "random model, float64": (1e-9, 1e-10),
    "averaged, float64": (1e-11, 1e-13),
    "int8 value and error": (1e-6, 1e-7),
    "int8 error of four steps": (1e-3, 2e-6),
}


def parallel_close(kind: str, got: Any, want: Any) -> bool:
    """Whether a sharded result is near the whole one everywhere, by PARALLEL_ERROR[kind]."""
    return _close(PARALLEL_ERROR[kind], got, want)


# Optimizers after a few steps, against another way to the same answer: (relative, absolute).
OPTIMIZER_ERROR = {
    # torch's Muon orthogonalises in bf16, and ours on the CPU in fp32.
    "torch's Muon, float32 parameters": (1e-2, 5e-3),
    "torch's Muon, bfloat16 parameters": (1e-2, 0.05),
    "torch's Muon, float32 momentum": (1e-2, 1e-6),
    "torch's Muon, bfloat16 momentum": (1e-2, 0.02),
    "fp64 Muon": (1e-5, 1e-5),
    "clipped before the step": (1e-6, 1e-6),
    "scaled loss": (1e-6, 1e-6),
    "gradient norm": (1e-6, 0.0),
    "step of half the rate": (1e-5, 0.0),
    "8-bit momentum, movement": (0.05, 0.0),  # in norm
}


def optimizer_close(kind: str, got: Any, want: Any) -> bool:
    """Whether got is near want everywhere, by OPTIMIZER_ERROR[kind]."""
    return _close(OPTIMIZER_ERROR[kind], got, want)


# Attention, whose order of sums may change with what other rows or keys hold: (relative, absolute).
ATTENTION_ERROR = {"beside unseen NaN": (1e-6, 1e-6)}


def attention_close(kind: str, got: Any, want: Any) -> bool:
    """Whether got is near want everywhere, by ATTENTION_ERROR[kind]."""
    return _close(ATTENTION_ERROR[kind], got, want)


def check_mean_error(
    op: Callable[..., Any], reference: Callable[..., Any], draws: list[Inputs], options: dict[str, Any], *, backend: str
) -> None:  # fmt: skip
    """The rule for the root mean square of all errors over many draws of the inputs, where the largest error of one
    draw is a matter of luck: each output and gradient within FACTOR of plain torch's."""
    squares: dict[str, list[float]] = {}
    for inputs in draws:
        high = cast(inputs, torch.float64)
        _, _, upstream = run(reference, high, options)
        upstream = [u.float().double() for u in upstream]
        exact, plain, ours = (
            run(function, tensors, choice, (), upstream)
            for function, tensors, choice in (
                (reference, high, options),
                (reference, inputs, options),
                (op, inputs, {**options, "backend": backend}),
            )
        )
        named = [(f"output {i}", e, plain[0][i], ours[0][i]) for i, e in enumerate(exact[0])]
        named += [(f"gradient of {n}", e, plain[1][n], ours[1][n]) for n, e in exact[1].items()]
        for name, e, p, o in named:
            sums = squares.setdefault(name, [0.0, 0.0])
            for i, x in enumerate((o, p)):
                sums[i] += (x.double() - e.double()).square().sum().item()
    for name, (o, p) in squares.items():
        assert o <= FACTOR**2 * p, f"{name}: {(o / p) ** 0.5:.2f} times plain torch's mean error"


def same_bits(a: Tensor, b: Tensor | None) -> bool:
    """Equal shapes, dtypes and bit patterns (so NaN equals the same NaN)."""
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def strided_variants(x: Tensor) -> dict[str, Tensor]:
    """The same values in other layouts: a slice of a larger tensor, every second element, transposed storage."""
    big = torch.full(
        (*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device
    )
    step = big[..., 3 : 3 + 2 * x.shape[-1] : 2]
    step.copy_(x)
    wide = torch.full(
        (*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype, device=x.device
    )
    sliced = wide[..., 1 : 1 + x.shape[-1]]
    sliced.copy_(x)
    variants = {"every second": step, "slice": sliced}
    if x.dim() >= 2:
        variants["transposed"] = x.transpose(0, -1).contiguous().transpose(0, -1)
    return variants


def check_layouts(
    op: Callable[..., Any], inputs: Inputs, options: dict[str, Any] | None = None, *, backend: str | None = None,
    no_grad: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Any strides of any input, and an expanded (stride 0) upstream gradient, give the bits of the contiguous call."""
    options = {**(options or {}), "backend": backend}
    inputs = {k: v.contiguous() for k, v in inputs.items()}
    outs, grads, upstream = run(op, inputs, options, no_grad)
    for name, value in inputs.items():
        if not value.is_floating_point() or value.dim() == 0:
            continue
        for layout, variant in strided_variants(value).items():
            got, got_grads, _ = run(op, {**inputs, name: variant}, options, no_grad, upstream)
            for i, (g, o) in enumerate(zip(got, outs)):
                assert same_bits(g, o), f"{name} {layout}: output {i} differs"
            for key, o in grads.items():
                if o is not None:
                    assert same_bits(o, got_grads[key]), (
                        f"{name} {layout}: gradient of {key} differs"
                    )
    ones = [torch.ones_like(u) for u in upstream]
    expanded = [torch.ones((), dtype=u.dtype).expand(u.shape) for u in upstream]
    _, dense, _ = run(op, inputs, options, no_grad, ones)
    _, broadcast, _ = run(op, inputs, options, no_grad, expanded)
    for key, o in dense.items():
        if o is not None:
            assert same_bits(o, broadcast[key]), (
                f"expanded upstream gradient: gradient of {key} differs"
            )


def check_gradcheck(
    op: Callable[..., Any], inputs: Inputs, options: dict[str, Any] | None = None, *, backend: str | None = None,
    no_grad: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Analytic against numeric gradients in fp64."""
    leaves = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    names = [k for k, v in leaves.items() if v.is_floating_point() and k not in no_grad]
    rest = {k: v for k, v in leaves.items() if k not in names}

    def function(*values: Tensor) -> Any:
        return op(**dict(zip(names, values)), **rest, **(options or {}), backend=backend)

    values = [leaves[k].detach().clone().requires_grad_() for k in names]
    assert torch.autograd.gradcheck(function, values)


def check_compile(
    op: Callable[..., Any], inputs: Inputs, options: dict[str, Any] | None = None, *, no_grad: tuple[str, ...] = (),
    compiler: str = "aot_eager",
) -> None:  # fmt: skip
    """`torch.compile(fullgraph=True)` gives the bits of eager, forward and backward."""
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend=compiler)
    outs, grads, upstream = run(op, inputs, options or {}, no_grad)
    got, got_grads, _ = run(compiled, inputs, options or {}, no_grad, upstream)
    for i, (g, o) in enumerate(zip(got, outs)):
        assert same_bits(g, o), f"compiled output {i} differs"
    for key, o in grads.items():
        if o is not None:
            assert same_bits(o, got_grads[key]), f"compiled gradient of {key} differs"


def check_opcheck(op: Any, *args: Any) -> None:
    """torch's own audit of a dispatcher op: schema, fake tensors, AOT dispatch."""
    torch.library.opcheck(op, args)


def backends_for_tests(function: Callable[..., Any]) -> list[str]:
    """Backends that can run on CPU tensors here: the compiled one, Triton in its interpreter, the torch reference, and
    the CUDA kernels on the virtual GPU ("vgpu", skipped by conftest.py where it cannot be built)."""
    available = tw.available_backends(function)
    if os.environ.get("TRAINWRIGHT_TEST_DEVICE") == "cuda":  # conftest.py
        return [b for b in ("cuda", "triton") if available.get(b) == "ok"]
    virtual = ["vgpu"] if "cuda" in available else []
    return [b for b in ("cpu", "triton", "torch") if available.get(b) == "ok"] + virtual


def interpreted(backend: str) -> bool:
    """Whether this is Triton in its interpreter, which is slow: of the longest tables it runs the rows that reach all
    of its code. Compiled, on a GPU or the virtual one, it runs them all."""
    return backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
