# Everything sets itself up in .venv; the only needs are Python 3.11+, g++ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

NATIVE := $(wildcard memhier/native/CMakeLists.txt memhier/native/src/*)
TREE := memhier ann recsys benchmarks tests

.DEFAULT_GOAL := help
.PHONY: help build demo test lint types pytest clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

build: $(VENV)/.installed  ## create .venv and install memhier into it, editable

# cmake and ninja come as wheels, so no system package is needed; building without isolation keeps rebuilds short.
$(VENV)/.tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q scikit-build-core nanobind cmake ninja
	touch $@

$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(NATIVE)
	$(BIN)/pip install -q --no-build-isolation -e ".[dev]"
	touch $@

demo: build  ## index every function of this Python installation and search it from SSD
	$(BIN)/memhier demo

lint: build
	$(BIN)/ruff check $(TREE)
	$(BIN)/ruff format --check $(TREE)

types: build
	$(BIN)/mypy

pytest: build
	$(BIN)/python -m pytest

test: lint types pytest  ## ruff, mypy and pytest

clean:  ## remove build products (not .venv)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
