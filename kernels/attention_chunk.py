"""A chunk of keys for a few queries that see all of it: what decode and shared-prefix kernels have in common."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from octavo.kernels.attention import CHUNK, AttentionShape, attend_tile, block_offsets, load_dims, row_sum

__all__ = ["attend_chunk", "chunk_constants", "load_queries", "store_dims"]


def chunk_constants(shape: AttentionShape, num_stages: int) -> dict[str, Any]:
    """The constants of a kernel that calls these functions."""
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
        "STAGES": num_stages,
    }


@triton.jit
def attend_chunk(
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
def load_queries(qkv, offsets, rows, D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Both parts of the queries at offsets int64 [ROWS], 0 where rows is false; the first twice where D1 is 0."""
    q0 = load_dims(qkv, offsets, rows, qkv.dtype.element_ty, 0, D0, HEAD_DIM)
    q1 = q0
    if D1 > 0:
        q1 = load_dims(qkv, offsets, rows, qkv.dtype.element_ty, D0, D1, HEAD_DIM)
    return q0, q1


@triton.jit
def store_dims(base, offsets, rows, x, FIRST: tl.constexpr, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Store x [ROWS, DIMS] as dimensions FIRST onwards of the vectors at base + offsets."""
    dims = FIRST + tl.arange(0, DIMS)
    tl.store(base + offsets[:, None] + dims[None, :], x, mask=rows[:, None] & (dims < HEAD_DIM)[None, :])
