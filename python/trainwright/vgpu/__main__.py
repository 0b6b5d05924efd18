"""``python -m trainwright.vgpu profile``: launch kernels on a virtual GPU and show what they cost, as counts.

    python -m trainwright.vgpu profile kernel.ptx --grid 4 --block 256 --args f32:1024 f32:1024 1024
    python -m trainwright.vgpu profile mypackage.bench:run_softmax --arch sm_90a --gpu H100

A target with a colon names a Python function without arguments, which launches Triton kernels on CPU tensors. No time
is measured; what is printed as a bound is one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainwright.vgpu.counters import PRESETS, Counts, KernelCounters
from trainwright.vgpu.device import ARCHITECTURES, Device
from trainwright.vgpu.errors import VgpuError

_DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8,
    "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip


class _Mistake(Exception):
    """Of the command line; its text is shown without a traceback."""


def parser() -> argparse.ArgumentParser:
    text = (__doc__ or "").split("\n\n")
    whole = argparse.ArgumentParser(prog="python -m trainwright.vgpu", description=text[-1])
    commands = whole.add_subparsers(required=True, metavar="profile")
    p = commands.add_parser(
        "profile",
        help="launch kernels and show what they cost",
        description=text[-1],
        epilog=text[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("target", help="FILE.ptx, or MODULE:FUNCTION that launches Triton kernels")
    p.add_argument(
        "--arch", choices=ARCHITECTURES, help="default: of the PTX; sm_90a for a function"
    )
    p.add_argument(
        "--gpu", choices=PRESETS, help="whose peak rates bound the time; default: by architecture"
    )
    p.add_argument(
        "--lines", type=int, default=20, metavar="N", help="source lines in the table (20)"
    )
    p.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="default: NAME.profile.png here"
    )
    p.add_argument("--check", action="store_true", help="look for races and the like, too (slower)")
    ptx = p.add_argument_group("for a PTX file")
    ptx.add_argument("--kernel", help="its name; needed if the file has several")
    ptx.add_argument("--grid", type=_shape, default=(1,), metavar="X[,Y[,Z]]", help="blocks (1)")
    ptx.add_argument(
        "--block",
        type=_shape,
        metavar="X[,Y[,Z]]",
        help="threads; default: what the kernel requires",
    )
    ptx.add_argument(
        "--smem", type=int, default=0, metavar="BYTES", help="dynamic shared memory (0)"
    )
    ptx.add_argument(
        "--args", nargs="*", default=[], metavar="ARG",
        help="a number, or TYPE:COUNT for a tensor of random values (integers: zeros); types: " + ", ".join(_DTYPES),
    )  # fmt: skip
    return whole


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in text.split(","))
    except ValueError:
        shape = ()
    if not 1 <= len(shape) <= 3 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"expected one to three positive numbers, got {text!r}")
    return shape


def _argument(text: str) -> Any:
    kind, colon, count = text.partition(":")
    try:
        if colon:
            dtype = _DTYPES[kind]
            shape = int(count)
            return (
                torch.randn(shape).to(dtype)
                if dtype.is_floating_point
                else torch.zeros(shape, dtype=dtype)
            )
        return float(text) if any(c in text.lower() for c in ".einf") else int(text, 0)
    except (KeyError, ValueError, RuntimeError):
        raise _Mistake(f"--args: expected a number or TYPE:COUNT, got {text!r}") from None


# ---- running the target


def _run(options: argparse.Namespace) -> Device:
    if options.target.endswith(".ptx"):
        return _run_file(options)
    if ":" in options.target:
        return _run_function(options)
    raise _Mistake(f"target: expected FILE.ptx or MODULE:FUNCTION, got {options.target!r}")


def _run_file(options: argparse.Namespace) -> Device:
    try:
        text = Path(options.target).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _Mistake(f"{options.target}: {error}") from None
    target = next((w.split(",")[0] for w in text.partition(".target")[2].split()), "")
    arch = options.arch or (target if target in ARCHITECTURES else "sm_90a")
    device = Device(arch, check=options.check, count=True)
    module = device.load_ptx(text)
    names = module.kernels
    if options.kernel is None and len(names) != 1:
        raise _Mistake(f"--kernel: {options.target} has {', '.join(names) or 'none'}: name one")
    name = options.kernel or names[0]
    block = options.block
    if block is None:
        block = tuple(module._native.required_block(name))
        if not block[0]:
            raise _Mistake(f"--block: {name} does not say how many threads it wants: name them")
    module.launch(
        name, options.grid, block, [_argument(a) for a in options.args], smem=options.smem
    )
    return device


def _run_function(options: argparse.Namespace) -> Device:
    module_name, _, function_name = options.target.partition(":")
    sys.path.insert(0, "")
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _Mistake(f"{options.target}: {error}") from None
    if not callable(function) or hasattr(function, "arg_names"):
        raise _Mistake(
            f"{options.target}: expected a function without arguments that launches kernels, "
            f"got {type(function).__name__}"
        )
    device = Device(options.arch or "sm_90a", check=options.check, count=True)
    with device:
        function()
    if not len(device.counters):
        raise _Mistake(f"{options.target}: launched no kernel")
    return device


# ---- the table


def _number(n: float) -> str:
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if n >= factor:
            return f"{n / min(factor, 1e3 if unit == ' k' else factor):.3g}{unit}"
    return f"{n:.0f}"


def show(kernel: KernelCounters, gpu: str, lines: int) -> None:
    """Print a kernel's counts, its bound on `gpu` and its `lines` busiest source lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120)
    c, bound = kernel.total, kernel.bound(gpu)
    table = Table(
        title=f"{kernel.name} ({kernel.target}), {kernel.launches} launch(es)", show_header=False
    )
    table.add_row("blocks x threads", f"{kernel.shape.blocks} x {kernel.shape.threads}")
    table.add_row(
        "warp instructions",
        f"{_number(c.warp_instructions)}, {c.lane_efficiency:.1%} of lanes active",
    )
    shares = [f"{kind} {n / c.warp_instructions:.0%}" for kind, n in list(kernel.mix.items())[:6]]
    table.add_row("of them", ", ".join(shares))
    table.add_row(
        "global memory",
        f"{_number(c.global_bytes)}B in {_number(c.global_sectors)} sectors: {c.sector_efficiency:.1%} of their bytes, "
        f"{c.sectors_per_request:.1f} per request; footprint {_number(kernel.footprint_bytes)}B",
    )
    table.add_row(
        "shared memory",
        f"{_number(c.shared_wavefronts)} wavefronts, {_number(c.bank_conflicts)} by bank conflicts",
    )
    table.add_row(
        "FLOPs", ", ".join(f"{kind} {_number(n)}" for kind, n in c.flops.items()) or "none"
    )
    table.add_row("barriers", _number(c.barriers))
    code, occupancy = kernel.assembled(), kernel.occupancy(gpu)
    if code is None or occupancy is None:
        table.add_row("occupancy", "unknown: no ptxas for this target at hand")
    else:
        table.add_row(
            "occupancy",
            f"{occupancy.warps} of {occupancy.limit} warps, by {occupancy.limited_by} ({code.registers} registers, "
            f"{code.static_shared + kernel.shape.shared_bytes} B shared memory, {code.spill_bytes} B spilled)",
        )
    table.add_row(f"bound on {gpu}", str(bound).removeprefix("bound: "))
    console.print(table)

    table = Table(title="by source line")
    for heading in (
        "line",
        "warp instr.",
        "global B",
        "sector eff.",
        "wavefronts",
        "conflicts",
        "tensor FLOPs",
    ):
        table.add_column(heading, justify="left" if heading == "line" else "right")
    busiest = sorted(kernel.lines.items(), key=lambda item: -item[1].warp_instructions)[:lines]
    for (file, line), n in sorted(busiest):
        label = f"{Path(file).name}:{line} {_source(file, line)}" if line else "(no line)"
        table.add_row(
            Text(label[:52], no_wrap=True, overflow="ellipsis"),
            _number(n.warp_instructions), _number(n.global_bytes),
            f"{n.sector_efficiency:.0%}" if n.global_sectors else "", _number(n.shared_wavefronts),
            _number(n.bank_conflicts), _number(n.tensor_flops),
        )  # fmt: skip
    console.print(table)


def _source(file: str, line: int) -> str:
    try:
        return Path(file).read_text().splitlines()[line - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


# ---- the picture


def picture(kernels: Sequence[KernelCounters], gpu: str, path: Path) -> None:
    """Write a roofline of the kernels on `gpu`, and the heat of the busiest one's source lines, to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    device = PRESETS[gpu]
    figure, (roof, heat) = plt.subplots(1, 2, figsize=(14, 6))
    x = [2.0 ** (e / 8) for e in range(-32, 97)]
    for kind, peak in device.tflops.items():
        roof.plot(
            x,
            [min(peak, i * device.gbps / 1e3) for i in x],
            linewidth=1,
            label=f"{kind}, {peak} TFLOP/s",
        )
    for kernel in kernels:
        flops = sum(kernel.total.flops.values())
        bound = kernel.bound(gpu)
        if flops and kernel.footprint_bytes:
            point = (flops / kernel.footprint_bytes, flops / bound.total_us / 1e6)
            roof.plot(*point, "ko")
            roof.annotate(
                kernel.name, point, xytext=(4, -12), textcoords="offset points", fontsize=8
            )
    roof.set(
        xscale="log", yscale="log", xlabel="FLOPs per byte of footprint", ylabel="TFLOP/s",
        title=f"Roofline bound on {device.name}: counted, not timed",
    )  # fmt: skip
    roof.legend(fontsize=7)

    kernel = max(kernels, key=lambda k: k.warp_instructions)
    rows = sorted(kernel.lines.items(), key=lambda item: -item[1].warp_instructions)[:25]
    rows.sort(reverse=True)
    measures: dict[str, Callable[[Counts], int]] = {
        "instructions": lambda n: n.warp_instructions, "sectors": lambda n: n.global_sectors,
        "wavefronts": lambda n: n.shared_wavefronts, "conflicts": lambda n: n.bank_conflicts,
        "tensor FLOPs": lambda n: n.tensor_flops,
    }  # fmt: skip
    sums = [sum(measure(n) for n in kernel.lines.values()) or 1 for measure in measures.values()]
    shares = [[measure(n) / s for measure, s in zip(measures.values(), sums)] for _, n in rows]
    heat.imshow(shares, cmap="Reds", aspect="auto", vmin=0, vmax=1, origin="lower")
    labels = [
        f"{Path(f).name}:{line} {_source(f, line)[:40]}" if line else "(no line)"
        for (f, line), _ in rows
    ]
    heat.set_yticks(range(len(rows)), labels, fontsize=7, family="monospace", parse_math=False)
    heat.set_xticks(range(len(measures)), list(measures), fontsize=8)
    heat.set_title(f"{kernel.name}: share of each line")
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            if share >= 0.005:
                heat.text(j, i, f"{share:.0%}", ha="center", va="center", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        device = _run(options)
        gpu = options.gpu or ("A100" if device.arch < "sm_90" else "H100")
        kernels = list(device.counters)
        for kernel in kernels:
            show(kernel, gpu, options.lines)
        stem = Path(options.target.partition(":")[2] or options.target).stem
        path = options.picture or Path(f"{stem}.profile.png")
        picture(kernels, gpu, path)
        print(f"picture: {path}")
    except (_Mistake, VgpuError, OSError) as error:
        print(f"trainwright.vgpu: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
