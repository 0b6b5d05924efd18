"""What works on this machine, and why the rest does not: ``python -m trainwright.info [--json] [--check]``.

Every probe is guarded, so the report appears even where torch is missing or broken; `--check` runs each op once per
backend against its torch reference and exits with 1 if one fails. Only the standard library is imported at the top.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable
from typing import Any

Section = dict[str, Any]
BF16_PRODUCTS = ("fp32", "avx512", "amx", "amx-emulated")

# Every variable that the package or its build reads. "<OP>" stands for an op's name in capitals.
ENVIRONMENT = {
    "TRAINWRIGHT_BACKEND": "backend of every op: cpu, cuda, triton or torch",
    "TRAINWRIGHT_BACKEND_<OP>": "backend of one op, e.g. TRAINWRIGHT_BACKEND_RMS_NORM",
    "TRAINWRIGHT_STRICT": "1: an automatic choice never ends at the torch reference",
    "TRAINWRIGHT_CPU_ISA": "base, avx2 or avx512: the most that the CPU kernels may use",
    "TRAINWRIGHT_CPU_BF16": "fp32, avx512 or amx: the most that CPU products of bf16 may use; amx-emulated: for tests",
    "TRITON_INTERPRET": "1, set before import: Triton kernels run in Python, on CPU tensors too",
    "CC": "C compiler that Triton builds its launchers with",
    "OMP_NUM_THREADS": "CPU threads of torch and of our kernels",
    "TRAINWRIGHT_BUILD": "at build: auto, none, cpu or cuda",
    "TRAINWRIGHT_DEBUG": "at build: 1 for -O1 -g and assertions",
    "TRAINWRIGHT_SANITIZE": "at build: sanitizers, e.g. address,undefined",
    "TORCH_CUDA_ARCH_LIST": "at build: GPU architectures, e.g. 8.0;9.0a;12.0+PTX",
    "MAX_JOBS": "at build: compilers at a time",
    "CXX": "at build: the C++ compiler",
    "CUDA_HOME": "at build: where nvcc is",
}
PACKAGES = (
    *("torch", "triton", "numpy", "ninja", "pybind11"),
    *("rich", "matplotlib", "safetensors", "pyarrow"),
)
ISAS = {  # what module.cpp asks the CPU for
    "base": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
}
CHECK_TOLERANCE = 1e-4  # relative, fp32: tells a broken kernel from a working one, no more
CHECK_ULPS = 8  # of a dtype of 16 bits, where a backend does not take fp32


def main(arguments: list[str] | None = None) -> int:
    width = max(map(len, ENVIRONMENT))
    table = "\n".join(f"  {name:<{width}}  {text}" for name, text in ENVIRONMENT.items())
    parser = argparse.ArgumentParser(
        prog="python -m trainwright.info",
        description=__doc__,
        epilog="environment variables:\n" + table,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--check", action="store_true", help="run every op once on every backend")
    options = parser.parse_args(arguments)
    report = collect(check=options.check)
    print(json.dumps(report, indent=2) if options.json else text(report))
    failed = options.check and not report["check"].get("passed", False)
    return 1 if failed else 0


def collect(check: bool = False) -> dict[str, Section]:
    """The report as plain data. A probe that fails leaves ``{"error": ...}`` in its place."""
    probes: dict[str, Callable[[], Section]] = {
        "trainwright": package,
        "packages": versions,
        "build": build_record,
        "torch": torch_state,
        "cpu": cpu,
        "gpu": gpu,
        "extensions": extensions,
        "backends": backends,
        "environment": environment,
    }
    if check:
        probes["check"] = run_checks
    return {name: _guarded(probe) for name, probe in probes.items()}


def _guarded(probe: Callable[[], Section]) -> Section:
    try:
        return probe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


# ---- probes


def package() -> Section:
    from trainwright._version import __version__

    return {
        "version": __version__,
        "location": str(pathlib.Path(__file__).parent),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform()}, {platform.machine()}",
    }


def versions() -> Section:
    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {name: version(name) for name in PACKAGES}


def build_record() -> Section:
    path = pathlib.Path(__file__).with_name("_build_info.json")
    if not path.exists():
        return {"error": f"{path.name} is missing: the package was not built (make setup)"}
    record: Section = json.loads(path.read_text())
    return record


def torch_state() -> Section:
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "none (CPU build)",
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
    }


def cpu_name() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.*)$", text, re.M)
    return found.group(1) if found else platform.processor() or platform.machine()


def cpu_isas() -> list[str]:
    """The instruction sets that this CPU has, of those that the kernels are compiled for."""
    try:
        flags = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    return [isa for isa, needed in ISAS.items() if flags.issuperset(needed)]


def _build_word(name: str) -> str:
    """What the loaded CPU module says of itself under `name`; "none" without the module."""
    import torch

    from trainwright import dispatch

    if not dispatch.extension("_C").loaded:
        return "none"
    found = re.search(rf"{name}=([\w-]+)", torch.ops.trainwright.build_info())
    return found.group(1) if found else "unknown"


def chosen_isa() -> str:
    """The instruction set that the loaded CPU kernels use; "none" without the compiled module."""
    return _build_word("isa")


def cpu() -> Section:
    available, asked = cpu_isas(), os.environ.get("TRAINWRIGHT_CPU_ISA")
    section: Section = {
        "name": cpu_name(),
        "cores": os.cpu_count(),
        "instruction sets of this CPU": available,
    }
    try:
        section["in use"] = chosen_isa()
        section["bf16 products"] = _build_word("bf16")
    except Exception as error:
        section["in use"] = f"unknown: {type(error).__name__}: {error}"
    if asked and asked not in ISAS:
        section["note"] = f"TRAINWRIGHT_CPU_ISA={asked} is not one of {', '.join(ISAS)}: ignored"
    elif asked and asked not in available:
        section["note"] = f"TRAINWRIGHT_CPU_ISA={asked} is more than this CPU has: capped"
    products = os.environ.get("TRAINWRIGHT_CPU_BF16") or "amx"
    if products not in BF16_PRODUCTS:
        names = ", ".join(BF16_PRODUCTS)
        section["note on bf16"] = f"TRAINWRIGHT_CPU_BF16={products} is not one of {names}: ignored"
    return section


def arch_covers(archs: str, capability: tuple[int, int]) -> bool:
    """Whether code compiled for `archs` ("8.0;9.0a;12.0+PTX") runs on a GPU of this compute capability."""
    for arch in archs.replace(" ", ";").split(";"):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        if not match:
            continue
        compiled = int(match[1]), int(match[2])
        if compiled == capability or (match[4] and not match[3] and compiled <= capability):
            return True
        if not match[3] and compiled[0] == capability[0] and compiled[1] <= capability[1]:
            return True
    return False


def gpu() -> Section:
    import torch

    if not torch.cuda.is_available():
        return {"found": "none" if torch.version.cuda else "none (this torch is a CPU build)"}
    archs = build_record().get("cuda_archs")
    section: Section = {}
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        fits = "no CUDA module was built"
        if archs:
            fits = "covered" if arch_covers(archs, capability) else "NOT covered"
            fits += f" by the compiled {archs}"
        section[f"cuda:{index}"] = (
            f"{torch.cuda.get_device_name(index)}, sm_{capability[0]}{capability[1]}, {fits}"
        )
    return section


def extensions() -> Section:
    from trainwright import dispatch

    section = {name: dispatch.extension(name).reason for name in ("_C", "_C_cuda", "_host")}
    return {name: "loaded" if reason == "ok" else reason for name, reason in section.items()}


def backends() -> Section:
    """op -> backend -> "ok" or the reason."""
    from trainwright import dispatch, ops

    assert ops.__all__  # importing `ops` registers them
    return {op: dispatch.backends_of(op) for op in dispatch.ops()}


def environment() -> Section:
    """The variables that are set. Unknown ones of ours are most likely misspelt."""
    try:
        from trainwright import dispatch

        ops = {f"TRAINWRIGHT_BACKEND_{op.upper()}" for op in dispatch.ops()}
    except Exception:  # without torch no op is known
        ops = {name for name in os.environ if name.startswith("TRAINWRIGHT_BACKEND_")}
    section: Section = {}
    for name in sorted(os.environ):
        if name in ENVIRONMENT:
            section[name] = f"{os.environ[name]}  ({ENVIRONMENT[name]})"
        elif name in ops:
            section[name] = f"{os.environ[name]}  ({ENVIRONMENT['TRAINWRIGHT_BACKEND_<OP>']})"
        elif name.startswith("TRAINWRIGHT_"):
            section[name] = f"{os.environ[name]}  (unknown: no effect)"
    return section


# ---- --check


def run_checks() -> Section:
    """Every op on every backend that works here against the torch reference, forward and backward."""
    from trainwright import dispatch

    results: dict[str, dict[str, str]] = {}
    for op, reasons in backends().items():
        check = dispatch.self_checks().get(op)
        usable = [b for b, reason in reasons.items() if reason == "ok"]
        results[op] = (
            {b: _check_one(op, check, b) for b in usable} if check else {"": "no self-check"}
        )
    passed = all(r.startswith("ok") for by_backend in results.values() for r in by_backend.values())
    return {"passed": passed and bool(results), "results": results}


def _check_one(op: str, check: Callable[..., Any], backend: str) -> str:
    import torch

    from trainwright import dispatch

    on_gpu = torch.cuda.is_available() and (
        backend == "cuda" or (backend == "triton" and not dispatch.interpreting())
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    worst = 0.0
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            got = check(backend, device)
            torch.manual_seed(0)
            want = check("torch", torch.device("cpu"))
        dtype = dispatch.check_dtype(op, backend)
        narrow = dtype != torch.float32
        tolerance = CHECK_ULPS * torch.finfo(dtype).eps if narrow else CHECK_TOLERANCE
        for g, w in zip(got, want):
            if g.shape != w.shape or (g.dtype != w.dtype and not (narrow and g.dtype == dtype)):
                return f"FAILED: {g.dtype} {tuple(g.shape)}, expected {w.dtype} {tuple(w.shape)}"
            g, w = g.detach().cpu().double(), w.detach().double()
            if w.numel():
                scale = max(w.abs().max().item(), 1e-30)
                worst = max(worst, (g - w).abs().nan_to_num(float("inf")).max().item() / scale)
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}"
    if worst > tolerance:
        return f"FAILED: differs from the torch reference by {worst:.1e}"
    return f"ok, error {worst:.1e}"


# ---- text


def text(report: dict[str, Section]) -> str:
    """The report for people, in plain text."""
    lines: list[str] = []
    for name, section in report.items():
        lines += [name, *_rows(name, section), ""]
    return "\n".join(lines).rstrip()


def _rows(name: str, section: Section) -> list[str]:
    if "error" in section:
        return [f"  {section['error']}"]
    if name == "backends":
        return _table(section, "ok")
    if name == "check":
        verdict = "  all passed" if section["passed"] else "  FAILED"
        return [*_table(section["results"], None), verdict]
    if not section:
        return ["  none set"]
    width = max(map(len, section))
    return [f"  {key:<{width}}  {_value(value)}" for key, value in section.items() if value != {}]


def _table(results: dict[str, dict[str, str]], good: str | None) -> list[str]:
    """One line per op: what works first, then one indented line for each reason."""
    width = max(map(len, results), default=0)
    lines = []
    for op, by_backend in results.items():
        if good is None:
            lines += [f"  {op:<{width}}  {b:<7}{reason}" for b, reason in by_backend.items()]
            continue
        usable = [b for b, reason in by_backend.items() if reason == good]
        lines.append(f"  {op:<{width}}  {', '.join(usable)}")
    if good is not None:
        reasons: dict[str, list[str]] = {}
        for op, by_backend in results.items():
            for backend, reason in by_backend.items():
                if reason != good:
                    reasons.setdefault(f"{backend}: {reason}", []).append(op)
        for reason, ops in reasons.items():
            which = "all ops" if len(ops) == len(results) else ", ".join(ops)
            lines.append(f"  without {reason} ({which})")
    return lines


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{k}: {v}" for k, v in value.items())
    return "none" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
