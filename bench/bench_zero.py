"""A step of `Zero`, whose parameters come at the end of the step or under the next forward, against `DataParallel`,
on two hosts of bench/netlab.sh whose layers sleep instead of computing (see bench/overlap.py): an all-reduce of the
gradients takes half as long as forward and backward, or as long. Root only.
"""

import os

import pytest

from bench.netlab import SLEEP_RATE_MBIT, all_reduce_ms, run_on_hosts
from bench.rows import COLUMNS, machine, save

HOSTS = 2


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_zero(request, device, ratio):
    if device.type != "cpu":
        pytest.skip("hosts on one machine: CPU only")
    quick = request.config.getoption("--quick")
    if quick and ratio < 1:
        pytest.skip("not with --quick")
    sleep_ms = all_reduce_ms(HOSTS, SLEEP_RATE_MBIT) / ratio
    arguments = ["--sleep-ms", sleep_ms, "--rounds", 3 if quick else 5]
    found = run_on_hosts("zero.py", HOSTS, SLEEP_RATE_MBIT, arguments)
    assert found["parameters_equal"], "the stages give different parameters"
    report = getattr(request.config, "bench_report", print)
    peer = found["data_parallel_ms"]
    lines = []
    for provider, key in (
        ("trainwright DataParallel", "data_parallel"),
        ("trainwright Zero 1", "zero_1_auto"),
        ("trainwright Zero 1, forward", "zero_1_forward"),
        ("trainwright Zero 2", "zero_2_auto"),
        ("trainwright Zero 2, forward", "zero_2_forward"),
    ):
        took = found[f"{key}_ms"]
        row = dict.fromkeys(COLUMNS) | machine(device, True)
        row |= {
            "op": "zero",
            "provider": provider,
            "backend": "gloo",
            "mode": "step",
            "dtype": "float32",
        }
        row |= {
            "shape": f"{HOSTS} hosts, layers that sleep, comm {ratio:g} of compute",
            "threads": 1,
        }
        row |= {"bytes": found["gradient_bytes"], "median_ms": took, "load": os.getloadavg()[0]}
        row |= {"best_peer": "trainwright DataParallel", "ratio_peer": peer / took}
        lines.append(row)
        report(f"zero, comm {ratio:g} of compute: {provider} {took:.0f} ms, {took / peer:.2f}")
    save("zero", lines)
