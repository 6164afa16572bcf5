# Two commands work on a fresh machine with Python 3.11-3.13 and nothing else: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check format setup clean

demo: setup            ## the whole pipeline on sample runs, on the CPU, with a tiny model made on the spot
	$(BIN)/traceforge demo

test: setup            ## all tests, of which some only wait: four at a time on two cores; ARGS are pytest's
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

check: setup           ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"traceforge needs Python 3.11-3.13, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .traceforge build *.egg-info .pytest_cache .ruff_cache
