# Two commands: `make serve` and `make test`. Both set up what they need on a bare machine.

VENV ?= .venv
PYTHON ?= python3.11
BIN = $(VENV)/bin
# Installed again when the project's requirements or its place change; nothing is copied.
KEY := $(shell { cat pyproject.toml; pwd; } | sha256sum | cut -c1-16)
INSTALLED = $(VENV)/.installed-$(KEY)

MODEL ?= $(shell $(BIN)/sglang-beacon demo-model)
PORT ?= 30000
BUDGET ?= 512
ARGS ?=

.PHONY: serve test lint clean

serve: $(INSTALLED)
	$(BIN)/python -m sglang.launch_server --model-path $(MODEL) --port $(PORT) \
	    --kv-policy beacon --kv-budget $(BUDGET) $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-cache-dir --editable '.[dev]'
	rm -f $(VENV)/.installed-*
	touch $@

clean:
	rm -rf $(VENV)
