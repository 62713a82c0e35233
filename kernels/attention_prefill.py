"""Attention of prompt rows: many queries of a sequence at once, over the paged cache.

An item of `plan_attention`'s list is a run of tokens of one row. Its tokens times the query heads that share a kv head
are the rows of the products (FlashAttention-2, Dao 2023, walks keys so for each block of queries). Tiles that every row
sees whole need no mask; those at the diagonal and at a window's start do. What a row sees nothing of leaves its sums
as they are, so rows of one item need not agree on their first and last chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from octavo.kernels.attention import (
    CHUNK,
    AttentionShape,
    accumulate,
    block_offsets,
    finish,
    load_dims,
    log2_factor,
    merge_chunk,
    merge_factors,
    row_sum,
    score_tile,
    weigh_tile,
)
from octavo.kernels.attention_prefill_tables import PrefillConfig, prefill_config
from octavo.kernels.attention_work import AttentionWork, device_limits
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.gluon_support import gluon_serves
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow
from torch import Tensor

__all__ = ["compile_cases", "prefill_attention"]


def prefill_attention(
    qkv: Tensor,
    out: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    shape: AttentionShape,
    *,
    tokens: int,
    config: PrefillConfig | None = None,
) -> None:
    """Attention of the step's prompt rows, after `plan_attention`; their keys and values are in the cache.

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries first.
        out: [tokens, num_heads * head_dim], of qkv's dtype.
        kv_cache: [blocks, 2, num_kv_heads, block_size, head_dim] of qkv's dtype or float8_e4m3fn.
        block_tables: int32 [slots, blocks of a sequence].
        work: the lists of the layer's window.
        shape: of the layer.
        tokens: the most that this launch may be given.
        config: another launch than the table's; its rows are those that `work` was made with.
    """
    capability, processors = device_limits(qkv.device)
    chosen = config or prefill_config(capability, shape.head_dim, on_hopper=work.on_hopper)
    most = (tokens // work.queries + min(tokens, work.max_num_seqs)) * shape.num_kv_heads
    if chosen.hopper_stages and gluon_serves():
        from octavo.kernels.attention_prefill_hopper import hopper_serves, prefill_on_hopper

        if hopper_serves(capability, qkv.dtype, work, shape):
            prefill_on_hopper(
                qkv,
                out,
                kv_cache,
                block_tables,
                work,
                shape,
                programs=min(most, processors),
                stages=chosen.hopper_stages,
            )
            return
    cache = kv_cache.view(torch.uint8) if shape.kv_fp8 and capability < 89 else kv_cache
    launch(
        _prefill_kernel,
        (min(most, processors * chosen.programs),),
        qkv,
        out,
        cache,
        block_tables,
        block_tables.stride(0),
        work.prompt_items,
        work.totals,
        shape.scale,
        **_constants(shape, work.window, work.queries, chosen),
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
    )


def _constants(shape: AttentionShape, window: int, queries: int, config: PrefillConfig) -> dict[str, Any]:
    first, second = (triton.next_power_of_2(shape.head_dim), 0) if config.padded else shape.parts
    return {
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "D0": first,
        "D1": second,
        "TILE": shape.tile,
        "CHUNK": CHUNK,
        "WINDOW": window,
        "SOFTCAP": shape.softcap,
        "ROWS": max(16, triton.next_power_of_2(queries * shape.group)),
        "QUERIES": queries,
        "STAGES": config.num_stages,
    }


@triton.jit
def _merge(m_all, total_all, acc0_all, acc1_all, m, total, acc0, acc1, D1: tl.constexpr):
    """The sums of all chunks so far with those of one more."""
    top, old, new = merge_factors(m_all, m)
    total_all = merge_chunk(total_all, old, row_sum(total), new)
    acc0_all = merge_chunk(acc0_all, old[:, None], acc0, new[:, None])
    if D1 > 0:
        acc1_all = merge_chunk(acc1_all, old[:, None], acc1, new[:, None])
    return top, total_all, acc0_all, acc1_all


@triton.jit
def _prefill_kernel(
    qkv,
    out,
    cache,
    tables,
    table_stride,
    items,
    totals,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each item of the prompt list for each kv head."""
    follow(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK: tl.constexpr = 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM
    TILES: tl.constexpr = CHUNK // TILE
    values = cache + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    factor = log2_factor(scale, SOFTCAP)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, TILE)
    dtype: tl.constexpr = qkv.dtype.element_ty
    count = tl.load(totals + 2) * KV_HEADS
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        item = items + index // KV_HEADS * 4
        slot = tl.load(item)
        first = tl.load(item + 1)
        begin = tl.load(item + 2)
        tokens = tl.load(item + 3)
        end = begin + tokens
        rows = (row // GROUP < tokens) & (row < QUERIES * GROUP)
        head = index % KV_HEADS * GROUP + row % GROUP
        token = (first + row // GROUP).to(tl.int64)
        query = begin + row // GROUP
        q_offsets = token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
        q0 = load_dims(qkv, q_offsets, rows, dtype, 0, D0, HEAD_DIM)
        q1 = q0
        if D1 > 0:
            q1 = load_dims(qkv, q_offsets, rows, dtype, D0, D1, HEAD_DIM)
        table = tables + slot.to(tl.int64) * table_stride

        # Every row sees the whole of the tiles from `whole` to before `diagonal`.
        first_tile = 0
        whole = 0
        if WINDOW > 0:
            first_tile = tl.maximum(begin - WINDOW + 1, 0) // TILE
            whole = (tl.maximum(end - WINDOW, 0) + TILE - 1) // TILE
        diagonal = (begin + 1) // TILE
        m_all = tl.full([ROWS], float("-inf"), tl.float32)
        total_all = tl.zeros([ROWS], tl.float32)
        acc0_all = tl.zeros([ROWS, D0], tl.float32)
        acc1_all = tl.zeros([ROWS, D1 if D1 > 0 else 16], tl.float32)
        m = m_all
        total = tl.zeros([ROWS, 16], tl.float32)
        acc0 = acc0_all
        acc1 = acc1_all
        # Blocks that no query sees may be another sequence's by now.
        low = begin - WINDOW if WINDOW > 0 else -1
        positions = first_tile * TILE + lane
        seen = (positions > low) & (positions < end)
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0)
        for tile in tl.range(first_tile, (end + TILE - 1) // TILE, num_stages=STAGES):
            offsets = block_offsets(blocks, positions, index % KV_HEADS, BLOCK, BLOCK_SIZE, HEAD_DIM)
            k0 = load_dims(cache, offsets, seen, dtype, 0, D0, HEAD_DIM)
            v0 = load_dims(values, offsets, seen, dtype, 0, D0, HEAD_DIM)
            k1 = k0
            v1 = v0
            if D1 > 0:
                k1 = load_dims(cache, offsets, seen, dtype, D0, D1, HEAD_DIM)
                v1 = load_dims(values, offsets, seen, dtype, D0, D1, HEAD_DIM)
            # A chunk's sums are merged when the next begins: sums that a branch changed at the loop's end would have
            # every product wait for the one before it. The old sums end with the factor of a first tile, 0.
            if (tile % TILES == 0) & (tile > first_tile):
                m_all, total_all, acc0_all, acc1_all = _merge(
                    m_all, total_all, acc0_all, acc1_all, m, total, acc0, acc1, D1
                )
                m = tl.full([ROWS], float("-inf"), tl.float32)
            key = (tile * TILE + lane)[None, :]
            s = score_tile(q0, q1, k0, k1, scale, D1, SOFTCAP)
            if (tile >= diagonal) | (tile < whole):
                visible = key <= query[:, None]
                if WINDOW > 0:
                    visible = visible & (key > query[:, None] - WINDOW)
                s = tl.where(visible, s, float("-inf"))
            p, alpha, m = weigh_tile(s, m, factor, dtype)
            total, acc0, acc1 = accumulate(p, alpha, v0, v1, total, acc0, acc1, D1)
            # The next tile's blocks are looked up a tile ahead, so that the loads of keys wait for no other load.
            positions = (tile + 1) * TILE + lane
            seen = (positions > low) & (positions < end)
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0)
        m_all, total_all, acc0_all, acc1_all = _merge(m_all, total_all, acc0_all, acc1_all, m, total, acc0, acc1, D1)

        o_offsets = token * (HEADS * HEAD_DIM) + head * HEAD_DIM
        _store_dims(out, o_offsets, rows, finish(acc0_all, total_all, dtype), 0, D0, HEAD_DIM)
        if D1 > 0:
            _store_dims(out, o_offsets, rows, finish(acc1_all, total_all, dtype), D0, D1, HEAD_DIM)


@triton.jit
def _store_dims(base, offsets, rows, x, FIRST: tl.constexpr, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Store x [ROWS, DIMS] as dimensions FIRST onwards of the vectors at base + offsets."""
    dims = FIRST + tl.arange(0, DIMS)
    mask = rows[:, None]
    if FIRST + DIMS > HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    tl.store(base + offsets[:, None] + dims[None, :], x, mask=mask)


def compile_cases(capability: int) -> list[CompileCase]:
    """Shapes of Qwen3, Llama, Phi-3, Gemma and Qwen2.5 models, with and without what only some models have."""
    cases = []
    for dtype, shape, window in (
        ("*bf16", AttentionShape(16, 8, 128, 16, 0.088), 0),
        ("*bf16", AttentionShape(32, 8, 128, 16, 0.088), 0),
        ("*fp16", AttentionShape(28, 4, 128, 16, 0.088), 0),
        ("*bf16", AttentionShape(32, 8, 64, 16, 0.125), 0),
        ("*bf16", AttentionShape(12, 12, 80, 32, 0.11), 0),
        ("*bf16", AttentionShape(32, 32, 96, 16, 0.1), 2047),
        ("*bf16", AttentionShape(32, 8, 128, 32, 0.088, kv_fp8=True), 0),
        ("*bf16", AttentionShape(16, 8, 256, 16, 0.0625, softcap=50.0), 4096),
        ("*bf16", AttentionShape(8, 1, 192, 16, 0.07), 0),
    ):
        config = prefill_config(capability, shape.head_dim)
        arguments = {"qkv": dtype, "out": dtype, "cache": dtype, "tables": "*i32", "table_stride": "i32"}
        arguments |= {"items": "*i32", "totals": "*i32", "scale": "fp32"}
        if shape.kv_fp8:
            arguments["cache"] = "*fp8e4nv" if capability >= 89 else "*u8"
        queries = max(1, config.rows // shape.group)
        cases.append(
            CompileCase(
                _prefill_kernel,
                arguments,
                _constants(shape, window, queries, config),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                max_spilled=16 if capability < 90 and shape.head_dim >= 192 else 0,
            )
        )
    return cases
