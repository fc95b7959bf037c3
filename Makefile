# keepstep: `make demo` and `make test` set up everything they need in .venv and nothing outside it.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo toolcalls-demo chaos soak test test-fast test-browser test-cluster lint clean bench-checkpoint bench-data bench-plan bench-h200
help:           ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# One pinned set for everybody: what CI tested is what a newcomer gets.
$(READY): pyproject.toml requirements/pinned.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed ($$($(PYTHON) --version) found)"; echo " hint: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing pinned dependencies into $(VENV) (a minute or two)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements/pinned.txt --editable '.[test,lint]'
	@touch $@

demo: $(READY)  ## raw text to a trained model, offline, in minutes
	$(BIN)/keepstep demo

toolcalls-demo: $(READY)  ## teach a small model to call tools, offline, and measure it
	$(BIN)/python benchmarks/toolcalls.py

test: $(READY) lint  ## everything that must hold before a change lands
	scripts/system-packages
	$(BIN)/python -m pytest

test-fast: $(READY)  ## unit tests in about a minute
	$(BIN)/python -m pytest -m 'not slow'

test-browser: $(READY)  ## the live page in a real browser (needs apt: chromium)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements/pinned.txt --editable '.[browser]'
	$(BIN)/python -m pytest tests/observe/test_browser.py

test-cluster: $(READY)  ## all tests on a real Slurm: faults, limits, preemption, a pulled cable (15 minutes)
	scripts/system-packages
	$(BIN)/python -m pytest -m 'cluster or slow' tests/cluster

lint: $(READY)  ## lint, format, types, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench-h200: $(READY)  ## a step beside the references; needs a GPU; writes benchmarks/results/h200.json
	$(BIN)/python -W ignore benchmarks/h200.py

chaos: $(READY)  ## every fault on a small run, recovery beside torchrun's, 200 restarts; writes benchmarks/results/chaos.json
	scripts/system-packages
	$(BIN)/python -W ignore benchmarks/chaos.py

soak: $(READY)  ## the same, with 200 random faults in one run
	scripts/system-packages
	$(BIN)/python -W ignore benchmarks/chaos.py --soak 200

bench-plan: $(READY)  ## gpt3-175b on 512 processes, played on this machine; writes benchmarks/results/plan_dryrun.json
	$(BIN)/python -W ignore benchmarks/plan_dryrun.py

bench-checkpoint: $(READY)  ## saves and loads against torch's DCP, and 300 kills
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/checkpoint.py

BENCH_READY := .venv-bench/.data-ready
$(BENCH_READY): requirements/bench-data.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/bench-data.txt
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-foundry==0.22.0
	@touch $@

bench-data: $(READY) $(BENCH_READY)  ## preparation and loading beside the peers; writes benchmarks/results/data.json
	$(BIN)/python benchmarks/data.py --peers .venv-bench/bin/python --docs docs/data.md

clean:          ## remove the environment and everything made by runs
	rm -rf $(VENV) .venv-bench .cache runs
