"""Stands in for the core: writes plans by hand into the arenas a runner hands over."""

from __future__ import annotations

import ctypes
import math
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np

MAX_NUM_SEQS = 6
MAX_TOKENS = 64
_SIZES = {
    "counts": 16,
    "rows": MAX_NUM_SEQS,
    "query_start": MAX_NUM_SEQS + 1,
    "seq_lens": MAX_NUM_SEQS,
    "num_sampled": MAX_NUM_SEQS,
    "logits_rows": MAX_NUM_SEQS,
    "logits_slots": MAX_NUM_SEQS,
    "param_slots": MAX_NUM_SEQS,
    "param_values": 16 * MAX_NUM_SEQS,
    "bias_logits": 32,
    "bias_tokens": 32,
    "bias_values": 32,
    "mask_logits": MAX_NUM_SEQS,
    "copy_sources": MAX_NUM_SEQS,
    "copy_destinations": MAX_NUM_SEQS,
    "table_slots": 64,
    "table_indices": 64,
    "table_blocks": 64,
    "token_ids": MAX_TOKENS,
    "positions": MAX_TOKENS,
    "slot_mapping": MAX_TOKENS,
}


def params(
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    sample_index: int = 0,
    logprobs: int | None = None,
    prompt_length: int = 0,
) -> list[int]:
    """The 16 numbers of one slot's sampling parameters."""
    floats = struct.unpack("<6i", struct.pack("<6f", temperature, top_p, min_p, repetition, presence, frequency))
    low, high = struct.unpack("<2i", struct.pack("<Q", seed))
    has_penalties = (repetition, presence, frequency) != (1.0, 0.0, 0.0)
    flags = has_penalties * 1 | (logprobs is not None) * 2
    return [*floats, top_k, low, high, sample_index, flags, logprobs or 0, prompt_length, 0, 0, 0]


class PlanWriter:
    """As much of `Core` as a runner sees."""

    def __init__(self) -> None:
        self.histories: dict[int, list[int]] = {}
        self._arenas: list[np.ndarray[Any, Any]] = []
        self._results: list[np.ndarray[Any, Any]] = []
        self._step = 0

    def layout(self) -> list[tuple[str, int, int]]:
        offset, entries = 0, []
        for name, size in _SIZES.items():
            entries.append((name, offset, size))
            offset += -(-size // 32) * 32
        return entries

    def arena_len(self) -> int:
        return sum(-(-size // 32) * 32 for size in _SIZES.values())

    def attach(self, arenas: list[tuple[int, int]], results: list[tuple[int, int]], owner: object) -> None:
        def view(pointer: int, count: int) -> np.ndarray[Any, Any]:
            return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(pointer))

        assert len(arenas) == len(results) == 3
        assert all(count >= self.arena_len() for _, count in arenas)
        assert all(count >= MAX_NUM_SEQS for _, count in results)
        self._owner = owner
        self._arenas = [view(*arena) for arena in arenas]
        self._results = [view(*result) for result in results]

    def history(self, slot: int) -> bytes:
        return np.array(self.histories[slot], dtype=np.int32).tobytes()

    def plan(
        self,
        work: list[tuple[int, list[int], int]],
        tables: dict[int, list[int]],
        *,
        logits: list[tuple[int, int]] | None = None,
        new_params: dict[int, list[int]] | None = None,
        new_blocks: list[tuple[int, int, int]] = (),
        copies: list[tuple[int, int]] = (),
        bans: list[tuple[int, int]] = (),
        biases: list[tuple[int, int, float]] = (),
        masks: list[int] = (),
        block_size: int = 16,
    ) -> Any:
        """Write a step.

        Args:
            work: (slot, token ids, position of the first) a row, single tokens first.
            tables: a slot's blocks, for the slot mapping.
            logits: (row, slot) of each sample; every row for its own slot when None.
            new_params: a slot's new parameters.
            new_blocks: (slot, index, block) of the block tables.
            copies: (source, destination) blocks.
            bans: (logits row, token).
            biases: (logits row, token, what is added).
            masks: logits rows that have one.
            block_size: tokens a block.
        """
        self._step += 1
        biases = [*biases, *((row, token, -math.inf) for row, token in bans)]
        arena = self._step % 3
        memory = self._arenas[arena]
        memory[:] = -77
        positions, slots, starts = [], [], [0]
        for slot, tokens, first in work:
            for position in range(first, first + len(tokens)):
                positions.append(position)
                slots.append(tables[slot][position // block_size] * block_size + position % block_size)
            starts.append(len(positions))
        logits = logits if logits is not None else [(row, slot) for row, (slot, _, _) in enumerate(work)]
        written: dict[str, list[int]] = {
            "counts": [
                len(positions),
                len(work),
                sum(len(tokens) == 1 for _, tokens, _ in work),
                len(logits),
                len(new_blocks),
                len(copies),
                len(new_params or {}),
                len(biases),
                0,
                max(first + len(tokens) for _, tokens, first in work),
                max(len(tokens) for _, tokens, _ in work),
                self._step,
                len(masks),
                0,
                0,
                0,
            ],
            "rows": [slot for slot, _, _ in work],
            "query_start": starts,
            "seq_lens": [first + len(tokens) for _, tokens, first in work],
            "logits_rows": [starts[row + 1] - 1 for row, _ in logits],
            "logits_slots": [slot for _, slot in logits],
            "param_slots": list(new_params or {}),
            "param_values": [number for values in (new_params or {}).values() for number in values],
            "bias_logits": [row for row, _, _ in biases],
            "bias_tokens": [token for _, token, _ in biases],
            "bias_values": struct.unpack(f"<{len(biases)}i", struct.pack(f"<{len(biases)}f", *(b[2] for b in biases))),
            "mask_logits": list(masks),
            "copy_sources": [source for source, _ in copies],
            "copy_destinations": [destination for _, destination in copies],
            "table_slots": [slot for slot, _, _ in new_blocks],
            "table_indices": [index for _, index, _ in new_blocks],
            "table_blocks": [block for _, _, block in new_blocks],
            "token_ids": [token for _, tokens, _ in work for token in tokens],
            "positions": positions,
            "slot_mapping": slots,
        }
        for name, offset, _ in self.layout():
            values = written.get(name, [])
            memory[offset : offset + len(values)] = values
        return SimpleNamespace(
            step=self._step,
            arena=arena,
            num_tokens=len(positions),
            num_rows=len(work),
            num_decode_rows=sum(len(tokens) == 1 for _, tokens, _ in work),
            num_logits=len(logits),
            num_table_updates=len(new_blocks),
            num_block_copies=len(copies),
            num_param_updates=len(new_params or {}),
            num_biases=len(biases),
            num_groups=0,
            num_masks=len(masks),
        )

    def sampled(self, plan: Any) -> list[int]:
        """What the step left in its result buffer."""
        return self._results[plan.arena][: plan.num_logits].tolist()
