"""All that a step launches on a GPU, from taking the plan in to giving the samples out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo._core import NUM_ARENAS
from octavo.kernels.attention_plan import plan_attention
from octavo.kernels.sample import SampleWorkspace, sample
from octavo.kernels.sample_constrain import constrain
from octavo.kernels.step import DeviceState, PlanLayout, Samples
from octavo.kernels.step_plan import take_plan
from octavo.kernels.step_samples import publish
from octavo.kernels.token_counts import count_history
from octavo.layers.backends.cuda_inputs import CudaStepInputs, StepSize, has_groups, has_prompts
from octavo.runner.interface import mask_words

if TYPE_CHECKING:
    from octavo.kernels.attention_work import AttentionWork
    from octavo.layers.backend import KvCache
    from octavo.layers.decoder import Decoder

__all__ = ["CudaStep"]

_MIN_STAGING = 1 << 14


class CudaStep:
    """The step of one model. All memory is taken at construction; a launch allocates nothing and waits for nothing.

    Args:
        decoder: the model.
        cache: its KV cache.
        works: attention's plan and partial results, by sliding window.
        layout: of the plan.
        max_num_seqs: slots.
        max_model_len: tokens of the longest sequence.
        block_size: tokens of a block.
        max_logprobs: likeliest tokens a sample may ask for.
        device: of all this; on `meta`, launches can be compiled and not run.

    Attributes:
        arenas: int32[NUM_ARENAS, length] on the host, pinned where the device is a GPU.
        ring: the samples of the step of each arena, likewise.
        masks: int32[NUM_ARENAS, max_num_seqs, words] likewise, what the masked rows of each arena's step may choose of.
        staging: int32[NUM_ARENAS, tokens of at least one sequence] likewise, for histories on their way to be counted.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        works: dict[int, AttentionWork],
        layout: PlanLayout,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        max_logprobs: int,
        device: torch.device,
    ) -> None:
        vocab_size = decoder.vocab_size
        pinned = device.type == "cuda"
        host = device if device.type == "meta" else torch.device("cpu")
        self.layout = layout

        def on_host(*shape: int) -> Tensor:
            return torch.zeros((NUM_ARENAS, *shape), dtype=torch.int32, device=host, pin_memory=pinned)

        self.arenas = on_host(layout.length)
        self.masks = on_host(max_num_seqs, mask_words(vocab_size))
        self.staging = on_host(max(max_model_len, _MIN_STAGING))
        self.ring = Samples.empty(max_num_seqs, max_logprobs, device, ring=True)
        self._token_counts = torch.zeros((max_num_seqs, vocab_size), dtype=torch.int32, device=device)
        self._decoder = decoder
        self._cache = cache
        self._works = works
        self._max_num_seqs = max_num_seqs
        self._state = DeviceState.empty(layout, max_num_seqs, -(-max_model_len // block_size), device)
        self._samples = Samples.empty(max_num_seqs, max_logprobs, device)
        self._workspace = SampleWorkspace(max_num_seqs, vocab_size, max_logprobs, device)
        self._mask_logits = layout.view(self._state.plan, "mask_logits")
        self._bias_logits = layout.view(self._state.plan, "bias_logits")
        self._bias_tokens = layout.view(self._state.plan, "bias_tokens")
        self._bias_values = layout.view(self._state.plan, "bias_values")
        self._inputs: dict[StepSize, CudaStepInputs] = {}

    def __call__(self, size: StepSize) -> None:
        """Launch the next step, which is no larger than `size`, on the current stream."""
        inputs, state, samples = self.inputs(size), self._state, self._samples
        take_plan(self.arenas, self.layout, state, tokens=size.tokens, rows=inputs.num_rows)
        logits = self.compute(size)
        constrain(
            logits,
            inputs.counts,
            state.turn,
            self._mask_logits,
            self.masks,
            self._bias_logits,
            self._bias_tokens,
            self._bias_values,
            rows=size.samples,
        )
        sample(
            logits,
            inputs.counts,
            inputs.logits_rows,
            inputs.logits_slots,
            inputs.positions,
            state.params,
            self._token_counts,
            state.last_token,
            samples.ids,
            samples.logprobs,
            samples.top_ids,
            samples.top_logprobs,
            self._workspace,
            rows=size.samples,
        )
        publish(state, inputs.counts, inputs.logits_slots, samples, self.ring)

    def compute(self, size: StepSize) -> Tensor:
        """Launch all from attention's plan to the logits, for the step that was taken in last.

        Returns:
            float32 [samples, vocab_size], overwritten by the next step.
        """
        inputs = self.inputs(size)
        for work in self._works.values():
            plan_attention(
                inputs.counts,
                inputs.rows,
                inputs.query_start,
                inputs.seq_lens,
                inputs.group_rows,
                inputs.group_starts,
                inputs.group_blocks,
                work,
                rows=inputs.num_rows,
                grouped=has_groups(size.kind),
                mixed=has_prompts(size.kind),
            )
        self._decoder.forward(inputs, self._cache)
        # A decode row is one token and one sample.
        logits: Tensor = self._decoder.compute_logits(inputs.logits_rows if has_prompts(size.kind) else None)
        return logits

    def inputs(self, size: StepSize) -> CudaStepInputs:
        """Inputs of steps of a size: views of the plan on the device."""
        inputs = self._inputs.get(size)
        if inputs is None:
            rows = min(size.tokens, self._max_num_seqs)
            inputs = self._inputs[size] = CudaStepInputs.of(size, self._state, self.layout, self._works, rows=rows)
        return inputs

    def count_history(self, tokens: Tensor, slot: int, prompt_length: int) -> None:
        """Launch the counting of a sequence's tokens for its penalties; as `kernels.token_counts.count_history`."""
        count_history(tokens, self._token_counts, slot, prompt_length)

    def copy_blocks(self, turn: int) -> None:
        """Launch the copies of whole cache blocks that the plan in an arena asks for; before the step itself."""
        view, arena = self.layout.view, self.arenas[turn]
        self._cache.copy_blocks(view(arena, "copy_sources"), view(arena, "copy_destinations"), view(arena, "counts"))
