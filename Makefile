# Both commands set up everything they need in .venv; nothing is installed outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test check sanitize clean

demo: $(VENV)/.ready
	$(BIN)/spheret compare --out demo

test: $(VENV)/.ready-dev check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

# The C++ kernel under the address and undefined-behaviour sanitizers (g++), through the tests that call it.
SANITIZED := SPHERET_CACHE=$(VENV)/sanitize CXX="g++ -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
sanitize: $(VENV)/.ready-dev
	$(SANITIZED) LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest tests/geometry tests/kernels/test_ops.py

# torch first, from the constraint alone: a range resolved together with everything else may pull a build of several gigabytes.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r constraints.txt
	touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report]'
	touch $@

$(VENV)/.ready-dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.ready

clean:
	rm -rf $(VENV) demo runs
