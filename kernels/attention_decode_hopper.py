"""Attention of rows with one query on Hopper: as `attention_decode`, with copies that run ahead of the arithmetic.

One warp of a program asks the tensor memory accelerator for the keys and values of tile after tile, a block and half a
head at a time, and from one item to the next without a pause; the others take them as they come (Flash-Decoding's
items, Dao et al. 2023, by FlashAttention-3's division of work, Shah et al. 2024). Copies also start before the kernel
ahead has ended: it writes no key or value but each row's newest. The arithmetic and its order are those of every other
kernel here.
"""

from __future__ import annotations

from typing import Any

import torch
from octavo.kernels.attention import (
    CHUNK,
    AttentionShape,
    cap_scores,
    finish,
    log2_factor,
    merge_chunk,
    merge_factors,
    raise_maximum,
    row_sum,
    weights,
)
from octavo.kernels.attention_decode_copy import load_decode_tiles
from octavo.kernels.attention_decode_tables import DecodeConfig
from octavo.kernels.attention_work import DECODE_ROWS, AttentionWork
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import await_previous, start_next
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, mma_v2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["compile_cases", "decode_on_hopper", "hopper_serves"]

_PIECE = gl.NVMMASharedLayout(128, 16, 2)

_COPY_REGISTERS = gl.constexpr(48)
"""Of a thread of the copying warp, and of the three beside it that have nothing to do."""


def hopper_serves(capability: int, dtype: torch.dtype, shape: AttentionShape) -> bool:
    """Whether `decode_on_hopper` can take the place of the portable kernel, with the same bits."""
    plain = not shape.kv_fp8
    fits = shape.head_dim in (64, 128, 256) and shape.tile % shape.block_size == 0 and shape.group <= DECODE_ROWS
    return capability == 90 and dtype in (torch.bfloat16, torch.float16) and plain and fits


def decode_on_hopper(
    qkv: Tensor,
    out: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    *,
    config: DecodeConfig,
    long: bool,
    turns: bool,
) -> None:
    """The items of the decode list, as the portable kernel of `attention_decode`, where `hopper_serves`.

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries first.
        out: [tokens, num_heads * head_dim], of qkv's dtype.
        kv_cache: [blocks, 2, num_kv_heads, block_size, head_dim] of qkv's dtype.
        block_tables: int32 [slots, blocks of a sequence].
        work: the lists of the layer's window.
        shape: of the layer.
        config: the launch, with hopper_stages above 0.
        long: the next kernel starts when this one ends.
        turns: each program takes the next item there is when it is ready for one.
    """
    lines = kv_cache.view(-1, shape.head_dim)
    cache = TensorDescriptor(lines, list(lines.shape), list(lines.stride()), [shape.block_size, 64], _PIECE)
    launch(
        _decode_hopper_kernel,
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
        lines.shape[0],
        shape.scale,
        **_constants(shape, config, long, turns),
        num_warps=config.num_warps,
        maxnreg=_registers(config, shape),
        enable_fp_fusion=False,
    )


def _constants(shape: AttentionShape, config: DecodeConfig, long: bool, turns: bool) -> dict[str, Any]:
    return {
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "TILE": shape.tile,
        "CHUNK": CHUNK,
        "SOFTCAP": shape.softcap,
        "ROWS": DECODE_ROWS,
        "WARPS": config.num_warps,
        "STAGES": config.hopper_stages,
        "LONG": long,
        "TURNS": turns,
    }


def _registers(config: DecodeConfig, shape: AttentionShape) -> int:
    """Registers of a thread, of which the copying warp leaves some to the others; warps come in fours."""
    threads = config.programs * (config.num_warps // 4 + 1) * 128
    return config.registers or min(96 if shape.head_dim <= 128 else 128, 65536 // threads // 8 * 8)


@gluon.constexpr_function
def _warps_in_registers(warps: int) -> gl.DistributedLinearLayout:
    """Layout of [16, warps] with a row's values in one thread, the rows as those of a product's sums."""
    registers = [[0, 1 << i] for i in range(warps.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*registers, [8, 0]], lanes, [[0, 0]] * len(registers), [], [16, warps])


@gluon.jit
def _load_record(items, place, there):
    """Of a record of the decode list what the other warps need: row, first and past the last position, partial."""
    item = items + place * 8
    row = gl.load(item, mask=there, other=0)
    start = gl.load(item + 2, mask=there, other=0)
    end = gl.load(item + 3, mask=there, other=0)
    partial = gl.load(item + 4, mask=there, other=0)
    return row, start, end, partial


@gluon.jit
def _copy_queries(
    qkv,
    queries,
    row,
    kv_head,
    there,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Start to copy the queries of kv_head's heads to [ROWS, HEAD_DIM]: 0 where there are no more, or no such item."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    line = gl.arange(0, ROWS, gl.SliceLayout(1, LINE))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINE))
    offsets = row.to(gl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + (kv_head * GROUP + line) * HEAD_DIM
    held = (line < GROUP) & there
    async_copy.async_copy_global_to_shared(queries, qkv + offsets[:, None] + dims[None, :], mask=held[:, None])
    async_copy.commit_group()


@gluon.jit
def _row_maximum(s, WARPS: gl.constexpr, ROW: gl.constexpr):
    """The largest of each row of s [16, N], by one exchange between the warps, which lie along N."""
    EIGHTS: gl.constexpr = s.shape[1] // (8 * WARPS)
    OTHERS: gl.constexpr = _warps_in_registers(WARPS)
    own = gl.max(gl.max(gl.reshape(s, [s.shape[0], EIGHTS, WARPS, 8]), 1), 2)
    return gl.convert_layout(gl.max(gl.convert_layout(own, OTHERS), 1), ROW)


@gluon.jit
def _merged(all_m, all_weight, all_acc, m, total, acc):
    """What a chunk's maximum, sums of weights and values make of those of the chunks before: as the merge's kernel."""
    all_m, old, new = merge_factors(all_m, m)
    all_weight = merge_chunk(all_weight, old, row_sum(total), new)
    return all_m, all_weight, merge_chunk(all_acc, old[:, None], acc, new[:, None])


@gluon.jit
def _attend(
    qkv,
    out,
    items,
    capacity,
    totals,
    values,
    stats,
    scale,
    queries,
    shares,
    tiles,
    following_items,
    full,
    empty,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The other warps: each has some keys of a tile, then some dimensions of its values."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TILES: gl.constexpr = CHUNK // TILE
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    FOLLOWING: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    dtype: gl.constexpr = qkv.dtype.element_ty
    factor = log2_factor(scale, SOFTCAP)
    lane = gl.arange(0, ROWS, ROW)
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, SUMS))
    column = gl.arange(0, TILE, gl.SliceLayout(0, SUMS))
    line = gl.arange(0, TILE, gl.SliceLayout(1, RIGHT))
    ones = gl.full([TILE, 8], 1.0, dtype, RIGHT)
    no_scores = gl.zeros([ROWS, TILE], gl.float32, SUMS)
    programs = gl.num_programs(0)
    index = gl.program_id(0)
    count = gl.load(totals) * KV_HEADS
    row, start, end, partial = _load_record(items, index // KV_HEADS, index // KV_HEADS < capacity)
    await_previous(PDL)
    _copy_queries(qkv, queries, row, index % KV_HEADS, index < count, HEADS, KV_HEADS, HEAD_DIM, ROWS, WARPS)
    step = 0
    while index < count:
        async_copy.wait_group(0)
        gl.thread_barrier()
        q = queries.load(LEFT)
        m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        # As many equal columns of sums as a product has at least.
        total = gl.zeros([ROWS, 8], gl.float32, SUMS)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, SUMS)
        all_m = m
        all_weight = gl.zeros([ROWS], gl.float32, ROW)
        all_acc = acc
        first_tile = start // TILE
        last_tile = (end - 1) // TILE
        following = index + programs
        if TURNS:
            mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
            following = gl.max(following_items.index(step % STAGES).load(FOLLOWING), 0)
        there = following < count
        next_row, next_start, next_end, next_partial = _load_record(items, following // KV_HEADS, there)
        for tile in range(first_tile, last_tile + 1):
            if (tile % TILES == 0) & (tile > first_tile):
                all_m, all_weight, all_acc = _merged(all_m, all_weight, all_acc, m, total, acc)
                m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
                total = gl.zeros([ROWS, 8], gl.float32, SUMS)
                acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, SUMS)
            if tile == last_tile:
                _copy_queries(
                    qkv, queries, next_row, following % KV_HEADS, there, HEADS, KV_HEADS, HEAD_DIM, ROWS, WARPS
                )
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            k = tiles.index(stage * 2).permute((1, 0)).load(RIGHT)
            s = cap_scores(mma_v2(q, k, no_scores), scale, SOFTCAP)
            v = tiles.index(stage * 2 + 1).load(RIGHT)
            if (tile * TILE < start) | (tile * TILE + TILE > end):
                key = tile * TILE + column
                s = gl.where(((key >= start) & (key < end))[None, :], s, float("-inf"))
                # Places of the cache that hold no value yet may be NaN, which times a weight of 0 is not 0.
                key = tile * TILE + line
                v = gl.where(((key >= start) & (key < end))[:, None], v, 0.0)
            m, finite, alpha = raise_maximum(m, _row_maximum(s, WARPS, ROW) * factor)
            shares.store(weights(s, factor, finite, dtype))
            p = shares.load(LEFT)
            # Before this all warps wait for each other, and so have read the tile.
            mbarrier.arrive(empty.index(stage), count=1)
            total = mma_v2(p, ones, gl.fma(total, alpha[:, None], 0.0))
            acc = mma_v2(p, v, gl.fma(acc, alpha[:, None], 0.0))
            step += 1
        kv_head = index % KV_HEADS
        weight = row_sum(total)
        if first_tile // TILES < last_tile // TILES:
            m, weight, acc = _merged(all_m, all_weight, all_acc, m, total, acc)
        head = kv_head * GROUP + lane
        held = lane < GROUP
        if partial < 0:
            place = row.to(gl.int64) * HEADS + head
            at = out + place[:, None] * HEAD_DIM + dims[None, :]
            gl.store(at, finish(acc, weight, dtype), mask=held[:, None])
        else:
            place = partial.to(gl.int64) * HEADS + head
            gl.store(stats + place * 2, m, mask=held)
            gl.store(stats + place * 2 + 1, weight, mask=held)
            gl.store(values + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=held[:, None])
        row, start, end, partial = next_row, next_start, next_end, next_partial
        index = following


@gluon.jit(do_not_specialize=["table_stride", "capacity", "out_of_bounds"])
def _decode_hopper_kernel(
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
    out_of_bounds,
    scale,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    LONG: gl.constexpr,
    TURNS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Each item of the decode list for each kv head."""
    if not LONG:
        start_next(PDL)
    dtype: gl.constexpr = qkv.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PIECES: gl.constexpr = STAGES * 2 * (HEAD_DIM // 64) * (TILE // BLOCK_SIZE)
    # A tile of a whole head lies in memory as its halves of 64 dimensions, each its blocks one after the other.
    buffers = gl.allocate_shared_memory(dtype, [PIECES, BLOCK_SIZE, 64], WIDE)
    tiles = buffers._reinterpret(dtype, [STAGES * 2, TILE, HEAD_DIM], WIDE)
    queries = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    shares = gl.allocate_shared_memory(dtype, [ROWS, TILE], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    following_items = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (
                qkv, out, items, capacity, totals, values, stats, scale, queries, shares, tiles,
                following_items, full, empty,
                HEADS, KV_HEADS, HEAD_DIM, TILE, CHUNK, SOFTCAP, ROWS, WARPS, STAGES, TURNS, PDL,
            )),
            (load_decode_tiles, (
                cache, tables, table_stride, items, capacity, totals, turns, out_of_bounds, buffers,
                following_items, full, empty, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, CHUNK, STAGES, TURNS, PDL,
            )),
        ],
        [1],
        [_COPY_REGISTERS],
    )
    # fmt: on
    await_previous(PDL)
    if LONG:
        start_next(PDL)


def compile_cases(capability: int) -> list[CompileCase]:
    """Shapes of Qwen3, Llama and Gemma models; the kernel is of one generation of GPUs."""
    cases = []
    for dtype, shape, config, many in (
        ("bf16", AttentionShape(16, 8, 128, 16, 0.088), DecodeConfig(4, 2, 2, hopper_stages=3), True),
        ("bf16", AttentionShape(32, 8, 128, 32, 0.088), DecodeConfig(4, 2, 1, hopper_stages=6), False),
        ("fp16", AttentionShape(28, 4, 128, 16, 0.088), DecodeConfig(4, 2, 2, hopper_stages=3), True),
        ("bf16", AttentionShape(32, 8, 64, 16, 0.125), DecodeConfig(4, 2, 2, hopper_stages=6), True),
        ("bf16", AttentionShape(8, 4, 256, 16, 0.0625, softcap=50.0), DecodeConfig(4, 2, 2, hopper_stages=3), True),
        ("bf16", AttentionShape(32, 16, 128, 16, 0.083, softcap=50.0), DecodeConfig(4, 2, 2, hopper_stages=2), True),
    ):
        arguments = {"qkv": f"*{dtype}", "out": f"*{dtype}", "tables": "*i32", "table_stride": "i32"}
        arguments["cache"] = f"tensordesc<{dtype}[{shape.block_size}, 64],{_PIECE!r}>"
        arguments |= {"items": "*i32", "totals": "*i32", "turns": "*i32", "values": "*fp32", "stats": "*fp32"}
        arguments |= {"capacity": "i32", "out_of_bounds": "i32", "scale": "fp32"}
        constants = _constants(shape, config, many, many)
        warps, registers = config.num_warps, _registers(config, shape)
        cases.append(CompileCase(_decode_hopper_kernel, arguments, constants, num_warps=warps, registers=registers))
    return cases if capability == 90 else []
