"""Which backend runs a call.

Each op registers its candidates in order of preference, each with its limits as data. `resolve` picks the first that
can run the call; a choice can be forced, in this order of precedence:

    ``backend=``  >  ``with tw.use_backend("triton")``  >  ``TRAINWRIGHT_BACKEND_<OP>``  >  ``TRAINWRIGHT_BACKEND``

A forced backend that cannot run the call raises `BackendError` with the reason; nothing falls back silently. With
``TRAINWRIGHT_STRICT=1`` the automatic choice never ends at the torch reference.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import operator
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from trainwright.errors import BackendError
from trainwright.kernels import _notes

BACKENDS = ("cpu", "cuda", "triton", "torch")
F = TypeVar("F", bound=Callable[..., Any])
Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Yield:
    """Calls that plain torch runs faster than this candidate, so that the automatic choice leaves them to it: of this
    dtype, on a device of this type, with these sizes; `native_bf16`: only if this CPU multiplies bf16 in hardware;
    `mkl`: only where MKL's fp32 products are faster than ours."""

    device_type: str
    dtype: torch.dtype
    reason: str
    sizes: tuple[tuple[str, int], ...] = ()
    native_bf16: bool = False
    mkl: bool = False


@dataclass(frozen=True)
class Candidate:
    """One backend of one op and what it can run.

    `limits` holds (size name, largest value), `lacks` the options that this backend does not implement: `resolve` gets
    them as ``option=True`` where the call uses them.
    """

    backend: str
    dtypes: tuple[torch.dtype, ...]
    min_capability: tuple[int, int] = (8, 0)
    limits: tuple[tuple[str, int], ...] = ()
    yields: tuple[Yield, ...] = ()
    lacks: tuple[str, ...] = ()


@dataclass
class Extension:
    """A compiled module and, if it could not be loaded, why."""

    name: str
    loaded: bool = False
    reason: str = "not tried"
    info: str = field(default="")


_extensions: dict[str, Extension] = {}
_ops: dict[str, tuple[Candidate, ...]] = {}
_self_checks: dict[str, Callable[[str, torch.device], list[torch.Tensor]]] = {}
_override: str | None = None  # set by use_backend
_record: list[str] | None = None  # set by explain


def extension(name: str) -> Extension:
    """Load trainwright.<name> once. A missing or broken module is remembered with its reason, never raised."""
    if name not in _extensions:
        ext = Extension(name)
        try:
            if name == "_C_cuda" and not torch.cuda.is_available():
                raise ImportError("no CUDA GPU, or a CPU build of torch")
            importlib.import_module(f"trainwright.{name}")
            ext.loaded, ext.reason = True, "ok"
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError)
            ext.reason = f"trainwright.{name} was not built" if missing else str(error)
        _extensions[name] = ext
    return _extensions[name]


def register(op: str, *candidates: Candidate) -> Callable[[F], F]:
    """Decorator for an op's public function: names the op and its candidates, in order of preference."""

    def mark(function: F) -> F:
        _ops[op] = candidates
        function.__trainwright_op__ = op  # type: ignore[attr-defined]
        return function

    return mark


def self_check(op: str) -> Callable[[F], F]:
    """Decorator for `check(backend, device) -> tensors`: one small seeded call of an op in fp32 (in `check_dtype` where
    a backend does not take that), and its gradients.

    ``python -m trainwright.info --check`` compares its result on every backend with that of the torch reference. Inputs
    are drawn on the CPU and moved to `device`.
    """

    def mark(function: F) -> F:
        _self_checks[op] = function
        return function

    return mark


def check_dtype(op: str, backend: str | None) -> torch.dtype:
    """Of the self-check of `op` on `backend`: fp32, or the first dtype of a backend that does not take fp32."""
    dtypes = next((c.dtypes for c in _ops[op] if c.backend == backend), (torch.float32,))
    return torch.float32 if torch.float32 in dtypes else dtypes[0]


def ops() -> list[str]:
    """Names of all registered ops."""
    return sorted(_ops)


def self_checks() -> dict[str, Callable[[str, torch.device], list[torch.Tensor]]]:
    return dict(_self_checks)


@functools.lru_cache(maxsize=1)
def triton_reason() -> str:
    """Why Triton cannot be used here, or "ok"."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "ok"
    if not torch.cuda.is_available():
        return "no CUDA GPU (TRITON_INTERPRET=1, set before import, runs it on CPU tensors)"
    if not any(shutil.which(os.environ.get("CC", c)) for c in ("cc", "gcc", "clang")):
        return "no C compiler, which Triton needs for its launcher"
    return "ok"


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def backend_reason(
    candidate: Candidate, device_type: str, capability: tuple[int, int] | None
) -> str:
    """Why this candidate cannot run on a device of this type at all, or "ok"."""
    name = candidate.backend
    if name == "torch":
        return "ok"
    if name == "cpu":
        return (
            extension("_C").reason
            if device_type == "cpu"
            else f"needs CPU tensors, got {device_type}"
        )
    if name == "triton":
        reason = triton_reason()
        if reason != "ok":
            return reason
        if device_type != "cuda" and not interpreting():
            return f"needs CUDA tensors, got {device_type}"
    if name == "cuda":
        if device_type != "cuda":
            return f"needs CUDA tensors, got {device_type}"
        reason = extension("_C_cuda").reason
        if reason != "ok":
            return reason
    if capability is not None and capability < candidate.min_capability:
        need = ".".join(map(str, candidate.min_capability))
        return f"needs compute capability {need}, this GPU has {'.'.join(map(str, capability))}"
    return "ok"


def _call_reason(
    candidate: Candidate,
    device_type: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    sizes: Sizes,
) -> str:
    reason = backend_reason(candidate, device_type, capability)
    if reason != "ok":
        return reason
    if dtype not in candidate.dtypes:
        return f"does not support {str(dtype).removeprefix('torch.')}"
    largest = dict(candidate.limits)
    for name, value in sizes:
        if name in candidate.lacks and value:
            return f"does not implement {name}"
        if name in largest and value > largest[name]:
            return f"needs {name} <= {largest[name]}, got {value}"
    return "ok"


@functools.lru_cache(maxsize=1)
def native_bf16() -> bool:
    """Whether torch multiplies bf16 with AVX512-BF16 or AMX here. A CPU that is made to look smaller, by
    TRAINWRIGHT_CPU_ISA or ONEDNN_MAX_CPU_ISA, counts as the smaller one."""
    wide = ("ALL", "DEFAULT", "BF16", "FP16", "AMX", "AVX10")
    allowed = (os.environ.get("ONEDNN_MAX_CPU_ISA") or "ALL").upper()
    if os.environ.get("TRAINWRIGHT_CPU_ISA") or not any(name in allowed for name in wide):
        return False
    return torch.cpu._is_avx512_bf16_supported() and torch.backends.mkldnn.is_available()


@functools.lru_cache(maxsize=1)
def mkl_is_faster() -> bool:
    """Whether to expect MKL, under torch, to multiply fp32 faster than our kernels: not on AMD's CPUs, for which it has
    no kernels of their own (forward, ours took 0.65 to 0.98 of its time on an EPYC)."""
    try:
        with open("/proc/cpuinfo") as file:
            return "AuthenticAMD" not in file.read(4096)
    except OSError:
        return True


def _yield_reason(
    candidate: Candidate, device_type: str, dtype: torch.dtype, sizes: Sizes
) -> str | None:
    for y in candidate.yields:
        matches = (y.device_type, y.dtype) == (device_type, dtype) and set(y.sizes) <= set(sizes)
        if matches and (not y.native_bf16 or native_bf16()) and (not y.mkl or mkl_is_faster()):
            return f"left to torch: {y.reason}"
    return None


@functools.lru_cache(maxsize=4096)
def _choose(
    op: str,
    forced: str | None,
    strict: bool,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes,
) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    reasons: list[tuple[str, str]] = []
    chosen: str | None = None
    for candidate in _ops[op]:
        reason = _call_reason(candidate, device.type, capability, dtype, sizes)
        if forced is not None and candidate.backend != forced:
            reason = f"not asked for (backend={forced!r})" if reason == "ok" else reason
        elif reason == "ok" and chosen is None:
            if candidate.backend == "torch" and strict and forced is None:
                reason = "TRAINWRIGHT_STRICT=1 forbids the torch reference"
            elif candidate.backend == "triton" and device.type != "cuda" and forced is None:
                reason = "the interpreter runs only when asked for"
            elif (
                forced is None
                and not strict
                and (left := _yield_reason(candidate, device.type, dtype, sizes))
            ):
                reason = left
            else:
                chosen, reason = candidate.backend, "chosen"
        elif reason == "ok":
            reason = f"skipped ({chosen} preferred)"
        reasons.append((candidate.backend, reason))
    if forced is not None and all(c.backend != forced for c in _ops[op]):
        reasons.append((forced, "not implemented for this op"))
    return chosen, tuple(reasons)


# What os.environ keeps its variables in, encoded: asking it for one that is not set takes a microsecond, and a short
# call as a whole takes ten.
_environment: Any = getattr(os.environ, "_data", None) if os.name == "posix" else None


@functools.cache
def _variables(op: str) -> tuple[str | bytes, ...]:
    names = (f"TRAINWRIGHT_BACKEND_{op.upper()}", "TRAINWRIGHT_BACKEND", "TRAINWRIGHT_STRICT")
    return names if _environment is None else tuple(map(os.fsencode, names))


def _setting(key: Any) -> str | None:
    value = (os.environ if _environment is None else _environment).get(key)
    return None if value is None else os.fsdecode(value)


def _resolve(
    op: str,
    asked: str | None,
    context: str | None,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes,
) -> str:
    own, every, strict = map(_setting, _variables(op))
    forced = asked or context or own or every or None
    if forced is not None and forced not in BACKENDS:
        raise ValueError(f"{op}: backend: expected one of {', '.join(BACKENDS)}, got {forced!r}")
    chosen, reasons = _choose(op, forced, strict == "1", device, dtype, sizes)
    # A backend with several candidates, one per range of sizes or dtypes, may give one reason for all.
    said = list(dict.fromkeys(f"  {name}: {reason}" for name, reason in reasons))
    if _record is not None:
        where = f"{device.type}, {str(dtype).removeprefix('torch.')}" + "".join(
            f", {k}={v}" for k, v in sizes
        )
        _record.append(f"{op} ({where})")
        _record.extend(said)
    if chosen is None:
        lines = [f"{op}: no backend can run this call.", *said]
        lines.append("See `python -m trainwright.info`; backend=None lets Trainwright choose.")
        raise BackendError("\n".join(lines))
    return chosen


# What torch.compiler.assume_constant_result sets, without its import of torch._dynamo (1.6 s).
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


def resolve(
    op: str, backend: str | None, device: torch.device, dtype: torch.dtype, **sizes: int
) -> str:
    """The backend that runs this call of `op`. Touches no tensor; cached on its plain arguments.

    Args:
        op: name given to `register`.
        backend: the caller's ``backend=`` argument.
        device, dtype: of the tensor that decides.
        **sizes: values that candidates may limit, e.g. ``D=128``.

    Raises:
        BackendError: no candidate can run the call, or the forced one cannot.
        ValueError: an unknown backend name.
    """
    # index: under torch.compile with dynamic shapes a size that a limit may depend on becomes a constant.
    if torch.compiler.is_compiling():
        plain = tuple((name, operator.index(value)) for name, value in sizes.items())
    else:  # the same in half the time
        plain = tuple(zip(sizes, map(operator.index, sizes.values())))
    return _resolve(op, backend, _override, device, dtype, plain)


def note(line: str) -> None:
    """Add a line to what `explain` is collecting, if it is."""
    if _record is not None:
        _record.append(line)


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Force a backend for the ops called inside, e.g. ``with tw.use_backend("torch"): ...``.

    An op's own ``backend=`` argument wins over it. ``None`` restores the automatic choice. The setting is one per
    process, not per thread. A forced backend that cannot run a call raises `BackendError`.
    """
    global _override
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"use_backend: name: expected one of {', '.join(BACKENDS)} or None, got {name!r}"
        )
    before, _override = _override, name
    try:
        yield
    finally:
        _override = before


def op_name(function: Any) -> str:
    name = getattr(function, "__trainwright_op__", None)
    if name is None:
        raise TypeError(f"expected a Trainwright op such as tw.rms_norm, got {function!r}")
    return str(name)


def available_backends(function: Callable[..., Any]) -> dict[str, str]:
    """For each backend of an op "ok", or the reason why it cannot run on this machine.

    >>> import trainwright as tw
    >>> tw.available_backends(tw.rms_norm)["torch"]
    'ok'
    """
    return backends_of(op_name(function))


def backends_of(op: str) -> dict[str, str]:
    """`available_backends` by the op's name."""
    result = {}
    for candidate in _ops[op]:
        needs_gpu = candidate.backend == "cuda" or (
            candidate.backend == "triton" and not interpreting()
        )
        capability = None
        if needs_gpu and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability()
        result[candidate.backend] = backend_reason(
            candidate, "cuda" if needs_gpu else "cpu", capability
        )
        if needs_gpu and not torch.cuda.is_available() and result[candidate.backend] == "ok":
            result[candidate.backend] = "no CUDA GPU"
    return result


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call `function` and return which backend ran each op in it, and why the others did not.

    The call is made for real, so an in-place op does its work. `function` may be an op, a module or any callable that
    calls ops. A `BackendError` becomes part of the text; other errors are raised.
    """
    global _record
    before, _record = _record, []
    before_notes, _notes.sink = _notes.sink, _record.append
    try:
        with contextlib.suppress(BackendError):
            function(*args, **kwargs)
        lines = _record
    finally:
        _record, _notes.sink = before, before_notes
    return "\n".join(lines) if lines else "no Trainwright op was called"
