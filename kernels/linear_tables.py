"""Tiles of dense products, by compute capability, shape and rows: chosen on cards, read here, never tuned at run time.

No choice can change a bit of a result: every tile sums K in order, 16 at a time, in float32.
"""

from __future__ import annotations

import dataclasses

__all__ = [
    "MAX_SKINNY_ROWS",
    "MAX_WIDE_ROWS",
    "SkinnyTile",
    "SlabTile",
    "TiledTile",
    "WideTile",
    "cublas_is_invariant",
    "gated_tile",
    "middle_tile",
    "skinny_tile",
    "slab_tile",
    "tiled_tile",
    "wide_tile",
]

MAX_SKINNY_ROWS = 64
MAX_SLAB_ROWS = 8
_SMALL_SHARED_MEMORY = (12, 0)
"""From here on a program has 99 KB again: Hopper's tiles do not fit, and cuBLAS serves."""

_HOPPER_PROCESSORS = 132
MAX_WIDE_ROWS = 256
_MAX_WIDE_WEIGHTS = 8 << 20
"""Elements. Most larger products take as long as their weights need from memory, by cuBLAS as by ours."""

_SLAB_PIECE = 1024
_MAX_SLAB_PIECES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class SkinnyTile:
    """How `linear_skinny` cuts a product.

    Attributes:
        swap: weights are the left operand, so that the rows of x may be as few as 8 to an instruction.
        rows: height of x's tile; the product's rows fit in it.
        columns: rows of W a program owns.
        depth: of K a step.
        warps: of a program.
        stages: steps whose loads are under way.
    """

    swap: bool
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class SlabTile:
    """How `linear_slab` cuts a product.

    Attributes:
        rows: of x's tile; the product's rows fit in it.
        columns: rows of W a program owns.
        piece: of K a load, a power of two.
        pieces: that make up K.
        warps: of a program.
    """

    rows: int
    columns: int
    piece: int
    pieces: int
    warps: int


@dataclasses.dataclass(frozen=True, slots=True)
class TiledTile:
    """How `linear_tiled` cuts a product.

    Attributes:
        rows: height of a tile.
        columns: its width.
        warps: of a program.
        stages: steps of K whose loads are under way.
        group: tiles of rows that pass over W together.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    group: int = 8


@dataclasses.dataclass(frozen=True, slots=True)
class WideTile:
    """How `linear_hopper` cuts a product.

    Attributes:
        rows: height of a tile, 64 or 128.
        columns: its width.
        stages: steps of K whose loads are under way.
    """

    rows: int
    columns: int
    stages: int


def cublas_is_invariant(capability: tuple[int, int]) -> bool:
    """Whether cuBLASLt, held from splitting K, gives a row the same bits at every number of rows.

    Measured on Hopper: 26 numbers of rows from 1 to 4096, ten shapes. Ampere's kernels are known to differ.
    """
    return capability >= (9, 0)


def skinny_tile(capability: tuple[int, int], n: int, k: int, rows: int, *, gated: bool) -> SkinnyTile | None:
    """The tile of a product of few rows; None where it is not the one to use.

    Args:
        capability: of the card.
        n: columns of the result.
        k: summed.
        rows: of x.
        gated: for two products, the gate's and up's.
    """
    if rows > MAX_SKINNY_ROWS or capability >= _SMALL_SHARED_MEMORY:
        return None
    if capability >= (9, 0):
        return _hopper_gated(n, rows) if gated else _hopper(n, k, rows)
    height = next(bucket for bucket in (16, 32, 64) if rows <= bucket)
    if gated or n < 4096:
        return SkinnyTile(False, height, 16, 128, 2, 4)
    if n < 16384:
        return SkinnyTile(False, height, 32, 128, 4, 4)
    return SkinnyTile(False, height, 64, 64, 4, 5)


def slab_tile(capability: tuple[int, int], n: int, k: int, rows: int, *, gated: bool) -> SlabTile | None:
    """The tile of a product whose weights wait in shared memory; None where it is not the one to use.

    Args:
        capability: of the card.
        n: columns of the result.
        k: summed.
        rows: of x.
        gated: for two products, the gate's and up's.
    """
    pieces, rest = divmod(k, _SLAB_PIECE)
    if not (9, 0) <= capability < _SMALL_SHARED_MEMORY or rows > MAX_SLAB_ROWS or rest:
        return None
    if pieces * (1 + gated) > _MAX_SLAB_PIECES or n > 16384:
        return None
    columns = 32 if not gated and (pieces == 2 or (pieces == 1 and rows <= 4)) else 16
    return SlabTile(MAX_SLAB_ROWS, columns, _SLAB_PIECE, pieces, 2)


def gated_tile(capability: tuple[int, int], n: int, rows: int) -> TiledTile | None:
    """The tile of gate and up at once, of more rows than `skinny_tile` serves; None where two kernels compute it.

    Args:
        capability: of the card.
        n: columns of the result.
        rows: of x.
    """
    if capability != (9, 0):
        return None
    if n <= 4096:
        # Of more than 128 rows there may be more tiles than multiprocessors: so few stages that two fit on one.
        return TiledTile(64, 64, 4, 6 if rows <= 128 else 4) if rows <= 256 else None
    if rows <= 64:
        return TiledTile(64, 64, 4, 4)
    # Of 65 to 96 rows cuBLAS leaves out a quarter of the work that this tile has.
    return TiledTile(128, 128, 8, 4) if 96 < rows <= 128 else None


def middle_tile(capability: tuple[int, int], n: int, k: int, rows: int) -> TiledTile | None:
    """The tile of a large product of 33 to 64 rows; None where it is not the one to use.

    As measured on an H200 for a large model's q, k and v and its o.

    Args:
        capability: of the card.
        n: columns of the result.
        k: summed.
        rows: of x.
    """
    if capability != (9, 0) or not 32 < rows <= 64:
        return None
    if n > 8192 or k > 4096 or n * k <= _MAX_WIDE_WEIGHTS:
        return None
    return TiledTile(64, 32 if n > 4096 else 16, 4, 8)


def wide_tile(capability: tuple[int, int], n: int, k: int, rows: int, *, gated: bool) -> WideTile | None:
    """The tile of a product whose weights are asked for before the kernel ahead has ended; None where it is not to be.

    For more than 64 rows, gated 32. Those whose programs all run at once, as measured on an H200 with a small model's
    products (others were faster by a microsecond here and there; each is a kernel more to compile at the start), and of
    a large model's those that were faster than cuBLAS.

    Args:
        capability: of the card.
        n: columns of the result.
        k: summed.
        rows: of x.
        gated: for two products, the gate's and up's.
    """
    if capability != (9, 0) or k % 64 or not (32 if gated else MAX_SKINNY_ROWS) < rows <= MAX_WIDE_ROWS:
        return None
    # (tile, programs of it that fit on a multiprocessor)
    tiles: tuple[tuple[WideTile, int], ...]
    if (1 + gated) * n * k <= _MAX_WIDE_WEIGHTS:
        if gated:
            tiles = ((WideTile(64, 64, 6), 1), (WideTile(64, 64, 4), 2))
        else:
            tiles = ((WideTile(64, 64, 8), 1), (WideTile(128, 64, 6), 1))
    elif gated:
        return WideTile(64, 64, 8) if n > 8192 and rows <= 64 else None
    else:
        tiles = ((WideTile(128, 64, 8), 1),) if n * k <= 2 * _MAX_WIDE_WEIGHTS and rows > 192 else ()
    for tile, beside in tiles:
        if -(-rows // tile.rows) * -(-n // tile.columns) <= beside * _HOPPER_PROCESSORS:
            return tile
    return None


def _hopper(n: int, k: int, rows: int) -> SkinnyTile | None:
    """Measured on an H200 over the products of two models; None where cuBLAS was as fast."""
    low = 8 if rows <= 8 else 16
    if n > 65536:
        if rows <= 16:
            return SkinnyTile(True, 16, 64, 128, 4, 5)
        return SkinnyTile(True, 32, 64, 64, 4, 6) if rows <= 32 else SkinnyTile(False, 64, 64, 64, 4, 6)
    if n > 4096 or (n > 2048 and k <= 2048):
        if rows <= 16:
            return SkinnyTile(True, 16, 64, 128, 4, 5)
        if rows <= 32:
            return SkinnyTile(True, 32, 64, 128, 4, 5)
        return SkinnyTile(False, 64, 32, 128, 4, 5) if k <= 2048 else None
    if n > 2048:
        if k > 8192:
            return SkinnyTile(True, 8, 16, 256, 2, 5) if rows <= 8 else None
        if rows <= 16:
            return SkinnyTile(True, low, 32, 256, 2, 4)
        return SkinnyTile(True, 32, 64, 128, 4, 5) if rows <= 32 else None
    if rows <= 8 or (rows <= 16 and k > 2048):
        return SkinnyTile(False, 16, 8, 512, 2, 4)
    if rows <= 16:
        return None
    return SkinnyTile(False, 32, 8, 512, 4, 4) if rows <= 32 else SkinnyTile(False, 64, 16, 256, 4, 4)


def _hopper_gated(n: int, rows: int) -> SkinnyTile | None:
    """As `_hopper`, for gate and up at once, against cuBLAS and an activation of its own."""
    if n > 4096:
        height = 16 if rows <= 16 else 32
        return SkinnyTile(True, height, 64, 64, 4, 5) if rows <= 32 else None
    if rows <= 8:
        return SkinnyTile(True, 8, 32, 128, 2, 5)
    if rows <= 16:
        return SkinnyTile(False, 16, 32, 128, 4, 5)
    if rows <= 32:
        return SkinnyTile(False, 32, 16, 256, 2, 4)
    return SkinnyTile(False, 64, 32, 128, 4, 5)


def tiled_tile(capability: tuple[int, int], n: int, k: int, rows: int) -> TiledTile:
    """The tile of a product of any number of rows.

    Args:
        capability: of the card.
        n: columns of the result.
        k: summed.
        rows: of x.
    """
    if rows <= 16:
        return TiledTile(16, 64, 4, 5)
    if rows <= 32:
        return TiledTile(32, 64, 4, 5)
    if rows <= 64:
        return TiledTile(64, 64, 4, 4)
    if rows <= 128 or n < 4096:
        return TiledTile(64, 128, 4, 4)
    return TiledTile(128, 128, 8, 3)
