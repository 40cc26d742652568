# The targets set everything up in .venv; nothing else is needed than Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A plain `torch` would fetch gigabytes of CUDA packages where a CPU build is wanted.
TORCH := torch==2.13.0

.PHONY: demo test unit lint bench setup clean

demo: setup
	@$(BIN)/python examples/demo.py

test: setup lint unit
	$(BIN)/python -m pytest -m distributed

# The tests without several processes: for running at every change.
unit: setup
	$(BIN)/python -m pytest -m "not distributed" -n auto --maxprocesses 8

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# weft and what a user would pick instead, on two emulated hosts: needs root and iproute2.
bench: $(VENV)/.bench-ready
	$(BIN)/python -m benchmarks

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[dev]"
	@touch $@

$(VENV)/.bench-ready: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[bench]"
	@touch $@

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
