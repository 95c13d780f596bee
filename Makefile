# `make train` and `make test` set everything up by themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# setuptools warns of every editable install.
PIP    := PYTHONWARNINGS='ignore:Editable installation' \
          $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
# Some machines forbid Python to keep what it has compiled. Tests start many processes: each would compile torch again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup train test learn tables sizes kernels stack docs wheel check format clean

help: ## show this list
	@awk 'BEGIN { FS = ":.*## "; print "make <target>\n" } \
	     /^[a-z-]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "To use the environment:    source $(BIN)/activate"
	@echo "Training takes overrides:  python train.py attention=tiled seq_len=512"
	@echo "All overrides:             python train.py --help"
	@echo
	@echo "Libraries keep files outside this folder, which make clean leaves:"
	@echo "  /tmp/torchinductor_<you>, ~/.triton            compiled code"
	@echo "  /tmp/torchelastic_*, /tmp/pytorch-errorfile-*  reports of ranks that failed"
	@echo "  ~/.cache/matplotlib, ~/.cache/huggingface      a list of fonts; data sets and models"

# What to install of pyproject.toml's extras. The stamp is newer than that file when the environment is up to date.
# The pip that comes with Python 3.11 takes three times as long as today's.
EXTRAS ?= dev
$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: this project needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 setup" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@touch $@

$(VENV)/.installed: $(VENV)/.pip pyproject.toml
	$(PIP) $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[$(EXTRAS)]'
	@touch $@

setup: $(VENV)/.installed ## create .venv with all dependencies (a minute or two)

train: setup ## train a small GPT on the source of Python's standard library (two and a half minutes on two cores)
	$(BIN)/python train.py

TESTS ?= -m "not slow"
test: setup ## run the tests but the slow ones (about three minutes on two cores; tests that need a GPU are skipped without one)
	$(BIN)/python -m pytest $(TESTS) --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

learn: setup ## from softmax to FlashAttention in checked steps, and a page to walk through (half a minute)
	$(BIN)/python -m learn

tables: setup ## paste the tables of bench/results/ and of the configuration into README and docs/
	$(BIN)/python -m bench.tables

sizes: setup ## print the size of each package beside its budget
	$(BIN)/python -m bench.sizes

kernels: setup ## compile all GPU kernels, which needs no GPU, and renew their record (some minutes)
	$(BIN)/python -m bench.kernels

# PAIRS="-k 'torch_2_15 and python_3_14'" is one of them.
stack: $(VENV)/.pip ## test every supported torch and Python, each in a temporary environment of 6 GB (20 of them, some minutes each)
	@test -x $(BIN)/nox || $(PIP) 'nox[uv]>=2025.2.9'
	$(BIN)/nox $(PAIRS)

# For continuous integration, whose other checks use the Triton of a newer torch.
.PHONY: oldest-triton
OLDEST := .cache/oldest-triton
$(OLDEST)/.installed: $(VENV)/.pip
	rm -rf $(OLDEST)
	$(PIP) --no-deps --target $(OLDEST) 'triton==3.6.*'
	@touch $@

oldest-triton: setup $(OLDEST)/.installed
	TRITON_INTERPRET=0 PYTHONPATH=$(OLDEST) $(BIN)/python -m bench.kernels.oldest sm_80 sm_90a

docs: setup ## build the documentation site in docs/_build/html (half a minute)
	@test -x $(BIN)/sphinx-build || $(PIP) --editable '.[docs]'
	$(BIN)/python -m learn out=docs/_build/extra/walk.html
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html
	@echo "site: docs/_build/html/index.html"

wheel: setup ## build the library's wheel in dist/, and test it away from the checkout (half a minute)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m pytest tests/attention/test_library.py

check: setup ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## fix format and lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment, caches and prepared data; keep the runs in outputs/ and multirun/
	rm -rf dist $(VENV) .cache .nox .pytest_cache .ruff_cache .mypy_cache build docs/_build *.egg-info
	find . -name __pycache__ -type d -not -path './outputs/*' -prune -exec rm -rf {} +
