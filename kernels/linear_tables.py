"""Tiles of dense products, by compute capability, shape and rows: chosen on cards, read here, never tuned at run time.

No choice can change a bit of a result: every tile sums K in order, 16 at a time, in float32.
"""

from __future__ import annotations

import dataclasses

__all__ = ["MAX_SKINNY_ROWS", "SkinnyTile", "TiledTile", "cublas_is_invariant", "skinny_tile", "tiled_tile"]

MAX_SKINNY_ROWS = 64


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
    if rows > MAX_SKINNY_ROWS or cublas_is_invariant(capability):
        return None
    height = next(bucket for bucket in (16, 32, 64) if rows <= bucket)
    if gated or n < 4096:
        return SkinnyTile(False, height, 16, 128, 2, 4)
    if n < 16384:
        return SkinnyTile(False, height, 32, 128, 4, 4)
    return SkinnyTile(False, height, 64, 64, 4, 5)


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
