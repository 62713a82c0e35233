"""The inputs of one step on a GPU: views of the plan that lies there, and how the step is bounded."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

from octavo.layers.operations import StepInputs

if TYPE_CHECKING:
    from octavo.kernels.attention_work import AttentionWork
    from octavo.kernels.step import DeviceState, PlanLayout

__all__ = ["CudaStepInputs", "StepKind"]

StepKind: TypeAlias = Literal["decode", "grouped", "mixed"]
"""Decode rows only; decode rows of which some share their first blocks; prompt rows too."""


@dataclasses.dataclass(slots=True, kw_only=True)
class CudaStepInputs(StepInputs):
    """As `StepInputs`, for every step of one kind and size: what varies from step to step is read on the device.

    `num_tokens` and `num_rows` are bounds. Tokens beyond the step's own are padding: id 0, position 0, cache slot -1.

    Attributes:
        kind: which rows there may be.
        counts: int32[16], the step's own counts.
        group_rows: int32, decode rows, a group after the other.
        group_starts: int32, where each group's rows begin, and the end.
        group_blocks: int32, the first blocks that each group shares.
        logits_rows: int32[num_rows], the tokens that samples are drawn from.
        logits_slots: int32[num_rows], the slots they are drawn for.
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
        kind: StepKind,
        state: DeviceState,
        layout: PlanLayout,
        works: dict[int, AttentionWork],
        *,
        tokens: int,
        rows: int,
    ) -> CudaStepInputs:
        """The inputs of steps of one kind and size.

        Args:
            kind: which rows there may be.
            state: where the plan lies.
            layout: of the plan.
            works: by sliding window.
            tokens: the most tokens.
            rows: the most rows, and samples.
        """

        def view(name: str) -> Tensor:
            return layout.view(state.plan, name)

        return cls(
            token_ids=view("token_ids"),
            positions=view("positions"),
            slot_mapping=view("slot_mapping"),
            rows=view("rows"),
            seq_lens=view("seq_lens"),
            query_start=view("query_start"),
            block_tables=state.block_tables,
            table_stride=state.block_tables.shape[1],
            num_tokens=tokens,
            num_rows=rows,
            num_decode_rows=0 if kind == "mixed" else rows,
            kind=kind,
            counts=view("counts"),
            group_rows=view("group_rows"),
            group_starts=view("group_starts"),
            group_blocks=view("group_blocks"),
            logits_rows=view("logits_rows")[:rows],
            logits_slots=view("logits_slots")[:rows],
            works=works,
        )
