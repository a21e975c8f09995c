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
# ManiSkill3 as well: it brings a simulator and robot libraries that nobody else needs.
MANISKILL_VENV := .venv-maniskill
MANISKILL_STAMP := $(MANISKILL_VENV)/.installed
ISAACLAB_VENV := .venv-isaaclab
ISAACLAB_STAMP := $(ISAACLAB_VENV)/.installed
PY38_VENV := .venv-py38
PY38_STAMP := $(PY38_VENV)/.installed
# Interpreters: pyenv's of that version, else the one on the path.
pyenv_python = $(lastword $(sort $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python)))
PYTHON38 ?= $(or $(call pyenv_python,3.8),$(shell command -v python3.8))
PYTHON312 ?= $(or $(call pyenv_python,3.12),$(shell command -v python3.12))
MANISKILL_INSTALL = -m pip install --disable-pip-version-check -qq $(if $(CONSTRAINTS),-c constraints-maniskill.txt)

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-sim test-maniskill test-isaaclab test-integrations test-py38 test-wheel lint format clean

help:  ## this list
	@echo "rl_stagger: make TARGET"
	@sed -n 's/^\([a-z0-9-]*\):.*##  *\(.*\)/  \1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '%-20s %s\n' "  $$name" "$$text"; done
	@echo 'e.g. make train TASK=pendulum RESET=synchronous ARGS="iterations=50 seed=1"'

train: $(RUN_STAMP)  ## train the default task with staggered resets; prints the result and where the curves are
	$(BIN)/python scripts/train.py task=$(TASK) reset=$(RESET) $(ARGS)

test: lint  ## format, lint, types and the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not sim and not integrations"

test-slow: $(MJLAB_STAMP)  ## the tests that train for minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

test-sim: $(MJLAB_STAMP) test-wheel  ## the tests on simulators, and the wheel alone in an empty environment
	$(BIN)/python -c "import mjlab"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -m "sim and not slow" --ignore=tests/envs/test_maniskill_real.py --ignore=tests/envs/test_isaac_lab_real.py
	@echo "not here: ManiSkill3 (make test-maniskill), Isaac Lab (make test-isaaclab, 8 GB), envpool (pip install" \
		"'.[envpool]', 0.75 GB), Isaac Gym (a GPU and NVIDIA's download); make test has them on doubles"

test-maniskill: $(MANISKILL_STAMP)  ## the tests on ManiSkill3; as root on Debian, installs a Vulkan driver if there is none
	scripts/ci/vulkan.sh
	$(MANISKILL_VENV)/bin/python -W ignore -c "import mani_skill.envs"
	OMP_NUM_THREADS=1 $(MANISKILL_VENV)/bin/python -m pytest -rs -m "sim and not slow" tests/envs/test_maniskill_real.py

test-isaaclab: $(ISAACLAB_STAMP)  ## the tests on Isaac Lab 3.0, without Isaac Sim; Python 3.12, an install of 8 GB
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OMP_NUM_THREADS=1 $(ISAACLAB_VENV)/bin/python -m pytest -rs -m sim tests/envs/test_isaac_lab_real.py

# Isaac Gym's ground: Python 3.8, the last torch that it has, and beside the wheel what Isaac Gym's own packages want.
test-py38: $(PY38_STAMP)  ## the core's tests on Python 3.8 and torch 2.4.1, an install of 5 GB
	OMP_NUM_THREADS=1 $(PY38_VENV)/bin/python -m pytest -n 2 -rs -m "not slow and not sim and not integrations"
	@rm -rf build/py38 && mkdir -p build/py38/empty
	@$(BIN)/python -m build --wheel --outdir build/py38 . > build/py38/log 2>&1 || { cat build/py38/log; exit 1; }
	$(PY38_VENV)/bin/python -m pip install -qq --force-reinstall --no-deps build/py38/*.whl
	$(PY38_VENV)/bin/python -m pip install -qq gym==0.23.1 "numpy<1.24"
	$(PY38_VENV)/bin/python -m pip check
	cd build/py38/empty && OMP_NUM_THREADS=1 $(CURDIR)/$(PY38_VENV)/bin/rl-stagger train task=skill_chain iterations=2 num_envs=32
	@rm -f $(PY38_STAMP)  # the wheel has taken the place of the editable install

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
	find . -path "./.venv*" -prune -o -name __pycache__ -type d -exec rm -rf {} +

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

$(MANISKILL_VENV)/bin/python:
	@echo "creating $(MANISKILL_VENV) ..."
	@$(PYTHON) -m venv $(MANISKILL_VENV)

$(MANISKILL_STAMP): pyproject.toml constraints-maniskill.txt | $(MANISKILL_VENV)/bin/python
	@echo "installing torch into $(MANISKILL_VENV) (once; the largest part) ..."
	@$(MANISKILL_VENV)/bin/python $(MANISKILL_INSTALL) torch
	@echo "installing ManiSkill3 (two minutes) ..."
	@$(MANISKILL_VENV)/bin/python $(MANISKILL_INSTALL) -e ".[maniskill]" pytest pytest-xdist
	@touch $@

$(ISAACLAB_STAMP): pyproject.toml
	@test -n "$(PYTHON312)" || { echo "Isaac Lab 3.0 needs Python 3.12: make test-isaaclab PYTHON312=/path/to/python3.12"; exit 1; }
	@echo "installing Isaac Lab into $(ISAACLAB_VENV) (8 GB, five minutes) ..."
	@$(PYTHON312) -m venv $(ISAACLAB_VENV)
	@$(ISAACLAB_VENV)/bin/python -m pip install --disable-pip-version-check -qq isaaclab==3.0.0
	@$(ISAACLAB_VENV)/bin/python -m pip install --disable-pip-version-check -qq -e . pytest
	@touch $@

$(PY38_STAMP): pyproject.toml
	@test -n "$(PYTHON38)" || { echo "needs Python 3.8: make test-py38 PYTHON38=/path/to/python3.8"; exit 1; }
	@echo "installing torch 2.4.1 into $(PY38_VENV) (5 GB) ..."
	@$(PYTHON38) -m venv $(PY38_VENV)
	@$(PY38_VENV)/bin/python -m pip install --disable-pip-version-check -qq torch==2.4.1
	@$(PY38_VENV)/bin/python -m pip install --disable-pip-version-check -qq -e . pytest pytest-xdist
	@touch $@

$(MJLAB_STAMP): $(DEV_STAMP)
	@echo "installing mjlab (one minute) ..."
	@$(BIN)/python $(PIP_INSTALL) -e ".[dev,mjlab]"
	@touch $@
