# Everything sets itself up in .venv; the only needs are Python 3.11+ with venv, g++ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Every install goes through the pins. The path stays relative: pip splits an absolute one at its spaces.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

NATIVE := $(wildcard memhier/native/CMakeLists.txt memhier/native/src/*/*)
TREE := memhier ann recsys benchmarks tests docs

# A file's tests stay in one process: they share what their fixtures build.
PARALLEL := -n 2 --dist loadfile

.DEFAULT_GOAL := help
# Tests measure nothing while something else compiles, and messages stay in order.
.NOTPARALLEL:
.PHONY: help build build-python develop demo docs test test-long test-native test-plugins test-cluster soak-cluster lint stub types pyright try-wheel pytest pytest-python house soak sanitize sanitize-address sanitize-thread clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

build: $(VENV)/.installed  ## create .venv and install memhier into it, editable, with what its command needs

develop: $(VENV)/.developing  ## the same with the tests' tools and the packages of all systems

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "memhier needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 has no venv; on Debian: apt install python3-venv" >&2; exit 1; }

# cmake and ninja come as wheels, so no system package is needed; building without isolation keeps rebuilds short. They stay
# in a folder beside the environment, which holds memhier and its requirements alone: these are installed first, as pip
# takes a package of that folder for one of the environment.
TOOLS := .venv-build
WITH_TOOLS := PYTHONPATH="$(CURDIR)/$(TOOLS)" PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH"
$(TOOLS)/.installed: constraints.txt | $(BIN)/python
	@echo "Installing the build tools into $(TOOLS)"
	@rm -rf $(TOOLS)
	@$(INSTALL) --target $(TOOLS) scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/.installed: $(TOOLS)/.installed pyproject.toml $(NATIVE)
	@echo "Compiling memhier and installing what its command needs (a minute or two the first time)"
	@$(INSTALL) $$($(BIN)/python tests/house/requirements.py cli)
	@$(WITH_TOOLS) $(INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

# Tests build wheels, so they import the build tools.
$(VENV)/.developing: $(VENV)/.installed
	@echo "Installing the tests' tools and the packages of all systems (1.5 GB, mostly torch)"
	@$(INSTALL) $$($(BIN)/python tests/house/requirements.py dev)
	@echo "$(CURDIR)/$(TOOLS)" > "$(SITE)/memhier-build.pth"
	@touch $@

build-python: | $(BIN)/python  ## the same where nothing can be compiled: memhier in pure Python
	@$(INSTALL) --target $(TOOLS) scikit-build-core
	@$(INSTALL) $$($(BIN)/python tests/house/requirements.py cli)
	@$(WITH_TOOLS) $(INSTALL) --no-build-isolation --no-deps --config-settings=wheel.cmake=false -e .
	@touch $(TOOLS)/.installed && touch $(VENV)/.installed

demo: build  ## index every function of this Python installation and search it from SSD
	$(BIN)/memhier demo

test: lint types pytest pytest-python  ## all checks: ruff, mypy, the tests, and memhier's own again in pure Python

# Makes the packages of an environment, .venv or $(2), importable in the environment $(1), after its own.
see_all_of_venv = $(or $(2),$(VENV))/bin/python -c "import site; print(*(f'import site; site.addsitedir({path!r})' for path in site.getsitepackages()), sep='\n')" \
	    > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/memhier-parent.pth"

# The libraries that adapters serve, in an environment of their own, which sees all of .venv: some would bring other builds
# of torch.
PLUGINS := .venv-plugins
PLUGIN_TESTS := $(foreach name,avalanche torchrl mammoth plugins references datasets images,tests/recsys/test_replay_$(name).py) \
    $(foreach name,containers_plugins payload_plugins sklearn datasets langchain llama_index,tests/ann/test_$(name).py) \
    tests/recsys/test_lightning.py tests/recsys/test_torchrec.py tests/memhier/test_backup_s3.py
PLUGINS_RUN := $(PLUGINS)/bin/python -m pytest -p no:cacheprovider -o asyncio_default_fixture_loop_scope=function

# Avalanche's wheel has a package "tests", so that processes that are spawned would not find our tests' own functions.
test-plugins: $(PLUGINS)/.installed  ## the adapters, tried with the real libraries
	MEMHIER_PLUGINS=1 OMP_NUM_THREADS=1 $(PLUGINS_RUN) $(PLUGIN_TESTS) -k "not workers and not get_one_mixture" -o asyncio_mode=auto
	MEMHIER_PLUGINS=1 $(PLUGINS_RUN) tests/test_house.py tests/test_documents.py -k "public_names or another_library"

test-cluster: $(PLUGINS)/.installed  ## indexes over several shards, in Ray on this machine
	OMP_NUM_THREADS=1 $(PLUGINS_RUN) tests/cluster

soak-cluster: $(PLUGINS)/.installed  ## the slow ones of them: every step of a commit killed, workers of Ray Train killed
	OMP_NUM_THREADS=1 $(PLUGINS_RUN) tests/cluster -m slow

$(PLUGINS)/.installed: $(VENV)/.developing constraints-plugins.txt
	@echo "Installing the libraries that adapters serve into $(PLUGINS) (some 600 MB)"
	@rm -rf $(PLUGINS)
	@$(PYTHON) -m venv $(PLUGINS)
	@$(PLUGINS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-plugins.txt
	@$(call see_all_of_venv,$(PLUGINS))
	@touch $@

house: develop  ## rooms, floors, arrows, circles and other counts; fails if one grew
	@$(BIN)/python tests/house/counts.py

# Sphinx in an environment of its own, which sees all of .venv: it stays out of the developers' one.
DOCS := .venv-docs
docs: $(DOCS)/.installed  ## the documentation as HTML, into build/docs; a warning is an error
	@$(DOCS)/bin/python -m sphinx -q -W --keep-going -b html docs build/docs && echo "build/docs/index.html"

$(DOCS)/.installed: $(VENV)/.developing pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt sphinx myst-parser furo
	@$(call see_all_of_venv,$(DOCS))
	@touch $@

lint: develop  ## ruff, rules and format; the format of the C++ code; the compiled core's stub
	$(BIN)/ruff check $(TREE)
	$(BIN)/ruff format --check $(TREE)
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	@if $(BIN)/python -c "import memhier_native._core" 2>/dev/null; then \
	    mkdir -p build && $(call write_stub,build/_core.pyi) && diff -u $(STUB) build/_core.pyi || \
	    { echo "$(STUB) is not what the compiled core has; renew it with: make stub" >&2; exit 1; }; fi

STUB := memhier/native/memhier_native/_core.pyi
CXX_SOURCES = $(wildcard memhier/native/src/*/*.?pp memhier/native/tests/*.?pp)
write_stub = $(BIN)/python -m nanobind.stubgen -q -m memhier_native._core -o $(1) && \
    $(BIN)/ruff check -q --fix --select I $(1) && $(BIN)/ruff format -q $(1)

stub: develop  ## renew the compiled core's stub, which mypy checks the calls into it by
	$(call write_stub,$(STUB))

test-native: build  ## the tests of the reader's core in C++, without Python
	$(WITH_TOOLS) cmake -S memhier/native/tests -B build/$@ -G Ninja >/dev/null
	$(WITH_TOOLS) cmake --build build/$@
	build/$@/reader_test

types: develop  ## mypy, strict
	$(BIN)/mypy

# A plain install, as pyright passes over editable ones, in an environment that sees .venv and the libraries of adapters.
PYRIGHT := .venv-pyright
# --verifytypes infers no types of a library without the file py.typed, so that a class derived from it would be unknown.
UNMARKED := datasets scipy sklearn
pyright: $(PLUGINS)/.installed  ## the types that users see: pyright on the public names, strict
	@test -x $(PYRIGHT)/bin/pyright || { $(PYTHON) -m venv $(PYRIGHT) && \
	    $(PYRIGHT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pyright; }
	@$(call see_all_of_venv,$(PYRIGHT),$(PLUGINS))
	@cd $(PYRIGHT)/lib/python3*/site-packages && for package in $(UNMARKED); do rm -rf $$package && \
	    cp -rs "$(CURDIR)/$(PLUGINS)"/lib/python3*/site-packages/$$package . && touch $$package/py.typed || exit 1; done
	@$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps \
	    --config-settings=wheel.cmake=false -w build/pyright .
	@$(PYRIGHT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall build/pyright/*.whl
	@$(BIN)/python tests/house/public_names.py > build/pyright/public_names.py
	cd build/pyright && PATH="$(CURDIR)/$(PYRIGHT)/bin:$$PATH" pyright public_names.py
	@rm -rf $(PYRIGHT)/lib/python3*/site-packages/memhier/benchmarks
	@echo "The share of complete types in all modules but the benchmarks"
	cd build/pyright && PATH="$(CURDIR)/$(PYRIGHT)/bin:$$PATH" pyright --verifytypes memhier --ignoreexternal

try-wheel:  ## the wheel in empty environments: every block of README and tutorials, twice (needs the network)
	$(PYTHON) tests/house/try_wheel.py

pytest: develop  ## the tests, but for the longer ones, on the compiled core where there is one
	$(BIN)/python -m pytest $(PARALLEL) -m "not long and not slow"

test-long: develop  ## the tests that take some seconds, likewise
	$(BIN)/python -m pytest $(PARALLEL) -m "long and not slow"
	MEMHIER_NATIVE=0 $(BIN)/python -m pytest $(PARALLEL) -m "long and not slow" tests/memhier

pytest-python: develop  ## memhier's own tests without the compiled core
	MEMHIER_NATIVE=0 $(BIN)/python -m pytest $(PARALLEL) -m "not long and not slow" tests/memhier

soak: develop  ## the slow tests
	$(BIN)/python -m pytest -m slow

# The interpreter that .venv was made from: .venv's own would import the editable, plain core first.
BASE = $(shell $(BIN)/python -c 'import sys; print(sys._base_executable)')
SITE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
runtime = $(shell realpath $$(g++ -print-file-name=$(1)))
space := $(subst ,, )

sanitize: sanitize-address sanitize-thread  ## memhier's tests on a core built with ASan and UBSan, then with TSan

# Assertions are on (no NDEBUG). Python and numpy leak by design, so leaks are not looked for.
sanitize-address: FLAGS = -fsanitize=address,undefined -fno-sanitize-recover=all
sanitize-address: DECODER = $(foreach name,graph index stored threads,tests/ann/test_decoder_$(name).py)
sanitize-address: RUNTIMES = libasan.so libubsan.so libstdc++.so.6
sanitize-address: RUN = ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

# GCC 12's TSan clashes with much address randomisation, at build time as well; forked readers must survive in the child.
sanitize-thread: FLAGS = -fsanitize=thread
sanitize-thread: DECODER = tests/ann/test_decoder_threads.py
sanitize-thread: RUNTIMES = libtsan.so libstdc++.so.6
sanitize-thread: RUN = TSAN_OPTIONS="exitcode=66 die_after_fork=0" setarch -R

sanitize-address sanitize-thread: develop
	$(WITH_TOOLS) setarch -R cmake -S memhier/native -B build/$@ -G Ninja -DCMAKE_BUILD_TYPE=Debug \
	    -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -DCMAKE_CXX_FLAGS="-O1 -g -fno-omit-frame-pointer $(FLAGS)" >/dev/null
	$(WITH_TOOLS) setarch -R cmake --build build/$@
	$(WITH_TOOLS) cmake --install build/$@ --prefix build/$@/site >/dev/null
	cp memhier/native/memhier_native/__init__.py build/$@/site/memhier_native/
	env MEMHIER_NATIVE=1 PYTHONMALLOC=malloc PYTHONPATH="$(CURDIR)/build/$@/site:$(CURDIR):$(SITE)" \
	    LD_PRELOAD="$(subst $(space),:,$(foreach name,$(RUNTIMES),$(call runtime,$(name))))" \
	    $(RUN) $(BASE) -m pytest -q -p no:cacheprovider -o timeout=600 tests/memhier tests/ann/test_zoom_scan.py \
	    tests/ann/test_code_scan.py $(DECODER) --ignore=tests/memhier/test_budget_holds.py  # a sanitizer's own memory is beyond any budget

clean:  ## remove build products (not .venv)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
