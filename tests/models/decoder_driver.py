"""Drives a decoder step by step without the core: hand-made plans over shuffled blocks."""

from __future__ import annotations

import random

import numpy as np
import torch
from octavo.layers.backend import Backend, IntArray, StepInputs
from octavo.layers.backends.cpu import CpuBackend
from octavo.layers.decoder import Decoder
from octavo.layers.parameter import Weights
from reference_backend import ReferenceBackend

MAX_TOKENS = 256
NUM_BLOCKS = 80
TABLE_STRIDE = 48


class DecoderDriver:
    """Keeps the sequences' blocks; every step gives the logits of every token computed."""

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        *,
        backend: str = "cpu",
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        num_positions: int = 512,
        num_slots: int = 8,
    ) -> None:
        self.backend = self._make_backend(backend, dtype, block_size)
        self.decoder = decoder
        decoder.load(weights, self.backend, num_positions=num_positions)
        decoder.bind(MAX_TOKENS, MAX_TOKENS)
        # Blocks of a cache group follow those of the one before, so that one table serves all.
        self.num_groups = len(decoder.cache_layout.windows)
        self.cache = self.backend.kv_cache(decoder.cache_layout, NUM_BLOCKS * self.num_groups, block_size)
        self.block_size = block_size
        self.block_tables = np.zeros((num_slots, TABLE_STRIDE), dtype=np.int32)
        self.lengths = [0] * num_slots
        self.blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._free = list(range(1, NUM_BLOCKS))
        random.Random(7).shuffle(self._free)

    def _make_backend(self, backend: str, dtype: torch.dtype, block_size: int) -> Backend:
        if backend == "cpu":
            return CpuBackend(str(dtype).removeprefix("torch."), block_size)
        return ReferenceBackend(dtype)

    def share(self, source: int, target: int, num_blocks: int) -> None:
        """Give a fresh slot the first full blocks of another, as a prefix hit does."""
        self.blocks[target] = self.blocks[source][:num_blocks]
        self.lengths[target] = num_blocks * self.block_size
        assert self.lengths[target] <= self.lengths[source]

    def adopt(self, other: DecoderDriver) -> None:
        """Take over another driver's sequences, whose cached blocks were copied here."""
        self.lengths, self.blocks, self._free = list(other.lengths), [*map(list, other.blocks)], list(other._free)

    def step(self, work: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """Compute some tokens of some slots.

        Returns:
            float32 [tokens, vocab_size] of each entry.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        query_start = [0]
        for slot, tokens in work:
            first = self.lengths[slot]
            self.lengths[slot] += len(tokens)
            while len(self.blocks[slot]) * self.block_size < self.lengths[slot]:
                self.blocks[slot].append(self._free.pop())
            table = self.blocks[slot]
            self.block_tables[slot, : len(table)] = table
            token_ids += tokens
            for position in range(first, self.lengths[slot]):
                positions.append(position)
                block = table[position // self.block_size]
                slot_mapping.append(block * self.block_size + position % self.block_size)
            query_start.append(len(token_ids))
        arrays = {
            "token_ids": token_ids,
            "positions": positions,
            "slot_mapping": slot_mapping,
            "rows": [slot for slot, _ in work],
            "seq_lens": [self.lengths[slot] for slot, _ in work],
            "query_start": query_start,
        }
        plan = {name: np.array(values, dtype=np.int32) for name, values in arrays.items()}
        logits = self._logits(plan, sum(len(tokens) == 1 for _, tokens in work))
        return list(logits.split([len(tokens) for _, tokens in work]))

    def _logits(self, plan: dict[str, IntArray], num_decode_rows: int) -> torch.Tensor:
        """Logits of every token of a plan."""
        num_tokens = len(plan["token_ids"])
        slot_mappings, block_tables = self.groups(plan)
        buffers = {name: self.backend.buffer(array) for name, array in plan.items() if name != "slot_mapping"}
        inputs = StepInputs(
            slot_mappings=[self.backend.buffer(slots) for slots in slot_mappings],
            **buffers,
            block_tables=[self.backend.buffer(tables) for tables in block_tables],
            table_stride=TABLE_STRIDE,
            num_tokens=num_tokens,
            num_rows=len(plan["rows"]),
            num_decode_rows=num_decode_rows,
        )
        self.decoder.forward(inputs, self.cache)
        logits = self.decoder.compute_logits(np.arange(num_tokens, dtype=np.int32))
        return torch.as_tensor(logits).clone()

    def groups(self, plan: dict[str, IntArray]) -> tuple[list[IntArray], list[IntArray]]:
        """Slot mapping and block tables of each cache group."""
        firsts = [np.int32(group * NUM_BLOCKS) for group in range(self.num_groups)]
        slots = [plan["slot_mapping"] + first * np.int32(self.block_size) for first in firsts]
        return slots, [self.block_tables + first for first in firsts]

    def alone(self, slot: int, tokens: list[int]) -> torch.Tensor:
        """A whole prompt in one step of its own; float32 [tokens, vocab_size]."""
        return self.step([(slot, tokens)])[0]
