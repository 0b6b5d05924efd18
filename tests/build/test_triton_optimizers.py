"""No Triton optimizer spills in any storage format: every pass of every op, compiled for sm_80, sm_90a and sm_120."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = pathlib.Path(__file__).parent / "triton_spills.py"
ARCHS = ["80", "90", "120"]


# AdamW in all formats: it has three states and the longest formula. The others in some that have every two properties
# together that occur together.
@pytest.mark.parametrize(
    ("op", "which"),
    [
        ("adamw", "all"),
        *((op, "pairs") for op in ("adam", "sgd", "rmsprop", "lion", "lamb", "muon")),
    ],
)
def test_no_format_spills(op, which):
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, op, which, *ARCHS], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compiled"] >= 30 * len(ARCHS) and not found["spilling"], found["spilling"]
