"""`import trainwright` prints nothing and costs little beside torch's own import."""

import os
import pathlib
import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(600)
PACKAGE = pathlib.Path(__file__).parents[2] / "python"
LIMIT_S = 0.150

TIME_IMPORT = """
import torch, time
begin = time.process_time()
import trainwright
print(time.process_time() - begin)
"""
QUIET = """
import sys
import torch
before = set(sys.modules)
import trainwright
heavy = {"triton", "torch._dynamo", "torch._inductor", "rich", "matplotlib", "numpy.testing", "pyarrow"}
loaded = sorted((set(sys.modules) - before) & heavy)
assert not loaded, loaded
"""


def python(code, **environment):
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), **environment}
    return subprocess.run(
        [sys.executable, "-W", "default", "-c", code], env=env, capture_output=True, text=True, check=True
    )  # fmt: skip


def test_prints_nothing_and_loads_nothing_heavy():
    done = python(QUIET)
    assert done.stdout == "" and done.stderr == ""


def test_adds_little_to_the_import_of_torch():
    """Processor time, the median of five: the clock on the wall also counts what else the machine does."""
    seconds = statistics.median(float(python(TIME_IMPORT).stdout) for _ in range(5))
    assert seconds < LIMIT_S, f"{seconds * 1e3:.0f} ms"
