"""The inputs of one step on a GPU: views of the plan that lies there, and how the step is bounded."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from torch import Tensor

from octavo.layers.backend import StepInputs

if TYPE_CHECKING:
    from octavo.kernels.attention_work import AttentionWork
    from octavo.kernels.step import DeviceState, PlanLayout

__all__ = ["CudaStepInputs", "StepKind", "StepSize", "has_groups", "has_prompts"]

StepKind: TypeAlias = Literal["decode", "grouped", "mixed", "mixed_grouped"]
"""Decode rows only; decode rows of which some share their first blocks; either with prompt rows too."""


def has_groups(kind: StepKind) -> bool:
    """Whether decode rows may share their first blocks, which are then read once for all of them."""
    return kind in ("grouped", "mixed_grouped")


def has_prompts(kind: StepKind) -> bool:
    """Whether there may be prompt rows."""
    return kind in ("mixed", "mixed_grouped")


class StepSize(NamedTuple):
    """Size and kind of the steps of one graph.

    Attributes:
        kind: which rows there may be.
        tokens: the most tokens.
        samples: the most samples.
    """

    kind: StepKind
    tokens: int
    samples: int


@dataclasses.dataclass(slots=True, kw_only=True)
class CudaStepInputs(StepInputs):
    """`StepInputs` for every step of one kind and size; values that vary between steps are read on the device.

    `num_tokens` and `num_rows` are bounds. Tokens beyond the step's own are padding: id 0, position 0, cache slot -1.

    Attributes:
        kind: which rows there may be.
        counts: int32[16], the step's own counts.
        group_rows: int32, decode rows, a group after the other.
        group_starts: int32, where each group's rows begin, and the end.
        group_blocks: int32, the first blocks that each group shares.
        logits_rows: int32[samples], the tokens that samples are drawn from.
        logits_slots: int32[samples], the slots they are drawn for.
        works: attention's plan and partial results, by sliding window.
    """

    kind: StepKind
    counts: Tensor
    group_rows: Tensor
    group_starts: Tensor
    group_blocks: Tensor
    logits_rows: Tensor
    logits_slots: Tensor
    works: dict[int, AttentionWork]

    @classmethod
    def of(
        cls,
        size: StepSize,
        state: DeviceState,
        layout: PlanLayout,
        works: dict[int, AttentionWork],
        *,
        rows: int,
    ) -> CudaStepInputs:
        """The inputs of steps of one size.

        Args:
            size: of the steps.
            state: where the plan lies.
            layout: of the plan.
            works: by sliding window.
            rows: the most rows.
        """

        def view(name: str) -> Tensor:
            return layout.view(state.plan, name)

        num_groups = layout.num_groups
        return cls(
            token_ids=view("token_ids"),
            positions=view("positions"),
            slot_mappings=list(view("slot_mapping").view(num_groups, -1)),
            rows=view("rows"),
            seq_lens=view("seq_lens"),
            query_start=view("query_start"),
            block_tables=list(state.block_tables.view(num_groups, -1, state.block_tables.shape[1])),
            table_stride=state.block_tables.shape[1],
            num_tokens=size.tokens,
            num_rows=rows,
            num_decode_rows=0 if has_prompts(size.kind) else rows,
            kind=size.kind,
            counts=view("counts"),
            group_rows=view("group_rows"),
            group_starts=view("group_starts"),
            group_blocks=view("group_blocks"),
            logits_rows=view("logits_rows")[: size.samples],
            logits_slots=view("logits_slots")[: size.samples],
            works=works,
        )
