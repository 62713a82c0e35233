"""How the prompt kernel is launched on each generation of GPUs. None of it changes an answer's bits."""

from __future__ import annotations

import dataclasses

__all__ = ["PrefillConfig", "prefill_config"]


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """A launch of the prompt kernel.

    Attributes:
        rows: query heads of all tokens together that one item takes, a power of two.
        num_warps: of a program.
        num_stages: tiles in flight or in use.
        programs: a multiprocessor, at most; each takes items until none is left.
        padded: whether a head is one part, padded to a power of two, and not two.
        hopper_stages: tiles of keys and of values in shared memory in Hopper's own kernel, where that serves; 0 for the
            portable one everywhere.
    """

    rows: int
    num_warps: int
    num_stages: int
    programs: int = 4
    padded: bool = False
    hopper_stages: int = 0


# By (least compute capability, least head size); the last that fits holds.
_CONFIGS = {
    (80, 0): PrefillConfig(64, 8, 2, padded=True),
    (90, 0): PrefillConfig(128, 8, 2, hopper_stages=3),
    (90, 128): PrefillConfig(128, 8, 2, hopper_stages=2),
    (90, 192): PrefillConfig(64, 8, 2),
}


# Only for Hopper's own kernel: the portable one spills with so many rows.
_WIDE_ON_HOPPER = PrefillConfig(128, 8, 2, hopper_stages=2)


def prefill_config(capability: int, head_dim: int, *, on_hopper: bool = False) -> PrefillConfig:
    """The launch for a compute capability such as 90 and a head size.

    Args:
        capability: of the device.
        head_dim: of the shape.
        on_hopper: Hopper's own kernels serve the shape.
    """
    if on_hopper and head_dim == 256:
        return _WIDE_ON_HOPPER
    return _CONFIGS[max(key for key in _CONFIGS if key[0] <= max(80, capability) and key[1] <= head_dim)]
