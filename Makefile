# `make` alone says what there is to do.
PYTHON ?= python3
TASK ?= skill_chain
RESET ?= staggered
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
WHEEL_VENV := build/wheel-venv

# constraints.txt pins what rl_stagger is developed with, which needs Python 3.11 or newer; an older Python gets what
# the ranges in pyproject.toml give. torch goes in first and alone, so that no other package picks its build.
CONSTRAINTS = $(shell $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) and print("-c constraints.txt")')
PIP_INSTALL = -m pip install --disable-pip-version-check -qq $(CONSTRAINTS)

RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
MJLAB_STAMP := $(VENV)/.installed-mjlab

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-sim test-wheel lint format clean

help:  ## this list
	@echo "rl_stagger: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  \1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '%-13s %s\n' "  $$name" "$$text"; done
	@echo 'e.g. make train TASK=pendulum RESET=synchronous ARGS="iterations=50 seed=1"'

train: $(RUN_STAMP)  ## train the default task with staggered resets; prints the result and where the curves are
	$(BIN)/python scripts/train.py task=$(TASK) reset=$(RESET) $(ARGS)

test: lint  ## format, lint, types and the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not sim"

test-slow: $(DEV_STAMP)  ## the tests that train for minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

test-sim: $(MJLAB_STAMP) test-wheel  ## the tests on simulators, and the wheel alone in an empty environment
	$(BIN)/python -c "import mjlab"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -m sim
	@echo "skipped: ManiSkill3, Isaac Gym, Isaac Lab (rl_stagger has no adapter for them yet)"

# The sdist is built first and the wheel from it: both must carry configs/. The empty directory hides this checkout.
test-wheel: $(DEV_STAMP)
	@echo "building the wheel and trying it in an environment of its own (two minutes) ..."
	@rm -rf build && mkdir -p build/empty
	@$(BIN)/python -m build --outdir build/dist . > build/log 2>&1 || { cat build/log; exit 1; }
	@$(PYTHON) -m venv $(WHEEL_VENV)
	@$(WHEEL_VENV)/bin/python $(PIP_INSTALL) torch
	@$(WHEEL_VENV)/bin/python $(PIP_INSTALL) build/dist/*.whl
	cd build/empty && ../../$(WHEEL_VENV)/bin/rl-stagger --help > /dev/null
	cd build/empty && OMP_NUM_THREADS=1 ../../$(WHEEL_VENV)/bin/rl-stagger train task=skill_chain iterations=2 num_envs=32
	@echo "the wheel works on its own"

lint: $(DEV_STAMP)  ## format, lint and types only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(DEV_STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove builds and caches; keeps .venv and runs/
	rm -rf build dist .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	@echo "creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing torch into $(VENV) (once; the largest part) ..."
	@$(BIN)/python $(PIP_INSTALL) torch
	@echo "installing rl_stagger and what it needs (one minute) ..."
	@$(BIN)/python $(PIP_INSTALL) -e .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "installing the tools for tests and checks ..."
	@$(BIN)/python $(PIP_INSTALL) -e ".[dev]"
	@touch $@

$(MJLAB_STAMP): $(DEV_STAMP)
	@echo "installing mjlab (one minute) ..."
	@$(BIN)/python $(PIP_INSTALL) -e ".[dev,mjlab]"
	@touch $@
