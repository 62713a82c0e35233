"""From logits to tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo import _core
from octavo.layers.backend import IntArray, Memory

if TYPE_CHECKING:
    from octavo._core import StepPlan
    from octavo.runner.host_state import Arena, HostState
    from octavo.runner.interface import StepResult

__all__ = ["CpuSampler", "Sampler"]


class Sampler(Protocol):
    """Samples rows of logits by their slots' parameters."""

    def sample(
        self,
        logits: Memory,
        plan: StepPlan,
        state: HostState,
        arena: Arena,
        positions: IntArray,
        result: StepResult,
        start: int,
    ) -> None:
        """Sample rows `start` onwards of a step.

        Args:
            logits: float32 [rows, vocab_size], changed in place.
            plan: says how many masks and biases the step has.
            state: parameters and counts of the slots.
            arena: names the rows' slots and what holds them, and takes their ids.
            positions: int32, place of each new token of the whole step in its sequence.
            result: takes log probabilities where it has arrays for them.
            start: the first row.
        """
        ...


class CpuSampler:
    """As `Sampler`, by the extension's kernel."""

    def sample(
        self,
        logits: Memory,
        plan: StepPlan,
        state: HostState,
        arena: Arena,
        positions: IntArray,
        result: StepResult,
        start: int,
    ) -> None:
        """As `Sampler.sample`."""
        rows, vocab_size = logits.shape
        offset, width = 4 * start, 0
        out = arena.result_pointer + offset
        # The kernel wants an address though no row that asks will be written.
        logprobs, top_ids, top_logprobs = out, 0, 0
        if result.logprobs is not None and result.top_ids is not None and result.top_logprobs is not None:
            width = result.top_ids.shape[1]
            logprobs = result.logprobs.ctypes.data + offset
            top_ids = result.top_ids.ctypes.data + offset * width
            top_logprobs = result.top_logprobs.ctypes.data + offset * width
        _core.cpu_sample(
            logits.ctypes.data,
            rows,
            vocab_size,
            vocab_size,
            state.params_pointer,
            arena.pointers["logits_slots"] + offset,
            positions.ctypes.data + offset,
            state.counts_pointer,
            vocab_size,
            out,
            logprobs,
            top_ids,
            top_logprobs,
            width,
            first_logit=start,
            num_masks=plan.num_masks,
            mask_logits=arena.pointers["mask_logits"],
            masks=arena.masks_pointer,
            mask_words=arena.masks.shape[1],
            num_biases=plan.num_biases,
            bias_logits=arena.pointers["bias_logits"],
            bias_tokens=arena.pointers["bias_tokens"],
            bias_values=arena.pointers["bias_values"],
        )
