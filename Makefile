# Each target makes the environment that it needs; the second call is quick.
#
#   make demo     uniform against personalized training on small images; prints a table, writes a page
#   make test     lint, types, tests, doctests, the README's code, the report page in a browser (11 to 14 minutes)
#   make check    its two-minute part: lint, types, and the quick rooms
#   make lint     ruff and mypy only
#   make fuzz     10,000 damaged files and odd options, and 1,000 kills of a run (an hour or so)
#   make bench    ratios against the peers, in one run (several minutes)
#   make guards   every refusal of the engine's checks is switched off once, to see a test fail (half an hour or so)
#   make kills    a process at a ledger is killed 1,000 times, on SQLite and PostgreSQL (about ten minutes)
#   make docs     the documentation, into site/
#   make reproduce WHAT=...   the paper's tables and figures; more options: OPTIONS="--dataset mnist"
#
# Another interpreter: make demo PYTHON=python3.12. Another place for the environment: VENV=/tmp/env.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
QUICK := tests/test_rooms.py $(addprefix tests/,budgets accounting sampling data models reporting) \
	tests/engine/test_step.py tests/engine/test_edges.py tests/training/test_options.py tests/training/test_run_folder.py \
	tests/cli/test_plan.py
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test check lint fuzz bench guards kills docs reproduce clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.ready-demo
	$(BIN)/python -m pdpsgd.cli.demo

# Everything is run, and everything that failed is seen, before it ends.
test: $(VENV)/.ready-test
	@echo "$(if $(PYTEST),Some tests,All tests: 11 to 14 minutes on two quiet cores (make check: two)). Skipped ones say why at the end."
	@failed=0; $(LINT) || failed=1; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -n $(WORKERS) $(PYTEST) || failed=1; exit $$failed

check: $(VENV)/.ready-test
	@echo "The quick part of the tests: two minutes on two quiet cores."
	@failed=0; $(LINT) || failed=1; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -n $(WORKERS) $(QUICK) || failed=1; exit $$failed

lint: $(VENV)/.ready-test
	$(LINT)

fuzz: $(VENV)/.ready-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.cli.fuzz 10000 $(FUZZ)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.training.killed 1000

bench: $(VENV)/.ready-bench
	@for file in bench/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

kills: $(VENV)/.ready-test
	KILLS=1000 $(BIN)/python -m pytest -q tests/ledger/test_failures.py -k killed_at_any_moment

guards: $(VENV)/.ready-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.guards $(or $(GUARDS),engine gradients/unsupported tests/engine tests/gradients/test_refusals.py)

docs: $(VENV)/.ready-docs
	$(BIN)/mkdocs build --strict

reproduce: $(VENV)/.ready-demo
	$(BIN)/python -m experiments $(WHAT) $(OPTIONS)

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache

# One stamp for each set of extras: installing again is skipped until the requirements change.
$(VENV)/.ready-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what 'make $*' needs into $(VENV) (once)"
	$(INSTALL) -e '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
