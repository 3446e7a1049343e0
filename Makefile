# `make demo` and `make test` set themselves up; nothing else is needed before them but Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Tests of emulated GPUs and of compilers, which use one thread each: a process for each of two cores.
EMULATED := tests/kernels/cuda tests/turbo/engine/test_cuda_engine.py tests/test_gpu_numerics.py tests/benchmarks/test_gpu.py

.PHONY: demo test lint setup clean

demo: setup
	$(BIN)/python -m benchmarks.demo

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lmkit benchmarks
	$(BIN)/python -m pytest $(addprefix --ignore=,$(EMULATED))
	$(BIN)/python -m pytest -n 2 $(EMULATED)

lint: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy lmkit benchmarks

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
