#!/usr/bin/env bash
# tests/build/abi.sh ["torch==2.14.1"]: a wheel built here, against the torch of $PYTHON (.venv), must load and work in a
# fresh environment with another torch. By hand, for its size: a CUDA build of torch takes 6 GB of disk for a while.
set -euo pipefail
cd "$(dirname "$0")/../.."
other=${1:-torch==2.14.1}
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

TRAINWRIGHT_BUILD=cpu "$python" setup.py -q egg_info --egg-base "$work" build --build-base "$work/build" \
  bdist_wheel --dist-dir "$work" --bdist-dir "$work/bdist" 2>/dev/null
wheel=$(echo "$work"/*.whl)
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$other" numpy
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "$wheel"

cd "$work"
venv/bin/python -m trainwright.info --check
venv/bin/python - "$("$python" -c 'import torch; print(torch.__version__)')" <<'PY'
import sys
import torch, trainwright as tw
from trainwright import dispatch

assert dispatch.extension("_C").loaded, dispatch.extension("_C").reason
info = torch.ops.trainwright.build_info()
assert f"torch={sys.argv[1]}" in info and torch.__version__ != sys.argv[1], (info, torch.__version__)

# A model trains, eager and compiled, and the compiled kernels are the ones that ran.
torch.manual_seed(0)
model = torch.nn.Sequential(tw.nn.RMSNorm(32), torch.nn.Linear(32, 32), tw.nn.RMSNorm(32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(64, 32), torch.randn(64, 32)
step = torch.compile(model, fullgraph=True, backend="aot_eager")
losses = []
for _ in range(20):
    loss = (step(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.9 * losses[0], losses
assert "cpu: chosen" in tw.explain(model, x)
print(f"ok: built with torch {sys.argv[1]}, runs with torch {torch.__version__}")
PY
