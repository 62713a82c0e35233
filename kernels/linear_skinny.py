"""Products of few rows, y[M, N] = x[M, K] @ W[N, K]^T: bound by reading W once, so built around that stream.

A program owns some rows of W and all rows of x. Its sums are one chain over K, 16 at a time and in order, in the
float32 accumulators of the tensor cores: neither the number of rows nor a tile's shape can change a bit of a result.
No split of K: the chain is what makes a row's bits the same here and in a product of thousands of rows.

An MLP's gate and up products may share a program, which then rounds both, applies the activation and stores what the
separate products and the activation's kernel would have stored, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.activation import activate
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.linear_tables import SkinnyTile, skinny_tile
from octavo.kernels.overlap import await_previous, start_next

__all__ = ["compile_cases", "skinny_gated", "skinny_product"]

_SMALL_BYTES = 16 << 20
"""Of weights up to which a product asks for its own ahead and lets the next kernel start at once. Larger ones would
push each other out of L2 before they are read, and take long enough for the next kernel to be in the way."""


@triton.jit
def _tile(
    w_ptr, first, N, K, k, step, BN: tl.constexpr, SWAP: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr
):
    """W's tile of rows from first: [BN, BK], transposed unless SWAP."""
    n = tl.arange(0, BN)
    base = w_ptr + first.to(tl.int64) * K + step
    if SWAP:
        pointers = base + n[:, None] * K + k[None, :]
        inside = (first + n < N)[:, None] & (step + k < K)[None, :]
    else:
        pointers = base + n[None, :] * K + k[:, None]
        inside = (first + n < N)[None, :] & (step + k < K)[:, None]
    if EVEN_N and EVEN_K:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _prefetch(pointer, num_bytes):
    """Ask for num_bytes (a multiple of 16) from pointer on to be brought to L2; one thread of the program asks."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointer, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _chained(x, w, acc, SWAP: tl.constexpr):
    """Acc and one step of the product more."""
    if SWAP:
        return tl.dot(w, x, acc, input_precision="ieee")
    else:
        return tl.dot(x, w, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x_ptr,  # [>= rows, K]
    w_ptr,  # [N, K], or [2N, K] where GATED: N gate rows, then N up rows
    bias_ptr,  # [N] where HAS_BIAS
    out_ptr,  # [>= rows, N]
    rows,
    N,
    K,
    BM: tl.constexpr,  # >= rows
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "" for a plain product
    SMALL: tl.constexpr,  # whether L2 holds all of W at once
    PDL: tl.constexpr,
):
    """Store x @ W^T (+ bias), or activation(x @ gate^T) * (x @ up^T)."""
    GATED: tl.constexpr = ACTIVATION != ""
    first = tl.program_id(0) * BN
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    if SMALL:
        start_next(PDL)
        if PDL:
            size = tl.minimum(BN, N - first) * K * 2
            _prefetch(w_ptr + first.to(tl.int64) * K, size)
            if GATED:
                _prefetch(w_ptr + (N + first).to(tl.int64) * K, size)
    await_previous(PDL)
    if SWAP:
        acc = tl.zeros((BN, BM), dtype=tl.float32)
        acc_up = tl.zeros((BN, BM), dtype=tl.float32)
    else:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        acc_up = tl.zeros((BM, BN), dtype=tl.float32)
    for step in tl.range(0, K, BK):
        if SWAP:
            x_pointers = x_ptr + m[None, :] * K + (step + k)[:, None]
            x_inside = (m < rows)[None, :]
            if not EVEN_K:
                x_inside = x_inside & (step + k < K)[:, None]
        else:
            x_pointers = x_ptr + m[:, None] * K + (step + k)[None, :]
            x_inside = (m < rows)[:, None]
            if not EVEN_K:
                x_inside = x_inside & (step + k < K)[None, :]
        x = tl.load(x_pointers, mask=x_inside, other=0.0)
        w = _tile(w_ptr, first, N, K, k, step, BN, SWAP, EVEN_N, EVEN_K)
        acc = _chained(x, w, acc, SWAP)
        if GATED:
            w_up = _tile(w_ptr + N.to(tl.int64) * K, first, N, K, k, step, BN, SWAP, EVEN_N, EVEN_K)
            acc_up = _chained(x, w_up, acc_up, SWAP)
    if not SMALL:
        start_next(PDL)
    n = first + tl.arange(0, BN)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if SWAP:
            acc += bias[:, None]
        else:
            acc += bias[None, :]
    if GATED:
        y = activate(acc.to(x_ptr.dtype.element_ty), acc_up.to(x_ptr.dtype.element_ty), ACTIVATION)
    else:
        y = acc.to(out_ptr.dtype.element_ty)
    if SWAP:
        tl.store(out_ptr + m[None, :] * N + n[:, None], y, mask=(m < rows)[None, :] & (n < N)[:, None])
    else:
        tl.store(out_ptr + m[:, None] * N + n[None, :], y, mask=(m < rows)[:, None] & (n < N)[None, :])


def skinny_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, rows: int, tile: SkinnyTile
) -> None:
    """Store x @ weight.T + bias of the first rows.

    Args:
        x: [rows or more, K], contiguous.
        weight: [N, K] of x's dtype, contiguous; K a multiple of 16.
        bias: [N] or None.
        out: [rows or more, N], contiguous, of x's dtype or float32.
        rows: to compute, tile.rows at most.
        tile: how the product is cut.
    """
    _launch(x, weight, bias, out, rows, weight.shape[0], tile, "")


def skinny_gated(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int, tile: SkinnyTile, activation: str
) -> None:
    """Store activation(x @ gate.T) * (x @ up.T) of the first rows, rounded as `reference.act_and_mul` of the products.

    Args:
        x: [rows or more, K], contiguous.
        weight: [2N, K] of x's dtype, contiguous: the gate's rows, then the up's; K a multiple of 16.
        out: [rows or more, N], contiguous, of x's dtype.
        rows: to compute, tile.rows at most.
        tile: how either product is cut.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    _launch(x, weight, None, out, rows, weight.shape[0] // 2, tile, activation)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    n: int,
    tile: SkinnyTile,
    activation: str,
) -> None:
    k = weight.shape[1]
    launch(
        _skinny_kernel,
        (triton.cdiv(n, tile.columns),),
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        n,
        k,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        SWAP=tile.swap,
        EVEN_N=n % tile.columns == 0,
        EVEN_K=k % tile.depth == 0,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        SMALL=weight.nbytes <= _SMALL_BYTES,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """The table's tiles at the shapes of small and middle models; where a card uses none, those of sm_80."""
    cases = {}
    card = divmod(capability, 10)
    for n, rows, gated in (
        (1024, 8, False),
        (4096, 32, False),
        (151936, 64, False),
        (3072, 16, True),
        (14336, 64, True),
    ):
        tile = skinny_tile(card, n, 4096, rows, gated=gated) or skinny_tile((8, 0), n, 4096, rows, gated=gated)
        assert tile is not None
        for dtype, even in (("bf16", True), ("fp16", False)):
            pointers = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
            arguments = pointers | dict.fromkeys(("rows", "N", "K"), "i32")
            if n > 100_000:
                arguments["out_ptr"] = "*fp32"
            constants: dict[str, int | str] = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "SWAP": tile.swap}
            constants |= {"EVEN_N": even, "EVEN_K": even, "HAS_BIAS": not even and not gated}
            constants |= {"ACTIVATION": ("silu" if even else "gelu") if gated else "", "SMALL": even}
            cases[tile, dtype, gated] = CompileCase(
                _skinny_kernel, arguments, constants, tile.warps, tile.stages, aligned=("N", "K")
            )
    return list(cases.values())
