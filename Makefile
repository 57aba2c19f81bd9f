# make run    the main job on this machine, after setting up .venv
# make test   the tests, after the same set-up      (TESTS="tests/routing -k groups"  narrows them)
# make lint   ruff, mypy and clang-format
# make docs   the site in docs/_build, with an API reference from the docstrings; a warning is an error
# make bench  dispatch benchmark on the GPUs of this machine
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
TESTS  ?= tests
# Files of tests that run at a time: more than two cores, since many tests wait. With `make --jobs=2 test lint docs` the
# others take what the tests leave.
JOBS   ?= 3
POLITELY = nice -n 10
ARGS   ?=
# Extras to install: on a machine with NVIDIA GPUs also what the kernels and NVSHMEM need (EXTRAS=test leaves it out).
comma  := ,
EXTRAS ?= test$(if $(wildcard /dev/nvidia[0-9]*),$(comma)cuda)

# Modules stay compiled: every worker that a test starts imports torch, which takes twice as long from source.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test lint docs docs-packages bench clean
.DEFAULT_GOAL := run

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"$(PYTHON) is " + sys.version.split()[0] + "; moe_ep needs 3.11 or newer: make PYTHON=python3.11")'
	@echo "Installing torch, Ray and the rest into $(VENV): some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt --upgrade pip
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt torch
	@$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[$(EXTRAS)]' || { echo \
		"The extras $(EXTRAS) could not be installed$(if $(findstring cuda,$(EXTRAS)),; without CUDA's: make EXTRAS=test)" \
		>&2; exit 1; }
	-@$(BIN)/python -c "import moe_ep.hf.parallelize"  # compiles once what tests import in many processes at a time
	@touch $@

run: $(VENV)/.installed
	$(BIN)/moe-ep run $(ARGS)

# One thread a process: more spin while they wait for each other, on cores that other tests need.
test: export OMP_NUM_THREADS = 1
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(POLITELY) $(BIN)/mypy
	git ls-files -z '*.c' '*.cu' '*.cuh' '*.cpp' '*.h' | xargs -0 $(BIN)/clang-format --dry-run --Werror

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[docs]'
	@touch $@

docs-packages: $(VENV)/.docs

docs: $(VENV)/.docs
	$(POLITELY) $(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build

bench: $(VENV)/.installed
	$(BIN)/python scripts/bench_dispatch.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info docs/api docs/_build
