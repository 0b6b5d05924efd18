"""Data parallel over a slow link: step time and exposed communication of `DataParallel`, as it is and over the int8
wire, against torch DDP, on bench/netlab.sh.

The link is set so that an all-reduce of the gradients takes a quarter, half, one or two times as long as the
computation. The hosts' network is this machine's own cores: moving a byte costs them the same at any rate, so the fewer
rows a rank computes per gradient byte, the more of the computation that work displaces. 1024 rows show it, at 4096 it
is small; layers that sleep instead of computing leave it out, and show what the schedule alone exposes, on four hosts
too, for whose computation two cores are too few. With --quick, one case of each. Root only.
"""

import os

import pytest

from bench.netlab import SLEEP_RATE_MBIT, WIDTH, all_reduce_ms, run_on_hosts
from bench.rows import COLUMNS, machine, save

FIRST_RATE_MBIT = {1024: 1250, 4096: 300}  # by rows per rank
SLEEP = 0  # rows
WIDTH_OF = {8: WIDTH, 16: 704}  # by layers: about as many bytes
# hosts, rows, layers, comm / compute
CASES = [(2, 1024, 8, 0.5), (2, SLEEP, 8, 0.5)]
MORE = [
    *((2, 1024, 8, ratio) for ratio in (0.25, 1.0, 2.0)),
    (2, 4096, 8, 0.5),
    *((2, SLEEP, 8, ratio) for ratio in (0.25, 1.0, 2.0)),
    (2, SLEEP, 16, 0.5),
    *((4, SLEEP, 8, ratio) for ratio in (0.5, 1.0)),
]


def measure(hosts, rows, layers, ratio, rounds):
    shape = ["--layers", layers, "--width", WIDTH_OF[layers]]
    if rows == SLEEP:
        comm_ms = all_reduce_ms(hosts, SLEEP_RATE_MBIT, layers, WIDTH_OF[layers])
        arguments = ["--sleep-ms", comm_ms / ratio, "--rounds", rounds, *shape]
        return run_on_hosts("overlap.py", hosts, SLEEP_RATE_MBIT, arguments)
    first = run_on_hosts(
        "overlap.py", hosts, FIRST_RATE_MBIT[rows], ["--rows", rows, "--rounds", 3]
    )
    rate = round(FIRST_RATE_MBIT[rows] * first["comm_over_compute"] / ratio)
    return run_on_hosts("overlap.py", hosts, rate, ["--rows", rows, "--rounds", rounds])


@pytest.mark.parametrize(("hosts", "rows", "layers", "ratio"), CASES + MORE)
def test_overlap(request, device, hosts, rows, layers, ratio):
    if device.type != "cpu":
        pytest.skip("hosts on one machine: CPU only")
    quick = request.config.getoption("--quick")
    if quick and (hosts, rows, layers, ratio) in MORE:
        pytest.skip("not with --quick")
    found = measure(hosts, rows, layers, ratio, 4 if quick else 7)
    assert found["gradients_agree"], "the two reducers give different gradients"

    work = f"{rows} rows each" if rows else f"{layers} layers that sleep"
    shared = dict.fromkeys(COLUMNS)
    shared |= {
        "op": "overlap",
        "dtype": "float32",
        "bytes": found["gradient_bytes"],
        "backend": "gloo",
    }
    shared |= {
        "shape": f"{hosts} hosts, {work}, comm {ratio:g} of compute",
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
        if (
            mode == "exposed" and "int8" not in provider
        ):  # no schedule hides what the last layer of the backward sends
            row |= {
                "bound": "last layer",
                "fraction": found["tail"] * found["comm_ms"] / max(found[key], 1e-3),
            }
        lines.append(row)
    save("overlap", lines)
    report = getattr(request.config, "bench_report", print)
    comm = f"{found['comm_ms']:.0f} ms comm, {found['comm_over_compute']:.2f} of compute"
    for name in ("ddp", "trainwright", "int8"):
        step, exposed = found[f"{name}_ms"], found[f"{name}_exposed_ms"]
        share = found[f"{name}_exposed_fraction"]
        report(
            f"overlap {hosts} hosts, {work}, {found['rate']}  {name:12s} step {step:.0f} ms, "
            f"exposed {exposed:.0f} ms = {share:.0%} of {comm}"
        )
