# Only Python 3.11 or later must be there: everything else goes into .venv, at the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
SITE := .venv/.site
DIST := .venv/.dist
OTHER = .venvs/torch-$(TORCH)

# One node, from the wheel that pyright[nodejs] brings, whatever the machine has; and no notice of newer versions.
export PYRIGHT_PYTHON_GLOBAL_NODE := 0
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# A worker a core. Each imports torch, so there is no gain in very many; who has done its share takes half of another's.
PYTEST := $(BIN)/python -m pytest --numprocesses=logical --maxprocesses=8 --dist=worksteal

.PHONY: help demo demo-distributed docs site notebooks families-page kernels-page quick test cpus deep families lint pythons bench versions dist
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Run examples/demo.py
	$(BIN)/python examples/demo.py

demo-distributed: $(INSTALLED) ## Run examples/train_gpt.py on two processes
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --check

docs: $(INSTALLED) ## Write docs/schedules.md from the registry of schedules
	$(BIN)/python docs/schedules.py

site: $(SITE) ## Build build/site from docs/ and the docstrings, with warnings as errors and without a network
	@rm -rf build/site build/doctrees
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site -d build/doctrees docs build/site
	$(BIN)/python docs/site/links.py build/site
	@echo "open build/site/index.html"

notebooks: $(INSTALLED) ## Write build/notebooks, three pages as notebooks: .venv/bin/jupyter lab build/notebooks
	$(BIN)/python -m docs.notebooks build/notebooks
	$(BIN)/python -m pip install -q -c constraints.txt jupyterlab

families-page: $(INSTALLED) ## Write docs/families.md: each family of transformers, measured on this machine
	$(BIN)/python -m docs.families

kernels-page: $(INSTALLED) ## Write docs/kernels.md: how each kernel runs, tried on this machine
	$(BIN)/python -m docs.kernels

# Types are checked by one process for half a minute, so tests run beside it.
quick: style ## Lint, types, and the fast half of the tests: what is not marked slow
	@$(MAKE) --no-print-directory --jobs=2 types fast

test: style ## Lint, types, tests, property tests, doctests and the code blocks of the documentation
	@$(MAKE) --no-print-directory --jobs=2 types all

fast: $(INSTALLED)
	$(PYTEST) -m 'not slow and not deep'

all: $(INSTALLED)
	$(PYTEST)

# Kernels without AVX-512 add up in another order, in torch and in oneDNN.
cpus: $(INSTALLED) ## Run the fast half of the tests with the kernels of other x86 CPUs
	@set -e; for kernels in ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2; do \
		echo "== $$kernels"; env $$kernels $(PYTEST) -m 'not slow and not deep'; done

deep: $(INSTALLED) ## Thousands of random cases for each property, and the tests marked deep; hours, without a time limit
	HYPOTHESIS_PROFILE=deep $(PYTEST) -m 'law or deep' --timeout=0 -o faulthandler_timeout=0

families: $(INSTALLED) ## Every family of transformers at four stages, against its own autograd
	$(PYTEST) tests/test_families.py -m 'deep or not deep' --timeout=0 -o faulthandler_timeout=0

lint: style types ## Check style, format and types

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/pyright

pythons: $(INSTALLED) ## Check types for each later Python, as `make types` does for 3.11
	@set -e; for python in 3.12 3.13 3.14; do echo "== $$python"; $(BIN)/pyright --pythonversion $$python; done

bench: $(INSTALLED) ## Run every file of benchmarks/, one after the other
	@set -e; for file in $(sort $(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file; done

versions: ## Run the fast half of the tests on another torch: make versions TORCH=2.15.0
	@test -n "$(TORCH)" || { echo "say which: make versions TORCH=2.15.0"; exit 2; }
	$(PYTHON) -m venv $(OTHER)
	grep -v -E '^(torch|setuptools)==' constraints.txt > $(OTHER)/constraints.txt  # each torch wants a setuptools of its own
	$(OTHER)/bin/python -m pip install -q -c $(OTHER)/constraints.txt hatchling editables torch==$(TORCH)
	$(OTHER)/bin/python -m pip install -q -c $(OTHER)/constraints.txt --no-build-isolation -e '.[all]' torch==$(TORCH)
	$(OTHER)/bin/python -m pytest --numprocesses=logical --maxprocesses=8 --dist=worksteal -m 'not slow and not deep'

# Built twice: the same commit gives the same bytes.
dist: $(DIST) ## Build wheel and sdist into dist/, check them, and use the wheel in an empty environment
	rm -rf dist build/again build/installed
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m hatchling build
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m hatchling build -d build/again
	cd dist && for file in *; do cmp $$file ../build/again/$$file; done
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/installed
	build/installed/bin/python -m pip install -q -c constraints.txt dist/*.whl
	cd build && installed/bin/python ../tests/installed.py
	build/installed/bin/python -m pip install -q -c constraints.txt rich typer
	cd build && installed/bin/fpipe show one_f_one_b --ranks 3 --microbatches 4

# The build tools come first, pinned too: an isolated build would fetch its own, at any version.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt hatchling editables
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[all]'
	@touch $@

# Sphinx is there for the site alone.
$(SITE): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[site]'
	@touch $@

$(DIST): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dist]'
	@touch $@
