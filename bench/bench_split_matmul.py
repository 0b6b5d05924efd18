"""Products split over 2 and 4 hosts with rate-limited links (bench/netlab.sh): overlapped against plain, and against
what the cost model predicted. The rate is chosen so that a message takes as long as the product it belongs to. Root
only."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from bench.rows import COLUMNS, machine, save

HERE = pathlib.Path(__file__).parent
ROWS, INNER, OUTER = {2: 1024, 4: 512}, 1024, 4096  # rows by hosts


def run_on_hosts(hosts, rate, rounds):
    """One run of bench/split_matmul.py: its JSON line. Skips, saying why, where netlab cannot run."""
    torchrun = str(pathlib.Path(sys.executable).with_name("torchrun"))
    environment = {**os.environ, "TORCHRUN": torchrun, "OMP_NUM_THREADS": "1"}
    sizes = {"rows": ROWS[hosts], "inner": INNER, "outer": OUTER, "rounds": rounds}
    command = [
        str(HERE / "netlab.sh"),
        "-n",
        str(hosts),
        "-r",
        rate,
        "--",
        str(HERE / "split_matmul.py"),
    ]
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    if result.returncode == 3:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("SPLIT "))
    return json.loads(line.removeprefix("SPLIT "))


@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=pytest.mark.full)])
def test_split_matmul(request, device, hosts):
    if device.type != "cpu":
        pytest.skip("hosts on one machine: CPU only")
    quick = request.config.getoption("--quick")
    flops_per_s = run_on_hosts(hosts, "none", 0)["model"]["flops_per_s"]
    # Bytes of a row of a message in the time of 2 · OUTER · INNER FLOPs.
    rate = round(8e-6 * 4 * flops_per_s / (2 * OUTER))
    found = run_on_hosts(hosts, f"{rate}mbit", 5 if quick else 11)
    lines, report = [], getattr(request.config, "bench_report", print)
    for name, case in found.items():
        if not isinstance(case, dict) or "ratio" not in case:
            continue
        assert case["same_bits"], f"{name}: overlap changed the result"
        shared = dict.fromkeys(COLUMNS) | {
            "op": "split_matmul", "backend": "gloo", "dtype": "float32", "mode": name, "load": os.getloadavg()[0],
            "shape": f"{hosts} hosts, {ROWS[hosts]} rows x {INNER} x {OUTER}, comm = compute",
        }  # fmt: skip
        for provider, key in (("plain", "plain_ms"), ("trainwright", "auto_ms")):
            ours = provider == "trainwright"
            row = shared | machine(device, ours) | {"provider": provider, "threads": 1}
            row["median_ms"] = case[key]
            if ours:
                row |= {"best_peer": "plain", "ratio_peer": case["ratio"]}
                row |= {"bound": "cost model", "fraction": case["ratio"] / case["predicted"]}
            lines.append(row)
        how = f"{case['chunks']} chunks" if case["overlap"] else "plain"
        report(
            f"split_matmul {hosts} hosts, {rate} Mbit/s  {name:28s} plain {case['plain_ms']:.0f} ms, {how} "
            f"{case['auto_ms']:.0f} ms: {case['ratio']:.2f} times as fast, predicted {case['predicted']:.2f}"
        )
    save("split_matmul", lines)
