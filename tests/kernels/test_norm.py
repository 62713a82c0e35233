"""Norms and gated activations of the CPU kernels against transformers and torch."""

import pytest
import reference_kernels as reference
import torch
from kernel_calls import ISAS, NAMES, act_and_mul, instruction_set, rms_norm, threads
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

DTYPES = [torch.bfloat16, torch.float32]


def random(*shape: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def assert_rounded_alike(out: Tensor, expected: Tensor) -> None:
    """Equal but for rare last bits: sums in another order can tip a rounding."""
    if out.dtype == torch.bfloat16:
        torch.testing.assert_close(out, expected, atol=0, rtol=2**-7)
        assert (out == expected).float().mean() > 0.998
    else:
        torch.testing.assert_close(out, expected, atol=2e-7, rtol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("n", [16, 100, 576, 4096])
def test_rms_norm_is_that_of_transformers(isa: str, dtype: torch.dtype, n: int) -> None:
    x = random(37, n, dtype=dtype, spread=3)
    norm = LlamaRMSNorm(n, eps=1e-5).to(dtype)
    norm.weight.data = random(n, dtype=dtype)
    with instruction_set(isa), torch.no_grad():
        assert_rounded_alike(rms_norm(x, norm.weight.float(), 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_the_residual_is_summed_first_and_normed(dtype: torch.dtype) -> None:
    x, residual = random(9, 576, dtype=dtype), random(9, 576, dtype=dtype).flip(0)
    weight = random(576, dtype=torch.float32)
    expected, total = reference.rms_norm(x, weight, 1e-6, residual.clone())
    out = rms_norm(x, weight, 1e-6, residual)
    assert residual.equal(total)
    assert_rounded_alike(out, expected)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random(70, 576, dtype=torch.bfloat16), torch.ones(576)
    gate_up = random(70, 2 * 1536, dtype=torch.bfloat16)
    for count in (1, 2, 4):
        with threads(count):
            together = rms_norm(x, weight, 1e-5), act_and_mul(gate_up, "silu")
            for i in (0, 33, 69):
                assert rms_norm(x[i : i + 1].clone(), weight, 1e-5)[0].equal(together[0][i])
                assert act_and_mul(gate_up[i : i + 1].clone(), "silu")[0].equal(together[1][i])


def test_not_a_number_stays_in_its_row() -> None:
    x = random(3, 64, dtype=torch.float32)
    x[1, 5] = torch.nan
    out = rms_norm(x, torch.ones(64), 1e-5)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("n", [16, 37, 1536])
def test_activations(isa: str, dtype: torch.dtype, activation: str, n: int) -> None:
    gate_up = random(21, 2 * n, dtype=dtype, spread=4)
    gate_up[0, :8] = torch.tensor([0.0, -0.0, 30.0, -30.0, 90.0, -90.0, 1e4, -1e4])
    with instruction_set(isa):
        out = act_and_mul(gate_up, activation)
    exact = reference.act_and_mul(gate_up.double(), activation)
    # 1 + erf loses the small end: the error is relative to the gate.
    scale = gate_up[:, n:].abs().double() * gate_up[:, :n].abs().clamp(min=1).double()
    # The activation is rounded, then the product.
    rounding = 2**-7 if dtype == torch.bfloat16 else 2**-23
    assert ((out.double() - exact).abs() <= 4e-7 * scale + 1.01 * rounding * exact.abs()).all()
    if dtype == torch.bfloat16:
        # Further down torch's own 1 + tanh has lost its digits.
        large = gate_up[:, :n] > -2
        assert (out == reference.act_and_mul(gate_up, activation))[large].float().mean() > 0.98


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_of_not_a_number(activation: str) -> None:
    gate_up = torch.ones(1, 32)
    gate_up[0, 3] = torch.nan
    out = act_and_mul(gate_up, activation)[0]
    assert out.isnan().tolist() == [i == 3 for i in range(16)]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="activation"):
        act_and_mul(torch.ones(1, 32), "relu")
