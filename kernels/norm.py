"""RMS norm, alone and after the residual's sum: one program a row, so a row's bits never depend on the others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow

__all__ = ["add_rms_norm", "compile_cases", "norm_warps", "rms_norm"]

_MAX_BLOCK = 16384
_ELEMENTS_A_WARP = 256


@triton.jit
def _summed(
    x, residual, offsets, valid, post_weight, eps, COLUMNS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr
):
    """What is normed, in float32; with ADD the rounded sum, stored where the residual was.

    With NORM the whole row x is normed first, and rounded as if it had been stored between the two norms.
    """
    value = tl.load(x + offsets, mask=valid, other=0.0)
    if NORM:
        dtype = value.dtype
        wide = value.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps)
        value = ((wide * factor).to(dtype).to(tl.float32) * post_weight).to(dtype)
    if ADD:
        dtype = value.dtype
        total = value.to(tl.float32) + tl.load(residual + offsets, mask=valid, other=0.0).to(tl.float32)
        value = total.to(dtype)
        tl.store(residual + offsets, value, mask=valid)
    return value.to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    post_weight_ptr,
    out_ptr,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store rms_norm(x[row] (+ residual[row])) * weight; with NORM, x stands for rms_norm(x) * post_weight."""
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    x, residual, out = x_ptr + start, residual_ptr + start, out_ptr + start
    dtype = out_ptr.dtype.element_ty
    offsets = tl.arange(0, BLOCK)
    if BLOCK >= COLUMNS:
        valid = offsets < COLUMNS
        weight = tl.load(weight_ptr + offsets, mask=valid, other=0.0)
        post_weight = tl.load(post_weight_ptr + offsets, mask=valid, other=0.0) if NORM else weight
        follow(PDL)
        value = _summed(x, residual, offsets, valid, post_weight, eps, COLUMNS, ADD, NORM)
        factor = tl.rsqrt(tl.sum(value * value, axis=0) / COLUMNS + eps)
        tl.store(out + offsets, (value * factor).to(dtype).to(tl.float32) * weight, mask=valid)
    else:
        follow(PDL)
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for column in range(0, COLUMNS, BLOCK):
            valid = column + offsets < COLUMNS
            value = _summed(x, residual, column + offsets, valid, 0.0, eps, COLUMNS, ADD, False)
            squares += value * value
        factor = tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + eps)
        # What other threads stored of the sums is read below.
        tl.debug_barrier()
        for column in range(0, COLUMNS, BLOCK):
            valid = column + offsets < COLUMNS
            weight = tl.load(weight_ptr + column + offsets, mask=valid, other=0.0)
            source = residual if ADD else x
            value = tl.load(source + column + offsets, mask=valid, other=0.0).to(tl.float32)
            tl.store(out + column + offsets, (value * factor).to(dtype).to(tl.float32) * weight, mask=valid)


def norm_warps(columns: int) -> tuple[int, int]:
    """(block, warps) of rows of a width; never of the number of rows, which would change the order of the sums."""
    block = min(triton.next_power_of_2(columns), _MAX_BLOCK)
    return block, max(1, min(16, block // _ELEMENTS_A_WARP))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, rows: int) -> None:
    """Norm the first rows, as `reference.rms_norm` does.

    Args:
        x: [rows or more, n], contiguous.
        weight: float32[n].
        out: as x.
        eps: added to the mean of the squares.
        rows: to compute.
    """
    _launch(x, x, weight, weight, out, eps, rows, add=False)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    rows: int,
    post_weight: torch.Tensor | None = None,
) -> None:
    """Add the first rows of x to the residual, rounded to their dtype, and norm the sums into out.

    Args:
        x: [rows or more, n], contiguous; scratch afterwards.
        residual: as x.
        weight: float32[n].
        out: as x.
        eps: added to the mean of the squares.
        rows: to compute.
        post_weight: float32[n]; given, rms_norm(x) * post_weight, rounded, is added in place of x.
    """
    norm = post_weight is not None
    if post_weight is not None and weight.shape[0] > _MAX_BLOCK:
        rms_norm(x, post_weight, x, eps, rows)
        norm = False
    _launch(x, residual, weight, weight if post_weight is None else post_weight, out, eps, rows, add=True, norm=norm)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    post_weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    rows: int,
    *,
    add: bool,
    norm: bool = False,
) -> None:
    columns = weight.shape[0]
    block, warps = norm_warps(columns)
    launch(
        _rms_norm_kernel,
        (rows,),
        x,
        residual,
        weight,
        post_weight,
        out,
        eps,
        COLUMNS=columns,
        BLOCK=block,
        ADD=add,
        NORM=norm,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """Widths of small, middle and very large models."""
    cases = []
    for dtype, columns in (("bf16", 1024), ("fp16", 4096), ("bf16", 5120), ("bf16", 16384), ("fp32", 18432)):
        block, warps = norm_warps(columns)
        for add, norm in ((False, False), (True, False), (True, columns <= _MAX_BLOCK)):
            pointers = dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr"), f"*{dtype}")
            constants = {"COLUMNS": columns, "BLOCK": block, "ADD": add, "NORM": norm}
            arguments = pointers | {"weight_ptr": "*fp32", "post_weight_ptr": "*fp32", "eps": "fp32"}
            cases.append(CompileCase(_rms_norm_kernel, arguments, constants, num_warps=warps))
    return cases
