"""The merge of a row's partials, by a kernel or by the program that ends the last of them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from octavo.kernels.attention import AttentionShape, finish, merge_chunk, merge_factors
from octavo.kernels.attention_chunk import store_dims
from octavo.kernels.attention_work import AttentionWork
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow
from torch import Tensor

__all__ = ["compile_cases", "launch_merge", "merge_ahead", "merge_partials"]

_PROGRAMS = 16
"""Programs a multiprocessor, of one warp each."""


def launch_merge(out: Tensor, work: AttentionWork, shape: AttentionShape, v_scale: float) -> None:
    """Merge the partials of all rows that have some into out [tokens, num_heads * head_dim]."""
    launch(
        _merge_kernel,
        (work.processors * _PROGRAMS,),
        out,
        work.row_plan,
        work.totals,
        work.values,
        work.stats,
        v_scale,
        **_merge_constants(shape),
        num_warps=1,
        enable_fp_fusion=False,
    )


def merge_ahead(heads: int, head_dim: int, threads: int, held: int) -> int:
    """Partials of `heads` heads to load together, so that a thread holds about `held` values of them."""
    each = max(1, heads * int(triton.next_power_of_2(head_dim)) // threads)
    return min(16, max(1, held // each))


def _merge_constants(shape: AttentionShape) -> dict[str, Any]:
    return {
        "HEADS": shape.num_heads,
        "HEAD_DIM": shape.head_dim,
        "AHEAD": merge_ahead(1, shape.head_dim, 32, held=64),
    }


@triton.jit
def merge_partials(
    out,
    o_offsets,
    places,
    rows,
    chunks,
    values,
    stats,
    v_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AHEAD: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Merge partials in order and store the outputs of COUNT heads (those where rows [COUNT]) of one sequence.

    o_offsets, places: int64 [COUNT], elements to the outputs and number of the first partial times HEADS, plus head.
    AHEAD partials are loaded together. They pass by the first cache, which may hold what was there before.
    """
    DIMS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    dims = tl.arange(0, DIMS)
    m = tl.full([COUNT], float("-inf"), tl.float32)
    total = tl.zeros([COUNT], tl.float32)
    acc = tl.zeros([COUNT, DIMS], tl.float32)
    for start in range(0, chunks, AHEAD):
        for i in tl.static_range(AHEAD):
            here = rows & (start + i < chunks)
            at = places + (start + i) * HEADS
            part_m = tl.load(stats + at * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(stats + at * 2 + 1, mask=here, other=0.0, cache_modifier=".cg")
            part = tl.load(
                values + at[:, None] * HEAD_DIM + dims[None, :],
                mask=here[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            m, old, new = merge_factors(m, part_m)
            total = merge_chunk(total, old, part_total, new)
            acc = merge_chunk(acc, old[:, None], part, new[:, None])
    store_dims(out, o_offsets, rows, finish(acc, total, v_scale, out.dtype.element_ty), 0, DIMS, HEAD_DIM)


@triton.jit
def _merge_kernel(
    out,
    row_plan,
    totals,
    values,
    stats,
    v_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partials of each row and head."""
    follow(PDL)
    count = tl.load(totals + 3) * HEADS
    one = tl.arange(0, 1)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        row = index // HEADS
        head = index % HEADS + one
        first = tl.load(row_plan + 4 * row)
        chunks = tl.load(row_plan + 4 * row + 1)
        if chunks > 0:
            merge_partials(
                out,
                row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM,
                first.to(tl.int64) * HEADS + head,
                one == 0,
                chunks,
                values,
                stats,
                v_scale,
                HEADS,
                HEAD_DIM,
                AHEAD,
                1,
            )


def compile_cases(capability: int) -> list[CompileCase]:
    """The kernel for small and large heads."""
    del capability
    types = {
        "out": "*bf16",
        "row_plan": "*i32",
        "totals": "*i32",
        "values": "*fp32",
        "stats": "*fp32",
        "v_scale": "fp32",
    }
    shapes = [AttentionShape(16, 8, head_dim, 16, 0.1) for head_dim in (80, 128, 256)]
    return [CompileCase(_merge_kernel, types, _merge_constants(shape), num_warps=1) for shape in shapes]
