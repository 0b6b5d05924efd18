# make demo | test | test-full | bench | lint | info | setup | sanitize | clean
#   PYTHON=python3.12  TORCH="torch==2.14.1"  VENV=...   what the environment is made of
#   OP="rms_norm rope"  ARGS=...                         bench: which ops; bench, demo: more arguments
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
PY := $(VENV)/bin/python
# Machines without an NVIDIA driver get torch's CPU build (200 MB) instead of its CUDA build (several GB).
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install --quiet
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
CXX_FILES = git ls-files '*.h' '*.cpp' '*.cu' '*.cuh'
SANITIZED := build/sanitized
# Two test processes: what one leaves idle (imports, compilers, ranks that wait) the other uses. "PARALLEL=" for one.
PARALLEL ?= -n 2 --dist worksteal

.PHONY: demo test test-full bench lint info setup sanitize clean FORCE
.DELETE_ON_ERROR:

demo: setup
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m trainwright.train $(ARGS)

test: setup
	$(PY) -m pytest $(PARALLEL) -m "not slow and not gpu" --durations=10

test-full: setup
	$(PY) -m pytest $(PARALLEL) -m "not gpu" --durations=20

bench: setup
	$(PY) -m bench $(OP) $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CXX_FILES) | xargs $(VENV)/bin/clang-format --dry-run -Werror

info: setup
	$(PY) -m trainwright.info --check

setup: $(VENV)/.built

# The tests of the CPU ops and of the virtual GPU on modules built with AddressSanitizer and UBSan, beside the normal
# build. Python itself is not instrumented, so leaks are not looked for; reports go to the terminal past pytest.
SANITIZED_PYTEST = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONPATH=$(SANITIZED) \
	$(PY) -m pytest -m "not slow and not gpu" --timeout=900 --capture=sys

sanitize: setup
	TRAINWRIGHT_SANITIZE=address,undefined,float-cast-overflow TRAINWRIGHT_BUILD=cpu \
	$(PY) setup.py -q build --build-lib $(SANITIZED)
	$(SANITIZED_PYTEST) tests/ops tests/optim -k "not triton and not compile and not vgpu"
	$(SANITIZED_PYTEST) tests/vgpu -k "not triton"

# ---- the environment. What changes an answer is kept in a stamp, so that a second call does nothing.

build/.asked-env: FORCE
	@mkdir -p build; echo "$(PYTHON) $(TORCH)" | cmp -s - $@ || echo "$(PYTHON) $(TORCH)" > $@

build/.asked-build: FORCE
	@mkdir -p build; asked="$$TRAINWRIGHT_BUILD $$TRAINWRIGHT_DEBUG $$TORCH_CUDA_ARCH_LIST $$CXX"; \
	echo "$$asked" | cmp -s - $@ || echo "$$asked" > $@

$(VENV)/.torch: build/.asked-env
	sh .ci/bootstrap $(PYTHON)
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --retries 2 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)"
	touch $@

# A CUDA build of torch has brought the triton that it was made for: leave it.
$(VENV)/.installed: $(VENV)/.torch requirements.txt
	if $(PY) -c "import triton" 2>/dev/null; then grep -v '^triton' requirements.txt; else cat requirements.txt; fi > build/requirements.txt
	$(PIP) -r build/requirements.txt
	touch $@

# ninja compiles what changed.
$(VENV)/.built: $(VENV)/.installed build/.asked-build pyproject.toml setup.py $(SOURCES)
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf build dist $(VENV)/.built python/trainwright/*.so python/trainwright/_build_info.json
