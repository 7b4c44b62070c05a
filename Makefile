# The only set-up: `make demo` or `make test` on a machine with Python >= 3.10.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo demo-tiny test test-slow lint clean

demo: $(VENV)/.installed
	$(BIN)/puzzle demo

demo-tiny: $(VENV)/.installed
	$(BIN)/puzzle demo --parent tiny

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	rm -rf build/typecheck && $(BIN)/pip install -q --no-deps --target build/typecheck .
	cd build/typecheck && ../../$(BIN)/mypy --strict --config-file ../../pyproject.toml --follow-imports=silent \
	  -p puzzle.search -m puzzle.architecture -m puzzle.costs -m puzzle.config -m puzzle.run -m puzzle.errors

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
