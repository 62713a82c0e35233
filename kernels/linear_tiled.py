"""Products by tiles, y[M, N] = x[M, K] @ W[N, K]^T, where cuBLAS cannot be held to one arithmetic or lacks a product.

Every tile sums K 64 at a time and in order, 16 to an instruction, whatever its height: a row's bits do not depend on
the number of rows. Tile height, width, warps and stages are free. Gate and up may share a program, as in
`linear_skinny`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.activation import activate
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.linear_tables import TiledTile, gated_tile, middle_tile, tiled_tile
from octavo.kernels.overlap import follow

__all__ = ["DEPTH", "compile_cases", "tiled_gated", "tiled_product"]

DEPTH = 64
"""Of K a step, the same in every tile."""


@triton.jit
def _weights(rows, k, K, EVEN_K: tl.constexpr):
    """Elements k of rows of W, transposed: [BK, BN]."""
    if EVEN_K:
        return tl.load(rows + k[:, None])
    return tl.load(rows + k[:, None], mask=(k < K)[:, None], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _tiled_kernel(
    x_ptr,  # [>= rows, K]
    w_ptr,  # [N, K], or [2N, K] where ACTIVATION: N gate rows, then N up rows
    bias_ptr,  # [N] where HAS_BIAS
    out_ptr,  # [>= rows, N]
    rows,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,  # tiles of rows that pass over W together
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "" for a plain product
    PDL: tl.constexpr,
):
    """Store x @ W^T (+ bias), or activation(x @ gate^T) * (x @ up^T)."""
    GATED: tl.constexpr = ACTIVATION != ""
    follow(PDL)
    program = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(N, BN)
    # GROUP tiles of rows share the tiles of W that they walk over, which then come from L2.
    group = program // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside = program % (GROUP * tiles_n)
    tile_m = group * GROUP + inside % height
    tile_n = inside // height
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows past the end read a row that is there: what they give is not stored.
    x_rows = x_ptr + tl.where(m < rows, m, 0).to(tl.int64)[:, None] * K
    w_rows = w_ptr + tl.where(n < N, n, 0).to(tl.int64)[None, :] * K
    up_rows = w_rows + N.to(tl.int64) * K
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    acc_up = tl.zeros((BM, BN), dtype=tl.float32)
    for step in tl.range(0, K, BK):
        if EVEN_K:
            x = tl.load(x_rows + (step + k)[None, :])
        else:
            x = tl.load(x_rows + (step + k)[None, :], mask=(step + k < K)[None, :], other=0.0)
        acc = tl.dot(x, _weights(w_rows, step + k, K, EVEN_K), acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(x, _weights(up_rows, step + k, K, EVEN_K), acc_up, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        y = activate(acc.to(x_ptr.dtype.element_ty), acc_up.to(x_ptr.dtype.element_ty), ACTIVATION)
    else:
        y = acc.to(out_ptr.dtype.element_ty)
    out = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, y, mask=(m < rows)[:, None] & (n < N)[None, :])


def tiled_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, rows: int, tile: TiledTile
) -> None:
    """Store x @ weight.T + bias of the first rows.

    Args:
        x: [rows or more, K], contiguous.
        weight: [N, K] of x's dtype, contiguous; K a multiple of 16.
        bias: [N] or None.
        out: [rows or more, N], contiguous, of x's dtype or float32.
        rows: to compute.
        tile: how the product is cut.
    """
    _launch(x, weight, bias, out, rows, weight.shape[0], tile, "")


def tiled_gated(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int, tile: TiledTile, activation: str
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
    tile: TiledTile,
    activation: str,
) -> None:
    k = weight.shape[1]
    launch(
        _tiled_kernel,
        (triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns),),
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        n,
        k,
        BM=tile.rows,
        BN=tile.columns,
        BK=DEPTH,
        GROUP=tile.group,
        EVEN_K=k % DEPTH == 0,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """Every tile of the tables, at the shapes of a small and a middle model."""
    card = divmod(capability, 10)
    cases: dict[object, CompileCase] = {}
    for n, rows in ((1024, 1), (4096, 32), (28672, 64), (1024, 512), (28672, 8192)):
        _add_case(cases, tiled_tile(card, n, 4096, rows), "", even=rows != 512)
    for n in (4096, 6144):
        _add_case(cases, middle_tile(card, n, 4096, 64), "")
    for n, rows in ((3072, 128), (3072, 256), (14336, 64), (14336, 128)):
        _add_case(cases, gated_tile(card, n, rows), "silu")
    return list(cases.values())


def _add_case(cases: dict[object, CompileCase], tile: TiledTile | None, activation: str, *, even: bool = True) -> None:
    if tile is None:
        return
    pointers = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "out_ptr"), "*bf16" if even else "*fp16")
    arguments = pointers | dict.fromkeys(("rows", "N", "K"), "i32")
    constants: dict[str, int | str] = {"BM": tile.rows, "BN": tile.columns, "BK": DEPTH, "GROUP": tile.group}
    constants |= {"EVEN_K": even, "HAS_BIAS": not even, "ACTIVATION": activation}
    cases[tile, activation] = CompileCase(
        _tiled_kernel, arguments, constants, tile.warps, tile.stages, aligned=("N", "K")
    )
