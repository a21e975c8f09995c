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
# Other people's trainers want older versions of what mjlab wants: a venv and a set of pins of their own.
TRAINERS_VENV := .venv-integrations
TRAINERS_STAMP := $(TRAINERS_VENV)/.installed
TRAINERS_INSTALL = -m pip install --disable-pip-version-check -qq $(if $(CONSTRAINTS),-c constraints-integrations.txt)

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-sim test-integrations test-wheel lint format clean

help:  ## this list
	@echo "rl_stagger: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  \1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '%-20s %s\n' "  $$name" "$$text"; done
	@echo 'e.g. make train TASK=pendulum RESET=synchronous ARGS="iterations=50 seed=1"'

train: $(RUN_STAMP)  ## train the default task with staggered resets; prints the result and where the curves are
	$(BIN)/python scripts/train.py task=$(TASK) reset=$(RESET) $(ARGS)

test: lint  ## format, lint, types and the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not sim and not integrations"

test-slow: $(DEV_STAMP)  ## the tests that train for minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

test-sim: $(MJLAB_STAMP) test-wheel  ## the tests on simulators, and the wheel alone in an empty environment
	$(BIN)/python -c "import mjlab"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -m sim
	@echo "skipped: ManiSkill3, Isaac Gym, Isaac Lab (rl_stagger has no adapter for them yet)"

test-integrations: $(TRAINERS_STAMP)  ## the tests with other people's trainers (rsl_rl, rl_games, skrl, SB3, Gymnasium)
	$(TRAINERS_VENV)/bin/python -c "import rsl_rl, rl_games, skrl, stable_baselines3, gymnasium"
	OMP_NUM_THREADS=1 $(TRAINERS_VENV)/bin/python -m pytest -n 2 -rs -m integrations tests/integrations
	@echo "on doubles of their contracts: Isaac Lab, ManiSkill3"

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
	find . \( -path ./$(VENV) -o -path ./$(TRAINERS_VENV) \) -prune -o -name __pycache__ -type d -exec rm -rf {} +

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

$(TRAINERS_VENV)/bin/python:
	@echo "creating $(TRAINERS_VENV) ..."
	@$(PYTHON) -m venv $(TRAINERS_VENV)

$(TRAINERS_STAMP): pyproject.toml constraints-integrations.txt | $(TRAINERS_VENV)/bin/python
	@echo "installing torch into $(TRAINERS_VENV) (once; the largest part) ..."
	@$(TRAINERS_VENV)/bin/python $(TRAINERS_INSTALL) torch
	@echo "installing other people's trainers (one minute) ..."
	@$(TRAINERS_VENV)/bin/python $(TRAINERS_INSTALL) -e ".[integrations]" pytest pytest-xdist
	@touch $@

$(MJLAB_STAMP): $(DEV_STAMP)
	@echo "installing mjlab (one minute) ..."
	@$(BIN)/python $(PIP_INSTALL) -e ".[dev,mjlab]"
	@touch $@
