"""The Triton norms against the reference."""

from __future__ import annotations

import pytest
import reference_kernels as reference
import torch
from octavo.kernels.norm import add_rms_norm, rms_norm


def random(*shape: int, dtype: torch.dtype, device: torch.device, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * spread).to(dtype).to(device)


def assert_rounded_alike(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rare last bits: sums in another order can tip a rounding."""
    digits = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}[out.dtype]
    torch.testing.assert_close(out, expected, atol=digits / 8, rtol=digits)
    if out.dtype != torch.float32:
        assert (out == expected).float().mean() > 0.99


@pytest.mark.parametrize("n", [16, 100, 576, 4096, 17000])
def test_rms_norm(n: int, device: torch.device, dtype: torch.dtype) -> None:
    x = random(5, n, dtype=dtype, device=device, spread=3)
    weight = random(n, dtype=torch.float32, device=device)
    out = torch.zeros_like(x)
    rms_norm(x, weight, out, 1e-5, 4)
    assert_rounded_alike(out[:4], reference.rms_norm(x[:4], weight, 1e-5)[0])
    assert not out[4].any()


@pytest.mark.parametrize("n", [100, 576, 17000])
def test_the_residual_is_summed_first_and_normed(n: int, device: torch.device, dtype: torch.dtype) -> None:
    x, weight = random(3, n, dtype=dtype, device=device), random(n, dtype=torch.float32, device=device)
    residual = x.flip(0).contiguous() * 2
    expected, total = reference.rms_norm(x, weight, 1e-6, residual.clone())
    out = torch.empty_like(x)
    add_rms_norm(x, residual, weight, out, 1e-6, 3)
    assert residual.equal(total)
    assert_rounded_alike(out, expected)


@pytest.mark.parametrize("n", [100, 2304, 17000])
def test_a_sandwich_is_two_norms(n: int, device: torch.device, dtype: torch.dtype) -> None:
    """One launch has the bits of two."""
    x, residual = random(3, n, dtype=dtype, device=device, spread=3), random(4, n, dtype=dtype, device=device)[:3]
    weight, post_weight = (random(n, dtype=torch.float32, device=device, spread=spread) for spread in (1, 2))
    normed, expected, total = torch.empty_like(x), torch.empty_like(x), residual.clone()
    rms_norm(x, post_weight, normed, 1e-6, 3)
    add_rms_norm(normed, total, weight, expected, 1e-6, 3)
    out = torch.empty_like(x)
    add_rms_norm(x, residual, weight, out, 1e-6, 3, post_weight)
    assert residual.equal(total)
    assert out.equal(expected)


def test_a_row_does_not_depend_on_the_others(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = random(7, 576, dtype=dtype, device=device), torch.ones(576, device=device)
    x[3, 5] = torch.nan
    together, alone = torch.empty_like(x), torch.empty_like(x[:1])
    rms_norm(x, weight, together, 1e-5, 7)
    assert together[3].isnan().all()
    for i in (0, 2, 4, 6):
        rms_norm(x[i : i + 1].clone(), weight, alone, 1e-5, 1)
        assert alone[0].equal(together[i])
