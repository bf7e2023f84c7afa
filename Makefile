# make demo, make test and make check need nothing but Python >= 3.11: each makes .venv on first need.
# Another interpreter: make test PYTHON=/path/to/python VENV=.venv-other

PYTHON ?= $(shell sh .ci/find-python)
VENV ?= .venv
BIN = $(VENV)/bin
JOBS ?= 2

.PHONY: help demo test test-quick check format test-all clean

help:
	@echo "make demo        plan, compile, measure and compare a Llama-style train step on 8 CPU devices"
	@echo "make test        every test"
	@echo "make test-quick  the tests that are not marked slow"
	@echo "make check       ruff, formatting, types"
	@echo "make format      let ruff rewrite the files"
	@echo "make test-all    every test on Python 3.11 and on Python 3.13 with the newest jax"
	@echo "make clean       remove the virtual environments and caches"

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found; say PYTHON=/path/to/python"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing into $(VENV) (`$(BIN)/python --version`)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/autoshard demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n $(JOBS)

test-quick: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not slow"

check: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# jax 0.10.2 is the last release for Python 3.11; on 3.13 pip takes the newest.
test-all:
	@py311="`sh .ci/find-python 3.11`"; py313="`sh .ci/find-python 3.13`"; \
	test -n "$$py311" || { echo "no Python 3.11 found"; exit 1; }; \
	test -n "$$py313" || { echo "no Python 3.13 found"; exit 1; }; \
	$(MAKE) --no-print-directory test VENV=.venv PYTHON="$$py311" && \
	$(MAKE) --no-print-directory test VENV=.venv313 PYTHON="$$py313"

clean:
	rm -rf .venv* .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
