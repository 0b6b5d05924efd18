"""Which backend runs: order of precedence, strict mode, explain, available_backends, errors."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import trainwright as tw
from trainwright import dispatch

X = torch.randn(3, 8)


@pytest.fixture
def environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TRAINWRIGHT_BACKEND", "TRAINWRIGHT_STRICT")):
            monkeypatch.delenv(name)
    return monkeypatch


def chosen(**options):
    """The backend that explain reports for a call of rms_norm."""
    lines = tw.explain(tw.rms_norm, X, **options).splitlines()
    return [line.split(":")[0].strip() for line in lines if line.endswith(": chosen")]


def test_automatic_choice_is_the_compiled_kernel(environment):
    assert chosen() == ["cpu"]


def test_order_of_precedence(environment):
    """backend= over use_backend over TRAINWRIGHT_BACKEND_<OP> over TRAINWRIGHT_BACKEND; each without restart."""
    environment.setenv("TRAINWRIGHT_BACKEND", "torch")
    assert chosen() == ["torch"]
    environment.setenv("TRAINWRIGHT_BACKEND_RMS_NORM", "triton")
    assert chosen() == ["triton"]
    with tw.use_backend("cpu"):
        assert chosen() == ["cpu"]
        assert chosen(backend="torch") == ["torch"]
        with tw.use_backend(None):  # back to the environment
            assert chosen() == ["triton"]
        assert chosen() == ["cpu"]
    assert chosen() == ["triton"]


def test_the_variable_of_one_op_leaves_others_alone(environment):
    environment.setenv("TRAINWRIGHT_BACKEND_LAYER_NORM", "torch")
    assert chosen() == ["cpu"]


def test_use_backend_is_undone_by_an_exception(environment):
    with pytest.raises(KeyError), tw.use_backend("torch"):
        raise KeyError
    assert chosen() == ["cpu"]


def test_use_backend_holds_in_other_threads(environment):
    seen = []
    with tw.use_backend("torch"):
        thread = threading.Thread(target=lambda: seen.extend(chosen()))
        thread.start()
        thread.join()
    assert seen == ["torch"]


def test_use_backend_rejects_unknown_names():
    with pytest.raises(ValueError, match="cpu, cuda, triton, torch"), tw.use_backend("gpu"):
        pass


def test_an_unknown_name_in_the_environment_is_an_error(environment):
    environment.setenv("TRAINWRIGHT_BACKEND", "fast")
    with pytest.raises(ValueError, match=r"rms_norm: backend: expected .*, got 'fast'"):
        tw.rms_norm(X)


@pytest.mark.parametrize("where", ["argument", "context", "environment"])
def test_a_forced_backend_never_falls_back(environment, where):
    """However it was forced, the error lists every backend with its reason."""
    if where == "environment":
        environment.setenv("TRAINWRIGHT_BACKEND", "cuda")
    with pytest.raises(tw.BackendError) as caught:
        if where == "argument":
            tw.rms_norm(X, backend="cuda")
        elif where == "context":
            with tw.use_backend("cuda"):
                tw.rms_norm(X)
        else:
            tw.rms_norm(X)
    text = str(caught.value)
    assert "rms_norm: no backend can run this call." in text
    assert "cuda: needs CUDA tensors, got cpu" in text
    assert all(f"  {backend}: " in text for backend in ("cpu", "triton", "torch"))


def test_backend_error_is_a_runtime_error():
    assert issubclass(tw.BackendError, RuntimeError)


def test_strict_forbids_only_an_automatic_fallback(environment):
    """What the compiled kernels cannot run goes to the reference, not in strict mode; asking for it always works."""
    candidates = (
        dispatch.Candidate("cpu", (torch.float32,), limits=(("C", 4),)),
        dispatch.Candidate("torch", (torch.float32,)),
    )
    environment.setitem(dispatch._ops, "strict_probe", candidates)
    arguments = ("strict_probe", None, torch.device("cpu"), torch.float32)
    assert dispatch.resolve(*arguments, C=4) == "cpu"
    assert dispatch.resolve(*arguments, C=5) == "torch"
    environment.setenv("TRAINWRIGHT_STRICT", "1")
    assert dispatch.resolve(*arguments, C=4) == "cpu"
    with pytest.raises(tw.BackendError, match="needs C <= 4, got 5"):
        dispatch.resolve(*arguments, C=5)
    with pytest.raises(tw.BackendError, match="TRAINWRIGHT_STRICT=1 forbids the torch reference"):
        dispatch.resolve(*arguments, C=5)
    assert dispatch.resolve("strict_probe", "torch", *arguments[2:], C=5) == "torch"


def test_explain_names_op_dtype_sizes_and_reasons(environment):
    text = tw.explain(tw.rms_norm, X)
    assert text.splitlines()[0] == "rms_norm (cpu, float32, C=8)"
    assert "  cpu: chosen" in text
    assert "  cuda: needs CUDA tensors, got cpu" in text
    assert "  torch: skipped (cpu preferred)" in text


def test_explain_covers_every_op_in_a_module(environment):
    model = torch.nn.Sequential(tw.nn.RMSNorm(8), torch.nn.Linear(8, 4), tw.nn.RMSNorm(4))
    text = tw.explain(model, X)
    assert "rms_norm (cpu, float32, C=8)" in text and "rms_norm (cpu, float32, C=4)" in text


def test_explain_tells_a_refusal_and_raises_other_errors(environment):
    text = tw.explain(tw.rms_norm, X, backend="cuda")
    assert "cuda: needs CUDA tensors, got cpu" in text and "chosen" not in text
    with pytest.raises(TypeError, match="rms_norm: x"):
        tw.explain(tw.rms_norm, None)
    assert tw.explain(torch.relu, X) == "no Trainwright op was called"


def test_available_backends_has_ok_or_a_reason():
    result = tw.available_backends(tw.rms_norm)
    public = [b for b in result if b != "vgpu"]  # which tests of CUDA kernels add (vgpu_backend.py)
    assert public == ["cpu", "cuda", "triton", "torch"]
    assert result["cpu"] == result["torch"] == "ok"
    assert result["triton"] == "ok"  # the interpreter, set by conftest.py
    if not torch.cuda.is_available():
        assert result["cuda"] and result["cuda"] != "ok"


def test_available_backends_rejects_what_is_no_op():
    with pytest.raises(TypeError, match="expected a Trainwright op"):
        tw.available_backends(torch.relu)


@pytest.mark.parametrize("op", dispatch.ops())
def test_every_op_can_run_as_plain_torch(op):
    assert dispatch.backends_of(op)["torch"] == "ok"


def test_the_choice_is_the_same_under_compile(environment):
    def function(x):
        with_default = tw.rms_norm(x)
        return with_default + tw.rms_norm(x, backend="torch")

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), function(X))


def test_triton_without_a_gpu_says_how_to_interpret_it():
    code = "import trainwright as tw; print(tw.available_backends(tw.rms_norm)['triton'])"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    if not torch.cuda.is_available():
        assert "TRITON_INTERPRET=1" in done.stdout


def test_a_reason_that_holds_for_all_candidates_of_a_backend_is_given_once():
    with pytest.raises(tw.BackendError) as error:
        tw.rms_norm(torch.ones(2, 3), backend="cuda")
    lines = str(error.value).splitlines()
    assert len(lines) == len(set(lines))
    assert sum(line.startswith("  cuda: ") for line in lines) == 1
