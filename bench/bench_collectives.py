"""The parts of the reducer on two ranks of this machine, against torch's: see bench/collectives.py."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from bench.rows import COLUMNS, machine, save

HERE = pathlib.Path(__file__).parent
MIB = 1 << 20


def run_on_ranks(ranks, rounds):
    """One run of bench/collectives.py: its JSON line."""
    torchrun = pathlib.Path(sys.executable).with_name("torchrun")
    result = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", str(ranks), HERE / "collectives.py", "--rounds", str(rounds)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("COLLECTIVES "))
    return json.loads(line.removeprefix("COLLECTIVES "))


def test_collectives(request, device):
    if device.type != "cpu":
        pytest.skip("ranks on one machine over Gloo: CPU only")
    found = run_on_ranks(2, 10 if request.config.getoption("--quick") else 40)
    report = getattr(request.config, "bench_report", print)
    lines = []

    def row(provider, mode, shape, dtype, ms, size, peer=None):
        ours = provider == "trainwright"
        line = dict.fromkeys(COLUMNS) | machine(device, ours)
        line |= {"op": "collectives", "provider": provider, "backend": "gloo", "mode": mode}
        line |= {"shape": shape, "dtype": dtype, "median_ms": ms, "bytes": size, "threads": 1}
        line["load"] = os.getloadavg()[0]
        if peer is not None:
            line |= {"best_peer": peer[0], "ratio_peer": peer[1] / ms}
        lines.append(line)

    for dtype in ("float32", "bfloat16"):
        assert found[f"agree_torch.{dtype}"], "the two sums differ"
        times = found[f"reduce_scatter_torch.{dtype}"]
        shape = f"{found['world']} ranks, loopback, 16 MiB"
        peer = ("torch Gloo", times["gloo"])
        row("torch Gloo", "reduce-scatter", shape, dtype, times["gloo"], 16 * MIB)
        row("trainwright", "reduce-scatter", shape, dtype, times["ours"], 16 * MIB, peer)
        ratio = times["gloo"] / times["ours"]
        report(f"reduce-scatter {shape} {dtype}: {times['ours']:.1f} ms, Gloo's / ours {ratio:.2f}")
    for mode, key in (("CPU, all threads", "cpu_ms"), ("CPU, backward's thread", "backward_thread_ms")):  # fmt: skip
        cost = {name: found[key][name] - found[key]["bare"] for name in ("ddp", "trainwright")}
        shape = f"{found['world']} ranks, 200 small parameters"
        row("torch DDP", mode, shape, "float32", cost["ddp"], None)
        row("trainwright", mode, shape, "float32", cost["trainwright"], None, ("torch DDP", cost["ddp"]))  # fmt: skip
        report(f"{mode} of a step, {shape}: {cost['trainwright']:.2f} ms, DDP {cost['ddp']:.2f} ms")
    save("collectives", lines)
