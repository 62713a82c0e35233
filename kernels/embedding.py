"""Rows gathered by indices on the device (token ids, rows that sample), and the two scalings of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow

__all__ = ["compile_cases", "gather_rows", "scale", "softcap"]

_MAX_BLOCK = 1024


@triton.jit
def _gather_rows_kernel(table_ptr, indices_ptr, out_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of columns of one row: out[row] = table[indices[row]]."""
    follow(PDL)
    parts: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    valid = columns < COLUMNS
    index = tl.load(indices_ptr + row).to(tl.int64)
    value = tl.load(table_ptr + index * COLUMNS + columns, mask=valid)
    tl.store(out_ptr + row * COLUMNS + columns, value, mask=valid)


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32 numbers, safe at both ends and exact to a few last bits near 0."""
    square = x * x
    series = -0.05396825396825397 + 0.021869488536155203 * square
    series = 0.13333333333333333 + series * square
    series = -0.3333333333333333 + series * square
    near = x + x * square * series
    return tl.where(tl.abs(x) < 0.25, near, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit(do_not_specialize=["size"])
def _scale_kernel(x_ptr, size, factor, CAPPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """X = x * factor in place, or with CAPPED factor * tanh(x / factor)."""
    follow(PDL)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < size
    x = tl.load(x_ptr + offsets, mask=valid, other=0.0).to(tl.float32)
    x = tanh(x / factor) * factor if CAPPED else x * factor
    tl.store(x_ptr + offsets, x, mask=valid)


def gather_rows(table: torch.Tensor, indices: torch.Tensor, out: torch.Tensor, rows: int) -> None:
    """Store table[indices[i]] as row i of out, for the first rows.

    Args:
        table: [n, columns], contiguous.
        indices: int32[rows or more] below n, on the device.
        out: [rows or more, columns], of the table's dtype.
        rows: to gather.
    """
    columns = table.shape[1]
    block = min(triton.next_power_of_2(columns), _MAX_BLOCK)
    grid = (rows * triton.cdiv(columns, block),)
    launch(_gather_rows_kernel, grid, table, indices, out, COLUMNS=columns, BLOCK=block, num_warps=4)


def scale(x: torch.Tensor, factor: float) -> None:
    """Multiply contiguous x by a factor, in place: computed in float32, rounded to its dtype."""
    _scale(x, factor, capped=False)


def softcap(x: torch.Tensor, cap: float) -> None:
    """Replace contiguous x by cap * tanh(x / cap): computed in float32, rounded to its dtype."""
    _scale(x, cap, capped=True)


def _scale(x: torch.Tensor, factor: float, *, capped: bool) -> None:
    grid = (triton.cdiv(x.numel(), _MAX_BLOCK),)
    launch(
        _scale_kernel,
        grid,
        x,
        x.numel(),
        factor,
        CAPPED=capped,
        BLOCK=_MAX_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """An embedding, and the scaling of bfloat16 rows and of logits."""
    gather = CompileCase(
        _gather_rows_kernel,
        {"table_ptr": "*bf16", "indices_ptr": "*i32", "out_ptr": "*bf16"},
        {"COLUMNS": 4096, "BLOCK": _MAX_BLOCK},
    )
    scalings = [
        CompileCase(
            _scale_kernel,
            {"x_ptr": f"*{dtype}", "size": "i64", "factor": "fp32"},
            {"CAPPED": capped, "BLOCK": _MAX_BLOCK},
        )
        for dtype, capped in (("bf16", False), ("fp32", True))
    ]
    return [gather, *scalings]
