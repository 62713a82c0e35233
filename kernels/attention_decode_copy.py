"""The copying warp of Hopper's decode attention: keys and values of tile after tile, ahead of the arithmetic."""

from __future__ import annotations

from octavo.kernels.overlap import await_previous
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

__all__ = ["load_decode_tiles"]


@gluon.jit
def _load_copy_record(items, place, there):
    """Of a record of the decode list what the copying warp needs: slot, first and past the last position, query's."""
    item = items + place * 8
    slot = gl.load(item + 1, mask=there, other=0)
    start = gl.load(item + 2, mask=there, other=0)
    end = gl.load(item + 3, mask=there, other=0)
    query = gl.load(item + 5, mask=there, other=0)
    return slot, start, end, query


@gluon.jit
def _load_blocks(tables, table_stride, slot, start, end, there, BLOCK_SIZE: gl.constexpr, CHUNK: gl.constexpr):
    """Block ids of the chunk of positions start <= p < end, -1 for its other blocks: a tuple of int32."""
    BLOCKS: gl.constexpr = CHUNK // BLOCK_SIZE
    table = tables + slot.to(gl.int64) * table_stride
    base = start // CHUNK * BLOCKS
    ids = ()
    for i in gl.static_range(BLOCKS):
        place = base + i
        # Blocks that the query does not see may be another sequence's by now.
        held = there & (place >= start // BLOCK_SIZE) & (place * BLOCK_SIZE < end)
        ids = ids + (gl.load(table + place, mask=held, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
    return ids


@gluon.jit
def load_decode_tiles(
    cache,
    tables,
    table_stride,
    items,
    capacity,
    totals,
    turns,
    out_of_bounds,
    buffers,
    following_items,
    full,
    empty,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The copying warp: keys and values of each tile of each item into the next stage that is empty."""
    BLOCKS: gl.constexpr = TILE // BLOCK_SIZE
    HALVES: gl.constexpr = HEAD_DIM // 64
    TILES: gl.constexpr = CHUNK // TILE
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, LANES)
    programs = gl.num_programs(0)
    index = gl.program_id(0)
    count = gl.load(totals) * KV_HEADS
    slot, start, end, query = _load_copy_record(items, index // KV_HEADS, index // KV_HEADS < capacity)
    ids = _load_blocks(tables, table_stride, slot, start, end, index < count, BLOCK_SIZE, CHUNK)
    following = index + programs
    one = gl.full([32], 1, gl.int32, LANES)
    taken = one
    step = 0
    while index < count:
        there = following < count
        next_slot, next_start, next_end, next_query = _load_copy_record(items, following // KV_HEADS, there)
        if TURNS:
            # Each program's first three items are given, so that copies start before the kernel ahead has ended.
            begun = index >= programs
            if begun:
                await_previous(PDL)
                taken = gl.atomic_add(turns + lane, one, mask=lane == 0, sem="relaxed")
        head = index % KV_HEADS
        while start < end:
            # Of an item of several chunks, one after the other.
            stop = gl.minimum((start // CHUNK + 1) * CHUNK, end)
            for tile in range(start // TILE, (stop + TILE - 1) // TILE):
                if tile == query // TILE:
                    # The kernel ahead writes the newest token's key and value.
                    await_previous(PDL)
                stage = step % STAGES
                phase = step // STAGES & 1
                mbarrier.wait(empty.index(stage), phase ^ 1)
                if TURNS:
                    following_items.index(stage).store(gl.full([1], following, gl.int32, LANES))
                    gl.thread_barrier()
                mbarrier.expect(full.index(stage), 2 * TILE * HEAD_DIM * 2)
                for half in gl.static_range(2):
                    for block in gl.static_range(BLOCKS):
                        held = ids[block]
                        for i in gl.static_range(1, TILES):
                            held = gl.where(tile % TILES == i, ids[i * BLOCKS + block], held)
                        # Rows outside the cache are filled with zeros.
                        line = ((held * 2 + half) * KV_HEADS + head) * BLOCK_SIZE
                        line = gl.where(held < 0, out_of_bounds, line)
                        for part in gl.static_range(HALVES):
                            buffer = buffers.index(((stage * 2 + half) * HALVES + part) * BLOCKS + block)
                            tma.async_copy_global_to_shared(cache, [line, part * 64], full.index(stage), buffer)
                step += 1
            start = stop
            if start < end:
                ids = _load_blocks(tables, table_stride, slot, start, end, True, BLOCK_SIZE, CHUNK)
        slot, start, end, query = next_slot, next_start, next_end, next_query
        ids = _load_blocks(tables, table_stride, slot, start, end, there, BLOCK_SIZE, CHUNK)
        second = following + programs
        if TURNS:
            second = gl.where(begun, 3 * programs + gl.sum(gl.where(lane == 0, taken, 0), 0), second)
        index = following
        following = second
    await_previous(PDL)
    if TURNS:
        # Whoever ends last puts back to zero what the next layer counts by; its own turns have all been taken then.
        ended = gl.atomic_add(turns + 1, 1, mask=following >= 0, sem="relaxed")
        gl.store(turns, 0, mask=ended == programs - 1)
        gl.store(turns + 1, 0, mask=ended == programs - 1)
