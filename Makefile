# Every target is a thin wrapper of a command in the README; `make demo` and `make test` set themselves up.
MODEL  ?= qwen3-4b
DATA   ?= perfectblend
CODEC  ?= bf16
RECIPE ?= dspark
SUITE  ?= all
# processes: one per accelerator, one on a CPU
GPUS   ?= $$($(BIN)/python -c 'import torch; print("gpu" if torch.accelerator.is_available() else 1)')
LIMIT  ?=
OUT    ?=
ARGS   ?=
TESTS  ?= -m "not slow"

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
# test sets whose questions are kept out of the training prompts: `make suites` writes them
SUITES  ?= $(wildcard suites)
DATAARG := target=$(MODEL) data=$(DATA) $(if $(OUT),out=$(OUT)) $(if $(LIMIT),prompts.limit=$(LIMIT)) $(if $(SUITES),'prompts.decontaminate=[$(SUITES)]') $(ARGS)
# a data step on every accelerator, without a launcher where there is one process
ONALL    = n=$(GPUS); if [ "$$n" = 1 ]; then run=$(BIN)/python; else run="$(BIN)/torchrun --standalone --nproc-per-node $$n"; fi; $$run -m deepspec.data

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint suites cache train eval report clean

help:           ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP)   ## virtual environment with every dependency

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "DeepSpec needs Python 3.11 or newer: make setup PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)    ## the whole chain on SmolLM2-135M: prompts to report, on a CPU
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo.sh

test: $(STAMP)    ## the fast tests (TESTS="-k name" selects)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(TESTS)

test-all: TESTS := -m "slow or not slow"
test-all: test    ## every test, the slow end-to-end ones too

lint: $(STAMP)    ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

cache: $(STAMP)   ## prompts, responses and target cache (MODEL, DATA, CODEC, LIMIT, OUT, GPUS)
	$(BIN)/python -m deepspec.data prompts $(DATAARG)
	$(BIN)/python -m deepspec.data estimate $(DATAARG) cache=$(CODEC)
	$(ONALL) regenerate $(DATAARG)
	$(ONALL) cache $(DATAARG) cache=$(CODEC)

suites: $(STAMP)  ## the evaluation's prompts in suites/, for make cache to keep out and for --data-dir
	$(BIN)/python -m deepspec.eval.suites suites

train: $(STAMP)   ## train a drafter (MODEL, RECIPE, GPUS)
	$(BIN)/torchrun --standalone --nproc-per-node $(GPUS) deepspec/train/main.py +recipe=$(RECIPE) target=$(MODEL) $(if $(OUT),out=$(OUT)) $(ARGS)

eval: $(STAMP)    ## evaluate the newest drafter of all models (SUITE)
	$(BIN)/python -m deepspec.eval --suite $(SUITE) $(ARGS)

report: $(STAMP)  ## rebuild the HTML report of the newest evaluation
	$(BIN)/python -m deepspec.eval.report $(ARGS)

clean:          ## remove caches of the tools; never data or drafters
	rm -rf .pytest_cache .ruff_cache .mypy_cache build dist && find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
