"""Products of very few rows and a short K, y[M, N] = x[M, K] @ W[N, K]^T, on cards that launch dependents early.

Such a product takes less time than a memory access and the chain of its multiplications, so what counts is what lies
between the end of the kernel before and its own: a program has all of its rows of W in shared memory by then, which
it copies while other kernels still run. The arithmetic is that of `linear_skinny`: one chain over K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.activation import activate
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.linear_tables import SlabTile, slab_tile
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

__all__ = ["compile_cases", "slab_gated", "slab_product"]


@gluon.jit
def _follow():
    """Wait for the kernel before."""
    tl.extra.cuda.gdc_wait()


@gluon.jit(do_not_specialize=["rows"])
def _slab_kernel(
    x_ptr,  # [>= rows, K]
    w_ptr,  # [N, K], or [2N, K] where ACTIVATION: N gate rows, then N up rows
    bias_ptr,  # [N] where HAS_BIAS
    out_ptr,  # [>= rows, N]
    rows,
    N,
    BM: gl.constexpr,  # >= rows
    BN: gl.constexpr,
    PIECE: gl.constexpr,
    PIECES: gl.constexpr,  # PIECE * PIECES = K
    EVEN_N: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,  # "" for a plain product
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Store x @ W^T (+ bias), or activation(x @ gate^T) * (x @ up^T)."""
    K: gl.constexpr = PIECE * PIECES
    # Gate rows, then the up rows of the same columns, in one tile: two chains at once take no longer than one.
    TILE: gl.constexpr = 2 * BN if ACTIVATION != "" else BN
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    HELD: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = gl.program_id(0) * BN
    w_held = gl.allocate_shared_memory(dtype, [PIECES, TILE, PIECE], HELD)
    x_held = gl.allocate_shared_memory(dtype, [PIECES, BM, PIECE], HELD)
    k = gl.arange(0, PIECE, gl.SliceLayout(0, COPY))
    lane = gl.arange(0, TILE, gl.SliceLayout(1, COPY))
    column = first + lane % BN
    if not EVEN_N:
        column = gl.minimum(column, N - 1)
    w_offsets = (column + lane // BN * N).to(gl.int64)[:, None] * K + k[None, :]
    for i in gl.static_range(PIECES):
        async_copy.async_copy_global_to_shared(w_held.index(i), w_ptr + w_offsets + i * PIECE)
    async_copy.commit_group()
    if PDL:
        _follow()
    # Rows beyond the last repeat it; what they give is not stored.
    m = gl.minimum(gl.arange(0, BM, gl.SliceLayout(1, COPY)), rows - 1)
    x_offsets = m[:, None] * K + k[None, :]
    for i in gl.static_range(PIECES):
        async_copy.async_copy_global_to_shared(x_held.index(i), x_ptr + x_offsets + i * PIECE)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    acc = gl.zeros([TILE, BM], gl.float32, SUMS)
    for i in gl.static_range(PIECES):
        a = w_held.index(i).load(gl.DotOperandLayout(0, SUMS, 2))
        b = x_held.index(i).permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 2))
        acc = mma_v2(a, b, acc)
    if ACTIVATION != "":
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [0, 1])
        both = gl.allocate_shared_memory(dtype, [TILE, BM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        both.store(acc.to(dtype))
        gl.thread_barrier()
        gate, up = both.slice(0, BN, 0).load(PAIRS), both.slice(BN, BN, 0).load(PAIRS)
        y = activate(gate, up, ACTIVATION)
        n = first + gl.arange(0, BN, gl.SliceLayout(1, PAIRS))
        row = gl.arange(0, BM, gl.SliceLayout(0, PAIRS))
    else:
        n = first + gl.arange(0, BN, gl.SliceLayout(1, SUMS))
        row = gl.arange(0, BM, gl.SliceLayout(0, SUMS))
        if HAS_BIAS:
            acc += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        y = acc.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + row[None, :] * N + n[:, None], y, mask=(row < rows)[None, :] & (n < N)[:, None])


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
        WARPS=tile.warps,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """The table's tiles on cards that have them."""
    cases = []
    for n, k, gated in ((4096, 1024, False), (1024, 2048, False), (1024, 3072, False), (3072, 1024, True)):
        for rows in (1, 8):
            tile = slab_tile(divmod(capability, 10), n, k, rows, gated=gated)
            if tile is None:
                continue
            for dtype, even in (("bf16", True), ("fp16", False)):
                arguments = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
                arguments |= dict.fromkeys(("rows", "N"), "i32")
                constants: dict[str, int | str] = {
                    "BM": tile.rows,
                    "BN": tile.columns,
                    "PIECE": tile.piece,
                    "WARPS": tile.warps,
                }
                constants |= {"PIECES": tile.pieces, "EVEN_N": even, "HAS_BIAS": not even and not gated}
                constants |= {"ACTIVATION": ("silu" if even else "gelu") if gated else ""}
                cases.append(CompileCase(_slab_kernel, arguments, constants, tile.warps, 1, aligned=("N",)))
    return cases
