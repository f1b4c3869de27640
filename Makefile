# One virtual environment, rebuilt when the declared dependencies change.
#
# It holds an editable install, so that an edit counts at once in whatever is run from it by hand.
# `make test` puts a wheel, built on the spot, in front of it: what is tested is what users get,
# so a file missing from the wheel fails here.

PYTHON ?= python3
ARGS   ?=

VENV  := .venv
BIN   := $(VENV)/bin
WHEEL := $(VENV)/wheel
# Errors still show.
PIP   := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check

define RUN_TESTS
@rm -rf $(WHEEL)
@$(PIP) --no-deps --target $(WHEEL) .
PYTHONPATH=$(CURDIR)/$(WHEEL) $(BIN)/pytest -n auto $(ARGS)
endef

.DELETE_ON_ERROR:
.PHONY: help lab corroborate test test-light lint bench mutants record readme docs clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

lab: $(VENV)/.lab ## train under all four schemes and write the report (ARGS="..." goes to `zerosim lab`)
	@$(BIN)/zerosim lab $(ARGS)

corroborate: $(VENV)/.torch ## hold the simulator to real torch.distributed ranks (ARGS="..." goes to it)
	@$(BIN)/zerosim corroborate $(ARGS)

test: $(VENV)/.torch lint ## lint, then run every test against a freshly built wheel (ARGS="..." goes to pytest)
	$(RUN_TESTS)

test-light: lint ## the same without torch: what needs it is skipped, unless it is there already
	$(RUN_TESTS)

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.bench ## time a step beside its floor and its rivals (ARGS="..." goes to the benchmark)
	@$(BIN)/python benchmarks/bench.py $(ARGS)

mutants: $(VENV)/.mutants ## change the source in one place at a time; the tests must notice (ARGS="--jobs 4")
	@$(BIN)/python scripts/mutants.py $(ARGS)

record: $(VENV)/.torch ## run the recorded commands again (ARGS="lab card" for some of them)
	@$(BIN)/python scripts/record.py $(ARGS)

readme: $(VENV)/.dev ## write README.md, its figures and the notebook's outputs from what is recorded
	@$(BIN)/python scripts/write_readme.py
	@$(BIN)/python scripts/run_notebook.py

docs: $(VENV)/.docs ## build the documentation site into out/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environment, caches and builds; results in out/ stay
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks scripts -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("zerosim needs Python 3.11 or newer; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.lab: EXTRAS = [plots]
$(VENV)/.dev: EXTRAS = [dev]
$(VENV)/.torch: EXTRAS = [dev,torch,plan]
$(VENV)/.bench: EXTRAS = [bench]
$(VENV)/.mutants: EXTRAS = [dev,mutants]
$(VENV)/.docs: EXTRAS = [docs]
$(VENV)/.lab $(VENV)/.dev $(VENV)/.torch $(VENV)/.bench $(VENV)/.mutants $(VENV)/.docs: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing zerosim$(EXTRAS) into $(VENV)"
	@$(PIP) --constraint constraints.txt --editable '.$(EXTRAS)'
	@touch $@
