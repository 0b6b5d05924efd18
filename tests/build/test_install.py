"""sdist, wheels and editable installs: what is in them, and that they run, with and without compiled modules."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

pytestmark = pytest.mark.timeout(600)
ROOT = pathlib.Path(__file__).parents[2]
KERNELS = {p.name for p in (ROOT / "kernels").glob("*.py")}
IGNORED = shutil.ignore_patterns(
    ".*", "build", "dist", "runs", "*.so", "*.egg-info", "__pycache__", "_build_info.json"
)
PIP = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]

# Every op, forward and backward, with the backend that Trainwright chooses; and each backend against the reference.
USE = """
import json, sys, torch, trainwright as tw
from trainwright import dispatch, info
chosen = {}
for op, check in dispatch.self_checks().items():
    text = tw.explain(check, None, torch.device("cpu"))
    chosen[op] = sorted({l.split(":")[0].strip() for l in text.splitlines() if l.endswith(": chosen")})
print(json.dumps({
    "where": tw.__file__, "reason": dispatch.extension("_C").reason, "host": dispatch.extension("_host").loaded,
    "chosen": chosen, "check": info.run_checks(), "backends": info.backends(),
}))
"""


def command(*arguments, cwd=ROOT, ok=True, **environment):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, arguments)), cwd=cwd, env={**env, **environment}, capture_output=True, text=True
    )  # fmt: skip
    assert not ok or done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def use(site, cwd, **environment):
    """Run every op from an installation. `site` is added as a site folder, so that .pth files count."""
    code = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.insert(0, {str(site)!r})\n{USE}"
    return json.loads(command(sys.executable, "-c", code, cwd=cwd, **environment).stdout)


def copy_of_the_tree(folder):
    shutil.copytree(ROOT, folder, symlinks=True, ignore=IGNORED)
    return folder


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    tree = copy_of_the_tree(folder / "tree")
    command(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder, cwd=tree)
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def pure_wheel(sdist, tmp_path_factory):
    """Made from the sdist alone, as pip would."""
    folder = tmp_path_factory.mktemp("pure")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    command(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, tree, TRAINWRIGHT_BUILD="none"
    )  # fmt: skip
    (path,) = folder.glob("*.whl")
    return path


def test_sdist_is_complete(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {f"python/trainwright/kernels/{k}" for k in KERNELS} <= names
    csrc = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*.*") if p.is_file()}
    assert csrc <= names and {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert not [n for n in names if n.endswith((".so", ".pyc", "_build_info.json"))]


def test_pure_wheel_is_for_every_platform(pure_wheel):
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(pure_wheel).namelist())
    assert {f"trainwright/kernels/{k}" for k in KERNELS} <= names
    assert {"trainwright/py.typed", "trainwright/_build_info.json"} <= names
    assert not [n for n in names if n.endswith(".so")]


def test_without_compiled_modules_every_op_runs(pure_wheel, tmp_path):
    """Forward and backward through the torch reference; Triton's kernels come along."""
    site = tmp_path / "site"
    command(*PIP, "--target", site, pure_wheel)
    result = use(site, tmp_path, TRITON_INTERPRET="1")
    assert result["where"].startswith(str(site))
    assert result["reason"] == "trainwright._C was not built"
    assert len(result["chosen"]) >= 5
    assert all(backends == ["torch"] for backends in result["chosen"].values()), result["chosen"]
    assert result["check"]["passed"], result["check"]
    assert result["backends"]["rms_norm"]["triton"] == "ok"


def test_editable_install_reads_the_tree(tmp_path):
    tree, prefix = copy_of_the_tree(tmp_path / "tree"), tmp_path / "prefix"
    editable = ["--no-build-isolation", "--prefix", prefix, "--editable", tree]
    command(*PIP, *editable, TRAINWRIGHT_BUILD="none")
    (site,) = prefix.glob("lib/python*/site-packages")
    (tree / "python/trainwright/_version.py").write_text('__version__ = "9.9"\n')
    code = f"import site; site.addsitedir({str(site)!r}); import trainwright as tw; "
    code += "import trainwright.kernels.rms_norm as k; print(tw.__version__, k.__file__)"
    version, where = command(sys.executable, "-c", code, cwd=tmp_path).stdout.split()
    assert version == "9.9"
    assert pathlib.Path(where).resolve() == (tree / "kernels/rms_norm.py").resolve()


def test_compiled_wheel_serves_every_python(tmp_path):
    """Linked from the objects of the normal build. Test-only modules, which are for one Python, stay out."""
    command(
        sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "build", "--build-base", tmp_path / "b",
        "bdist_wheel", "--dist-dir", tmp_path, "--bdist-dir", tmp_path / "d", TRAINWRIGHT_BUILD="cpu",
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp310-abi3-linux_" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert [n for n in names if n.endswith(".so")] == ["trainwright/_C.abi3.so"]
    assert {f"trainwright/kernels/{k}" for k in KERNELS} <= names
    assert not [n for n in names if n.startswith(("tests", "bench", "csrc"))]
    command(*PIP, "--target", tmp_path / "site", wheel)
    result = use(tmp_path / "site", tmp_path)
    assert result["where"].startswith(str(tmp_path)) and result["reason"] == "ok"
    assert all(backends == ["cpu"] for backends in result["chosen"].values()), result["chosen"]
    assert result["check"]["passed"] and not result["host"]


@pytest.mark.parametrize(
    ("build", "compiler", "succeeds", "text"),
    [
        ("auto", "no-such-compiler", True, "installing pure Python: no C++ compiler"),
        ("cpu", "no-such-compiler", False, "TRAINWRIGHT_BUILD=cpu: no C++ compiler"),
        ("auto", "false", False, ""),  # a compiler that is there but fails: never a silent fallback
        ("fast", "g++", False, "expected auto, none, cpu or cuda, got 'fast'"),
    ],
)
def test_nothing_degrades_silently(build, compiler, succeeds, text, tmp_path):
    tree = copy_of_the_tree(tmp_path / "tree")
    done = command(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, ok=False,
                   TRAINWRIGHT_BUILD=build, CXX=compiler)  # fmt: skip
    assert (done.returncode == 0) is succeeds, done.stderr
    assert done.stderr.count(text) == 1 or not text
    record = tree / "python/trainwright/_build_info.json"
    assert record.exists() is succeeds
    if succeeds:
        assert json.loads(record.read_text())["built"] == []
