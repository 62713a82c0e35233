"""How the decode and shared-prefix kernels are launched on each generation of GPUs."""

from __future__ import annotations

import dataclasses

from octavo.kernels.attention import AttentionShape

__all__ = ["DecodeConfig", "decode_config", "group_config", "hopper_decode_config"]


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How a kernel is launched. None of it changes the bits.

    Attributes:
        num_warps: of a program.
        num_stages: tiles in flight or in use.
        programs: a multiprocessor.
        registers: most a thread may use; None for what the compiler takes.
        pieces: 1 or 2, in how many a tile is loaded.
        hopper_stages: tiles of keys and values in shared memory in Hopper's own decode kernel, where that serves; its
            num_warps, a multiple of 4, are those of the arithmetic. 0 for the portable one everywhere.
    """

    num_warps: int
    num_stages: int
    programs: int
    registers: int | None = None
    pieces: int = 1
    hopper_stages: int = 0


# By (least compute capability, least head size, 1 for an fp8 cache); the last that fits holds.
_Table = dict[tuple[int, int, int], DecodeConfig]
_DECODE: _Table = {
    (80, 0, 0): DecodeConfig(4, 3, 2),
    (86, 0, 0): DecodeConfig(4, 3, 1),
    (90, 0, 0): DecodeConfig(2, 3, 6),
    (90, 80, 0): DecodeConfig(4, 3, 3),
    (90, 128, 0): DecodeConfig(2, 2, 4),
    (90, 128, 1): DecodeConfig(4, 4, 2),
    (90, 192, 0): DecodeConfig(4, 3, 2),
}
# For fewer rows at most, there are too few items to hide what each waits for: by more warps each is done sooner.
_DECODE_16: _Table = _DECODE | {(90, 128, 0): DecodeConfig(2, 3, 3)}
_DECODE_4: _Table = _DECODE | {(90, 0, 0): DecodeConfig(4, 3, 4), (90, 128, 0): DecodeConfig(4, 3, 2)}
_GROUP: _Table = {
    (80, 0, 0): DecodeConfig(4, 3, 1),
    (86, 0, 0): DecodeConfig(8, 2, 1),
    (90, 0, 0): DecodeConfig(4, 2, 2),
    (90, 192, 0): DecodeConfig(8, 3, 1),
}


def decode_config(capability: int, shape: AttentionShape, tokens: int) -> DecodeConfig:
    """The decode kernel's launch for a compute capability such as 90 and the most rows there may be."""
    table = _DECODE_4 if tokens <= 4 else _DECODE_16 if tokens <= 16 else _DECODE
    return _last_that_fits(table, capability, shape)


def hopper_decode_config(head_dim: int, tokens: int) -> DecodeConfig:
    """The launch of Hopper's own decode kernel for the most rows there may be."""
    # A tile of heads of 256 has half as many positions, so a stage has the bytes of heads of 128.
    return DecodeConfig(4, 2, 2, hopper_stages=(3 if tokens <= 4 else 2) * 128 // min(head_dim, 128))


def group_config(capability: int, shape: AttentionShape) -> DecodeConfig:
    """The shared-prefix kernel's launch for a compute capability."""
    return _last_that_fits(_GROUP, capability, shape)


def _last_that_fits(table: _Table, capability: int, shape: AttentionShape) -> DecodeConfig:
    limits = (max(80, capability), shape.head_dim, int(shape.kv_fp8))
    return table[max(key for key in table if all(least <= limit for least, limit in zip(key, limits, strict=True)))]
