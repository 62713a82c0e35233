"""Attention of prompt rows on Hopper: as `attention_prefill`, with copies and products that run beside the softmax.

One warp asks the tensor memory accelerator for the keys and values of each tile, a block and half a head at a time; two
warp groups of 64 rows each take them (FlashAttention-3, Shah et al. 2024). A group asks for the scores of the next tile
before it waits for the values of the one before, so that tensor cores work while weights are computed. The arithmetic
and its order are those of every other kernel here.
"""

from __future__ import annotations

from typing import Any

import torch
from octavo.kernels.attention import (
    CHUNK,
    AttentionShape,
    cap_scores,
    log2_factor,
    merge_chunk,
    merge_factors,
    row_sum,
    weigh_tile,
)
from octavo.kernels.attention_prefill_copy import first_tile_of, item_of_turn, load_prefill_tiles
from octavo.kernels.attention_work import AttentionWork
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["compile_cases", "hopper_serves", "prefill_on_hopper"]

ROWS = 128
"""Query heads of all tokens of an item together, at most."""

_PIECE = gl.NVMMASharedLayout(128, 16, 2)


def hopper_serves(capability: int, dtype: torch.dtype, work: AttentionWork, shape: AttentionShape) -> bool:
    """Whether `prefill_on_hopper` can take the place of the portable kernel, with the same bits."""
    plain = not shape.kv_fp8
    fits = (
        shape.head_dim in (64, 128, 256) and shape.tile % shape.block_size == 0 and work.queries * shape.group <= ROWS
    )
    return capability == 90 and dtype in (torch.bfloat16, torch.float16) and plain and fits


def prefill_on_hopper(
    qkv: Tensor,
    out: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    *,
    programs: int,
    stages: int,
) -> None:
    """As `attention_prefill.prefill_attention`, where `hopper_serves`.

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries first.
        out: [tokens, num_heads * head_dim], of qkv's dtype.
        kv_cache: [blocks, 2, num_kv_heads, block_size, head_dim] of qkv's dtype.
        block_tables: int32 [slots, blocks of a sequence].
        work: the lists of the layer's window.
        shape: of the layer.
        programs: to launch; no more than the multiprocessors.
        stages: tiles of keys and of values in shared memory.
    """
    lines = kv_cache.view(-1, shape.head_dim)
    cache = TensorDescriptor(lines, list(lines.shape), list(lines.stride()), [shape.block_size, 64], _PIECE)
    launch(
        _prefill_hopper_kernel,
        (programs,),
        qkv,
        out,
        cache,
        block_tables,
        block_tables.stride(0),
        work.prompt_items,
        work.totals,
        lines.shape[0],
        shape.scale,
        **_constants(shape, work.window, work.queries, stages),
        num_warps=4,
        enable_fp_fusion=False,
    )


def _constants(shape: AttentionShape, window: int, queries: int, stages: int) -> dict[str, Any]:
    return {
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "TILE": shape.tile,
        "CHUNK": CHUNK,
        "SOFTCAP": shape.softcap,
        "WINDOW": window,
        "QUERIES": queries,
        "STAGES": stages,
    }


@gluon.jit
def _merge(m_all, total_all, acc_all, m, total, acc, ROW: gl.constexpr, ACC: gl.constexpr):
    """The sums of all chunks so far with those of one more."""
    top, old, new = merge_factors(m_all, m)
    total_all = merge_chunk(total_all, old, gl.convert_layout(row_sum(total), ROW), new)
    wide_old = gl.convert_layout(old, gl.SliceLayout(1, ACC))
    wide_new = gl.convert_layout(new, gl.SliceLayout(1, ACC))
    acc_all = merge_chunk(acc_all, wide_old[:, None], acc, wide_new[:, None])
    return top, total_all, acc_all


@gluon.jit
def _rescale(x, alpha, LAYOUT: gl.constexpr):
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT))
    return gl.fma(x, factor[:, None], 0.0)


@gluon.jit
def _attend(
    PART: gl.constexpr,
    qkv,
    out,
    items,
    totals,
    scale,
    queries,
    ones,
    tiles,
    full,
    empty,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr,
    QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warp group: rows 64 * PART to 64 * PART + 63 of each item."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TILES: gl.constexpr = CHUNK // TILE
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    LINE_ROW: gl.constexpr = gl.SliceLayout(1, LINE)
    dtype: gl.constexpr = qkv.dtype.element_ty
    factor = log2_factor(scale, SOFTCAP)
    row = 64 * PART + gl.arange(0, 64, ROW)
    line = 64 * PART + gl.arange(0, 64, LINE_ROW)
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINE))
    lane = gl.arange(0, TILE, KEY)
    q_buffer = queries.index(PART)
    no_scores = gl.zeros([64, TILE], gl.float32, SCORES)
    programs = gl.num_programs(0)
    count = gl.load(totals + 2) * KV_HEADS
    turns = (count + programs - 1) // programs
    step = 0
    for turn in range(turns):
        index = item_of_turn(turn, programs)
        if index < count:
            item = items + index // KV_HEADS * 4
            first = gl.load(item + 1)
            begin = gl.load(item + 2)
            tokens = gl.load(item + 3)
            end = begin + tokens
            head = index % KV_HEADS * GROUP + line % GROUP
            held = (line // GROUP < tokens) & (line < QUERIES * GROUP)
            token = (first + line // GROUP).to(gl.int64)
            q_offsets = token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
            q = gl.load(qkv + q_offsets[:, None] + dims[None, :], mask=held[:, None], other=0.0)
            q_buffer.store(q)
            fence_async_shared()

            first_tile = first_tile_of(begin, TILE, WINDOW)
            last_tile = (end + TILE - 1) // TILE
            whole = 0
            if WINDOW > 0:
                whole = (gl.maximum(end - WINDOW, 0) + TILE - 1) // TILE
            diagonal = (begin + 1) // TILE
            query = begin + row // GROUP
            m_all = gl.full([64], float("-inf"), gl.float32, ROW)
            total_all = gl.zeros([64], gl.float32, ROW)
            acc_all = gl.zeros([64, HEAD_DIM], gl.float32, ACC)
            m = m_all
            total = gl.zeros([64, 16], gl.float32, TOTAL)
            acc = acc_all

            stage = step % STAGES
            phase = step // STAGES & 1
            mbarrier.wait(full.index(stage * 2), phase)
            s = warpgroup_mma(q_buffer, tiles.index(stage * 2).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(empty.index(stage * 2), count=1)
            s = cap_scores(s, scale, SOFTCAP)
            s = _mask(s, first_tile, lane, query, whole, diagonal, TILE, WINDOW)
            p, alpha, m = weigh_tile(s, m, factor, dtype)
            p = gl.convert_layout(p, WEIGHTS)
            for tile in range(first_tile + 1, last_tile):
                step += 1
                next_stage = step % STAGES
                next_phase = step // STAGES & 1
                mbarrier.wait(full.index(next_stage * 2), next_phase)
                s = warpgroup_mma(
                    q_buffer, tiles.index(next_stage * 2).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                mbarrier.wait(full.index(stage * 2 + 1), phase)
                total = warpgroup_mma(p, ones, total, is_async=True)
                acc = warpgroup_mma(p, tiles.index(stage * 2 + 1), acc, is_async=True)
                s = warpgroup_mma_wait(2, deps=[s])
                mbarrier.arrive(empty.index(next_stage * 2), count=1)
                s = cap_scores(s, scale, SOFTCAP)
                s = _mask(s, tile, lane, query, whole, diagonal, TILE, WINDOW)
                fresh = tile % TILES == 0
                before = gl.where(fresh, float("-inf"), m)
                next_p, alpha, next_m = weigh_tile(s, before, factor, dtype)
                total, acc, p = warpgroup_mma_wait(0, deps=[total, acc, p])
                mbarrier.arrive(empty.index(stage * 2 + 1), count=1)
                if fresh:
                    m_all, total_all, acc_all = _merge(m_all, total_all, acc_all, m, total, acc, ROW, ACC)
                m = next_m
                total = _rescale(total, alpha, TOTAL)
                acc = _rescale(acc, alpha, ACC)
                p = gl.convert_layout(next_p, WEIGHTS)
                stage = next_stage
                phase = next_phase
            mbarrier.wait(full.index(stage * 2 + 1), phase)
            if end % BLOCK_SIZE != 0:
                _clear_rows(tiles.index(stage * 2 + 1), end - (last_tile - 1) * TILE, TILE, HEAD_DIM, BLOCK_SIZE)
            total = warpgroup_mma(p, ones, total, is_async=True)
            acc = warpgroup_mma(p, tiles.index(stage * 2 + 1), acc, is_async=True)
            total, acc, p = warpgroup_mma_wait(0, deps=[total, acc, p])
            mbarrier.arrive(empty.index(stage * 2 + 1), count=1)
            step += 1
            m_all, total_all, acc_all = _merge(m_all, total_all, acc_all, m, total, acc, ROW, ACC)
            weight = gl.convert_layout(total_all, gl.SliceLayout(1, ACC))
            result = (acc_all / weight[:, None]).to(dtype)
            result = gl.convert_layout(result, LINE)
            o_offsets = token * (HEADS * HEAD_DIM) + head * HEAD_DIM
            gl.store(out + o_offsets[:, None] + dims[None, :], result, mask=held[:, None])


@gluon.jit
def _mask(s, tile, lane, query, whole, diagonal, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Scores of a tile with -inf where a row does not see the key."""
    if (tile >= diagonal) | (tile < whole):
        key = (tile * TILE + lane)[None, :]
        visible = key <= query[:, None]
        if WINDOW > 0:
            visible = visible & (key > query[:, None] - WINDOW)
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _clear_rows(buffer, count, TILE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Zeros for the rows from count on of a buffer [TILE, HEAD_DIM]: places of the cache that hold no value yet.

    Those of the last block, that is: what lies behind it was filled with zeros.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, LINE))
    end = (count + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    for start in gl.static_range(0, TILE, 16):
        if (start < end) & (start + 16 > count):
            part = buffer.slice(start, 16)
            x = part.load(LINE)
            part.store(gl.where((start + row < count)[:, None], x, 0.0))
    fence_async_shared()


@gluon.jit
def _prefill_hopper_kernel(
    qkv,
    out,
    cache,
    tables,
    table_stride,
    items,
    totals,
    out_of_bounds,
    scale,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr,
    QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Each item of the prompt list for each kv head, dealt to as many programs as run at once."""
    dtype: gl.constexpr = qkv.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    LOWER: gl.constexpr = 0
    UPPER: gl.constexpr = 1
    PIECES: gl.constexpr = STAGES * 2 * (HEAD_DIM // 64) * (TILE // BLOCK_SIZE)
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    queries = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], WIDE)
    ones = gl.allocate_shared_memory(dtype, [TILE, 16], NARROW, gl.full([TILE, 16], 1.0, dtype, LINE))
    # A tile of a whole head lies in memory as its halves of 64 dimensions, each its blocks one after the other.
    buffers = gl.allocate_shared_memory(dtype, [PIECES, BLOCK_SIZE, 64], WIDE)
    tiles = buffers._reinterpret(dtype, [STAGES * 2, TILE, HEAD_DIM], WIDE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES * 2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (
                LOWER, qkv, out, items, totals, scale, queries, ones, tiles, full, empty,
                HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, CHUNK, SOFTCAP, WINDOW, QUERIES, STAGES,
            )),
            (_attend, (
                UPPER, qkv, out, items, totals, scale, queries, ones, tiles, full, empty,
                HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, CHUNK, SOFTCAP, WINDOW, QUERIES, STAGES,
            )),
            (load_prefill_tiles, (
                cache, tables, table_stride, items, totals, buffers, full, empty, out_of_bounds,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


def compile_cases(capability: int) -> list[CompileCase]:
    """Shapes of Qwen3, Llama and Gemma models; the kernel is of one generation of GPUs."""
    cases = []
    for dtype, shape, window in (
        ("bf16", AttentionShape(16, 8, 128, 16, 0.088), 0),
        ("bf16", AttentionShape(32, 8, 128, 32, 0.088), 0),
        ("fp16", AttentionShape(28, 4, 128, 16, 0.088), 4096),
        ("bf16", AttentionShape(32, 8, 64, 16, 0.125), 0),
        ("bf16", AttentionShape(32, 16, 128, 16, 0.083, softcap=50.0), 4096),
        ("bf16", AttentionShape(8, 4, 256, 16, 0.0625, softcap=50.0), 4096),
        ("bf16", AttentionShape(4, 1, 256, 16, 0.0625), 0),
    ):
        arguments = {"qkv": f"*{dtype}", "out": f"*{dtype}", "tables": "*i32", "table_stride": "i32"}
        arguments["cache"] = f"tensordesc<{dtype}[{shape.block_size}, 64],{_PIECE!r}>"
        arguments |= {"items": "*i32", "totals": "*i32", "out_of_bounds": "i32", "scale": "fp32"}
        constants = _constants(shape, window, ROWS // shape.group, 2 if shape.head_dim == 256 else 3)
        # Heads of 256 keep the sums of the chunks before in local memory; so they are still twice as fast.
        spilled = 768 if shape.head_dim == 256 else 64
        cases.append(CompileCase(_prefill_hopper_kernel, arguments, constants, max_spilled=spilled))
    return cases if capability == 90 else []
