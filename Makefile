# The commands of this repository. Each one sets up its environment first; that takes minutes once, then no time.
PY := .venv/bin/python
PORT ?= 30000
WORKERS ?= 2 # processes for tests that may run beside others; 0: none but pytest itself, for a debugger
HOST := # a version of SGLang. Not read from the environment, where shells keep a machine's name
LINTED := pla_sglang kernels patches graphs scripts setup.py $(wildcard bench tests examples)

.PHONY: help setup serve test test-host test-lab demo lint package docs constraints clean clean-cache

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: ## make .venv (PYTHON=... chooses the interpreter, HOST=0.5.23 the version of SGLang, until another is named)
	@bash scripts/setup_venv.sh $(if $(HOST),--host $(HOST))

serve: setup ## serve the embedded demo model on this machine (PORT=30000)
	@exec $(PY) -m pla_sglang.launch_server --prefill-disagg temporal --enable-metrics --port $(PORT)

test: setup ## test the product and the benches that users run (ARGS=... goes to pytest)
	@WORKERS=$(WORKERS) bash scripts/run_tests.sh $(PY) $(ARGS)

test-lab: setup ## test bench/lab: papers, fleets, baselines (ARGS=...)
	@bash scripts/run_twice.sh $(PY) -n $(or $(WORKERS),2) --dist loadfile bench/lab/tests $(ARGS)

test-host: ## tests that meet SGLang, on another version than .venv has (HOST=0.5.17, ARGS=...)
	@bash scripts/setup_venv.sh --thin $(or $(HOST),0.5.17)
	@WORKERS=$(WORKERS) bash scripts/run_tests.sh .venv-$(or $(HOST),0.5.17)/bin/python -m host $(ARGS)

demo: setup ## short requests behind long ones, stock SGLang against pla_sglang
	$(PY) -m bench hol $(ARGS)

lint: setup ## style, format and types
	$(PY) -m ruff check $(LINTED)
	$(PY) -m ruff format --check $(LINTED)
	$(PY) -m mypy

package: setup ## build and check an sdist and a wheel in dist/, with tools of their own
	$(PY) -m venv build/tools
	build/tools/bin/pip install --quiet --constraint scripts/tools.txt build twine
	rm -rf dist && build/tools/bin/pyproject-build
	build/tools/bin/twine check --strict dist/*
	rm -rf pla_sglang.egg-info # it would hide the installed metadata from processes started here

docs: setup ## the pages as a site in build/site, with tools of their own; a dead link or a lost page ends it
	$(PY) -m venv build/tools
	build/tools/bin/pip install --quiet --constraint scripts/tools.txt mkdocs-material
	$(PY) scripts/stage_docs.py build/docs-source
	NO_MKDOCS_2_WARNING=1 build/tools/bin/mkdocs build --strict

constraints: ## resolve the dependencies afresh into constraints-HOST.txt
	HOST=$(HOST) bash scripts/make_constraints.sh

clean: ## remove .venv and everything that was built here
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench_out
	find . -name __pycache__ -prune -exec rm -rf {} +

clean-cache: ## remove shared environments in the cache folder that this checkout does not use
	@bash scripts/setup_venv.sh --prune
