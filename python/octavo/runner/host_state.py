"""State that a device in host memory keeps between steps, and the plan arenas that update it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from octavo._core import NUM_ARENAS, PARAM_LEN
from octavo.layers.backend import Buffer, IntArray, Memory, StepInputs
from octavo.layers.backends.cpu import mapped_zeros
from octavo.runner.interface import mask_words

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan

__all__ = ["Arena", "HostState"]

_FLAGS, _NUM_LOGPROBS, _PROMPT_LENGTH = 10, 11, 12
_HAS_PENALTIES, _WANTS_LOGPROBS = 1, 2
_IN_PROMPT = np.int32(1 << 30)


class Arena:
    """One plan arena and its result buffer.

    Attributes:
        memory: int32[length]; the core writes it.
        result: int32[R], the sampled ids.
        masks: int32 [R, words], the tokens allowed in each masked row of the plan.
        arrays: the plan arrays by name, views of `memory`.
        pointers: the plan arrays' addresses by name.
        masks_pointer, result_pointer: addresses.
        inputs: the plan arrays for the decoder's kernels.
    """

    def __init__(self, layout: list[tuple[str, int, int]], length: int, vocab_size: int) -> None:
        self.memory: IntArray = np.zeros(length, dtype=np.int32)
        self.arrays: dict[str, IntArray] = {name: self.memory[offset : offset + size] for name, offset, size in layout}
        self.result: IntArray = np.zeros(self.arrays["logits_rows"].size, dtype=np.int32)
        # The pages take no memory until a row is masked.
        self.masks: IntArray = mapped_zeros((self.result.size, mask_words(vocab_size)), np.int32)
        self.pointers: dict[str, int] = {name: array.ctypes.data for name, array in self.arrays.items()}
        self.masks_pointer = self.masks.ctypes.data
        self.result_pointer = self.result.ctypes.data
        self.inputs: StepInputs


class HostState:
    """Block tables, last tokens, sampling parameters and penalty counts of every slot, in host memory.

    Args:
        core: gives the arenas' layout and the history of a slot.
        buffer: converts an array to what a kernel takes.
        num_slots: sequences that run at once, `max_num_seqs`.
        table_stride: entries of one block table, the blocks of the longest sequence.
        vocab_size: columns of the penalty counts.

    Attributes:
        arenas: the NUM_ARENAS plan arenas.
        params_pointer: address of int32 [num_slots, 16].
        counts_pointer: address of int32 [num_slots, vocab_size]; 0 until some sequence has penalties.
    """

    def __init__(
        self, core: Core, buffer: Callable[[Memory], Buffer], num_slots: int, table_stride: int, vocab_size: int
    ) -> None:
        layout, length = core.layout(), core.arena_len()
        self.arenas = [Arena(layout, length, vocab_size) for _ in range(NUM_ARENAS)]
        self.history: Callable[[int], bytes] = core.history
        self.vocab_size = vocab_size
        sizes = {name: size for name, _, size in layout}
        max_tokens = sizes["token_ids"]
        num_groups = sizes["slot_mapping"] // max_tokens
        self._block_tables: IntArray = np.zeros((num_groups * num_slots, table_stride), dtype=np.int32)
        self._params: IntArray = np.zeros((num_slots, PARAM_LEN), dtype=np.int32)
        self._last_token: IntArray = np.zeros(num_slots, dtype=np.int32)
        self._counts: IntArray | None = None
        self.params_pointer = self._params.ctypes.data
        self.counts_pointer = 0
        for arena in self.arenas:
            arrays = arena.arrays
            arena.inputs = StepInputs(
                token_ids=buffer(arrays["token_ids"]),
                positions=buffer(arrays["positions"]),
                slot_mappings=[buffer(part) for part in arrays["slot_mapping"].reshape(num_groups, max_tokens)],
                rows=buffer(arrays["rows"]),
                seq_lens=buffer(arrays["seq_lens"]),
                query_start=buffer(arrays["query_start"]),
                block_tables=[buffer(part) for part in self._block_tables.reshape(num_groups, num_slots, table_stride)],
                table_stride=table_stride,
            )

    def apply(self, plan: StepPlan, arena: Arena) -> StepInputs:
        """Apply the plan's updates, and replace token ids of -1 by the last tokens of their slots.

        Returns:
            the decoder's inputs, with the step's numbers of tokens and rows set.
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
        """Store the step's samples as last tokens, and count them in slots with penalties."""
        sampled = arena.result[:num_logits]
        slots = arena.arrays["logits_slots"][:num_logits]
        self._last_token[slots] = sampled
        if self._counts is not None:
            penalized = (self._params[slots, _FLAGS] & _HAS_PENALTIES).astype(bool)
            # Every slot samples once a step, so no pair occurs twice.
            self._counts[slots[penalized], sampled[penalized]] += 1

    def max_logprobs(self, arena: Arena, num_logits: int) -> int:
        """The largest `logprobs` of the step's rows; -1 when no row asks for log probabilities."""
        params = self._params[arena.arrays["logits_slots"][:num_logits]]
        wanted = params[:, _NUM_LOGPROBS][(params[:, _FLAGS] & _WANTS_LOGPROBS).astype(bool)]
        return int(wanted.max()) if wanted.size else -1

    def _update_params(self, count: int, arrays: dict[str, IntArray]) -> None:
        slots = arrays["param_slots"][:count]
        values = arrays["param_values"][: count * PARAM_LEN].reshape(count, PARAM_LEN)
        self._params[slots] = values
        for index in np.flatnonzero(values[:, _FLAGS] & _HAS_PENALTIES):
            self._fill_counts(int(slots[index]), int(values[index, _PROMPT_LENGTH]))

    def _fill_counts(self, slot: int, prompt_length: int) -> None:
        """Count the tokens of a sequence's output, and set a mark on the tokens of its prompt."""
        if self._counts is None:
            self._counts = mapped_zeros((self._params.shape[0], self.vocab_size), np.int32)
            self.counts_pointer = self._counts.ctypes.data
        tokens = np.frombuffer(self.history(slot), dtype=np.int32)
        row = self._counts[slot]
        row[:] = 0
        np.add.at(row, tokens[prompt_length:], 1)
        row[tokens[:prompt_length]] |= _IN_PROMPT
