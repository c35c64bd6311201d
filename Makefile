PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?=
OUT ?= demo

.PHONY: install demo test test-slow lint format interop bench bench-peers docs clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Makes data (or takes DATA=folder), builds and checks stores, shows what came out in $(OUT)/.
demo: install
	$(BIN)/python scripts/demo.py --out $(OUT) $(if $(DATA),--data $(DATA))

test: install
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered --cov-fail-under=95

test-slow: install
	$(BIN)/python -m pytest -n 2 --run-slow

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
	$(BIN)/python -m benchmarks.run --quick

# The same samples through other formats and loaders, in an environment of their own; cold figures need root.
bench-peers: install
	$(BIN)/python -m benchmarks.peers.environment
	benchmarks/peers/env/bin/python -m benchmarks.peers.run --quick

docs: install
	$(BIN)/python scripts/make_hexdump.py --write

clean:
	rm -rf $(VENV) $(OUT) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
