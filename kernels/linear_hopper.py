"""Products of some dozens to hundreds of rows, y[M, N] = x[M, K] @ W[N, K]^T, on Hopper, their weights asked for early.

One warp asks the tensor memory accelerator for tile after tile of x and W, the first of W while the kernel before still
runs; four others multiply them. The arithmetic is that of `linear_skinny`: one chain over K, 16 at a time.
"""

from __future__ import annotations

import torch
import triton
from octavo.kernels.activation import activate
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.linear_tables import WideTile, wide_tile
from octavo.kernels.overlap import await_previous, start_next
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["compile_cases", "wide_gated", "wide_product"]

_DEPTH = 64
_TILE = gl.NVMMASharedLayout(128, 16, 2)
_COPY_REGISTERS = 40


@gluon.jit
def _load_tiles(
    x,
    w,
    x_tiles,
    w_tiles,
    full,
    empty,
    first_row,
    first_column,
    N,
    steps,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """The copying warp: each step's tiles of W, and of x, into the next stage that is empty."""
    PARTS: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = (x_tiles.shape[1] + PARTS * w_tiles.shape[1]) * DEPTH * 2
    # The kernel ahead writes x, and no weight.
    for step in gl.static_range(STAGES):
        mbarrier.expect(full.index(step), BYTES, pred=step < steps)
        for part in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(
                w,
                [first_column + part * N, step * DEPTH],
                full.index(step),
                w_tiles.index(step * PARTS + part),
                pred=step < steps,
            )
    await_previous(PDL)
    for step in range(steps):
        stage = step % STAGES
        if step >= STAGES:
            mbarrier.wait(empty.index(stage), step // STAGES - 1 & 1)
            mbarrier.expect(full.index(stage), BYTES)
            for part in gl.static_range(PARTS):
                tma.async_copy_global_to_shared(
                    w,
                    [first_column + part * N, step * DEPTH],
                    full.index(stage),
                    w_tiles.index(stage * PARTS + part),
                )
        tma.async_copy_global_to_shared(x, [first_row, step * DEPTH], full.index(stage), x_tiles.index(stage))


@gluon.jit
def _multiply(
    bias_ptr,
    out_ptr,
    x_tiles,
    w_tiles,
    full,
    empty,
    first_row,
    first_column,
    rows,
    N,
    steps,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """The other warps: the chain over K, then the tile's result."""
    GATED: gl.constexpr = ACTIVATION != ""
    PARTS: gl.constexpr = 2 if GATED else 1
    BM: gl.constexpr = x_tiles.shape[1]
    BN: gl.constexpr = w_tiles.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([BM, BN], gl.float32, SUMS)
    acc_up = acc
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        x = x_tiles.index(stage)
        acc = warpgroup_mma(x, w_tiles.index(stage * PARTS).permute((1, 0)), acc, is_async=True)
        # The step before has read its tiles when only this one's products are under way.
        if GATED:
            acc_up = warpgroup_mma(x, w_tiles.index(stage * PARTS + 1).permute((1, 0)), acc_up, is_async=True)
            acc, acc_up = warpgroup_mma_wait(2, deps=[acc, acc_up])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    if GATED:
        acc, acc_up = warpgroup_mma_wait(0, deps=[acc, acc_up])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    row = first_row + gl.arange(0, BM, gl.SliceLayout(1, SUMS))
    column = first_column + gl.arange(0, BN, gl.SliceLayout(0, SUMS))
    if HAS_BIAS:
        acc += gl.load(bias_ptr + column, mask=column < N, other=0.0).to(gl.float32)[None, :]
    if GATED:
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        y = activate(acc.to(dtype), acc_up.to(dtype), ACTIVATION)
    else:
        y = acc.to(out_ptr.dtype.element_ty)
    at = out_ptr + row.to(gl.int64)[:, None] * N + column[None, :]
    gl.store(at, y, mask=(row < rows)[:, None] & (column < N)[None, :])


@gluon.jit(do_not_specialize=["rows", "steps"])
def _wide_kernel(
    x,  # [>= rows, K]
    w,  # [N, K], or [2N, K] where ACTIVATION: N gate rows, then N up rows
    bias_ptr,  # [N] where HAS_BIAS
    out_ptr,  # [>= rows, N]
    rows,
    N,
    steps,
    BM: gl.constexpr,
    BN: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,  # "" for a plain product
    COPY_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Store x @ W^T (+ bias), or activation(x @ gate^T) * (x @ up^T)."""
    start_next(PDL)
    dtype: gl.constexpr = x.dtype
    GATED: gl.constexpr = ACTIVATION != ""
    PARTS: gl.constexpr = 2 if GATED else 1
    tiles_m = gl.cdiv(rows, BM)
    first_row = gl.program_id(0) % tiles_m * BM
    first_column = gl.program_id(0) // tiles_m * BN
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BM, DEPTH], x.layout)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BN, DEPTH], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (
                bias_ptr, out_ptr, x_tiles, w_tiles, full, empty, first_row, first_column, rows, N, steps,
                STAGES, HAS_BIAS, ACTIVATION,
            )),
            (_load_tiles, (
                x, w, x_tiles, w_tiles, full, empty, first_row, first_column, N, steps, DEPTH, STAGES, GATED, PDL,
            )),
        ],
        [1],
        [COPY_REGISTERS],
    )
    # fmt: on


def wide_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, rows: int, tile: WideTile
) -> None:
    """Store x @ weight.T + bias of the first rows.

    Args:
        x: [rows or more, K], contiguous; K a multiple of 64.
        weight: [N, K] of x's dtype, contiguous.
        bias: [N] or None.
        out: [rows or more, N], contiguous, of x's dtype or float32.
        rows: to compute.
        tile: how the product is cut.
    """
    _launch(x, weight, bias, out, rows, weight.shape[0], tile, "")


def wide_gated(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int, tile: WideTile, activation: str
) -> None:
    """Store activation(x @ gate.T) * (x @ up.T) of the first rows, as `linear_skinny.skinny_gated`."""
    _launch(x, weight, None, out, rows, weight.shape[0] // 2, tile, activation)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    n: int,
    tile: WideTile,
    activation: str,
) -> None:
    k = weight.shape[1]
    launch(
        _wide_kernel,
        (triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns),),
        _described(x, tile.rows),
        _described(weight, tile.columns),
        weight if bias is None else bias,
        out,
        rows,
        n,
        k // _DEPTH,
        BM=tile.rows,
        BN=tile.columns,
        DEPTH=_DEPTH,
        STAGES=tile.stages,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        COPY_REGISTERS=_COPY_REGISTERS,
        num_warps=4,
        maxnreg=_registers(tile, activation),
        enable_fp_fusion=False,
    )


def _registers(tile: WideTile, activation: str) -> int:
    """Registers of a thread, of which the copying warp leaves some to the others: few, so that kernels overlap."""
    sums: int = tile.rows * tile.columns * (2 if activation else 1) // 128
    return max(64, (sums + 64 + _COPY_REGISTERS) // 2 // 8 * 8 + 8)


def _described(matrix: torch.Tensor, height: int) -> TensorDescriptor:
    """For copies of tiles [height, _DEPTH] of a matrix."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [height, _DEPTH], _TILE)


def compile_cases(capability: int) -> list[CompileCase]:
    """Every tile of the table; the kernel is of one generation of GPUs."""
    cases: dict[object, CompileCase] = {}
    for n, k, rows, activation in (
        (1024, 2048, 128, ""),
        (4096, 1024, 256, ""),
        (4096, 4096, 256, ""),
        (3072, 1024, 128, "silu"),
        (3072, 1024, 256, "gelu_tanh"),
        (14336, 4096, 64, "silu"),
    ):
        tile = wide_tile(divmod(capability, 10), n, k, rows, gated=activation != "")
        if tile is None:
            continue
        dtype = "fp16" if k == 2048 else "bf16"
        arguments = {"x": f"tensordesc<{dtype}[{tile.rows}, {_DEPTH}],{_TILE!r}>"}
        arguments |= {"w": f"tensordesc<{dtype}[{tile.columns}, {_DEPTH}],{_TILE!r}>"}
        arguments |= {"bias_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "rows": "i32", "N": "i32", "steps": "i32"}
        constants: dict[str, int | str] = {"BM": tile.rows, "BN": tile.columns, "DEPTH": _DEPTH, "STAGES": tile.stages}
        constants |= {"HAS_BIAS": not activation, "ACTIVATION": activation, "COPY_REGISTERS": _COPY_REGISTERS}
        registers = _registers(tile, activation)
        cases[tile, activation] = CompileCase(
            _wide_kernel, arguments, constants, num_warps=4, registers=registers, aligned=("N",)
        )
    return list(cases.values())
