# Both commands set up everything they need in .venv; nothing is installed outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test check clean

demo: $(VENV)/.ready
	$(BIN)/spheret compare --out demo

test: $(VENV)/.ready-dev check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch first, from the constraint alone: a range resolved together with everything else may pull a build of several gigabytes.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r constraints.txt
	touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report,cpu]'
	touch $@

$(VENV)/.ready-dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.ready

clean:
	rm -rf $(VENV) demo runs
