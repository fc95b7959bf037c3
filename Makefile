# keepstep: `make demo` and `make test` set up everything they need in .venv and nothing outside it.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready

.PHONY: help demo toolcalls-demo chaos soak survive fuzz test test-fast test-browser test-gpu test-cluster test-image test-recipes docs pictures lint structure clean bench-checkpoint bench-data bench-plan bench-gguf bench-rl bfcl bench-h200 bench-experts
help:           ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# One pinned set for everyone: a newcomer gets what CI tested. The demo needs the product alone, no test or lint tools.
# Python compiles what is imported; pip would compile all of PyTorch, which takes as long as the rest of the installation.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint requirements/pinned.txt
$(INSTALLED): pyproject.toml requirements/pinned.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: found $$($(PYTHON) --version), but it must be 3.11 or newer"; echo " hint: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing pinned dependencies into $(VENV) (a minute or two)"
	$(PIP_INSTALL) --editable .
	@touch $@

$(READY): $(INSTALLED) requirements/bfcl.txt requirements/gguf.txt requirements/triton.txt
	$(PIP_INSTALL) --editable '.[test,lint]'
	$(PIP_INSTALL) --no-deps --requirement requirements/bfcl.txt --requirement requirements/gguf.txt
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/triton --requirement requirements/triton.txt
	@touch $@

demo: $(INSTALLED)  ## raw text to a trained model, offline, in minutes
	$(BIN)/keepstep demo

toolcalls-demo: $(READY)  ## teach a small model to call tools, offline, and measure it
	$(BIN)/python benchmarks/toolcalls.py

# Most slow tests wait for a process to import PyTorch on one core: two at a time keep two cores busy, three are no faster.
test: $(READY) lint  ## everything that must pass before a change is merged
	scripts/system-packages
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-fast: $(READY)  ## unit tests, three minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

test-browser: $(READY)  ## the live page in a real browser (needs apt: chromium)
	$(PIP_INSTALL) --editable '.[browser]'
	$(BIN)/python -m pytest tests/observe/test_browser.py

test-gpu:  ## what we promise on a GPU, on a machine with PyTorch and a Hopper GPU; installs nothing; writes benchmarks/results/gpu.json
	PYTHONPATH=src $(PYTHON) -W ignore benchmarks/gpu.py

test-cluster: $(READY)  ## all tests on a real Slurm: faults, limits, preemption, a pulled cable (15 minutes)
	scripts/system-packages
	$(BIN)/python -m pytest -m 'cluster or slow' tests/cluster

test-image: $(READY)  ## build the image and try it, install by hashes (7 to 17 minutes; root, apt: buildah debootstrap)
	$(BIN)/python -m pytest -m 'cluster or slow' tests/launch/test_image.py
	$(BIN)/python -m pytest -m cluster tests/test_install.py

test-recipes: $(READY)  ## every command block of the five documents we follow: run, rendered, or why it differs (2 minutes)
	scripts/system-packages
	$(BIN)/python -m tests.launch.recipes

# The notice is about the successor of mkdocs-material, which reads the same mkdocs.yml.
docs: $(INSTALLED)  ## the documentation as a searchable site in site/; a broken link is an error
	$(PIP_INSTALL) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "next: $(BIN)/python -m http.server --directory site"

pictures: $(READY)  ## record the pictures of the docs again: the first hour in a terminal, the live page in a browser
	$(BIN)/python scripts/record_first_hour.py --steps 150 --cast docs/pictures/first-hour.cast --svg docs/pictures/first-hour.svg
	$(PIP_INSTALL) --editable '.[browser]'
	KEEPSTEP_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/observe/test_browser.py -k 'themes or keyboard'

structure: $(READY)  ## regenerate the table of rooms in docs/architecture.md
	$(BIN)/python scripts/measure_structure.py --docs docs/architecture.md

lint: $(READY)  ## lint, format, types, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench-h200: $(READY)  ## steps of all presets and the references; needs a GPU; writes benchmarks/results/h200.json and docs/performance.md
	$(BIN)/python -W ignore benchmarks/h200.py
	for part in lora8b loss8b lora70b; do $(BIN)/python -W ignore benchmarks/lora_h200.py --part $$part || exit 1; done
	$(BIN)/python -W ignore benchmarks/moe.py kernels layer steps fp8
	$(BIN)/python benchmarks/h200_page.py

chaos: $(READY)  ## every fault on a small run, recovery compared with torchrun's, 200 restarts; writes benchmarks/results/chaos.json
	scripts/system-packages
	$(BIN)/python -W ignore benchmarks/chaos.py

soak: $(READY)  ## the same, with 200 random faults in one run
	scripts/system-packages
	$(BIN)/python -W ignore benchmarks/chaos.py --soak 200

SURVIVE ?=
survive: $(READY)  ## 1,000 replicas of one run killed, 50 at each point of the protocol; writes benchmarks/results/survive.json
	$(BIN)/python -W ignore benchmarks/survive.py $(SURVIVE)

FUZZ ?= --output benchmarks/results/fuzz.json
fuzz: $(READY)  ## damaged files of every format and hostile requests, 100,000 or FUZZ='--minutes 10 --seed 3'; failing ones go to runs/fuzz
	$(BIN)/python -W ignore -m tests.fuzz.fuzz $(FUZZ)

bench-plan: $(READY)  ## a dry run of gpt3-175b on 512 processes; writes benchmarks/results/plan_dryrun.json
	$(BIN)/python -W ignore benchmarks/plan_dryrun.py

bench-experts: $(READY)  ## experts in every layout of up to 8 processes against one; writes benchmarks/results/expert_grid.json
	$(BIN)/python -W ignore -m benchmarks.expert_grid

bench-checkpoint: $(READY)  ## saves and loads against torch's DCP, and 300 kills
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/checkpoint.py

bench-gguf: $(READY)  ## the same calls from our GGUF export in llama.cpp; x86_64; continues where it stopped; writes benchmarks/results/gguf.json
	$(BIN)/python -W ignore benchmarks/gguf.py

bench-rl: $(READY)  ## 100 kills of a small GRPO run, rollouts included (10 minutes); writes benchmarks/results/rl_kills.json
	$(BIN)/python -W ignore benchmarks/rl_kills.py --output benchmarks/results/rl_kills.json

BFCL ?=
bfcl: $(READY)  ## SmolLM2-135M on BFCL before, after fine-tuning and after GRPO; a GPU helps; continues where it stopped; writes benchmarks/results/bfcl.json
	$(BIN)/python -W ignore benchmarks/bfcl.py $(BFCL)

BENCH_READY := .venv-bench/.data-ready
$(BENCH_READY): requirements/bench-data.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/bench-data.txt
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-foundry==0.22.0
	@touch $@

bench-data: $(READY) $(BENCH_READY)  ## preparation and loading compared with other tools; writes benchmarks/results/data.json
	$(BIN)/python benchmarks/data.py --peers .venv-bench/bin/python --docs docs/data.md

clean:          ## remove the environment and all run folders
	rm -rf $(VENV) .venv-bench .cache runs site
