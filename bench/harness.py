"""How everything here is measured. One fixture, `compare` (bench/conftest.py), owns these rules:

- Inputs are built outside the timed region. Each provider is called twice before timing (torch.compile compiles then).
- The result of the first call is compared with a reference in the same run. Ours must be within the rule of
  tests/numerics.py (at most twice the error of the peers, plus a floor), or the benchmark fails.
- Providers are interleaved in one process: every round calls each of them, in a new order, so a busy machine slows all.
- The figure is the median over rounds, the spread the interquartile range over it. Ratios are taken round by
  round; the table has their median.
- The bound is timed in the same rounds: a copy that moves as many bytes, and a matrix product; `fraction` is the time
  that the work would take at the rate of the slower one, over the time measured. What is updated in place is held
  against `mul_` instead, which writes to the lines that it has read: on most CPUs the faster of the two.
- The number of CPU threads is fixed. On a GPU times are those of CUDA events, after a write that empties the L2 cache.
- `ATEN_CPU_CAPABILITY` (torch's variable that forces an instruction set) leaves torch.compile out: it miscompiles then.
- `memory=True` adds one untimed call that records the peak of extra memory: outputs and gradients included, inputs not.
- One CSV row per (op, provider, mode, shape, dtype, hardware) in bench/results/<op>.csv; a new run replaces its rows.

A benchmark file, complete:

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
    def test_rms_norm(compare, device, mode, dtype):
        inputs = {"x": torch.randn(8192, 768, dtype=dtype, device=device), ...}
        functions = {"trainwright": tw.rms_norm, "torch eager": eager, "torch.compile": compiled(eager)}
        compare("rms_norm", mode, (8192, 768), dtype, calls_of(functions, inputs, mode), exact(eager, inputs, mode),
                bytes_moved=..., flops=...)

A provider named "trainwright..." is ours; all others are peers; "torch eager" is the baseline of the plots.
An optimizer passes its own calls: functions without arguments that do one step and return the tensors to check.
`pytest.mark.full` marks cases that `--quick` leaves out.
"""

from __future__ import annotations

import functools
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import trainwright as tw
from numerics import FACTOR, FLOOR_ULPS, Inputs, cast, outputs_of
from pytest_benchmark.stats import Stats
from torch import Tensor

from bench.memory import peak_extra_bytes
from bench.rows import BASELINE, OURS, line, machine, save

Call = Callable[[], Any]
SANITY = (
    0.25  # a provider that is this far off, relative to the largest value, computes something else
)


# ---- what is measured


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` of a peer, with Inductor; it compiles in the first, untimed call."""
    return torch.compile(function, dynamic=False)


def call(
    function: Callable[..., Any], inputs: Inputs, mode: str, no_grad: Sequence[str] = (),
    round_to: torch.dtype | None = None,
) -> Call:  # fmt: skip
    """`function(**inputs)` as a call without arguments: returns outputs ("fwd"), gradients ("bwd") or both ("fwd+bwd").

    Args:
        no_grad: names of floating inputs that need no gradient.
        round_to: dtype that the upstream gradients are rounded to; that of the first floating input by default.
    """
    if mode == "fwd":
        plain = {k: v.detach() for k, v in inputs.items()}

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return outputs_of(function(**plain))

        return forward
    if mode not in ("bwd", "fwd+bwd"):
        raise ValueError(f"mode: expected fwd, bwd or fwd+bwd, got {mode!r}")
    floating = [k for k, v in inputs.items() if v.is_floating_point()]
    round_to = round_to or inputs[floating[0]].dtype
    leaves = {
        k: v.detach().requires_grad_(k in floating and k not in no_grad) for k, v in inputs.items()
    }
    wanted = [v for v in leaves.values() if v.requires_grad]
    upstream: list[Tensor] = []
    graph: list[Tensor] = []

    def run() -> list[Tensor]:
        outs = graph or [o for o in outputs_of(function(**leaves)) if o.requires_grad]
        if not upstream:  # first, untimed call
            generator = torch.Generator(outs[0].device).manual_seed(1)
            for o in outs:
                u = torch.randn(o.shape, generator=generator, device=o.device)
                upstream.append(u.to(round_to).to(o.dtype))
            if mode == "bwd":
                graph.extend(outs)
        grads = torch.autograd.grad(outs, wanted, upstream, retain_graph=mode == "bwd")
        return list(grads) if mode == "bwd" else [o.detach() for o in outs] + list(grads)

    return run


def calls_of(
    functions: dict[str, Callable[..., Any]], inputs: Inputs, mode: str, no_grad: Sequence[str] = ()
) -> dict[str, Call]:
    """One `call` per provider, all on the same inputs."""
    return {name: call(function, inputs, mode, no_grad) for name, function in functions.items()}


def exact(
    function: Callable[..., Any], inputs: Inputs, mode: str, no_grad: Sequence[str] = ()
) -> Call:
    """The reference: the same call in fp64, on the same rounded inputs and upstream gradients."""
    dtype = next(v.dtype for v in inputs.values() if v.is_floating_point())
    return call(function, cast(inputs, torch.float64), mode, no_grad, round_to=dtype)


# ---- measuring


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@functools.lru_cache(maxsize=1)
def _l2_eraser(device: torch.device) -> Tensor:
    return torch.empty(1 << 28, dtype=torch.uint8, device=device)


def time_seconds(function: Call, device: torch.device, repeats: int) -> float:
    """Time of one call, averaged over `repeats` calls in a row (one on a GPU, where the L2 cache is emptied first)."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _l2_eraser(device).zero_()
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    begin_s = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - begin_s) / repeats


def relative_error(got: Any, want: Sequence[Tensor]) -> float:
    """Largest |got - want| over the largest |want|, the worst over all tensors; in pieces, to save memory."""
    results = outputs_of(got)
    assert len(results) == len(want), f"{len(results)} results, reference has {len(want)}"
    worst = 0.0
    for r, w in zip(results, want):
        assert r.shape == w.shape, f"result {tuple(r.shape)}, reference {tuple(w.shape)}"
        largest, difference = 0.0, 0.0
        for a, b in zip(r.detach().flatten().split(1 << 22), w.detach().flatten().split(1 << 22)):
            b = b.double()
            largest = max(largest, b.abs().max().item())
            difference = max(difference, (a.double() - b).abs().nan_to_num(torch.inf).max().item())
        worst = max(worst, difference / largest if largest else difference)
    return worst


class Roofline:
    """The bounds: a copy of a given size, and a matrix product. They are timed like providers, in the same rounds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._fastest: dict[torch.dtype, torch.dtype] = {}

    def copy(self, moved_bytes: float) -> tuple[Call, float]:
        """A copy, and the bytes it reads and writes: the power of two below `moved_bytes`, 1 MiB to 1 GiB."""
        size = 1 << min(30, max(20, int(max(moved_bytes, 1.0)).bit_length() - 1))
        source = torch.ones(size // 8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), float(size)

    def mul(self, moved_bytes: float) -> tuple[Call, float]:
        """The same for a multiplication in place, torch's `mul_`."""
        size = 1 << min(30, max(20, int(max(moved_bytes, 1.0)).bit_length() - 1))
        values = torch.ones(size // 8, device=self.device)
        return lambda: values.mul_(1.0), float(size)

    def gemm(self, dtype: torch.dtype) -> tuple[Call, float]:
        """torch's matrix product in fp32, or in `dtype` where that is faster (fp64: in fp64), and its operations."""
        size = 8192 if self.device.type == "cuda" else 512
        if dtype not in self._fastest:
            times = {}
            for d in (dtype,) if dtype == torch.float64 else (torch.float32, dtype):
                product = self._product(d, size // 2)
                product()
                times[d] = min(time_seconds(product, self.device, 1) for _ in range(3))
            self._fastest[dtype] = min(times, key=times.__getitem__)
        return self._product(self._fastest[dtype], size), 2.0 * size**3

    def _product(self, dtype: torch.dtype, size: int) -> Call:
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        return lambda: a @ b


class Compare:
    """The `compare` fixture. See the head of this file."""

    def __init__(
        self,
        benchmark: Any,
        device: torch.device,
        roofline: Roofline,
        seconds: float,
        report: Callable[[str], None],
    ) -> None:
        self.benchmark, self.device, self.roofline = benchmark, device, roofline
        self.seconds, self.report = seconds, report

    def __call__(
        self, op: str, mode: str, shape: Sequence[int] | str, dtype: torch.dtype | str, calls: dict[str, Call],
        reference: Call | None, *, bytes_moved: float = 0.0, flops: float = 0.0, memory: bool = False,
        bound_dtype: torch.dtype = torch.float32, before: Call | None = None, in_place: bool = False,
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        """Measure and check the providers, write the CSV rows, and return them by provider.

        Args:
            shape: of the case, as in the table, e.g. ``(8192, 768)`` or ``"gpt2-124m"``.
            dtype: of the case; a string for a mix such as "bf16+fp32 master" (then give `bound_dtype`).
            calls: provider -> function without arguments that does the work and returns the tensors to check.
            reference: such a function too, called once; None only where a test already holds the result.
            bytes_moved: bytes that the algorithm has to read and write at least.
            flops: floating-point operations that it has to do, 2 per multiply-add.
            memory: record the peak of extra memory as well.
            before: called before every timed call, outside its time: puts back inputs that a call changes.
            in_place: the bytes are read and written in place: the bound is `mul_`, not a copy.
        """
        if os.environ.get("ATEN_CPU_CAPABILITY"):
            # Inductor's loops and ATen's vector headers then disagree on the width: its results are wrong.
            calls = {name: f for name, f in calls.items() if name != "torch.compile"}
        if before is not None:
            before()
        first = {name: function() for name, function in calls.items()}
        errors = self._check(first, reference, dtype)
        del first
        backends = {name: _backend(name, function) for name, function in calls.items()}
        peaks = {
            name: peak_extra_bytes(function, self.device) if memory else None
            for name, function in calls.items()
        }
        load = os.getloadavg()[0]
        kind = dtype if isinstance(dtype, torch.dtype) else bound_dtype
        times, bound_s, bound = self._rounds(calls, bytes_moved, flops, kind, before, in_place)
        stats_of = {name: _stats(series) for name, series in times.items()}
        peers = [n for n in calls if not n.startswith(OURS)]
        best = min(peers, key=lambda n: stats_of[n].median) if peers else ""
        rows = {}
        for name, series in times.items():
            stats = stats_of[name]
            rows[name] = {
                "op": op, "provider": name, "backend": backends[name], "mode": mode,
                "shape": shape if isinstance(shape, str) else "x".join(map(str, shape)),
                "dtype": str(dtype).removeprefix("torch."), "bytes": int(bytes_moved), "flops": int(flops),
                "median_ms": stats.median * 1e3, "spread": stats.iqr / stats.median,
                "gbps": bytes_moved / stats.median / 1e9, "gflops": flops / stats.median / 1e9,
                "fraction": _paired(bound_s, series), "bound": bound,
                "ratio_eager": _paired(times.get(BASELINE), series), "ratio_peer": _paired(times.get(best), series),
                "best_peer": best, "error": errors.get(name), "peak_bytes": peaks[name], "rounds": len(series),
                "load": load, **machine(self.device, name.startswith(OURS)),
            }  # fmt: skip
        save(op, list(rows.values()))
        self.benchmark.extra_info["rows"] = list(rows.values())
        for row in rows.values():
            self.report(line(row))
        return rows

    def _check(
        self, results: dict[str, Any], reference: Call | None, dtype: torch.dtype | str
    ) -> dict[str, float]:
        if reference is None:
            return {}
        want = outputs_of(reference())
        errors = {name: relative_error(result, want) for name, result in results.items()}
        low = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        peers = [e for n, e in errors.items() if not n.startswith(OURS)]
        limit = FACTOR * max(peers, default=0.0) + FLOOR_ULPS * torch.finfo(low).eps
        for name, error in errors.items():
            assert error < SANITY, f"{name}: computes something else: error {error:.3g}"
            if name.startswith(OURS):
                assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g}: {errors}"
        return errors

    def _rounds(
        self, calls: dict[str, Call], moved_bytes: float, flops: float, dtype: torch.dtype,
        before: Call | None, in_place: bool,
    ) -> tuple[dict[str, list[float]], list[float], str]:  # fmt: skip
        """Interleaved timing, driven by pytest-benchmark: one of its rounds calls every provider once.

        Returns the seconds of every round by provider, and those that the bound would have taken, and its name.
        """
        bounds: dict[str, tuple[Call, float]] = {}
        memory = "mul_" if in_place else "copy"
        if moved_bytes:
            bounds[memory] = (self.roofline.mul if in_place else self.roofline.copy)(moved_bytes)
        if flops:
            bounds["gemm"] = self.roofline.gemm(dtype)
        everything = {**calls, **{f"bound {k}": function for k, (function, _) in bounds.items()}}
        repeats, total = {}, 0.0
        for name, function in everything.items():
            function()
            once = time_seconds(function, self.device, 1)
            repeats[name] = 1 if before else max(1, min(1000, round(2e-3 / max(once, 1e-9))))
            total += once * (repeats[name] if self.device.type == "cpu" else 1)
        series: dict[str, list[float]] = {name: [] for name in everything}
        order, shuffle = list(everything), random.Random(0)

        def one_round() -> None:
            shuffle.shuffle(order)
            for name in order:
                if before is not None:
                    before()
                series[name].append(time_seconds(everything[name], self.device, repeats[name]))

        rounds = max(5, min(300, int(self.seconds / max(total, 1e-9))))
        self.benchmark.pedantic(one_round, rounds=rounds, iterations=1)
        work = {memory: moved_bytes, "gemm": flops}
        least = {
            k: [work[k] / amount * s for s in series.pop(f"bound {k}")]
            for k, (_, amount) in bounds.items()
        }
        bound = max(least, key=lambda k: statistics.median(least[k]), default="")
        return series, least.get(bound, []), bound


def _paired(base: list[float] | None, series: list[float]) -> float | None:
    """How many times faster than `base`: the median of the ratios round by round."""
    return statistics.median(b / s for b, s in zip(base, series)) if base else None


def _stats(series: list[float]) -> Stats:
    stats = Stats()
    for seconds in series:
        stats.update(seconds)
    return stats


def _backend(name: str, function: Call) -> str:
    """The backends that our ops chose in this call; "torch" for a peer."""
    if not name.startswith(OURS):
        return "torch"
    return "+".join(sorted(set(re.findall(r"^  (\w+): chosen$", tw.explain(function), re.M))))


def fix_threads() -> None:
    """As many threads as OMP_NUM_THREADS says, or as torch chose; never changed later."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or torch.get_num_threads())
