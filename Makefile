# Everything a newcomer types. Each target sets up what it needs in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Asked for by itself first, so that machines with a CPU build at hand take that one and not a CUDA build.
TORCH  ?= 2.13.0

.PHONY: help demo test lint protos clean

help:
	@echo "make demo    train a small Qwen2.5-VL by GRPO on real videos, on this machine (about 4 minutes after the install)"
	@echo "make test    lint, import rules, and every test that needs no GPU"
	@echo "make protos  regenerate protos/gen"
	@echo "make clean   remove the environment and what runs left behind"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rollplex needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.cpu: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/pip install --quiet --editable '.[cpu]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.cpu

demo: $(VENV)/.cpu
	$(BIN)/rollplex demo --out runs/demo

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports

protos: $(VENV)/.dev
	$(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .ruff_cache .import_linter_cache
