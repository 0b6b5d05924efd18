"""The benchmark harness itself: it measures what it says, and a wrong result fails a benchmark."""

import time

import pytest
import torch
import trainwright as tw

from bench import report, rows
from bench.harness import Compare, Roofline, call, calls_of, exact
from bench.memory import peak_extra_bytes

CPU = torch.device("cpu")


class Rounds:
    """The part of pytest-benchmark's fixture that the harness uses; that one serves once per test."""

    def __init__(self):
        self.extra_info = {}

    def pedantic(self, function, rounds, iterations):
        for _ in range(rounds * iterations):
            function()


@pytest.fixture
def compare(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return Compare(Rounds(), CPU, Roofline(CPU), seconds=0.02, report=lambda text: None)


def eager(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def test_rows_plots_and_tables(compare, tmp_path):
    inputs = {"x": torch.randn(64, 32), "weight": torch.randn(32)}
    functions = {"trainwright": tw.rms_norm, "torch eager": eager}
    for _ in range(2):  # the second run replaces the rows of the first
        for mode in ("fwd", "fwd+bwd"):
            compare(
                "probe", mode, (64, 32), torch.float32, calls_of(functions, inputs, mode),
                exact(eager, inputs, mode), bytes_moved=2 * inputs["x"].nbytes, flops=1e3, memory=True,
            )  # fmt: skip
    saved = rows.load_rows(tmp_path / "probe.csv")
    assert [(r["provider"], r["mode"]) for r in saved] == [
        (p, m) for m in ("fwd", "fwd+bwd") for p in ("trainwright", "torch eager")
    ]
    for row in saved:
        ours = row["provider"] == "trainwright"
        assert row["backend"] == ("cpu" if ours else "torch")
        assert float(row["median_ms"]) > 0 and int(row["rounds"]) >= 5
        assert float(row["error"]) < 1e-5 and row["peak_bytes"] != ""
        assert row["ratio_eager"] == "1" or ours
        assert row["best_peer"] == "torch eager" and row["bound"] in ("copy", "gemm")
    written = {path.name for path in report.write()}
    assert written == {"README.md", "probe.svg", "probe.png"}
    table = (tmp_path / "README.md").read_text()
    assert table.count("| fwd | 64x32 | float32 |") == 2


def test_a_wrong_result_fails_the_benchmark(compare, tmp_path):
    x = torch.randn(100)
    reference = lambda: [(x.double() * 2).sin()]  # noqa: E731
    good = lambda: [(x * 2).sin()]  # noqa: E731
    worse = lambda: [(x * 2).sin() * (1 + 1e-5)]  # noqa: E731
    other = lambda: [x.cos()]  # noqa: E731
    case = ("probe", "fwd", (100,), torch.float32)
    with pytest.raises(AssertionError, match="trainwright: error 1"):
        compare(*case, {"trainwright": worse, "torch eager": good}, reference)
    with pytest.raises(AssertionError, match="computes something else"):
        compare(*case, {"trainwright": good, "torch eager": other}, reference)
    assert not (tmp_path / "probe.csv").exists()


def test_medians_and_ratios_are_those_of_the_calls(compare):
    def sleeps(seconds):
        def function():
            time.sleep(seconds)
            return [torch.zeros(1)]

        return function

    calls = {"trainwright": sleeps(0.01), "torch eager": sleeps(0.04)}
    result = compare("probe", "fwd", "-", torch.float32, calls, lambda: [torch.zeros(1)])
    assert 10 <= result["trainwright"]["median_ms"] < result["torch eager"]["median_ms"]
    assert 2 < result["trainwright"]["ratio_eager"] <= 4.5
    assert 0.2 < result["torch eager"]["ratio_peer"] <= 1.0


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwd+bwd"])
def test_modes(mode):
    x = torch.tensor([1.0, 2.0])
    run = call(lambda x: x * x, {"x": x}, mode)
    for _ in range(2):  # a graph that is kept can be run again
        result = run()
    forward, backward = x * x, 2 * x
    upstream = torch.randn(2, generator=torch.Generator().manual_seed(1))
    want = {
        "fwd": [forward],
        "bwd": [backward * upstream],
        "fwd+bwd": [forward, backward * upstream],
    }
    assert len(result) == len(want[mode]) and all(map(torch.equal, result, want[mode]))
    assert not any(r.requires_grad for r in result)


@pytest.mark.parametrize("mib", [8, 200])
def test_peak_extra_bytes(mib):
    """A temporary twice the size of the result shows, also below the size where malloc maps memory afresh."""
    n = mib * 2**20 // 4

    def function():
        return torch.ones(2 * n)[:n].clone()

    function()
    peak = peak_extra_bytes(function, CPU)
    assert abs(peak - 3 * 4 * n) < 4 * 2**20
