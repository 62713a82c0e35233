"""The merge of each row's partials."""

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

__all__ = ["compile_cases", "launch_merge"]

_PROGRAMS = 16
"""Programs a multiprocessor, of one warp each."""

_FEW_TOKENS = 16
"""With as many rows at most, partials are loaded before it is known whether there are any: it saves a wait."""


def launch_merge(out: Tensor, work: AttentionWork, shape: AttentionShape, v_scale: float, *, tokens: int) -> None:
    """Merge the partials of all rows (tokens at most) that have some into out [tokens, num_heads * head_dim]."""
    heads = min(tokens, work.max_num_seqs) * shape.num_heads
    few = tokens <= _FEW_TOKENS
    launch(
        _merge_kernel,
        (heads if few else min(heads, work.processors * _PROGRAMS),),
        out,
        work.row_plan,
        work.totals,
        work.values,
        work.stats,
        v_scale,
        work.chunks,
        **_merge_constants(shape, few),
        num_warps=1,
        enable_fp_fusion=False,
    )


def _ahead(head_dim: int, few: bool) -> int:
    """Partials to load together, so that each thread of a warp holds about 64 values of them; 8 at most for few rows.

    That kernel holds the code twice: with 16 it takes as long to compile as all others together.
    """
    each = max(1, int(triton.next_power_of_2(head_dim)) // 32)
    return min(8 if few else 16, 64 // each)


def _merge_constants(shape: AttentionShape, few: bool) -> dict[str, Any]:
    return {
        "HEADS": shape.num_heads,
        "HEAD_DIM": shape.head_dim,
        "AHEAD": _ahead(shape.head_dim, few),
        "EARLY": few,
    }


@triton.jit
def _merge_partials(
    out,
    o_offsets,
    places,
    chunks,
    values,
    stats,
    v_scale,
    most_chunks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge partials in order and store the output of one head of one sequence.

    o_offsets, places: int64 [1], elements to the output and number of the first partial times HEADS, plus head.
    chunks: partials, of most_chunks at most; with 0 nothing is stored. AHEAD of them are loaded together, the first
    whether they are there or not where EARLY. Each is read once, so it passes by the first cache.
    """
    DIMS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    rows = tl.full([1], True, tl.int1)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DIMS], tl.float32)
    begin = 0
    if EARLY:
        for i in tl.static_range(AHEAD):
            here = rows & (i < chunks)
            part_m, part_total, part = _load_partial(
                values, stats, places + i * HEADS, rows & (i < most_chunks), HEAD_DIM, DIMS
            )
            m, old, new = merge_factors(m, tl.where(here, part_m, float("-inf")))
            total = merge_chunk(total, old, tl.where(here, part_total, 0.0), new)
            acc = merge_chunk(acc, old[:, None], tl.where(here[:, None], part, 0.0), new[:, None])
        begin = AHEAD
    for start in range(begin, chunks, AHEAD):
        for i in tl.static_range(AHEAD):
            here = rows & (start + i < chunks)
            at = places + (start + i) * HEADS
            part_m, part_total, part = _load_partial(values, stats, at, here, HEAD_DIM, DIMS)
            m, old, new = merge_factors(m, part_m)
            total = merge_chunk(total, old, part_total, new)
            acc = merge_chunk(acc, old[:, None], part, new[:, None])
    done = finish(acc, total, v_scale, out.dtype.element_ty)
    store_dims(out, o_offsets, rows & (chunks > 0), done, 0, DIMS, HEAD_DIM)


@triton.jit
def _load_partial(values, stats, places, rows, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Maximum, sum and weighted values of the partials at places [1]; those of nothing where rows is false."""
    dims = tl.arange(0, DIMS)
    m = tl.load(stats + places * 2, mask=rows, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + places * 2 + 1, mask=rows, other=0.0, cache_modifier=".cg")
    mask = rows[:, None] & (dims < HEAD_DIM)[None, :]
    at = values + places[:, None] * HEAD_DIM + dims[None, :]
    return m, total, tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["most_chunks"])
def _merge_kernel(
    out,
    row_plan,
    totals,
    values,
    stats,
    v_scale,
    most_chunks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partials of each row and head; where EARLY there is a program for each."""
    follow(PDL)
    count = tl.load(totals + 3) * HEADS
    one = tl.arange(0, 1)
    if EARLY:
        row = tl.program_id(0) // HEADS
        head = tl.program_id(0) % HEADS + one
        chunks = tl.where(tl.program_id(0) < count, tl.load(row_plan + 2 * row), 0)
        _merge_partials(
            out,
            row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM,
            row.to(tl.int64) * most_chunks * HEADS + head,
            chunks,
            values,
            stats,
            v_scale,
            most_chunks,
            HEADS,
            HEAD_DIM,
            AHEAD,
            True,
        )
    else:
        for index in range(tl.program_id(0), count, tl.num_programs(0)):
            row = index // HEADS
            head = index % HEADS + one
            _merge_partials(
                out,
                row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM,
                row.to(tl.int64) * most_chunks * HEADS + head,
                tl.load(row_plan + 2 * row),
                values,
                stats,
                v_scale,
                most_chunks,
                HEADS,
                HEAD_DIM,
                AHEAD,
                False,
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
        "most_chunks": "i32",
    }
    shapes = [AttentionShape(16, 8, head_dim, 16, 0.1) for head_dim in (80, 128, 256)]
    return [
        CompileCase(_merge_kernel, types, _merge_constants(shape, few), num_warps=1)
        for shape in shapes
        for few in (False, True)
    ]
