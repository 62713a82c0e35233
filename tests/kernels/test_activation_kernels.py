"""The Triton activations against the reference."""

from __future__ import annotations

import pytest
import reference_kernels as reference
import torch
from octavo.kernels.activation import act_and_mul


def gate_up(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    values = torch.randn(rows, 2 * n, generator=torch.Generator().manual_seed(n)) * 4
    values[0, :8] = torch.tensor([0.0, -0.0, 30.0, -30.0, 90.0, -90.0, 3e3, -3e3])
    return values.to(dtype).to(device)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("n", [16, 37, 1536])
def test_activations(activation: str, n: int, device: torch.device, dtype: torch.dtype) -> None:
    x = gate_up(5, n, dtype, device)
    out = torch.zeros(5, n, dtype=dtype, device=device)
    act_and_mul(x, out, 4, activation)
    exact = reference.act_and_mul(x[:4].double(), activation)
    # 1 + erf loses the small end: the error is relative to the gate.
    scale = x[:4, n:].abs().double() * x[:4, :n].abs().clamp(min=1).double()
    # The activation is rounded, then the product; float16 has its smallest steps below 2^-14.
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-21}[dtype]
    smallest = 2**-24 * (1 + x[:4, n:].abs().double()) if dtype == torch.float16 else 0
    assert ((out[:4].double() - exact).abs() <= 4e-7 * scale + 1.01 * rounding * exact.abs() + smallest).all()
    assert not out[4].any()
    if dtype != torch.float32:
        # Further down torch's own 1 + tanh has lost its digits.
        large = x[:4, :n] > -2
        assert (out[:4] == reference.act_and_mul(x[:4], activation))[large].float().mean() > 0.98


def test_a_row_does_not_depend_on_the_others(device: torch.device, dtype: torch.dtype) -> None:
    x = gate_up(5, 100, dtype, device)
    x[1] = torch.nan
    together, alone = torch.empty(5, 100, dtype=dtype, device=device), torch.empty(1, 100, dtype=dtype, device=device)
    act_and_mul(x, together, 5, "silu")
    assert together[1].isnan().all()
    for row in (0, 2, 4):
        act_and_mul(x[row : row + 1].clone(), alone, 1, "silu")
        assert alone[0].equal(together[row])
