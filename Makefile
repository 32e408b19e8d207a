# The map of what can be done here; `make` lists it. Everything lands in .venv*/ and .tools/.

PYTHON ?= python3
ARGS ?=
DIST ?= dist
# Programs that the tests run against; a Debian package each, as PACKAGE or PACKAGE=PROGRAM. Chromium alone is installed.
TOOLS ?= prometheus promtool prometheus-alertmanager prometheus-alertmanager=amtool victoria-metrics victoria-metrics=vmalert docker-compose chromium

# The one pin of pyproject.toml, given to pip by name besides: it would first download the newest torch, which the package itself
# allows, and only then read the pin among the extra's requirements.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",$$/\1/p' pyproject.toml | sort -u)

BIN := .venv/bin
STAMP := .venv/installed

# The benchmarks have an environment of their own: what they compare with brings a hundred packages.
BENCH := .venv-bench/bin
BENCH_STAMP := .venv-bench/installed
COMPOSER := mosaicml==0.32.1

# The trainers that people use, and what each of them needs, stay out of the way of development as well.
TRAINERS := .venv-trainers/bin
TRAINERS_STAMP := .venv-trainers/installed

# A gigabyte; see `make kernels`.
TRITON := .tools/triton

# What `make compat` runs: the oldest torch that pyproject.toml allows, two in between, and the newest, each in an environment of its own.
# A version may name a build, such as 2.4.0+cpu; COMPAT_PIP is what pip needs in addition to find it. From PyPI's builds for
# Linux comes CUDA as well: about 5 GB each. COMPAT_NEEDS: `numpy<2` for one that was built before numpy 2.
COMPAT ?= 2.4.0 2.6.0 2.9.1 2.15.0
COMPAT_PIP ?=
COMPAT_NEEDS ?=
# The tests of what the package does with PyTorch.
COMPAT_TESTS ?= tests/test_torch_compat.py tests/matrix tests/capture tests/statistics tests/store tests/model \
	tests/collectors/test_training_values.py tests/distributed/test_ranks.py tests/distributed/test_store.py \
	tests/test_traps.py tests/test_training_unchanged.py tests/test_full_stages.py tests/test_lifecycle.py tests/test_ending.py \
	tests/test_exits.py

.DEFAULT_GOAL := help
.PHONY: help venv demo quick quick-tests test test-full trainers kernels compat mutants soak bench bench-cuda bench-frameworks lint type golden dashboards pictures docs tools build image clean

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
	$(BIN)/python -m pip install --editable '.[dev]' '$(TORCH)'
	@touch $@

# The demo needs a tenth of what development does; where .venv is there, it is used.
DEMO := $(if $(wildcard $(STAMP)),.venv,.venv-demo)

demo: $(DEMO)/installed ## train a small model with the exporter on (ARGS='--steps 300 --inject nan@100')
	@$(DEMO)/bin/torch-grad-exporter demo $(ARGS)

.venv-demo/installed: pyproject.toml
	@$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install 'pip>=23'
	.venv-demo/bin/python -m pip install --editable . '$(TORCH)'
	@touch $@

# Two files for each core at a time, since many tests wait for a server or another process; the longest files come first
# (tests/conftest.py). Torch has one thread in each worker: the threads of several would wait for the same cores by spinning.
# Bytecode is written whatever the environment says: each worker, and each process of a test, would compile all files again.
WORKERS ?= $(shell echo $$((2 * $$(nproc 2>/dev/null || echo 2))))
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Without -m the options of pyproject.toml leave out the marker `full`.
QUICK = not full and not server and not process and not slow

quick: venv ## check style, types, and all that one process can test, in a minute
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target type quick-tests lint

# None of these waits for anything, so that one worker for each core is enough.
quick-tests: WORKERS = $(shell nproc 2>/dev/null || echo 2)
quick-tests: venv
	$(PYTEST) -m '$(QUICK)' $(ARGS)

test: venv tools ## run the tests that a change needs, in five minutes (ARGS='-k demo')
	$(PYTEST) $(ARGS)

test-full: venv tools $(TRAINERS_STAMP) $(TRITON) ## run the tests that `make test` leaves out: variants, alerts end to end, trainers
	@failed=0; \
	$(PYTEST) -m full $(ARGS) || failed=1; \
	$(PYTEST_TRAINERS) $(ARGS) || failed=1; \
	$(PYTEST_KERNELS) $(ARGS) || failed=1; \
	exit $$failed

# The programs that measure gradients on a GPU, by the interpreter of Triton, and compiled for GPUs that are not here. Triton is
# installed apart: torch uses it wherever it can be imported.
PYTEST_KERNELS = TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $$(nproc) tests/kernels

kernels: venv $(TRITON) ## run the tests of the programs for GPUs by Triton's interpreter, on the CPU (ARGS='-k units')
	$(PYTEST_KERNELS) $(ARGS)

$(TRITON): | venv
	@rm -rf $@.part
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part 'triton==3.9.0'
	mv $@.part $@

# Elsewhere the folder is left out (tests/conftest.py); here a package that is absent fails its tests. A file stays on one worker:
# Ray starts a cluster for it, and DeepSpeed keeps the process groups of its process.
PYTEST_TRAINERS = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(TRAINERS)/python -m pytest --numprocesses $$(nproc) --dist loadfile --no-loadscope-reorder tests/trainers

trainers: $(TRAINERS_STAMP) ## train by Transformers, Lightning, Ignite, DeepSpeed and others with the exporter on (ARGS='-k lightning')
	$(PYTEST_TRAINERS) $(ARGS)

$(TRAINERS_STAMP): pyproject.toml
	@$(PYTHON) -m venv .venv-trainers
	$(TRAINERS)/python -m pip install 'pip>=23'
	$(TRAINERS)/python -m pip install --editable '.[trainers]' '$(TORCH)'
	@# It writes a cache at its first import, which another process that imports it meanwhile would read half.
	@$(TRAINERS)/python -c 'import yapf'
	@touch $@

# A test that needs a newer torch skips itself (tests/support/torch_versions.py).
compat: $(COMPAT:%=.venv-torch-%/installed) ## run the tests that concern PyTorch on older versions of it (COMPAT='2.4.0', ARGS='-x')
	@failed=; \
	for version in $(COMPAT); do \
		echo "torch $$version"; \
		OMP_NUM_THREADS=1 .venv-torch-$$version/bin/python -m pytest -p tests.support.torch_versions \
			-m 'not full and not server and not cuda' $(COMPAT_TESTS) $(ARGS) || failed="$$failed $$version"; \
	done; \
	test -z "$$failed" || { echo "make: tests failed with torch$$failed" >&2; exit 1; }

.venv-torch-%/installed: pyproject.toml
	@$(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/python -m pip install 'pip>=23'
	.venv-torch-$*/bin/python -m pip install $(COMPAT_PIP) --editable '.[compat]' 'torch==$*' $(COMPAT_NEEDS)
	@touch $@

FOLDER ?= torch_grad_exporter/statistics
TESTS ?= tests
COUNT ?= 40

mutants: .venv/mutants ## change code in small ways and print what no test notices (FOLDER=... TESTS='...' COUNT=40)
	$(BIN)/python scripts/mutants.py $(FOLDER) --tests $(TESTS) --count $(COUNT) $(ARGS)

.venv/mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[mutants]' '$(TORCH)'
	@touch $@

soak: venv tools ## abuse the server, train 1,000,000 steps, look for leaks and false alarms, into docs/benchmarks.md (55 min)
	@failed=0; \
	$(BIN)/python -m benchmarks.abuse || failed=1; \
	$(BIN)/python -m benchmarks.soak || failed=1; \
	$(BIN)/python -m benchmarks.alarms || failed=1; \
	$(BIN)/python -m benchmarks.queries || failed=1; \
	$(BIN)/python -m benchmarks.report || failed=1; \
	exit $$failed

bench: $(BENCH_STAMP) ## measure what the exporter costs, and other monitors, into docs/benchmarks.md (45 min)
	$(BENCH)/python -m benchmarks.overhead
	$(BENCH)/python -m benchmarks.costs
	$(BENCH)/python -m benchmarks.scraped
	$(BENCH)/python -m benchmarks.idle
	$(BENCH)/python -m benchmarks.report

bench-cuda: venv ## measure the same on a GPU (5 min)
	$(BIN)/python -m benchmarks.cuda $(ARGS)
	$(BIN)/python -m benchmarks.report

$(BENCH_STAMP): pyproject.toml
	@$(PYTHON) -m venv .venv-bench
	$(BENCH)/python -m pip install 'pip>=23'
	$(BENCH)/python -m pip install --editable '.[bench]' '$(TORCH)'
	$(BENCH)/python -m pip install --no-deps '$(COMPOSER)'
	@touch $@

lint: venv ## check style, formatting, names, who imports whom and the files for GitHub
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/names.py
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml

type: venv ## check types
	$(BIN)/mypy --strict --package torch_grad_exporter

golden: venv ## write docs/metrics.md, the golden scrape and what follows from the options anew
	$(BIN)/python scripts/metrics_doc.py
	$(BIN)/python scripts/options_doc.py
	REWRITE_GOLDEN=1 $(BIN)/python -m pytest tests/metrics/test_golden.py

dashboards: venv ## make the Grafana dashboards anew
	$(BIN)/python -m dashboards.generate

pictures: $(TRAINERS_STAMP) ## draw a run of each framework into docs/frameworks/ (ARGS='lightning ray')
	OMP_NUM_THREADS=1 PYTHONPATH=. $(TRAINERS)/python scripts/framework_pictures.py $(ARGS)

bench-frameworks: $(TRAINERS_STAMP) ## measure what the line for each framework costs (12 min; ARGS='lightning')
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(TRAINERS)/python scripts/framework_pictures.py --cost $(ARGS) 2>/dev/null

docs: venv ## build the documentation as a site into site/, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

tools: ## fetch the servers, the browser and Grafana's types that the tests run against into .tools
	@TOOLS='$(TOOLS)' scripts/get_tools.sh
	@scripts/get_schema.sh

build: venv ## build the sdist and, from it, the wheel into dist/ (DIST=...)
	$(BIN)/python -m build --outdir $(DIST)

image: ## build the image of the demo and the gate, where Docker is (ARGS='--build-arg ...')
	@docker info >/dev/null 2>&1 || { echo 'make: no Docker daemon answers; install Docker, or start it' >&2; exit 1; }
	docker build --tag torch-grad-exporter $(ARGS) .

clean: ## remove everything that make and the tools made
	rm -rf .venv .venv-demo .venv-bench .venv-trainers .venv-torch-* .tools build dist site .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
