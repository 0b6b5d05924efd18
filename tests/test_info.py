"""python -m trainwright.info: complete, honest, and there even where torch is broken."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import trainwright as tw
from trainwright import dispatch, info

ROOT = pathlib.Path(__file__).parents[1]


def run_info(*arguments, **environment):
    # PYTHONPATH: the package that is tested here, also where another one is installed.
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment}
    return subprocess.run(
        [sys.executable, "-m", "trainwright.info", *arguments],
        env=env,
        capture_output=True,
        text=True,
    )


def test_report_as_json():
    done = run_info("--json", TRAINWRIGHT_STRICT="1", TRAINWRIGHT_BACKEND_RMS_NORM="torch")
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(done.stdout)
    assert report["trainwright"]["version"] == tw.__version__
    assert report["torch"]["version"] == torch.__version__
    assert report["build"]["built"][0] == "_C"
    assert report["extensions"]["_C"] == "loaded"
    assert report["backends"]["rms_norm"]["cpu"] == "ok"
    assert set(report["backends"]) == set(dispatch.ops())
    assert report["environment"]["TRAINWRIGHT_STRICT"].startswith("1 ")
    assert "backend of one op" in report["environment"]["TRAINWRIGHT_BACKEND_RMS_NORM"]


def test_report_for_people():
    text = info.text(info.collect())
    assert all(f"\n{name}\n" in f"\n{text}\n" for name in ("packages", "cpu", "extensions"))
    assert re.search(r"^  rms_norm +cpu, ", text, re.M)
    assert "{" not in text


@pytest.mark.parametrize("isa", ["base", "avx2"])
def test_forced_instruction_set_is_reported(isa):
    if isa not in info.cpu_isas():
        pytest.skip(f"this CPU has no {isa}")
    assert json.loads(run_info("--json", TRAINWRIGHT_CPU_ISA=isa).stdout)["cpu"]["in use"] == isa


def test_wrong_settings_are_pointed_out():
    wrong = {"TRAINWRIGHT_CPU_BF16": "amx2", "TRAINWRIGHT_BAKEND": "cpu"}
    done = run_info("--json", TRAINWRIGHT_CPU_ISA="avx1024", **wrong)
    report = json.loads(done.stdout)
    assert "amx2 is not one of fp32, avx512, amx, amx-emulated" in report["cpu"]["note on bf16"]
    assert "avx1024 is not one of base, avx2, avx512" in report["cpu"]["note"]
    assert "unknown: no effect" in report["environment"]["TRAINWRIGHT_BAKEND"]


def test_more_than_the_cpu_has_is_pointed_out(monkeypatch):
    monkeypatch.setattr(info, "cpu_isas", lambda: ["base"])
    monkeypatch.setenv("TRAINWRIGHT_CPU_ISA", "avx512")
    assert "avx512 is more than this CPU has" in info.cpu()["note"]


@pytest.mark.parametrize(
    "source", ["raise OSError('libtorch_cpu.so: cannot open')", "raise ImportError('no torch')"]
)
def test_broken_torch_still_gives_a_report(tmp_path, source):
    (tmp_path / "torch.py").write_text(source)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "python")])
    done = run_info("--json", "--check", PYTHONPATH=path, TRAINWRIGHT_STRICT="1")
    assert done.returncode == 1, "--check passed without torch"
    report = json.loads(done.stdout)
    reason = re.search(r"'(.*)'", source).group(1)
    for section in ("torch", "extensions", "backends", "check"):
        assert reason in report[section]["error"]
    assert report["cpu"]["name"] and report["environment"]["TRAINWRIGHT_STRICT"]
    done = subprocess.run(
        [sys.executable, "-c", "import trainwright"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and reason in done.stderr, "everybody else gets the error"


def test_every_op_has_a_self_check():
    assert sorted(dispatch.self_checks()) == dispatch.ops()


def test_self_checks_pass():
    result = info.run_checks()
    assert result["passed"], result["results"]


def test_a_wrong_kernel_fails_the_check(monkeypatch):
    """A result that is off, has another dtype or raises is a failure, and so is the exit code."""
    good = dispatch.self_checks()["rms_norm"]

    def off(backend, device):
        return [t * (1.001 if backend == "cpu" else 1.0) for t in good(backend, device)]

    def other_dtype(backend, device):
        return [t.double() if backend == "cpu" else t for t in good(backend, device)]

    def raises(backend, device):
        if backend == "cpu":
            raise RuntimeError("illegal instruction")
        return good(backend, device)

    one_op = {"rms_norm": {"cpu": "ok", "torch": "ok"}}
    monkeypatch.setattr(info, "backends", lambda: one_op)
    assert info.run_checks()["passed"]
    for broken, text in ((off, "differs"), (other_dtype, "float64"), (raises, "illegal")):
        monkeypatch.setitem(dispatch._self_checks, "rms_norm", broken)
        result = info.run_checks()
        assert not result["passed"]
        assert text in result["results"]["rms_norm"]["cpu"]
    assert info.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("archs", "capability", "covered"),
    [
        ("8.0;9.0a;12.0+PTX", (8, 0), True),
        ("8.0;9.0a;12.0+PTX", (8, 9), True),  # same major version, higher minor
        ("8.0;9.0a;12.0+PTX", (9, 0), True),
        ("8.0;9.0a;12.0+PTX", (10, 0), False),  # 9.0a runs on 9.0 alone
        ("8.0;9.0a;12.0+PTX", (12, 1), True),
        ("8.6", (8, 0), False),
        ("8.0+PTX", (9, 0), True),  # compiled by the driver
        ("8.0", (7, 5), False),
    ],
)
def test_arch_covers(archs, capability, covered):
    assert info.arch_covers(archs, capability) is covered


def test_every_variable_that_the_code_reads_is_documented():
    files = [*ROOT.glob("python/**/*.py"), *ROOT.glob("kernels/*.py"), ROOT / "setup.py"]
    files += [f for f in ROOT.glob("csrc/**/*") if f.is_file()]
    pattern = (
        r'f?"(TRAINWRIGHT_[A-Z0-9_]+)["{]'  # wherever a string is such a name, however it is read
    )
    ours = {
        name for f in files if f.name != "info.py" for name in re.findall(pattern, f.read_text())
    }
    ours = {n.replace("TRAINWRIGHT_BACKEND_", "TRAINWRIGHT_BACKEND_<OP>") for n in ours}
    assert ours == {name for name in info.ENVIRONMENT if name.startswith("TRAINWRIGHT_")}
