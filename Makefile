# exitwave: `make help` lists the verbs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long lint format typecheck docs bench clean

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("exitwave needs Python >= 3.11, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 …") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP) ## create .venv with exitwave and its development tools

demo: $(STAMP) ## the whole line once: simulate, stage, train on two ranks, evaluate, report (about 5 minutes, 2 cores)
	$(BIN)/exitwave run examples/quickstart.yaml --out runs/demo

test: $(STAMP) ## the test suite (under 20 minutes, 2 cores)
	$(BIN)/python -m pytest -q -m "not long"

test-long: $(STAMP) ## the long tests: many kills, many schedules
	$(BIN)/python -m pytest -q -m long --timeout 3600

lint: $(STAMP) ## ruff: errors and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## format and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

build/types/exitwave: ## (internal) lets mypy see the mapped packages as exitwave.*
	mkdir -p $@
	for p in simulate ingest train workflows; do ln -sfn ../../../$$p $@/$$p; done

typecheck: $(STAMP) build/types/exitwave ## mypy --strict over the four packages
	$(BIN)/mypy -p exitwave

docs: $(STAMP) ## the documentation as a site, docs/_build/index.html; a dead link is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

bench: $(STAMP) ## the benchmarks, peers beside ours in one run
	@for each in benchmarks/*.py; do echo "# $$each" >&2; $(BIN)/python $$each || exit; done

clean: ## remove build products (never .venv, never your runs)
	rm -rf build dist docs/_build docs/reference/commands.md *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
