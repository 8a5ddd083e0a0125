# Every target installs what it misses into .venv. `make run` serves, `make test` tests.
PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install check fix test test-clients test-gpu bench bench-cpu bench-overhead reliability run clean

# Twice --quiet: errors only, without setuptools' warning about editable installs.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Fovea, PyTorch and the development tools into $(VENV): 1.6 GB with PyTorch's CPU build, several GB"
	@echo "with the CUDA one. The first time this takes minutes, without further output."
	$(BIN)/python -m pip install --quiet --upgrade "pip>=26"
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable . --group dev
	touch $@

install: $(STAMP)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(STAMP)
	$(BIN)/python -m pytest

# Clients that others wrote, each group in an environment of its own.
CLIENTS := .venv-clients
GROUPS := openai llama-index schemathesis
NODE_CLIENTS := tests/clients/node

$(CLIENTS)/%/.installed: tests/clients/requirements-%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --requirement $<
	touch $@

$(NODE_CLIENTS)/node_modules/.installed: $(NODE_CLIENTS)/package-lock.json
	npm ci --prefix $(NODE_CLIENTS) --no-audit --no-fund --loglevel error
	touch $@

test-clients: $(STAMP) $(GROUPS:%=$(CLIENTS)/%/.installed) $(NODE_CLIENTS)/node_modules/.installed
	$(BIN)/python -m pytest -m clients tests/clients

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

bench: bench-overhead bench-cpu

# What the engine and the server cost beside the model: a step's parts, and streams over an engine that only replays.
bench-overhead: $(STAMP)
	$(BIN)/python -m benchmarks.step_overhead
	$(BIN)/python -m benchmarks.stream_capacity

# In turn with its peers, on the same requests; makes the README's table.
bench-cpu: $(STAMP)
	$(BIN)/python -m benchmarks.compare_cpu
	$(BIN)/python -m benchmarks.readme_table

# A load on the real service with faults, bad inputs and leaving clients; makes the table of docs/reliability.md.
reliability: $(STAMP)
	$(BIN)/python -m benchmarks.reliability; status=$$?; $(BIN)/python -m benchmarks.reliability_table && exit $$status

run: $(STAMP)
	$(BIN)/fovea serve --port $(PORT)

clean:
	rm -rf $(VENV) build *.egg-info
