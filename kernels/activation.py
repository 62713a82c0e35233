"""Gated activations: activation(gate) * up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow

__all__ = ["act_and_mul", "activate", "compile_cases"]

_MAX_BLOCK = 1024


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up of values of the model's dtype, rounded to it after the activation and after the product.

    gate, up: tensors of one shape and dtype. ACTIVATION: "silu", "gelu" (by erf) or "gelu_tanh". Whoever inlines this
    turns off the contraction of products and sums, so that the bits are the same everywhere.
    """
    x = gate.to(tl.float32)
    if ACTIVATION == "silu":
        value = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        value = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(u)) / 2 is the logistic function of 2u, which keeps its digits where tanh is near -1.
        value = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return (value.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _act_and_mul_kernel(
    gate_up_ptr, out_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    """A block of a row of out [rows, COLUMNS] from gate_up [rows, 2 * COLUMNS]."""
    follow(PDL)
    parts: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    valid = columns < COLUMNS
    source = gate_up_ptr + row * (2 * COLUMNS) + columns
    gate = tl.load(source, mask=valid, other=0.0)
    up = tl.load(source + COLUMNS, mask=valid, other=0.0)
    tl.store(out_ptr + row * COLUMNS + columns, activate(gate, up, ACTIVATION), mask=valid)


def act_and_mul(gate_up: torch.Tensor, out: torch.Tensor, rows: int, activation: str) -> None:
    """Store activation(gate) * up of the first rows, as `reference.act_and_mul`.

    Args:
        gate_up: [rows or more, 2n], contiguous; gate comes first.
        out: [rows or more, n], of the same dtype.
        rows: to compute.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    columns = out.shape[1]
    block = min(triton.next_power_of_2(columns), _MAX_BLOCK)
    launch(
        _act_and_mul_kernel,
        (rows * triton.cdiv(columns, block),),
        gate_up,
        out,
        COLUMNS=columns,
        BLOCK=block,
        ACTIVATION=activation,
        num_warps=4,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """Every activation."""
    return [
        CompileCase(
            _act_and_mul_kernel,
            {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"},
            {"COLUMNS": columns, "BLOCK": _MAX_BLOCK, "ACTIVATION": activation},
        )
        for dtype, columns, activation in (("bf16", 3072, "silu"), ("fp16", 14336, "gelu"), ("bf16", 9216, "gelu_tanh"))
    ]
