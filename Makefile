# Two commands do everything on a machine with Python 3.11+, git and make: `make demo`, `make test`.
# Both install into .venv once, and again only when pyproject.toml or the constraints change.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help demo quick test test-sites lint format bench docs clean demo-env test-env

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-cpu.txt
# one more than two cores: tests often wait for processes that they started
WORKERS ?= 3
# plugins of libraries that no test uses would be imported by every worker
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore=tests/sites \
  -p no:hydra_pytest -p no:anyio -p no:platformdirs
GROUP := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["test"])
export PYTHONUTF8 := 1

# install: $(1) names what is installed, $(2) is what pip gets; nothing happens if it is there
# (what the tests need contains what the demo needs)
define install
@wanted="$$(cat pyproject.toml constraints-cpu.txt | cksum) $(CURDIR)"
if ! grep -qsxF "$$wanted" $(VENV)/$(1).stamp $(VENV)/test.stamp; then
  if [ ! -x $(BIN)/python ]; then
    if [ -z "$(PYTHON)" ]; then
      echo "No Python 3.11 or newer was found. Install one, or: make PYTHON=/path/to/python" >&2
      exit 1
    fi
    $(PYTHON) -m venv $(VENV) || {
      echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv" >&2
      exit 1
    }
    # a newer pip needs less than half the time to find versions that fit together
    $(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip || true
  fi
  echo "Installing what is needed into $(VENV) (once; a few minutes) ..." >&2
  $(PIP) $(2)
  echo "$$wanted" > $(VENV)/$(1).stamp
fi
endef

help:
	@echo "make demo    record a training run, ask a new question about it, see it answered"
	@echo "make quick   the tests that start no process and need no server"
	@echo "make test    style, types and all tests"
	@echo "make test-sites  jobs under real HTCondor, Slurm and luigi daemons"
	@echo "make lint    style and types only"
	@echo "make format  put the source into its form"
	@echo "make docs    write the generated pages of docs/ anew"
	@echo "make bench   measure what the documents claim"
	@echo "make clean   remove the environment and caches"

# compile: Python reads its own bytecode from then on, also where PYTHONDONTWRITEBYTECODE is set
define compile
@$(BIN)/python -m compileall -q src
endef

demo: demo-env
	$(call compile)
	$(BIN)/rearview demo

demo-env:
	$(call install,demo,-e . torch scikit-learn)

test: test-env
	@if [ -x tests/servers/install ]; then
	  tests/servers/install "$$PWD/$(BIN)/python" || echo "Some servers are not there; the tests say which." >&2
	fi
	$(call compile)
	# beside the tests: mypy uses one core
	$(MAKE) --no-print-directory lint >$(VENV)/lint.txt 2>&1 & lint=$$!
	status=0
	$(PYTEST) || status=$$?
	wait $$lint || { cat $(VENV)/lint.txt; status=1; }
	exit $$status

quick: test-env
	$(call compile)
	$(PYTEST) -m "not slow and not server"

# Batch systems with their real daemons: heavy, so apart.
test-sites: test-env
	@tests/sites/install "$$PWD/$(BIN)/python"
	$(BIN)/python -m pytest tests/sites

test-env:
	$(call install,test,-e . $$($(PYTHON) -c '$(GROUP)'))

lint: test-env
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: test-env
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: test-env
	@$(BIN)/python docs/generate.py
	$(BIN)/python docs/draw_architecture.py
	$(BIN)/python docs/draw_session.py

bench: test-env
	@for script in benchmarks/*.py benchmarks/*/run.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
