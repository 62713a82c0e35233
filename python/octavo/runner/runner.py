"""Runs planned steps: takes in the plan's changes, runs the decoder, samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.layers.backend import IntArray, KvCache
from octavo.layers.decoder import Decoder
from octavo.runner.host_state import Arena, HostState
from octavo.runner.interface import ModelInfo, StepResult
from octavo.runner.sampler import Sampler

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan

__all__ = ["ModelRunner", "StepHandle"]


class StepHandle:
    """A step whose samples already lie in its result buffer."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """The step's samples."""
        return self._result


class ModelRunner:
    """A model on a device that computes when it is asked: `launch` returns when the step is done.

    Args:
        decoder: the model.
        cache: its KV cache.
        sampler: turns logits into tokens.
        info: what the model is.
        max_num_seqs: slots.

    Attributes:
        arenas: three int32 arrays, once attached.
        results: three int32 arrays, once attached.
        masks: three int32 arrays, once attached; as of `Runner`.
    """

    def __init__(self, decoder: Decoder, cache: KvCache, sampler: Sampler, info: ModelInfo, max_num_seqs: int) -> None:
        self.info = info
        self.arenas: list[IntArray] = []
        self.results: list[IntArray] = []
        self.masks: list[IntArray] = []
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._max_num_seqs = max_num_seqs
        self._state: HostState | None = None
        self._closed = False

    def attach(self, core: Core) -> None:
        """As `Runner.attach`."""
        stride = -(-self.info.max_model_len // self.info.block_size)
        buffer = self._decoder.backend.buffer
        state = HostState(core, buffer, self._max_num_seqs, stride, self.info.vocab_size)
        self.arenas = [arena.memory for arena in state.arenas]
        self.results = [arena.result for arena in state.arenas]
        self.masks = [arena.masks for arena in state.arenas]
        self._state = state
        core.attach(
            [(arena.ctypes.data, arena.size) for arena in self.arenas],
            [(result.ctypes.data, result.size) for result in self.results],
            self,
        )

    def launch(self, plan: StepPlan) -> StepHandle:
        """Run a step."""
        state = self._state
        assert state is not None, "a runner is attached before it is launched"
        arena = state.arenas[plan.arena]
        if plan.num_block_copies:
            self._copy_blocks(arena, plan.num_block_copies)
        self._decoder.forward(state.apply(plan, arena), self._cache)
        return StepHandle(self._sample(plan, arena, state))

    def close(self) -> None:
        """Let go of the model and its memory; the arenas stay, as the core may still look at them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._state = None
        self._cache.close()
        del self._decoder, self._cache, self._sampler

    def _copy_blocks(self, arena: Arena, count: int) -> None:
        self._cache.copy_blocks(arena.arrays["copy_sources"][:count], arena.arrays["copy_destinations"][:count])

    def _sample(self, plan: StepPlan, arena: Arena, state: HostState) -> StepResult:
        """Logits and samples, a bounded slice of rows at a time."""
        num_logits, decoder = plan.num_logits, self._decoder
        result = StepResult(num_logits)
        if not num_logits:
            return result
        arrays = arena.arrays
        logits_rows = arrays["logits_rows"][:num_logits]
        positions = arrays["positions"][logits_rows] + np.int32(1)
        top = state.max_logprobs(arena, num_logits)
        if top >= 0:
            result.logprobs = np.zeros(num_logits, dtype=np.float32)
            result.top_ids = np.zeros((num_logits, top), dtype=np.int32)
            result.top_logprobs = np.zeros((num_logits, top), dtype=np.float32)
        for start in range(0, num_logits, decoder.head_rows):
            stop = min(start + decoder.head_rows, num_logits)
            logits = decoder.compute_logits(logits_rows[start:stop])
            self._sampler.sample(logits, plan, state, arena, positions, result, start)
        state.record(arena, num_logits)
        return result
