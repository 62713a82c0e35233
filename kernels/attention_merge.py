"""The merge of each row's partials."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from octavo.kernels.attention import AttentionShape, finish, merge_chunk, merge_factors
from octavo.kernels.attention_chunk import store_dims
from octavo.kernels.attention_work import AttentionWork, split_rows
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import await_previous, start_next
from torch import Tensor

__all__ = ["compile_cases", "launch_merge"]

_FEW_TOKENS = 16
"""With as many rows at most, each head has a program of its own."""

_HEADS = 2
"""Heads of a program of more rows. It is one warp, in which no sum has to be passed on through shared memory."""


def launch_merge(out: Tensor, work: AttentionWork, shape: AttentionShape, *, tokens: int, grouped: bool) -> None:
    """Merge the partials of all rows (tokens at most) that have some into out [tokens, num_heads * head_dim]."""
    together = _heads_together(tokens)
    launch(
        _merge_kernel,
        (split_rows(work, tokens, grouped=grouped) * triton.cdiv(shape.num_heads, together),),
        out,
        work.row_partials,
        work.totals,
        work.values,
        work.stats,
        work.chunks,
        **_merge_constants(shape, together),
        num_warps=1,
        enable_fp_fusion=False,
    )


def _heads_together(tokens: int) -> int:
    return 1 if tokens <= _FEW_TOKENS else _HEADS


def _merge_constants(shape: AttentionShape, together: int) -> dict[str, Any]:
    # Of partials loaded at once a thread holds 64 values at most.
    ahead = 2048 // (together * int(triton.next_power_of_2(shape.head_dim)))
    return {"HEADS": shape.num_heads, "HEAD_DIM": shape.head_dim, "TOGETHER": together, "AHEAD": min(8, ahead)}


@triton.jit
def _load_partial(values, stats, places, rows, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Maximum, sum and weighted values of the partials at places [n]; neutral ones where rows is false.

    Each is read once, so it bypasses the first cache.
    """
    dims = tl.arange(0, DIMS)
    m = tl.load(stats + places * 2, mask=rows, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + places * 2 + 1, mask=rows, other=0.0, cache_modifier=".cg")
    mask = rows[:, None] & (dims < HEAD_DIM)[None, :]
    at = values + places[:, None] * HEAD_DIM + dims[None, :]
    return m, total, tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["most_chunks"])
def _merge_kernel(
    out,
    row_partials,
    totals,
    values,
    stats,
    most_chunks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOGETHER: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partials of TOGETHER heads of a row in order; AHEAD of them are loaded at once."""
    start_next(PDL)
    DIMS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    PARTS: tl.constexpr = (HEADS + TOGETHER - 1) // TOGETHER
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    head = tl.program_id(0) % PARTS * TOGETHER + tl.arange(0, TOGETHER)
    chunks = tl.load(row_partials + row)
    chunks = tl.where(row < tl.load(totals + 3), chunks, 0)
    await_previous(PDL)
    places = row * most_chunks * HEADS + head
    m = tl.full([TOGETHER], float("-inf"), tl.float32)
    total = tl.zeros([TOGETHER], tl.float32)
    acc = tl.zeros([TOGETHER, DIMS], tl.float32)
    for start in range(0, chunks, AHEAD):
        for i in tl.static_range(AHEAD):
            here = (head < HEADS) & (start + i < chunks)
            at = places + (start + i) * HEADS
            part_m, part_total, part = _load_partial(values, stats, at, here, HEAD_DIM, DIMS)
            m, old, new = merge_factors(m, part_m)
            total = merge_chunk(total, old, part_total, new)
            acc = merge_chunk(acc, old[:, None], part, new[:, None])
    done = finish(acc, total, out.dtype.element_ty)
    store_dims(out, (row * HEADS + head) * HEAD_DIM, (head < HEADS) & (chunks > 0), done, 0, DIMS, HEAD_DIM)


def compile_cases(capability: int) -> list[CompileCase]:
    """The kernel for small and large heads."""
    del capability
    types = {
        "out": "*bf16",
        "row_partials": "*i32",
        "totals": "*i32",
        "values": "*fp32",
        "stats": "*fp32",
        "most_chunks": "i32",
    }
    shapes = [AttentionShape(16, 8, head_dim, 16, 0.1) for head_dim in (80, 128, 256)]
    return [
        CompileCase(_merge_kernel, types, _merge_constants(shape, together), num_warps=1)
        for shape in shapes
        for together in (1, _HEADS)
    ]
