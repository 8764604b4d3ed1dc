# Everything runs in .venv, made on first use from PYTHON (3.11 or newer), with the versions
# in constraints.txt. For example: make demo PYTHON=python3.12

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
SOURCES := $(shell find src -name '*.py')

# pip's build environments (hatchling) follow these and not `-c`: the first up to pip 25, then the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

# Python compiles a module on its first import and keeps the result in __pycache__. Without that,
# each of the many processes of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# A stamp says which install .venv holds. `complete` is missing while an install runs and holds
# the place .venv was made for: one that was interrupted, copied or moved is built anew.
DEMO := .venv/installed-demo
TEST := .venv/installed-test
COMPLETE := .venv/complete
ifneq ($(shell cat $(COMPLETE) 2>/dev/null),$(CURDIR))
REBUILD := rebuild
endif

.PHONY: help demo test quick docs pictures outputs coverage hardening bench results dist clean check-python rebuild
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## list the commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' Makefile

# An install for tests is editable, so it serves the demo as it stands.
demo: $(if $(REBUILD),$(DEMO),$(or $(wildcard $(TEST)),$(DEMO))) ## install into .venv and run the demo
	$(BIN)/fedgft demo

test: $(TEST) ## install for development, then lint, types, layers and tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -n $(WORKERS) --durations=20

quick: $(TEST) ## lint and the tests that take no time: laws, units, each command once (a minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -n $(WORKERS) -m "not slow"

pictures: $(TEST) ## draw the pictures of the documentation (needs Chromium)
	$(BIN)/python docs/pictures.py

outputs: $(TEST) ## run the commands of the documentation and write what they print (minutes)
	$(BIN)/python docs/refresh_outputs.py

docs: $(TEST) ## build the documentation into site/, without a network
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs . site

coverage: $(TEST) ## which lines of src/ no test runs; fails below 95%
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS) --dist loadfile
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

hardening: $(TEST) ## bad inputs, misuse, fuzzing, kills, Ctrl-C, planted faults, load, into results/hardening (hours)
	$(BIN)/pip install -q -e '.[hardening]'
	$(BIN)/python hardening/bad_inputs.py
	$(BIN)/python hardening/misuse.py
	$(BIN)/python hardening/fuzz.py all
	$(BIN)/python hardening/newcomer.py
	$(BIN)/python hardening/privacy.py
	$(BIN)/python hardening/kills.py
	$(BIN)/python hardening/restart.py --out results/hardening
	$(BIN)/python hardening/interrupts.py
	$(BIN)/python hardening/mutants.py --jobs $(WORKERS)
	$(BIN)/python benchmarks/load.py

bench: $(TEST) ## measure the speed of all benchmark cases
	$(BIN)/python benchmarks/speed.py --json | tee results/speed.jsonl
	$(BIN)/python benchmarks/reproduce.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/classifier.py --out results
	$(BIN)/python docs/tables.py

results: $(TEST) ## reproduce the paper and go beyond it, 20 replicates, into results/ (two hours)
	$(BIN)/fedgft reproduce all --data adult compas --seeds 20 --out results
	$(BIN)/python benchmarks/decisions.py --out results
	$(BIN)/python benchmarks/rules.py --out results
	$(BIN)/python benchmarks/rivals.py --out results
	$(BIN)/fedgft bench --out results/bench
	$(BIN)/python benchmarks/levers.py --out results
	$(BIN)/python benchmarks/uncertain_groups.py
	$(BIN)/python benchmarks/coverage --out results
	$(BIN)/python benchmarks/flower.py --deployed --out results
	$(BIN)/fedgft --verbose demo | sed 's/ *$$//' > results/demo.txt && cp fedgft-demo/sites.svg docs/
	$(BIN)/python docs/tables.py

dist: $(TEST) ## build the wheel and the source archive into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

clean: ## remove .venv, caches and build outputs
	rm -rf .venv build dist site fedgft-demo fedgft-train fedgft-frontier fedgft-deploy adult-sites htmlcov .coverage results/cells
	rm -rf .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Most modules of the packages are never imported, so none is compiled ahead of its first import.
$(DEMO): pyproject.toml constraints.txt $(SOURCES) $(REBUILD)
	$(call install,--no-compile .)

$(TEST): pyproject.toml constraints.txt $(REBUILD)
	$(call install,-e '.[test]')

define install
@echo "Installing into .venv; the first time this takes a minute."
@rm -f $(COMPLETE) $(DEMO) $(TEST)
@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(1)
@printf '%s' '$(CURDIR)' > $(COMPLETE)
@touch $@
endef

rebuild: check-python
	@rm -rf .venv
	@$(PYTHON) -m venv .venv

check-python:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "No $(PYTHON) here: install Python 3.11 or newer, or name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than Python 3.11: name a newer one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo "$(PYTHON) cannot make environments: apt install python3-venv (or your system's name for it)" >&2; exit 1; }
