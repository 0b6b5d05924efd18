# make demo | test | setup | bench | lint | info | test-full | sanitize
# PYTHON=python3.12  TORCH="torch==2.14.1"  OP=rms_norm (bench)  ARGS=... (demo)
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
PY := $(VENV)/bin/python
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh') setup.py
ARGS ?=
OP ?=

.PHONY: demo test test-full setup bench lint info sanitize clean
.DELETE_ON_ERROR:

demo: setup
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m trainwright.train $(ARGS)

test: setup
	$(PY) -m pytest -m "not slow and not gpu" --durations=10

test-full: setup
	$(PY) -m pytest -m "not gpu"

bench: setup
	$(PY) -m bench $(OP)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run -Werror

info: setup
	$(PY) -m trainwright.info

setup: $(VENV)/.built

# Dependencies: again only when requirements.txt, the Python or the torch asked for changes.
$(VENV)/.installed: requirements.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

# Extensions: ninja rebuilds what changed.
$(VENV)/.built: $(VENV)/.installed pyproject.toml $(SOURCES)
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf build dist $(VENV)/.built python/trainwright/*.so python/trainwright/_build_info.json
