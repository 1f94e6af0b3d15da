# Everything a fresh machine needs is set up in .venv by the first target that runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SIZE ?= 1GiB
ROUNDS ?= 5
JSON ?= bench.json
TIME ?= 60
# Tests that start torch processes take a gigabyte each.
WORKERS ?= 2
# Tests start thousands of processes, and compiling the modules is half of the start of each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all test-gpu check format format-write lint types bench fuzz samples docs docs-serve clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# Wheels of another Python's time may be newer than torch's CPU build: torch first, then the rest around it.
	# Of tens of thousands of modules few are imported, which compiles them.
	$(BIN)/pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

demo: $(BIN)/.ready  ## Train with FSDP2 on 2 ranks, inspect, convert, read everything back with the upstream libraries, and train on
	$(BIN)/python samples/demo.py

test: $(BIN)/.ready check  ## Format, lint, types and tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not long and not gpu"

test-all: $(BIN)/.ready $(BIN)/.deepspeed-ready check  ## The same, with the tests that take minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	# By itself: transformers and accelerate import a DeepSpeed that they find.
	DS_ACCELERATOR=cpu PYTHONPATH=$(CURDIR)/$(VENV)/deepspeed $(BIN)/python -m pytest -m long -k deepspeed tests/upstream tests/formats

test-gpu: $(BIN)/.ready  ## Tests with one GPU, and with all that there are, one for each rank
	$(BIN)/python -m pytest -m gpu

check: format lint types

format: $(BIN)/.ready  ## Check the formatting (`make format-write` to change it)
	$(BIN)/ruff format --check .

format-write: $(BIN)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(BIN)/.ready
	$(BIN)/ruff check .

types: $(BIN)/.ready
	$(BIN)/mypy

bench: $(BIN)/.ready $(BIN)/.peers-ready $(BIN)/.deepspeed-ready  ## Measure against torch, accelerate, safetensors and cat (SIZE=1GiB ROUNDS=5)
	$(BIN)/python samples/bench/run.py --size "$(SIZE)" --rounds "$(ROUNDS)" --json "$(JSON)"
	$(BIN)/python samples/bench/names.py --rounds 1
	$(BIN)/python samples/bench/stores.py --size "$(SIZE)" --rounds 1 --peers $(VENV)/peers
	DS_ACCELERATOR=cpu PYTHONPATH=$(CURDIR)/$(VENV)/deepspeed $(BIN)/python samples/bench/zero.py

$(BIN)/.deepspeed-ready: $(BIN)/.ready
	# What it needs beside torch; it builds nothing, and no test or sample that is quick needs it.
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-compile --no-deps --target $(VENV)/deepspeed \
		deepspeed==0.19.8 einops hjson msgpack ninja psutil py-cpuinfo
	touch $@

$(BIN)/.peers-ready: $(BIN)/.ready
	# In a folder of their own: they need an older botocore than the tests do.
	$(BIN)/pip install --quiet --no-compile --target $(VENV)/peers s3fs aioboto3
	touch $@

fuzz: $(BIN)/.ready  ## Throw changed files at each parser, guided by coverage (TIME=60 seconds each)
	$(BIN)/python tests/fuzz/fuzz.py --time "$(TIME)"

docs: $(BIN)/.docs-ready  ## Build the documentation as a site, in site/ (`make docs-serve` to look at it)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs-serve: $(BIN)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

$(BIN)/.docs-ready: $(BIN)/.ready
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

samples: $(BIN)/.ready  ## Make the sample checkpoints anew
	$(BIN)/python samples/generators/make.py

clean:  ## Remove what the targets made
	rm -rf $(VENV) demo site bench.json .pytest_cache .mypy_cache .ruff_cache build dist
