"""On what the Triton kernels are tested."""

from __future__ import annotations

import os

import pytest
import torch

# Set by tests/conftest.py before anything imports Triton.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# The interpreter has no bfloat16 arithmetic, and rounds to it by cutting off.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
# For tests of what no dtype changes: every variant takes a card a second or two to compile.
in_one_dtype = pytest.mark.parametrize("dtype", DTYPES[:1], ids=[str(DTYPES[0]).removeprefix("torch.")])
