# Sets up .venv and runs what a visitor or a contributor needs. Only python3 (>= 3.11) and make are required.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO ?=
PYTEST ?= -n auto
ORACLES := .venv-oracles
MUTATIONS ?= 100000

.PHONY: demo test test-oracles test-trl install-oracles fuzz lint bench clean

demo: $(VENV)/.run
	$(BIN)/trajreplay demo $(DEMO)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST)

# Other frameworks have a .venv of their own: they pin what this project does not need.
test-oracles: install-oracles
	OMP_NUM_THREADS=1 $(ORACLES)/bin/python -m pytest -m oracle --hypothesis-profile=oracle -rs $(PYTEST) tests/oracles

# Real trainings with TRL, captured and replayed.
test-trl: install-oracles
	OMP_NUM_THREADS=1 $(ORACLES)/bin/python -m pytest -m trl -rs $(PYTEST) tests/trl

install-oracles: $(ORACLES)/.installed

# Files to import, changed at random; the tests do the same to 2,000, always the same ones.
fuzz: $(VENV)/.dev
	MUTATIONS=$(MUTATIONS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/capture/importers/test_fuzz.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.run
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) $(ORACLES) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "trajreplay needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# A stamp is newer than what was installed, so that an unchanged tree installs nothing.
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	@touch $@ $(VENV)/.run

$(ORACLES)/.installed: pyproject.toml constraints.txt tests/oracles/requirements.txt
	test -x $(ORACLES)/bin/python || $(PYTHON) -m venv $(ORACLES) || { rm -rf $(ORACLES); exit 1; }
	@echo '*' > $(ORACLES)/.gitignore
	$(ORACLES)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(ORACLES)/bin/python -m pip install --quiet --no-deps --requirement tests/oracles/requirements.txt
	@touch $@
