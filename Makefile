# The map of what can be done here; `make` lists it. Everything lands in .venv/, .venv-bench/ and .tools/.

PYTHON ?= python3
ARGS ?=
# Servers that the tests run against; a Debian package each, as PACKAGE or PACKAGE=PROGRAM.
TOOLS ?= prometheus promtool

BIN := .venv/bin
STAMP := .venv/installed

# The benchmarks have an environment of their own: what they compare with brings a hundred packages.
BENCH := .venv-bench/bin
BENCH_STAMP := .venv-bench/installed
COMPOSER := mosaicml==0.32.1

.DEFAULT_GOAL := help
.PHONY: help venv demo test soak bench bench-cuda lint type golden tools build clean

help: ## list what can be done
	@echo 'make TARGET'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv with the package and all that development needs (PYTHON=python3)

# Installed again when pyproject.toml changes; torch's version is pinned there, in the list `dev`.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'make: Python 3.11 or newer is needed; name one with PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ echo 'make: $(PYTHON) cannot create virtual environments; on Debian and Ubuntu install python3-venv' >&2; exit 1; }
	$(BIN)/python -m pip install 'pip>=23'
	$(BIN)/python -m pip install --editable '.[demo,dev]'
	@touch $@

demo: venv ## train a small model with the exporter on (ARGS='--steps 300 --inject nan@100')
	@$(BIN)/torch-grad-exporter demo $(ARGS)

test: venv tools ## run the tests (ARGS='-k demo')
	$(BIN)/python -m pytest $(ARGS)

soak: venv ## train 100,000 steps and look for leaks (6 min)
	$(BIN)/python -m benchmarks.soak $(ARGS)

bench: $(BENCH_STAMP) ## measure what the exporter costs, and other monitors, into docs/benchmarks.md (35 min)
	$(BENCH)/python -m benchmarks.overhead
	$(BENCH)/python -m benchmarks.costs
	$(BENCH)/python -m benchmarks.scraped
	$(BENCH)/python -m benchmarks.report

bench-cuda: venv ## measure the same on a GPU (5 min)
	$(BIN)/python -m benchmarks.cuda $(ARGS)
	$(BIN)/python -m benchmarks.report

$(BENCH_STAMP): pyproject.toml
	@$(PYTHON) -m venv .venv-bench
	$(BENCH)/python -m pip install 'pip>=23'
	$(BENCH)/python -m pip install --editable '.[bench]'
	$(BENCH)/python -m pip install --no-deps '$(COMPOSER)'
	@touch $@

lint: venv ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: venv ## check types
	$(BIN)/mypy --strict --package torch_grad_exporter

golden: venv ## write docs/metrics.md and the golden scrape anew
	$(BIN)/python scripts/metrics_doc.py
	REWRITE_GOLDEN=1 $(BIN)/python -m pytest tests/test_golden.py

tools: ## fetch the servers that the tests run against into .tools
	@TOOLS='$(TOOLS)' scripts/get_tools.sh

build: venv ## build the wheel into dist
	$(BIN)/python -m build --wheel

clean: ## remove everything that make and the tools made
	rm -rf .venv .venv-bench .tools build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
