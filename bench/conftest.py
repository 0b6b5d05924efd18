"""Options and fixtures of the benchmarks; the rules are in bench/harness.py."""

import pytest
import torch

from bench import harness


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="few rounds, and no case marked `full`: minutes for all",
    )
    parser.addoption(
        "--device", default=None, help="cpu or cuda (default: cuda where there is one)"
    )
    parser.addoption(
        "--seconds", type=float, default=None, help="time for the rounds of a case (3, quick 0.5)"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "full: a case that --quick leaves out")
    harness.fix_threads()


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        left_out = [item for item in items if "full" in item.keywords]
        items[:] = [item for item in items if "full" not in item.keywords]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def device(request):
    name = request.config.getoption("--device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.fixture(scope="session")
def roofline(device):
    return harness.Roofline(device)


@pytest.fixture
def compare(request, benchmark, device, roofline):
    torch.manual_seed(0)
    seconds = request.config.getoption("--seconds")
    if seconds is None:
        seconds = 0.5 if request.config.getoption("--quick") else 3.0
    report = getattr(request.config, "bench_report", print)
    return harness.Compare(benchmark, device, roofline, seconds, report)
