"""A chunk of keys for a few queries that see all of it: what decode and shared-prefix kernels have in common."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from octavo.kernels.attention import (
    CHUNK,
    AttentionShape,
    accumulate,
    add_values,
    block_offsets,
    load_dims,
    log2_factor,
    raise_maximum,
    row_sum,
    score_tile,
    weigh_tile,
    weights,
)

__all__ = ["attend_chunk", "chunk_constants", "load_chunk_blocks", "load_queries", "store_dims"]


def chunk_constants(shape: AttentionShape, num_stages: int, pieces: int = 1) -> dict[str, Any]:
    """The constants of a kernel that calls these functions; a tile is loaded in 1 or 2 pieces."""
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
        "PIECES": pieces,
        "SOFTCAP": shape.softcap,
        "STAGES": num_stages,
    }


@triton.jit
def attend_chunk(
    q0,
    q1,
    cache,
    blocks,
    kv_head,
    start,
    end,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax of queries q0, q1 [ROWS, ...] over positions start <= p < end of one chunk, all of which they see.

    blocks: of `load_chunk_blocks`.
    """
    BLOCK: tl.constexpr = 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM
    values = cache + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 16], tl.float32)
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = tl.zeros([ROWS, D1 if D1 > 0 else 16], tl.float32)
    # Whether a tile's products are one chain of its keys or two after each other is the same to the last bit.
    PIECE: tl.constexpr = TILE // PIECES
    base = start // CHUNK * CHUNK
    factor = log2_factor(scale, SOFTCAP)
    for tile in tl.range((start - base) // TILE, (end - base + TILE - 1) // TILE, num_stages=STAGES):
        s, v0, v1 = _score_piece(
            q0,
            q1,
            cache,
            values,
            blocks,
            base,
            tile * PIECES,
            kv_head,
            start,
            end,
            scale,
            BLOCK,
            HEAD_DIM,
            BLOCK_SIZE,
            D0,
            D1,
            CHUNK,
            PIECE,
            SOFTCAP,
        )
        if PIECES == 1:
            p, alpha, m = weigh_tile(s, m, factor, q0.dtype)
            total, acc0, acc1 = accumulate(p, alpha, v0, v1, total, acc0, acc1, D1)
        else:
            s_next, v0_next, v1_next = _score_piece(
                q0,
                q1,
                cache,
                values,
                blocks,
                base,
                tile * PIECES + 1,
                kv_head,
                start,
                end,
                scale,
                BLOCK,
                HEAD_DIM,
                BLOCK_SIZE,
                D0,
                D1,
                CHUNK,
                PIECE,
                SOFTCAP,
            )
            m, finite, alpha = raise_maximum(m, tl.maximum(tl.max(s, 1), tl.max(s_next, 1)) * factor)
            p = weights(s, factor, finite, q0.dtype)
            total, acc0, acc1 = accumulate(p, alpha, v0, v1, total, acc0, acc1, D1)
            p = weights(s_next, factor, finite, q0.dtype)
            total, acc0, acc1 = add_values(p, v0_next, v1_next, total, acc0, acc1, D1)
    return m, row_sum(total), acc0, acc1


@triton.jit
def load_chunk_blocks(
    table,
    start,
    end,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Block ids of the positions start <= p < end of a chunk, a tensor a piece of a tile, 0 for its other positions.

    All are looked up before the loop over tiles, so that there no load waits for another.
    """
    PIECE: tl.constexpr = TILE // PIECES
    base = start // CHUNK * CHUNK
    blocks = (_load_blocks(table, base, start, end, BLOCK_SIZE, PIECE),)
    for i in tl.static_range(1, CHUNK // PIECE):
        # Triton knows no starred tuple.
        blocks = blocks + (_load_blocks(table, base + i * PIECE, start, end, BLOCK_SIZE, PIECE),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@triton.jit
def _load_blocks(table, first, start, end, BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr):
    """Blocks of the positions from first on, int32 [PIECE]; 0 outside start .. end."""
    positions = first + tl.arange(0, PIECE)
    return tl.load(table + positions // BLOCK_SIZE, mask=(positions >= start) & (positions < end), other=0)


@triton.jit
def _score_piece(
    q0,
    q1,
    cache,
    values,
    blocks,
    base,
    piece,
    kv_head,
    start,
    end,
    scale,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Scores [ROWS, PIECE] of a piece of the chunk, -inf outside start .. end, and its values' parts."""
    positions = base + piece * PIECE + tl.arange(0, PIECE)
    seen = (positions >= start) & (positions < end)
    block = blocks[0]
    for i in tl.static_range(1, CHUNK // PIECE):
        block = tl.where(piece == i, blocks[i], block)
    place = block_offsets(block, positions, kv_head, BLOCK, BLOCK_SIZE, HEAD_DIM)
    k0 = load_dims(cache, place, seen, q0.dtype, 0, D0, HEAD_DIM)
    v0 = load_dims(values, place, seen, q0.dtype, 0, D0, HEAD_DIM)
    k1 = k0
    v1 = v0
    if D1 > 0:
        k1 = load_dims(cache, place, seen, q0.dtype, D0, D1, HEAD_DIM)
        v1 = load_dims(values, place, seen, q0.dtype, D0, D1, HEAD_DIM)
    s = score_tile(q0, q1, k0, k1, scale, D1, SOFTCAP)
    return tl.where(seen[None, :], s, float("-inf")), v0, v1


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
