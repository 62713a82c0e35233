# Everything a person does with the project; `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is pinned for development and CI; the package itself accepts newer ones.
TORCH ?= torch==2.11.0
PROFILE ?= release
MODEL ?= demo
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
# As many of Python's tests at a time; each process takes up to 1 GiB.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

$(VENV)/.tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Octavo needs Python 3.10 or newer; name one with PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) \
		|| { echo "no virtual environment could be made; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	touch $@

# The CUDA build of torch is what the package index carries for x86-64, some 3 GB; it runs on the CPU too.
$(VENV)/.dependencies: pyproject.toml | $(VENV)/.tools
	@echo "installing the dependencies (torch is about 3 GB the first time)"
	$(BIN)/uv pip install --quiet --python $(BIN)/python '$(TORCH)' 'maturin[zig]>=1.14,<2' \
		-r pyproject.toml --extra test --extra lint --extra plot
	touch $@

# One stamp for both profiles: the extension in the tree is the one built last.
$(VENV)/.extension-$(PROFILE): $(VENV)/.dependencies $(RUST_SOURCES)
	@command -v cargo >/dev/null || { echo "Octavo's core is written in Rust; install it from https://rustup.rs" >&2; exit 1; }
	@echo "compiling the extension ($(PROFILE)); the first time takes a minute or two"
	rm -f $(VENV)/.extension-*
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --quiet --uv --profile $(PROFILE) 2>&1 \
		| { grep -vE "^(🍹|🐍|🔗|📡|📦|✏️|🛠|Checked|Installed)" || true; }
	touch $@

.PHONY: build
build: $(VENV)/.extension-$(PROFILE)  ## a .venv with everything in it, the extension in release mode

.PHONY: develop
develop:  ## as build, with an extension that compiles quicker and runs a little slower
	@$(MAKE) build PROFILE=develop

.PHONY: run
run: build  ## serve a model on http://127.0.0.1:8000 (MODEL=demo HOST= PORT= ARGS=)
	@exec $(BIN)/octavo serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

.PHONY: test
test: build lint test-rust test-python  ## everything that must hold: lints, Rust and Python tests, the wheel

.PHONY: test-rust
test-rust:  ## the crates' tests, property tests and documentation tests
	cargo test --quiet --locked

.PHONY: test-python
test-python: build  ## pytest (ARGS= to choose, JOBS= processes)
	$(PYTEST) $(ARGS)

# Kernels take longest to compile, so those run in many processes; an engine takes the card's memory, so those run alone.
.PHONY: test-gpu
test-gpu: build  ## what runs on a GPU where there is one: the kernels and layers, then whole engines
	$(PYTEST) tests/kernels tests/layers tests/models/test_decoder_cuda.py tests/runner $(ARGS)
	$(BIN)/python -m pytest tests/gpu $(ARGS)

.PHONY: lint
lint: build  ## formatting, clippy, ruff, mypy, and the stub against the extension
	cargo fmt --all --check
	cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest octavo._core --allowlist tests/packaging/stubtest_allowlist.txt

.PHONY: format
format: $(VENV)/.dependencies  ## rewrite the sources in the project's format
	cargo fmt --all
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format --quiet .

.PHONY: bench
bench: build  ## the core's benches, and the demo model's workloads (ARGS= for `octavo bench`)
	cargo bench --quiet --locked --package octavo-benches
	$(BIN)/octavo bench step
	for name in W1 W2 W3; do $(BIN)/octavo bench $$name --model demo $(ARGS); done

.PHONY: fuzz
fuzz:  ## each fuzz target for FUZZ_SECONDS (60); needs cargo-fuzz
	cd fuzz && for target in $$(cargo fuzz list); do RUSTC_BOOTSTRAP=1 cargo fuzz run "$$target" -- -max_total_time=$${FUZZ_SECONDS:-60}; done

.PHONY: wheel
wheel: $(VENV)/.dependencies  ## the manylinux wheel of this machine's architecture, in dist/
	VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/maturin build --quiet --release --zig --compatibility manylinux_2_17 --out dist
	@ls -l dist

.PHONY: clean
clean:  ## remove what was built
	rm -rf target fuzz/target dist $(VENV) python/octavo/_core*.so
