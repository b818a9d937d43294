# One entry for people and CI alike. `make` lists the targets.
VENV := .venv
BIN := $(VENV)/bin
CHILDREN ?= 2
FUZZ_S ?= 60
RUNS := $(VENV)/runs
READY := $(VENV)/ready
# One process of tests more than CPUs, 5 at most, since two fifths of the tests' time are waits; each starts with a part
# of the list, and one that is done takes from the rest.
WORKERS ?= $(shell n=$$(nproc); echo $$((n > 4 ? 5 : n + 1)))
PYTEST := $(BIN)/python -m pytest -p xdist.plugin --numprocesses $(WORKERS) --dist worksteal --slowest-files 25

.PHONY: help setup native demo test whole fuzz unit lint types contracts house audit mutants docs bench kubernetes clean

# Of the sources each process that the tests start would otherwise make its own bytecode.
test whole fuzz unit: export PYTHONDONTWRITEBYTECODE =

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(RUNS): pyproject.toml constraints.txt scripts/setup.sh
	TOOLS= scripts/setup.sh

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh

setup: $(READY)  ## make .venv with isthmus in it

native: $(READY)  ## compile the gateway's state machine, which its process then uses; needs a C++ compiler
	$(BIN)/python scripts/build_native.py

demo: $(RUNS)  ## train a small model across three emulated clusters and show the result
	@$(BIN)/isthmus demo

test: $(READY) lint  ## lint, types, layer contracts, and all tests
	$(PYTEST)

whole: $(READY) lint  ## the same, with every case of the rules of which `test` tries a sample
	$(PYTEST) --whole

fuzz: $(READY)  ## every parser of files and messages from others, for a minute of CPU each; FUZZ_S=10 for less
	$(PYTEST) tests/attack/test_fuzz_parsers.py tests/attack/test_fuzz_sites.py tests/attack/test_link_parsers.py --fuzz-s $(FUZZ_S) --timeout 3600

unit: $(READY)  ## the fast tests of single parts only
	$(PYTEST) -m 'not slow and not root and not gpu and not integration and not attack'

lint: $(READY)  ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target types contracts

types:
	$(BIN)/mypy

contracts:
	$(BIN)/lint-imports --no-cache

house: $(READY)  ## print the figures that keep the code base in order, each with its limit
	$(BIN)/python -m scripts.house

audit:  ## compare the versions that CI installs with the published advisories; needs their server
	test -x $(VENV)/audit/bin/pip-audit || { python3 -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install -q pip-audit; }
	sh scripts/audit.sh $(VENV)/audit/bin/pip-audit

mutants: $(READY)  ## mutation testing; MUTANTS='isthmus.site.*' SAMPLE=200 SEED=1 CHILDREN=2 for a part of it
	$(BIN)/python -m scripts.mutants --children $(CHILDREN) $(SAMPLE:%=--sample %) $(SEED:%=--seed %) $(MUTANTS)

docs: $(READY)  ## generate the references, run the examples in the docs, and build the site
	$(BIN)/python -m scripts.docs
	$(BIN)/mkdocs build --strict --quiet

bench: $(READY)  ## run every benchmark and write docs/benchmarks
	$(BIN)/python -m benchmarks

kubernetes: $(READY)  ## build a real Kubernetes API server for the tests, from Debian's source package (minutes)
	VENV=$(VENV) scripts/kubernetes.sh

clean:  ## remove what setup and runs made
	rm -rf $(VENV) .isthmus site .mypy_cache .ruff_cache .hypothesis .pytest_cache
