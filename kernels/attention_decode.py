"""Attention of rows with one query over the paged cache.

Decoding reads keys and values at the memory's rate (Flash-Decoding, Dao et al. 2023, splits a row's keys for that).
The query heads of a kv head share what is read: they are the rows of one tensor-core product. A row of one chunk is
complete with it; the partials of other rows are merged.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from octavo.kernels.attention import AttentionShape, finish
from octavo.kernels.attention_chunk import (
    attend_chunk,
    chunk_constants,
    load_chunk_blocks,
    load_queries,
    store_dims,
)
from octavo.kernels.attention_decode_tables import DecodeConfig, decode_config
from octavo.kernels.attention_group import launch_group
from octavo.kernels.attention_merge import launch_merge
from octavo.kernels.attention_work import DECODE_ROWS, AttentionWork, decode_launch, device_limits
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.gluon_support import gluon_serves
from octavo.kernels.launch import launch
from octavo.kernels.overlap import await_previous, start_next
from torch import Tensor

__all__ = ["compile_cases", "decode_attention", "serves_on_hopper"]

_LONG_TOKENS = 16
"""With more rows the next kernel starts when this one ends."""

_TURNS_TOKENS = 64
"""With more rows each program takes the next item there is when it is ready for one; with fewer that costs more than
the waiting at the end, and every program has its items given."""


def decode_attention(
    qkv: Tensor,
    out: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    *,
    tokens: int,
    grouped: bool,
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
        tokens: the most rows there may be; chooses the launch.
        grouped: whether `plan_attention` used groups.
        config: another launch than the table's.
        group_config: the same of the shared-prefix kernel.
    """
    cache = kv_cache.view(torch.uint8) if shape.kv_fp8 and work.capability < 89 else kv_cache
    if grouped and work.members:
        launch_group(qkv, cache, block_tables, work, shape, group_config)
    config = config or decode_launch(work, tokens)
    if not _launch_hopper(qkv, out, cache, block_tables, work, shape, config, tokens):
        _launch_decode(qkv, out, cache, block_tables, work, shape, config, tokens)
    launch_merge(out, work, shape, tokens=tokens, grouped=grouped)


def serves_on_hopper(device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> bool:
    """Whether Hopper's own decode kernel can be used: with it in an `AttentionWork`, `decode_attention` does."""
    capability, _ = device_limits(device)
    if capability != 90 or not gluon_serves():
        return False
    from octavo.kernels.attention_decode_hopper import hopper_serves

    return hopper_serves(capability, dtype, shape)


def _launch_hopper(
    qkv: Tensor,
    out: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    config: DecodeConfig,
    tokens: int,
) -> bool:
    """Launch Hopper's own kernel if the configuration asks for it; whether that was so.

    Its programs take turns from fewer rows on than the portable kernel's: it costs them nothing.
    """
    if not config.hopper_stages:
        return False
    from octavo.kernels.attention_decode_hopper import decode_on_hopper

    decode_on_hopper(
        qkv,
        out,
        cache,
        block_tables,
        work,
        shape,
        config=config,
        long=tokens > _LONG_TOKENS,
        turns=tokens > _LONG_TOKENS,
    )
    return True


def _launch_decode(
    qkv: Tensor,
    out: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    config: DecodeConfig,
    tokens: int,
) -> None:
    launch(
        _decode_kernel,
        (work.processors * config.programs,),
        qkv,
        out,
        cache,
        block_tables,
        block_tables.stride(0),
        work.decode_items,
        len(work.decode_items),
        work.totals,
        work.turns,
        work.values,
        work.stats,
        shape.scale,
        **_decode_constants(shape, config, tokens),
        num_warps=config.num_warps,
        maxnreg=config.registers,
        enable_fp_fusion=False,
    )


def _decode_constants(shape: AttentionShape, config: DecodeConfig, tokens: int) -> dict[str, Any]:
    constants = chunk_constants(shape, config.num_stages, config.pieces)
    return constants | {"ROWS": DECODE_ROWS, "LONG": tokens > _LONG_TOKENS, "TURNS": tokens > _TURNS_TOKENS}


@triton.jit
def _load_item(items, place, there):
    """What one record of the decode list says, or anything where there is none."""
    item = items + place * 8
    row = tl.load(item, mask=there, other=0)
    slot = tl.load(item + 1, mask=there, other=0)
    start = tl.load(item + 2, mask=there, other=0)
    end = tl.load(item + 3, mask=there, other=0)
    partial = tl.load(item + 4, mask=there, other=0)
    return row, slot, start, end, partial


@triton.jit(do_not_specialize=["table_stride", "capacity"])
def _decode_kernel(
    qkv,
    out,
    cache,
    tables,
    table_stride,
    items,
    capacity,
    totals,
    turns,
    values,
    stats,
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
    LONG: tl.constexpr,
    TURNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each item of the decode list for each kv head (and each ROWS of its query heads)."""
    if not LONG:
        start_next(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SPLIT: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    PER_ITEM: tl.constexpr = KV_HEADS * SPLIT
    lane = tl.arange(0, ROWS)
    index = tl.program_id(0)
    programs = tl.num_programs(0)
    count = tl.load(totals) * PER_ITEM
    # Items are looked up one ahead, the first before it is known how many there are.
    row, slot, start, end, partial = _load_item(items, index // PER_ITEM, index // PER_ITEM < capacity)
    while index < count:
        table = tables + slot.to(tl.int64) * table_stride
        blocks = load_chunk_blocks(table, start, end, BLOCK_SIZE, TILE, CHUNK, PIECES)
        await_previous(PDL)
        following = programs + tl.atomic_add(turns, 1, sem="relaxed") if TURNS else index + programs
        ahead = _load_item(items, following // PER_ITEM, following < count)
        kv_head = index // SPLIT % KV_HEADS
        inside = index % SPLIT * ROWS + lane
        rows = inside < GROUP
        head = kv_head * GROUP + inside
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
        if partial < 0:
            o_offsets = row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
            dtype = out.dtype.element_ty
            store_dims(out, o_offsets, rows, finish(acc0, total, dtype), 0, D0, HEAD_DIM)
            if D1 > 0:
                store_dims(out, o_offsets, rows, finish(acc1, total, dtype), D0, D1, HEAD_DIM)
        else:
            place = partial.to(tl.int64) * HEADS + head
            tl.store(stats + place * 2, m, mask=rows)
            tl.store(stats + place * 2 + 1, total, mask=rows)
            store_dims(values, place * HEAD_DIM, rows, acc0, 0, D0, HEAD_DIM)
            if D1 > 0:
                store_dims(values, place * HEAD_DIM, rows, acc1, D0, D1, HEAD_DIM)
        row, slot, start, end, partial = ahead
        index = following
    await_previous(PDL)
    if TURNS:
        ended = tl.atomic_add(turns + 1, 1, sem="relaxed")
        # The last program to end resets the counters for the next layer.
        tl.store(turns, 0, mask=ended == programs - 1)
        tl.store(turns + 1, 0, mask=ended == programs - 1)
    if LONG:
        start_next(PDL)


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
        for tokens in (1, 16, 32, 256):
            config = decode_config(capability, shape, tokens)
            types = dict.fromkeys(["tables", "items", "totals", "turns"], "*i32")
            types |= dict.fromkeys(["values", "stats"], "*fp32")
            types |= dict.fromkeys(["qkv", "out", "cache"], "*bf16")
            types |= {"table_stride": "i32", "capacity": "i32", "scale": "fp32"}
            if shape.kv_fp8:
                types["cache"] = "*fp8e4nv" if capability >= 89 else "*u8"
            constants = _decode_constants(shape, config, tokens)
            cases.append(CompileCase(_decode_kernel, types, constants, num_warps=config.num_warps))
    return cases
