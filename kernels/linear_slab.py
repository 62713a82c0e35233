"""Products of very few rows and a short K, y[M, N] = x[M, K] @ W[N, K]^T, on cards that launch dependents early.

Such a product takes less time than a memory access and the chain of its multiplications, so what counts is what lies
between the end of the kernel before and its own: a program has all of its rows of W in registers by then, which it
loads while other kernels still run. The arithmetic is that of `linear_skinny`: one chain over K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.activation import activate
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.linear_tables import SlabTile, slab_tile

__all__ = ["compile_cases", "slab_gated", "slab_product"]


@triton.jit
def _pieces(pointers, inside, PIECE: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr):
    """The pieces along K of what pointers say of the first."""
    pieces = ()
    for i in tl.static_range(PIECES):
        if EVEN:
            pieces = pieces + (tl.load(pointers + i * PIECE),)
        else:
            pieces = pieces + (tl.load(pointers + i * PIECE, mask=inside, other=0.0),)
    return pieces


@triton.jit(do_not_specialize=["rows"])
def _slab_kernel(
    x_ptr,  # [>= rows, K]
    w_ptr,  # [N, K], or [2N, K] where ACTIVATION: N gate rows, then N up rows
    bias_ptr,  # [N] where HAS_BIAS
    out_ptr,  # [>= rows, N]
    rows,
    N,
    BM: tl.constexpr,  # >= rows
    BN: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,  # PIECE * PIECES = K
    EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "" for a plain product
    PDL: tl.constexpr,
):
    """Store x @ W^T (+ bias), or activation(x @ gate^T) * (x @ up^T)."""
    K: tl.constexpr = PIECE * PIECES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, PIECE)
    m = tl.arange(0, BM)
    w_pointers = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    w = _pieces(w_pointers, (n < N)[:, None], PIECE, PIECES, EVEN_N)
    if ACTIVATION != "":
        up = _pieces(w_pointers + N.to(tl.int64) * K, (n < N)[:, None], PIECE, PIECES, EVEN_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _pieces(x_ptr + m[None, :] * K + k[:, None], (m < rows)[None, :], PIECE, PIECES, False)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for i in tl.static_range(PIECES):
        acc = tl.dot(w[i], x[i], acc, input_precision="ieee")
    if ACTIVATION != "":
        acc_up = tl.zeros((BN, BM), dtype=tl.float32)
        for i in tl.static_range(PIECES):
            acc_up = tl.dot(up[i], x[i], acc_up, input_precision="ieee")
        y = activate(acc.to(x_ptr.dtype.element_ty), acc_up.to(x_ptr.dtype.element_ty), ACTIVATION)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + m[None, :] * N + n[:, None], y, mask=(m < rows)[None, :] & (n < N)[:, None])


def slab_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, rows: int, tile: SlabTile
) -> None:
    """Store x @ weight.T + bias of the first rows.

    Args:
        x: [rows or more, K], contiguous.
        weight: [N, K] of x's dtype, contiguous; K = tile.piece * tile.pieces.
        bias: [N] or None.
        out: [rows or more, N], contiguous, of x's dtype or float32.
        rows: to compute, tile.rows at most.
        tile: how the product is cut.
    """
    _launch(x, weight, bias, out, rows, weight.shape[0], tile, "")


def slab_gated(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int, tile: SlabTile, activation: str
) -> None:
    """Store activation(x @ gate.T) * (x @ up.T) of the first rows; as `linear_skinny.skinny_gated`."""
    _launch(x, weight, None, out, rows, weight.shape[0] // 2, tile, activation)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    n: int,
    tile: SlabTile,
    activation: str,
) -> None:
    launch(
        _slab_kernel,
        (triton.cdiv(n, tile.columns),),
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        n,
        BM=tile.rows,
        BN=tile.columns,
        PIECE=tile.piece,
        PIECES=tile.pieces,
        EVEN_N=n % tile.columns == 0,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """The table's tiles on cards that have them."""
    cases = []
    for n, k, gated in ((4096, 1024, False), (1024, 2048, False), (1024, 3072, False), (3072, 1024, True)):
        for rows in (8, 16):
            tile = slab_tile(divmod(capability, 10), n, k, rows, gated=gated)
            if tile is None:
                continue
            for dtype, even in (("bf16", True), ("fp16", False)):
                arguments = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
                arguments |= dict.fromkeys(("rows", "N"), "i32")
                constants: dict[str, int | str] = {"BM": tile.rows, "BN": tile.columns, "PIECE": tile.piece}
                constants |= {"PIECES": tile.pieces, "EVEN_N": even, "HAS_BIAS": not even and not gated}
                constants |= {"ACTIVATION": ("silu" if even else "gelu") if gated else ""}
                cases.append(CompileCase(_slab_kernel, arguments, constants, tile.warps, 1, aligned=("N",)))
    return cases
