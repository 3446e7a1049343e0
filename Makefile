# `make demo` and `make test` set themselves up; nothing else is needed before them but Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint setup clean

demo: setup
	$(BIN)/python -m benchmarks.demo

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lmkit benchmarks
	$(BIN)/python -m pytest --ignore=tests/kernels/cuda
	$(BIN)/python -m pytest -n 2 tests/kernels/cuda  # emulated GPUs, and compilers: one thread each

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
