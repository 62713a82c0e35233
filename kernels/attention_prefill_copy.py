"""The copying warp of Hopper's prompt attention, and how items are dealt to programs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

__all__ = ["first_tile_of", "item_of_turn", "load_prefill_tiles"]


@gluon.jit
def item_of_turn(turn, programs):
    """The item of a program's turn. Every other round is dealt backwards, so that none gets the heaviest of all."""
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def first_tile_of(begin, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """The first tile that a query at position `begin` sees."""
    return gl.maximum(begin - WINDOW + 1, 0) // TILE if WINDOW > 0 else begin * 0


@gluon.jit
def load_prefill_tiles(
    cache,
    tables,
    table_stride,
    items,
    totals,
    buffers,
    full,
    empty,
    out_of_bounds,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp: keys, then values, of each tile of each item into the next buffer that is empty."""
    BLOCKS: gl.constexpr = TILE // BLOCK_SIZE
    HALVES: gl.constexpr = HEAD_DIM // 64
    programs = gl.num_programs(0)
    count = gl.load(totals + 2) * KV_HEADS
    turns = (count + programs - 1) // programs
    step = 0
    for turn in range(turns):
        index = item_of_turn(turn, programs)
        if index < count:
            item = items + index // KV_HEADS * 4
            slot = gl.load(item)
            begin = gl.load(item + 2)
            end = begin + gl.load(item + 3)
            # Blocks that no query sees may be another sequence's by now.
            first_block = gl.maximum(begin - WINDOW + 1, 0) // BLOCK_SIZE if WINDOW > 0 else 0
            last_block = (end - 1) // BLOCK_SIZE
            table = tables + slot.to(gl.int64) * table_stride
            head = index % KV_HEADS
            for tile in range(first_tile_of(begin, TILE, WINDOW), (end + TILE - 1) // TILE):
                stage = step % STAGES
                phase = step // STAGES & 1
                ids = ()
                for block in gl.static_range(BLOCKS):
                    place = tile * BLOCKS + block
                    held = (place >= first_block) & (place <= last_block)
                    ids = ids + (gl.load(table + place, mask=held, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
                for half in gl.static_range(2):
                    at = stage * 2 + half
                    mbarrier.wait(empty.index(at), phase ^ 1)
                    mbarrier.expect(full.index(at), TILE * HEAD_DIM * 2)
                    for block in gl.static_range(BLOCKS):
                        # Rows outside the cache are filled with zeros.
                        row = ((ids[block] * 2 + half) * KV_HEADS + head) * BLOCK_SIZE
                        row = gl.where(ids[block] < 0, out_of_bounds, row)
                        for part in gl.static_range(HALVES):
                            buffer = buffers.index((at * HALVES + part) * BLOCKS + block)
                            tma.async_copy_global_to_shared(cache, [row, part * 64], full.index(at), buffer)
                step += 1
