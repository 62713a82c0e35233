"""Operands of the Triton products, and what their results are compared with."""

from __future__ import annotations

import torch
from octavo.kernels.linear_tables import (
    MAX_WIDE_ROWS,
)

UNTOUCHED = 7.0
# More rows than any product of ours takes on Hopper: cuBLAS computes them.
MANY = MAX_WIDE_ROWS + 1


def random(*shape: int, dtype: torch.dtype, device: torch.device, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * spread).to(dtype).to(device)


def operands(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [rows + 1, k] whose last row is poison, weight [n, k], bias [n]."""
    x = random(rows + 1, k, dtype=dtype, device=device)
    x[rows] = torch.nan
    return x, random(n, k, dtype=dtype, device=device, spread=k**-0.5), random(n, dtype=dtype, device=device)


def assert_exact(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int
) -> None:
    """The first rows are the product rounded once from sums in float32; the rest are untouched.

    A chain of n float32 sums, which tensor cores cut off rather than round, errs by 2^-23 n of the sum of its terms'
    sizes at most, and in every case seen by less than a quarter of that.
    """
    digits = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}[out.dtype]
    left, right = x[:rows].double(), weight.double().T
    expected, sizes = left @ right, left.abs() @ right.abs()
    if bias is not None:
        expected += bias.double()
    summed = 2**-25 * (weight.shape[1] / 16 + 16) * sizes
    error = (out[:rows].double() - expected).abs()
    assert (error <= summed + 1.01 * digits * (expected.abs() + summed)).all(), (error - summed).max()
    assert (out[rows:] == UNTOUCHED).all()


def untouched(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((rows + 1, n), UNTOUCHED, dtype=dtype, device=device)
