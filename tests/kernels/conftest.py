"""The dtypes of the Triton kernels' tests; `device` is a fixture of tests/conftest.py."""

from __future__ import annotations

import os
from typing import Any

import torch

# Set by tests/conftest.py before anything imports Triton.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# The interpreter has no bfloat16 arithmetic, and rounds to it by cutting off.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]


def pytest_generate_tests(metafunc: Any) -> None:
    """Run a test that takes `dtype` without saying which in every model dtype of the device."""
    if "dtype" not in metafunc.fixturenames:
        return
    chosen = [name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])]
    if "dtype" not in chosen:
        metafunc.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])


def _names(argument: str | list[str] | tuple[str, ...]) -> list[str]:
    return [name.strip() for name in argument.split(",")] if isinstance(argument, str) else list(argument)
