#!/bin/bash
# Everything that wants a GPU, in one command of less than 9 minutes: build, the case tables of the ops on the device, the
# virtual GPU against the device, steps inside CUDA graphs, benchmarks.
#
#   tests/gpu/run.sh [OUT]      OUT: folder of the results, default gpu-results
#
# Needs a CUDA build of torch >= 2.11, Triton, nvcc, and pytest with xdist, timeout and benchmark; installs nothing and needs no
# network. PYTHON chooses the interpreter. Each step has its own time limit and log, a failed step does not stop the next one,
# and the last lines say which failed; the exit code is their number. OUT gets summary.txt, one log per step, the CSV
# rows and the table of the benchmarks.
#
# Without a GPU, `tests/gpu/run.sh --dry-run [OUT]` goes through the same steps on what is there: the CUDA module is compiled for one
# architecture, the tables run on the virtual GPU, the benchmarks run on the CPU, briefly.
set -u
cd "$(dirname "$0")/../.." || exit 1
dry=0
[ "${1:-}" = "--dry-run" ] && { dry=1; shift; }
case "${1:-}" in -*) echo "usage: tests/gpu/run.sh [--dry-run] [OUT]" >&2; exit 64 ;; esac
out=$(mkdir -p "${1:-gpu-results}" && cd "${1:-gpu-results}" && pwd) || exit 1
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1
begin=$SECONDS failed=0
: > "$out/summary.txt"

say() { echo "$*" | tee -a "$out/summary.txt"; }

# step NAME SECONDS COMMAND...: runs it with a limit, its output in OUT/NAME.log.
step() {
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1
  code=$?
  if [ $code -eq 0 ]; then
    say "ok      $name ($((SECONDS - start)) s)"
  else
    failed=$((failed + 1))
    [ $code -eq 124 ] && say "TIMEOUT $name (limit $limit s)" || say "FAILED  $name (exit code $code, $((SECONDS - start)) s)"
    tail -n 15 "$out/$name.log" | sed 's/^/        /' | tee -a "$out/summary.txt"
  fi
}

if [ $dry -eq 1 ]; then
  arch=8.0 device=cpu tables="-k vgpu"
elif "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  arch=$("$python" -c 'import torch; m, n = torch.cuda.get_device_capability(); print(f"{m}.{n}" + ("a" if m >= 9 else ""))')
  device=cuda tables=""
  export TRAINWRIGHT_TEST_DEVICE=cuda
else
  echo "tests/gpu/run.sh: torch finds no CUDA GPU; --dry-run goes through the steps without one" >&2
  exit 69
fi
say "$(date -u +%Y-%m-%dT%H:%MZ) commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown) device $device arch $arch"
[ $dry -eq 1 ] || say "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader)"

step build 150 env TRAINWRIGHT_BUILD=cuda TORCH_CUDA_ARCH_LIST="$arch" "$python" setup.py -q build_ext --inplace
step info 40 "$python" -m trainwright.info --check
# shellcheck disable=SC2086
step ops 120 "$python" -m pytest tests/ops tests/optim -q -n 4 --dist worksteal --maxfail=40 $tables
step virtual_gpu 60 "$python" -m pytest tests/gpu -q
if [ $dry -eq 1 ]; then
  step bench 120 "$python" -m bench grad_norm merge_attention --quick --device cpu --seconds 0.1
else
  step bench 85 "$python" -m bench rms_norm layer_norm cross_entropy rope glu flash_attention merge_attention linear --quick --device cuda
  # Each storage format of AdamW, and each other optimizer, at 512M parameters as a fraction of copy bandwidth; 1000 small
  # tensors beside one of their size. Then Muon's products and steps against torch's own.
  step bench_adamw 60 "$python" -m bench adamw --quick --device cuda
  step bench_muon 25 "$python" -m bench newton_schulz muon --quick --device cuda --seconds 0.1
fi
cp bench/results/*.csv bench/results/README.md "$out/" 2>/dev/null
say "$failed failed, $((SECONDS - begin)) s; results in $out"
exit $failed
