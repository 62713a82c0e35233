"""Attention over prefixes that rows share: each chunk is read once for all of them (Hydragen, arXiv 2402.05099).

Several sequences' query heads are the rows of one product. Their partials land where the decode kernel would put them,
with the same bits, and the merge knows no difference.
"""

from __future__ import annotations

import triton
import triton.language as tl
from octavo.kernels.attention import AttentionShape
from octavo.kernels.attention_chunk import (
    attend_chunk,
    chunk_constants,
    load_chunk_blocks,
    load_queries,
    store_dims,
)
from octavo.kernels.attention_decode_tables import DecodeConfig, group_config
from octavo.kernels.attention_work import AttentionWork, group_rows
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import await_previous, start_next
from torch import Tensor

__all__ = ["compile_cases", "launch_group"]


def launch_group(
    qkv: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    config: DecodeConfig | None,
) -> None:
    """Partials of the shared chunks; arguments as `decode_attention`'s."""
    config = config or group_config(work.capability, shape)
    launch(
        _group_kernel,
        (work.processors * config.programs,),
        qkv,
        cache,
        block_tables,
        block_tables.stride(0),
        work.group_items,
        work.member_rows,
        work.totals,
        work.values,
        work.stats,
        work.chunks,
        shape.scale,
        **chunk_constants(shape, config.num_stages, config.pieces),
        ROWS=work.group_rows,
        num_warps=config.num_warps,
        maxnreg=config.registers,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["table_stride", "most_chunks"])
def _group_kernel(
    qkv,
    cache,
    tables,
    table_stride,
    items,
    member_rows,
    totals,
    values,
    stats,
    most_chunks,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each item of the shared-prefix list for each kv head: a whole chunk for several sequences."""
    start_next(PDL)
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
        place = (row * most_chunks + chunk).to(tl.int64) * HEADS + head
        start, end = chunk * CHUNK, chunk * CHUNK + CHUNK
        table = tables + slot.to(tl.int64) * table_stride
        blocks = load_chunk_blocks(table, start, end, BLOCK_SIZE, TILE, CHUNK, PIECES)
        await_previous(PDL)
        q_offsets = row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
        q0, q1 = load_queries(qkv, q_offsets, rows, D0, D1, HEAD_DIM)
        m, total, acc0, acc1 = attend_chunk(
            q0,
            q1,
            cache,
            blocks,
            kv_head,
            start,
            end,
            scale,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            D0,
            D1,
            TILE,
            CHUNK,
            PIECES,
            SOFTCAP,
            ROWS,
            STAGES,
        )
        tl.store(stats + place * 2, m, mask=rows)
        tl.store(stats + place * 2 + 1, total, mask=rows)
        store_dims(values, place * HEAD_DIM, rows, acc0, 0, D0, HEAD_DIM)
        if D1 > 0:
            store_dims(values, place * HEAD_DIM, rows, acc1, D0, D1, HEAD_DIM)
    await_previous(PDL)


def compile_cases(capability: int) -> list[CompileCase]:
    """The kernel for the head sizes and the caches it differs for."""
    shapes = [
        AttentionShape(16, 8, 128, 16, 0.1),
        AttentionShape(28, 4, 128, 16, 0.1, kv_fp8=True),
        AttentionShape(32, 32, 80, 32, 0.1),
        AttentionShape(16, 1, 192, 16, 0.1),
        AttentionShape(16, 8, 256, 16, 0.1, softcap=50.0),
    ]
    cases = []
    for shape in shapes:
        config = group_config(capability, shape)
        types = dict.fromkeys(["tables", "items", "member_rows", "totals"], "*i32")
        types |= dict.fromkeys(["values", "stats"], "*fp32")
        types |= {"qkv": "*bf16", "cache": "*bf16", "table_stride": "i32", "most_chunks": "i32", "scale": "fp32"}
        if shape.kv_fp8:
            types["cache"] = "*fp8e4nv" if capability >= 89 else "*u8"
        constants = chunk_constants(shape, config.num_stages, config.pieces) | {"ROWS": group_rows(capability)}
        cases.append(CompileCase(_group_kernel, types, constants, num_warps=config.num_warps))
    return cases
