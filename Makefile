# Everything runs in a virtual environment, made on first use and brought up to date when pyproject.toml changes.
#
#   make test TORCH=torch==2.11.0 VENV=.venv-2.11    another torch, in an environment of its own
#   make test WORKERS=4 ARGS="-k lower"              more workers, and more arguments for pytest
#
# TORCH is installed first and alone: left to choose, pip takes the newest CUDA build, several GB.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=
# Each starts processes of its own: two keep two cores busy.
WORKERS ?= 2

BIN     = $(abspath $(VENV))/bin
PIP     = $(BIN)/python -m pip --quiet --disable-pip-version-check
# A worker that has run its share takes over what the other hasn't begun.
PYTEST  = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
SOURCES = src tests docs/tutorials docs/site

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup bytecode test test-slow mutations sweep zoo states generation scaling demo zoo-page site site-pages lint layers style types format docs bench gpu wheel clean

help:
	@echo "make test       run the tests                       make test-slow  run the slow ones"
	@echo "make sweep      try every rule of every operator    "
	@echo "make demo       shard a trained model and show it   make bench      measure"
	@echo "make lint       style, types and layers             make format     let ruff fix what it can"
	@echo "make zoo        try every architecture, and write docs/coverage.md"
	@echo "make states     try every use of parameters and states, and write docs/state.md"
	@echo "make generation try every way of generating, and write docs/generation.md"
	@echo "make site       build the pages and the API as a site"
	@echo "make scaling    estimate programs of large models, and write docs/scaling.md; takes 10 to 30 min, ARGS='\"Llama 3.1 8B\"' 2"
	@echo "make docs       regenerate the generated pages      make wheel      build sdist and wheel into dist/"
	@echo "make gpu        test kernels and attention, and measure the kernels, on a machine with a GPU and torch, in the interpreter GPU_PYTHON"
	@echo "make mutations  plant bugs, and say which tests notice"
	@echo "make setup      only the virtual environment        make clean      remove what was built, not $(VENV)"

# The stamp names the torch that was asked for: another TORCH in the same environment installs anew.
TORCH_STAMP := $(VENV)/.torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)

$(TORCH_STAMP):
	@echo "Setting up $(VENV) with $(TORCH)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.torch-*
	@$(PIP) install '$(TORCH)'
	@touch $@

$(VENV)/.extra-%: pyproject.toml $(TORCH_STAMP)
	@echo "Installing tpplan[$*] into $(VENV)"
	@$(PIP) install --editable '.[$*]' '$(TORCH)'
	@touch $@

setup: $(VENV)/.extra-dev

# Processes that tests start read bytecode, also where PYTHONDONTWRITEBYTECODE keeps them from writing any.
bytecode: $(VENV)/.extra-dev
	@$(BIN)/python -m compileall -q src tests

test: bytecode
	$(PYTEST) $(ARGS)

test-slow: bytecode
	$(PYTEST) -m "slow and not sweep" $(ARGS)

mutations: $(VENV)/.extra-dev
	$(BIN)/python -m tests.mutations $(ARGS)

sweep: $(VENV)/.extra-dev
	$(PYTEST) -m sweep $(ARGS)

# With the packages whose models it tries, in an environment of their own: what they bring along fails some tests.
zoo:
	$(MAKE) VENV=$(VENV)-zoo zoo-page
zoo-page: $(VENV)/.extra-dev $(VENV)/.extra-zoo
	$(BIN)/python -m tests.zoo.page $(ARGS)

states: $(VENV)/.extra-dev
	$(BIN)/python -m tests.checkpoint.page $(ARGS)

generation: $(VENV)/.extra-dev
	$(BIN)/python -m tests.generation.page $(ARGS)

# Compile times are of one core; the largest models take minutes.
scaling: $(VENV)/.extra-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.cost.scaling $(ARGS)

demo: $(VENV)/.extra-demo
	$(BIN)/tpplan demo $(ARGS)

# With --keep-going, one that fails doesn't hide what the others say.
lint: layers style types

layers: $(VENV)/.extra-dev
	$(BIN)/python -m pytest --quiet tests/house/test_layers.py

style: $(VENV)/.extra-dev
	$(BIN)/ruff check $(SOURCES); found=$$?; $(BIN)/ruff format --check $(SOURCES) && exit $$found

types: $(VENV)/.extra-dev
	$(BIN)/pyright --threads $(WORKERS) --pythonpath $(BIN)/python

format: $(VENV)/.extra-dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Through a temporary file, so that a command that fails leaves the page as it was.
docs: $(VENV)/.extra-dev
	$(BIN)/tpplan schema > plans/plan.schema.json.new
	mv plans/plan.schema.json.new plans/plan.schema.json
	$(BIN)/tpplan rule --all --markdown > docs/diagnostics.md.new
	mv docs/diagnostics.md.new docs/diagnostics.md

# In an environment of its own, as the zoo. A link that leads nowhere is an error; nothing is loaded from elsewhere.
site:
	$(MAKE) VENV=$(VENV)-site site-pages
site-pages: $(VENV)/.extra-site
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs/site docs build/site
	@echo "build/site/index.html"

bench: $(VENV)/.extra-dev
	$(BIN)/tpplan bench $(ARGS)

# On the torch that the machine has: GPU_PYTHON's, which isn't replaced. What else is missing comes from pip; Liger is
# what the kernels are held against, and may be absent.
GPU_PYTHON ?= python3
gpu:
	$(GPU_PYTHON) -m pip install --quiet 'pytest>=8.4' 'hypothesis>=6.100' 'ruamel.yaml>=0.18' 'rich>=13' 'pydantic>=2' \
	    'safetensors>=0.4.3' 'numpy>=1.26'
	-$(GPU_PYTHON) -m pip install --quiet --no-deps liger-kernel==0.8.5
	PYTHONPATH=src $(GPU_PYTHON) -m pytest tests/kernels tests/ops/test_attention_on_a_gpu.py -m gpu
	PYTHONPATH=src $(GPU_PYTHON) -m pytest tests/cli/test_device.py
	PYTHONPATH=src $(GPU_PYTHON) -m tpplan.bench.kernels $(ARGS)

wheel: $(VENV)/.extra-dev
	$(BIN)/hatchling build --clean --directory dist --target sdist --target wheel

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
