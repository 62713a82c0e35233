"""What a step's kernels work on: the layout of a plan, the state on the device, and the samples.

The arenas of the plan and the ring of the results are pinned host memory that kernels read and write in place, so that
no copy is queued by the host and one graph serves all three arenas. Which of the three is next is a number on the
device (`turn`) that the last kernel of a step moves on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from octavo._core import NUM_ARENAS, PARAM_LEN
from torch import Tensor

__all__ = [
    "DeviceState",
    "PlanLayout",
    "Samples",
]


@dataclasses.dataclass(frozen=True)
class PlanLayout:
    """Where the arrays of a plan lie, in int32 elements; every offset is a multiple of 32.

    Attributes:
        offsets: first element of each array.
        sizes: elements of each array.
        length: of an arena.
    """

    offsets: dict[str, int]
    sizes: dict[str, int]
    length: int

    @classmethod
    def of(cls, arrays: Sequence[tuple[str, int, int]], length: int) -> PlanLayout:
        """From (name, offset, elements) of every array, as the core tells them."""
        return cls(
            {name: offset for name, offset, _ in arrays},
            {name: size for name, _, size in arrays},
            length,
        )

    @property
    def num_groups(self) -> int:
        """Cache groups: each has a slot mapping of all tokens."""
        return self.sizes["slot_mapping"] // self.sizes["token_ids"]

    def view(self, plan: Tensor, name: str) -> Tensor:
        """The named array of a plan int32[length]."""
        return plan[self.offsets[name] : self.offsets[name] + self.sizes[name]]


@dataclasses.dataclass(frozen=True)
class DeviceState:
    """What stays on the device from step to step.

    Attributes:
        turn: int32[1], the arena of the next step.
        plan: int32[length], the plan of the step that runs.
        block_tables: int32[num_groups * max_num_seqs, blocks of the longest sequence], a cache group after the other.
        params: int32[max_num_seqs, PARAM_LEN], sampling parameters.
        last_token: int32[max_num_seqs].
    """

    turn: Tensor
    plan: Tensor
    block_tables: Tensor
    params: Tensor
    last_token: Tensor

    @classmethod
    def empty(cls, layout: PlanLayout, max_num_seqs: int, table_stride: int, device: torch.device) -> DeviceState:
        """The state before the first step, whose arena is the second."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            torch.ones(1, dtype=torch.int32, device=device),
            zeros(layout.length),
            zeros(layout.num_groups * max_num_seqs, table_stride),
            zeros(max_num_seqs, PARAM_LEN),
            zeros(max_num_seqs),
        )


@dataclasses.dataclass(frozen=True)
class Samples:
    """What steps sample, on the device or in the ring of results (then each with a first dimension of NUM_ARENAS).

    Attributes:
        ids: int32[R].
        logprobs: float32[R], of the chosen tokens.
        top_ids: int32[R, M], the likeliest tokens.
        top_logprobs: float32[R, M].
    """

    ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @classmethod
    def empty(cls, rows: int, max_logprobs: int, device: torch.device, *, ring: bool = False) -> Samples:
        """Zeroed memory for `rows` samples; a ring lies in host memory, pinned where `device` is a GPU."""
        first = (NUM_ARENAS,) if ring else ()
        place = torch.device("cpu") if ring else device
        pinned = ring and device.type == "cuda"

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(first + shape, dtype=dtype, device=place, pin_memory=pinned)

        return cls(
            zeros(torch.int32, rows),
            zeros(torch.float32, rows),
            zeros(torch.int32, rows, max_logprobs),
            zeros(torch.float32, rows, max_logprobs),
        )
