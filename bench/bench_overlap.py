"""Data parallel over a slow link: step time and exposed communication of `DataParallel`, as it is and over the int8
wire, against torch DDP, on bench/netlab.sh.

The link is set so that an all-reduce of the gradients takes a quarter, half, one or two times as long as the
computation. The hosts' network is this machine's own cores: moving a byte costs them the same at any rate, so the fewer
rows a rank computes per gradient byte, the more of the computation that work displaces. 1024 rows show it, at 4096 it
is small. Root only.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from bench.rows import COLUMNS, machine, save

HERE = pathlib.Path(__file__).parent
COMM_OVER_COMPUTE = (0.25, 0.5, 1.0, 2.0)
FIRST_RATE_MBIT = {1024: 1250, 4096: 300}  # by rows per rank


def run_on_hosts(hosts, rows, rate_mbit, rounds):
    """One run of bench/overlap.py: its JSON line. Skips, saying why, where netlab cannot run."""
    environment = {
        **os.environ,
        "TORCHRUN": str(pathlib.Path(sys.executable).with_name("torchrun")),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(str(HERE / "netlab.sh"), "-n", str(hosts), "-r", f"{rate_mbit}mbit", "--"),
        *(str(HERE / "overlap.py"), "--rows", str(rows), "--rounds", str(rounds)),
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if result.returncode == 3:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("OVERLAP "))
    return json.loads(line.removeprefix("OVERLAP "))


@pytest.mark.parametrize(
    ("rows", "ratio"), [(1024, ratio) for ratio in COMM_OVER_COMPUTE] + [(4096, 0.5)]
)
@pytest.mark.parametrize("hosts", [2])
def test_overlap(request, device, hosts, rows, ratio):
    if device.type != "cpu":
        pytest.skip("hosts on one machine: CPU only")
    quick = request.config.getoption("--quick")
    first = run_on_hosts(hosts, rows, FIRST_RATE_MBIT[rows], 3)
    rate = round(FIRST_RATE_MBIT[rows] * first["comm_over_compute"] / ratio)
    found = run_on_hosts(hosts, rows, rate, 5 if quick else 15)
    assert found["gradients_agree"], "the two reducers give different gradients"

    shared = dict.fromkeys(COLUMNS)
    shared |= {
        "op": "overlap",
        "dtype": "float32",
        "bytes": found["gradient_bytes"],
        "backend": "gloo",
    }
    shared |= {
        "shape": f"{hosts} hosts, {rows} rows each, comm {ratio:g} of compute",
        "load": os.getloadavg()[0],
    }
    lines = []
    for provider, mode, key in (
        ("compute alone", "step", "compute_ms"),
        ("all-reduce alone", "comm", "comm_ms"),
        ("torch DDP", "step", "ddp_ms"),
        ("torch DDP", "exposed", "ddp_exposed_ms"),
        ("trainwright", "step", "trainwright_ms"),
        ("trainwright", "exposed", "trainwright_exposed_ms"),
        ("trainwright int8", "step", "int8_ms"),
        ("trainwright int8", "exposed", "int8_exposed_ms"),
    ):
        ours = provider.startswith("trainwright")
        row = shared | machine(device, ours) | {"provider": provider, "mode": mode, "threads": 1}
        row["median_ms"] = found[key]
        if ours:
            peer = found[key.replace("trainwright", "ddp").replace("int8", "ddp")]
            row |= {"best_peer": "torch DDP", "ratio_peer": peer / max(found[key], 1e-3)}
        lines.append(row)
    save("overlap", lines)
    report = getattr(request.config, "bench_report", print)
    comm = f"{found['comm_ms']:.0f} ms comm, {found['comm_over_compute']:.2f} of compute"
    for name in ("ddp", "trainwright", "int8"):
        step, exposed = found[f"{name}_ms"], found[f"{name}_exposed_ms"]
        share = found[f"{name}_exposed_fraction"]
        report(
            f"overlap {hosts} hosts, {rows} rows, {rate} Mbit/s  {name:12s} step {step:.0f} ms, "
            f"exposed {exposed:.0f} ms = {share:.0%} of {comm}"
        )
