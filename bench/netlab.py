"""Runs a script on the hosts of bench/netlab.sh, for the benchmarks of data parallel."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
LAYERS, WIDTH = 8, 1024  # the model of bench/overlap.py
USED_BY_DATA = 0.96  # of a link: the rest are headers
SLEEP_RATE_MBIT = 600  # slow enough that the network's CPU work is small beside its time


def run_on_hosts(script, hosts, rate_mbit, arguments):
    """One run of a script: its JSON line. Skips, saying why, where netlab cannot run."""
    environment = {
        **os.environ,
        "TORCHRUN": str(pathlib.Path(sys.executable).with_name("torchrun")),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(str(HERE / "netlab.sh"), "-n", str(hosts), "-r", f"{rate_mbit}mbit", "--"),
        *(str(HERE / script), *map(str, arguments)),
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if result.returncode == 3:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 0, result.stderr[-3000:]
    mark = script.removesuffix(".py").upper() + " "
    line = next(line for line in result.stdout.splitlines() if line.startswith(mark))
    return json.loads(line.removeprefix(mark))


def all_reduce_ms(hosts, rate_mbit, layers=LAYERS, width=WIDTH):
    """Of the model's gradients over links of that rate: 2 (n - 1) / n of the bytes over each of them."""
    gradient_bytes = 4 * layers * width * width
    return 2e3 * (hosts - 1) / hosts * 8 * gradient_bytes / (USED_BY_DATA * rate_mbit * 1e6)
