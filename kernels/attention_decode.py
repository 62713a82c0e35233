"""Attention of rows with one query: a partial for each chunk of keys, prefixes that rows share once, and the merge.

Decoding is a matter of reading keys and values at the memory's rate (Flash-Decoding, Dao et al. 2023, splits a row's
keys for that). The query heads of a kv head share what is read: they are the rows of a 16-row tensor-core product. A
chunk of a prefix that several sequences share is read once for all of them (Hydragen, arXiv 2402.05099), by products
of more rows whose partials land where those of the sequence alone would. The merge knows no difference.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from octavo.kernels.attention import (
    CHUNK,
    AttentionShape,
    attend_tile,
    block_offsets,
    finish,
    load_dims,
    merge_chunk,
    merge_factors,
    row_sum,
)
from octavo.kernels.attention_work import DECODE_ROWS, AttentionWork, device_limits, group_rows
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from torch import Tensor

__all__ = ["DecodeConfig", "compile_cases", "decode_attention", "decode_config"]


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How a kernel is launched. None of it changes the bits.

    Attributes:
        num_warps: of a program.
        num_stages: tiles in flight or in use.
        programs: a multiprocessor.
        registers: most a thread may use; None for what the compiler takes.
        merging: whether the program that ends a row's last partial merges them, instead of a kernel of its own.
    """

    num_warps: int
    num_stages: int
    programs: int
    registers: int | None = None
    merging: bool = False


# By (least compute capability, least head size); the last that fits holds.
_DECODE = {
    (80, 0): DecodeConfig(4, 3, 2),
    (86, 0): DecodeConfig(4, 3, 1),
    (90, 0): DecodeConfig(2, 3, 3),
}
_GROUP = {
    (80, 0): DecodeConfig(4, 3, 1),
    (86, 0): DecodeConfig(8, 2, 1),
    (90, 0): DecodeConfig(4, 2, 2),
}
_MERGE_PROGRAMS = 16
_MERGE_AHEAD = 8


def decode_config(
    capability: int, head_dim: int, table: dict[tuple[int, int], DecodeConfig] | None = None
) -> DecodeConfig:
    """The launch of the decode kernel (or of another `table`) for a compute capability such as 90."""
    fitting = [
        key for key in (_DECODE if table is None else table) if key[0] <= max(80, capability) and key[1] <= head_dim
    ]
    return (_DECODE if table is None else table)[max(fitting)]


def decode_attention(
    qkv: Tensor,
    out: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    *,
    grouped: bool,
    alibi_slopes: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: DecodeConfig | None = None,
    group_config: DecodeConfig | None = None,
) -> None:
    """Attention of the step's decode rows, row r of token r, after `plan_attention`.

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries first.
        out: [tokens, num_heads * head_dim], of qkv's dtype.
        kv_cache: [blocks, 2, num_kv_heads, block_size, head_dim] of qkv's dtype or float8_e4m3fn.
        block_tables: int32 [slots, blocks of a sequence].
        work: the lists of the layer's window.
        shape: of the layer.
        grouped: whether `plan_attention` used groups.
        alibi_slopes: float32 [num_heads] where shape.alibi.
        k_scale: what cached keys are to be multiplied with.
        v_scale: the same of values.
        config: another launch than the table's.
        group_config: the same of the shared-prefix kernel.
    """
    cache = kv_cache.view(torch.uint8) if shape.kv_fp8 and device_limits(qkv.device)[0] < 89 else kv_cache
    slopes = alibi_slopes if alibi_slopes is not None else work.stats
    scale = shape.scale * k_scale
    if grouped and work.members:
        _launch_group(qkv, cache, block_tables, work, shape, slopes, scale, group_config)
    config = config or decode_config(device_limits(qkv.device)[0], shape.head_dim)
    _launch_decode(qkv, out, cache, block_tables, work, shape, slopes, scale, v_scale, config)
    if not config.merging:
        _launch_merge(out, work, shape, v_scale)


def _launch_group(
    qkv: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    slopes: Tensor,
    scale: float,
    config: DecodeConfig | None,
) -> None:
    capability, processors = device_limits(qkv.device)
    config = config or decode_config(capability, shape.head_dim, _GROUP)
    launch(
        _group_kernel,
        (processors * config.programs,),
        qkv,
        cache,
        block_tables,
        block_tables.stride(0),
        work.group_items,
        work.member_rows,
        work.row_plan,
        work.totals,
        work.values,
        work.stats,
        slopes,
        scale,
        **_constants(shape, config),
        ROWS=work.group_rows,
        num_warps=config.num_warps,
        maxnreg=config.registers,
        enable_fp_fusion=False,
    )


def _launch_decode(
    qkv: Tensor,
    out: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    slopes: Tensor,
    scale: float,
    v_scale: float,
    config: DecodeConfig,
) -> None:
    _, processors = device_limits(qkv.device)
    launch(
        _decode_kernel,
        (processors * config.programs,),
        qkv,
        out,
        cache,
        block_tables,
        block_tables.stride(0),
        work.decode_items,
        work.row_plan,
        work.arrived,
        work.totals,
        work.values,
        work.stats,
        slopes,
        scale,
        v_scale,
        **_decode_constants(shape, config),
        num_warps=config.num_warps,
        maxnreg=config.registers,
        enable_fp_fusion=False,
    )


def _launch_merge(out: Tensor, work: AttentionWork, shape: AttentionShape, v_scale: float) -> None:
    _, processors = device_limits(out.device)
    launch(
        _merge_kernel,
        (processors * _MERGE_PROGRAMS,),
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


def _constants(shape: AttentionShape, config: DecodeConfig) -> dict[str, Any]:
    first, second = shape.parts
    return {
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "D0": first,
        "D1": second,
        "TILE": shape.tile,
        "CHUNK": CHUNK,
        "SOFTCAP": shape.softcap,
        "ALIBI": shape.alibi,
        "STAGES": config.num_stages,
    }


def _decode_constants(shape: AttentionShape, config: DecodeConfig) -> dict[str, Any]:
    return _constants(shape, config) | {
        "ROWS": DECODE_ROWS,
        "MERGING": config.merging,
        "MERGED": triton.next_power_of_2(min(shape.group, DECODE_ROWS)),
        "AHEAD": _MERGE_AHEAD,
    }


def _merge_constants(shape: AttentionShape) -> dict[str, Any]:
    return {
        "HEADS": shape.num_heads,
        "HEAD_DIM": shape.head_dim,
        "AHEAD": _MERGE_AHEAD,
    }


@triton.jit
def _attend_span(
    q0,
    q1,
    cache,
    table,
    kv_head,
    start,
    end,
    query,
    slopes,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax of queries q0, q1 [ROWS, ...] over positions start <= p < end of one chunk, all of which they see.

    query: position of each row's query, int32 [ROWS], for ALiBi.
    """
    BLOCK: tl.constexpr = 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM
    values = cache + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 16], tl.float32)
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = tl.zeros([ROWS, D1 if D1 > 0 else 16], tl.float32)
    lane = tl.arange(0, TILE)
    base = start // CHUNK * CHUNK
    # All blocks of the chunk are looked up first, so that in the loop no load waits for another.
    seen = (base + lane >= start) & (base + lane < end)
    blocks = (tl.load(table + (base + lane) // BLOCK_SIZE, mask=seen, other=0),)
    for i in tl.static_range(1, CHUNK // TILE):
        positions = base + i * TILE + lane
        seen = (positions >= start) & (positions < end)
        # Triton knows no starred tuple.
        blocks = blocks + (tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    for tile in tl.range((start - base) // TILE, (end - base + TILE - 1) // TILE, num_stages=STAGES):
        positions = base + tile * TILE + lane
        seen = (positions >= start) & (positions < end)
        block = blocks[0]
        for i in tl.static_range(1, CHUNK // TILE):
            block = tl.where(tile == i, blocks[i], block)
        place = block_offsets(block, positions, kv_head, BLOCK, BLOCK_SIZE, HEAD_DIM)
        k0 = load_dims(cache, place, seen, q0.dtype, 0, D0, HEAD_DIM)
        v0 = load_dims(values, place, seen, q0.dtype, 0, D0, HEAD_DIM)
        k1 = k0
        v1 = v0
        if D1 > 0:
            k1 = load_dims(cache, place, seen, q0.dtype, D0, D1, HEAD_DIM)
            v1 = load_dims(values, place, seen, q0.dtype, D0, D1, HEAD_DIM)
        m, total, acc0, acc1 = attend_tile(
            q0,
            q1,
            k0,
            k1,
            v0,
            v1,
            m,
            total,
            acc0,
            acc1,
            seen[None, :],
            positions[None, :] - query[:, None],
            slopes,
            scale,
            D1,
            SOFTCAP,
            ALIBI,
            True,
        )
    return m, row_sum(total), acc0, acc1


@triton.jit
def _load_queries(qkv, offsets, rows, D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Both parts of the queries at offsets int64 [ROWS], 0 where rows is false; the first twice where D1 is 0."""
    q0 = load_dims(qkv, offsets, rows, qkv.dtype.element_ty, 0, D0, HEAD_DIM)
    q1 = q0
    if D1 > 0:
        q1 = load_dims(qkv, offsets, rows, qkv.dtype.element_ty, D0, D1, HEAD_DIM)
    return q0, q1


@triton.jit
def _store_dims(base, offsets, rows, x, FIRST: tl.constexpr, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Store x [ROWS, DIMS] as dimensions FIRST onwards of the vectors at base + offsets."""
    dims = FIRST + tl.arange(0, DIMS)
    tl.store(base + offsets[:, None] + dims[None, :], x, mask=rows[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _decode_kernel(
    qkv,
    out,
    cache,
    tables,
    table_stride,
    items,
    row_plan,
    arrived,
    totals,
    values,
    stats,
    alibi,
    scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    MERGING: tl.constexpr,
    MERGED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Each item of the decode list for each kv head (and each ROWS of its query heads)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SPLIT: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    count = tl.load(totals) * (KV_HEADS * SPLIT)
    lane = tl.arange(0, ROWS)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        item = items + index // (KV_HEADS * SPLIT) * 8
        row = tl.load(item)
        slot = tl.load(item + 1)
        start = tl.load(item + 2)
        end = tl.load(item + 3)
        partial = tl.load(item + 4)
        query = tl.load(item + 5)
        kv_head = index // SPLIT % KV_HEADS
        inside = index % SPLIT * ROWS + lane
        rows = inside < GROUP
        head = kv_head * GROUP + inside
        q_offsets = row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
        q0, q1 = _load_queries(qkv, q_offsets, rows, D0, D1, HEAD_DIM)
        slopes = tl.load(alibi + head, mask=rows, other=0.0) if ALIBI else lane.to(tl.float32)
        m, total, acc0, acc1 = _attend_span(
            q0,
            q1,
            cache,
            tables + slot.to(tl.int64) * table_stride,
            kv_head,
            start,
            end,
            query + lane * 0,
            slopes,
            scale,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            D0,
            D1,
            TILE,
            CHUNK,
            SOFTCAP,
            ALIBI,
            ROWS,
            STAGES,
        )
        if partial < 0:
            o_offsets = row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
            dtype = out.dtype.element_ty
            _store_dims(out, o_offsets, rows, finish(acc0, total, v_scale, dtype), 0, D0, HEAD_DIM)
            if D1 > 0:
                _store_dims(out, o_offsets, rows, finish(acc1, total, v_scale, dtype), D0, D1, HEAD_DIM)
        else:
            place = partial.to(tl.int64) * HEADS + head
            tl.store(stats + place * 2, m, mask=rows)
            tl.store(stats + place * 2 + 1, total, mask=rows)
            _store_dims(values, place * HEAD_DIM, rows, acc0, 0, D0, HEAD_DIM)
            if D1 > 0:
                _store_dims(values, place * HEAD_DIM, rows, acc1, D0, D1, HEAD_DIM)
            if MERGING:
                first = tl.load(row_plan + 4 * row)
                chunks = tl.load(row_plan + 4 * row + 1)
                own_chunks = tl.load(row_plan + 4 * row + 3)
                counter = arrived + (row * KV_HEADS + kv_head) * SPLIT + index % SPLIT
                # What this program's threads wrote comes before the count, which shows it to who counts last.
                tl.debug_barrier()
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == own_chunks - 1:
                    tl.store(counter, 0)
                    few = tl.arange(0, MERGED)
                    few_rows = index % SPLIT * ROWS + few < GROUP
                    few_heads = kv_head * GROUP + index % SPLIT * ROWS + few
                    _merge_partials(
                        out,
                        row.to(tl.int64) * (HEADS * HEAD_DIM) + few_heads * HEAD_DIM,
                        first.to(tl.int64) * HEADS + few_heads,
                        few_rows,
                        chunks,
                        values,
                        stats,
                        v_scale,
                        HEADS,
                        HEAD_DIM,
                        AHEAD,
                        MERGED,
                    )


@triton.jit
def _group_kernel(
    qkv,
    cache,
    tables,
    table_stride,
    items,
    member_rows,
    row_plan,
    totals,
    values,
    stats,
    alibi,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each item of the shared-prefix list for each kv head: a whole chunk for several sequences."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    count = tl.load(totals + 1) * KV_HEADS
    lane = tl.arange(0, ROWS)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        item = items + index // KV_HEADS * 8
        first = tl.load(item)
        members = tl.load(item + 1)
        slot = tl.load(item + 2)
        chunk = tl.load(item + 3)
        kv_head = index % KV_HEADS
        rows = lane // GROUP < members
        head = kv_head * GROUP + lane % GROUP
        row = tl.load(member_rows + first + lane // GROUP, mask=rows, other=0)
        place = (tl.load(row_plan + 4 * row, mask=rows, other=0) + chunk).to(tl.int64) * HEADS + head
        query = tl.load(row_plan + 4 * row + 2, mask=rows, other=0)
        q_offsets = row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
        q0, q1 = _load_queries(qkv, q_offsets, rows, D0, D1, HEAD_DIM)
        slopes = tl.load(alibi + head, mask=rows, other=0.0) if ALIBI else lane.to(tl.float32)
        m, total, acc0, acc1 = _attend_span(
            q0,
            q1,
            cache,
            tables + slot.to(tl.int64) * table_stride,
            kv_head,
            chunk * CHUNK,
            chunk * CHUNK + CHUNK,
            query,
            slopes,
            scale,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            D0,
            D1,
            TILE,
            CHUNK,
            SOFTCAP,
            ALIBI,
            ROWS,
            STAGES,
        )
        tl.store(stats + place * 2, m, mask=rows)
        tl.store(stats + place * 2 + 1, total, mask=rows)
        _store_dims(values, place * HEAD_DIM, rows, acc0, 0, D0, HEAD_DIM)
        if D1 > 0:
            _store_dims(values, place * HEAD_DIM, rows, acc1, D0, D1, HEAD_DIM)


@triton.jit
def _merge_partials(
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
    _store_dims(out, o_offsets, rows, finish(acc, total, v_scale, out.dtype.element_ty), 0, DIMS, HEAD_DIM)


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
):
    """Merge the partials of each row and head."""
    count = tl.load(totals + 3) * HEADS
    one = tl.arange(0, 1)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        row = index // HEADS
        head = index % HEADS + one
        first = tl.load(row_plan + 4 * row)
        chunks = tl.load(row_plan + 4 * row + 1)
        if chunks > 0:
            _merge_partials(
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
    """The kernels for the head sizes and the caches they differ for."""
    types = dict.fromkeys(["qkv", "out", "cache"], "*bf16")
    types |= dict.fromkeys(["tables", "items", "totals", "member_rows", "row_plan", "arrived"], "*i32")
    types |= dict.fromkeys(["values", "stats", "alibi"], "*fp32") | dict.fromkeys(["scale", "v_scale"], "fp32")
    types["table_stride"] = "i32"
    shapes = [
        AttentionShape(16, 8, 128, 16, 0.1),
        AttentionShape(28, 4, 128, 16, 0.1, kv_fp8=True),
        AttentionShape(32, 32, 80, 32, 0.1, alibi=True),
        AttentionShape(16, 1, 192, 16, 0.1),
        AttentionShape(16, 8, 256, 16, 0.1, softcap=50.0),
    ]

    def case(kernel: Any, config: DecodeConfig, fp8: bool, constants: dict[str, Any]) -> CompileCase:
        arguments = {name: types[name] for name in kernel.arg_names if name in types}
        if fp8:
            arguments["cache"] = "*fp8e4nv" if capability >= 89 else "*u8"
        return CompileCase(kernel, arguments, constants, num_warps=config.num_warps, aligned=("table_stride",))

    cases = []
    for shape in shapes:
        chosen = decode_config(capability, shape.head_dim)
        for merging in (False, True):
            launched = dataclasses.replace(chosen, merging=merging)
            cases.append(case(_decode_kernel, launched, shape.kv_fp8, _decode_constants(shape, launched)))
        chosen = decode_config(capability, shape.head_dim, _GROUP)
        cases.append(
            case(_group_kernel, chosen, shape.kv_fp8, _constants(shape, chosen) | {"ROWS": group_rows(capability)})
        )
        cases.append(case(_merge_kernel, DecodeConfig(1, 3, 1), False, _merge_constants(shape)))
    return cases
