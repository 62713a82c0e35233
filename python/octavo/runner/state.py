"""What stays on the device from step to step, and the arenas that change it: never rebuilt, only updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from octavo.layers.cpu import mapped_zeros
from octavo.layers.operations import Buffer, StepInputs
from octavo.runner.interface import NUM_ARENAS, PARAM_WIDTH

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan

__all__ = ["Arena", "HostState"]

Array = npt.NDArray[np.int32]

_FLAGS, _NUM_LOGPROBS, _PROMPT_LENGTH = 10, 11, 12
_HAS_PENALTIES, _WANTS_LOGPROBS = 1, 2
_IN_PROMPT = np.int32(1 << 30)


class Arena:
    """One plan arena and its result buffer.

    Attributes:
        memory: int32, as the core fills it.
        result: int32[R], the sampled ids.
        arrays: the plan arrays by name, views of `memory`.
        inputs: the same for the decoder's kernels.
    """

    def __init__(self, layout: list[tuple[str, int, int]], length: int) -> None:
        self.memory = torch.zeros(length, dtype=torch.int32)
        self.arrays: dict[str, Array] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, offset, size in layout:
            self.tensors[name] = self.memory[offset : offset + size]
            self.arrays[name] = self.tensors[name].numpy()
        self.result = torch.zeros(self.tensors["logits_rows"].numel(), dtype=torch.int32)
        self.result_array: Array = self.result.numpy()
        self.logits_slots = self.tensors["logits_slots"].data_ptr()
        self.inputs: StepInputs


class HostState:
    """Block tables, last tokens, sampling parameters and penalty counts of every slot, in host memory.

    Args:
        core: whose layout the arenas have.
        buffer: makes a kernel's buffer of a tensor.
        num_slots: sequences that run at once.
        table_stride: blocks of the longest sequence.
        vocab_size: for the penalty counts.
    """

    def __init__(
        self, core: Core, buffer: Callable[[torch.Tensor], Buffer], num_slots: int, table_stride: int, vocab_size: int
    ) -> None:
        layout, length = core.layout(), core.arena_len()
        self.arenas = [Arena(layout, length) for _ in range(NUM_ARENAS)]
        self.history: Callable[[int], bytes] = core.history
        self.vocab_size = vocab_size
        self.block_tables = torch.zeros((num_slots, table_stride), dtype=torch.int32)
        self.params = torch.zeros((num_slots, PARAM_WIDTH), dtype=torch.int32)
        self.counts: torch.Tensor | None = None
        self._block_tables: Array = self.block_tables.numpy()
        self._params: Array = self.params.numpy()
        self._last_token: Array = np.zeros(num_slots, dtype=np.int32)
        self._counts: Array | None = None
        for arena in self.arenas:
            tensors = arena.tensors
            arena.inputs = StepInputs(
                token_ids=buffer(tensors["token_ids"]),
                positions=buffer(tensors["positions"]),
                slot_mapping=buffer(tensors["slot_mapping"]),
                rows=buffer(tensors["rows"]),
                seq_lens=buffer(tensors["seq_lens"]),
                query_start=buffer(tensors["query_start"]),
                block_tables=buffer(self.block_tables),
                table_stride=table_stride,
            )

    def apply(self, plan: StepPlan, arena: Arena) -> StepInputs:
        """Take in what the plan changes, and fill in the tokens that the core has not seen yet.

        Returns:
            the decoder's inputs, their counts set.
        """
        arrays = arena.arrays
        count = plan.num_table_updates
        if count:
            slots, indices = arrays["table_slots"][:count], arrays["table_indices"][:count]
            self._block_tables[slots, indices] = arrays["table_blocks"][:count]
        if plan.num_param_updates:
            self._update_params(plan.num_param_updates, arrays)
        num_decode_rows = plan.num_decode_rows
        if num_decode_rows:
            # A decode row is one token, so row and token have one index.
            token_ids = arrays["token_ids"][:num_decode_rows]
            np.copyto(token_ids, self._last_token[arrays["rows"][:num_decode_rows]], where=token_ids < 0)
        inputs = arena.inputs
        inputs.num_tokens = plan.num_tokens
        inputs.num_rows = plan.num_rows
        inputs.num_decode_rows = num_decode_rows
        return inputs

    def record(self, arena: Arena, num_logits: int) -> None:
        """Remember the step's samples as last tokens, and count them where penalties want it."""
        sampled = arena.result_array[:num_logits]
        slots = arena.arrays["logits_slots"][:num_logits]
        self._last_token[slots] = sampled
        if self._counts is not None:
            penalized = (self._params[slots, _FLAGS] & _HAS_PENALTIES).astype(bool)
            # Every slot samples once a step, so no pair occurs twice.
            self._counts[slots[penalized], sampled[penalized]] += 1

    def max_logprobs(self, arena: Arena, num_logits: int) -> int:
        """The most log probabilities a row of the step asks for beside the chosen token's; -1 where none asks."""
        params = self._params[arena.arrays["logits_slots"][:num_logits]]
        wanted = params[:, _NUM_LOGPROBS][(params[:, _FLAGS] & _WANTS_LOGPROBS).astype(bool)]
        return int(wanted.max()) if wanted.size else -1

    def _update_params(self, count: int, arrays: dict[str, Array]) -> None:
        slots = arrays["param_slots"][:count]
        values = arrays["param_values"][: count * PARAM_WIDTH].reshape(count, PARAM_WIDTH)
        self._params[slots] = values
        for index in np.flatnonzero(values[:, _FLAGS] & _HAS_PENALTIES):
            self._fill_counts(int(slots[index]), int(values[index, _PROMPT_LENGTH]))

    def _fill_counts(self, slot: int, prompt_length: int) -> None:
        """Count a sequence's output so far, and mark what its prompt holds."""
        if self._counts is None:
            self.counts = mapped_zeros((self._params.shape[0], self.vocab_size), torch.int32)
            self._counts = self.counts.numpy()
        tokens = np.frombuffer(self.history(slot), dtype=np.int32)
        row = self._counts[slot]
        row[:] = 0
        np.add.at(row, tokens[prompt_length:], 1)
        row[tokens[:prompt_length]] |= _IN_PROMPT
