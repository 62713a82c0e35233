"""The interface between the engine loop and a runner.

A runner owns the device: the model, the KV cache, the plan arenas and what stays on the device between steps. The
loop knows it by `attach` (once), `launch` (for every planned step) and the `result` of the handle that gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from octavo._core import Core, StepPlan

__all__ = ["Handle", "ModelInfo", "Runner", "StepResult", "mask_words"]


def mask_words(vocab_size: int) -> int:
    """int32 words of a row's mask: a bit for every token, bit t % 32 of word t // 32 for token t."""
    return -(-vocab_size // 32)


class ModelInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Properties and limits of a loaded model, for the engine loop and the server.

    Attributes:
        name: the model as the settings named it.
        architecture: such as `LlamaForCausalLM`.
        max_model_len: tokens of prompt and output together, at most.
        vocab_size: rows of the embedding, and logits of a row.
        num_blocks: blocks of the KV cache, the null block included.
        block_size: tokens a block.
        max_num_seqs: sequences that run at once.
        dtype: of weights, activations and KV cache.
        device: `cpu` or `cuda`.
        weights_bytes: of the weights as they lie in memory.
        kv_bytes: of the whole KV cache.
        cache_windows: the window of each cache group, 0 for full attention; see `KvCacheLayout`.
        eos_token_ids: tokens that end an answer, by the model's own files.
        group_min_blocks: first blocks that decode rows must share to be read once for all of them; 0 for never.
        sampling_defaults: `SamplingParams` fields that the model's makers recommend, for requests that name none.
    """

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    dtype: str
    device: str
    weights_bytes: int
    kv_bytes: int
    cache_windows: tuple[int, ...] = (0,)
    eos_token_ids: tuple[int, ...] = ()
    group_min_blocks: int = 0
    sampling_defaults: dict[str, float] = {}

    def known_as(self, name: str, recommended: Mapping[str, float]) -> ModelInfo:
        """The same, loaded by a process that knew the files only by their path.

        Args:
            name: the model as the settings named it.
            recommended: `sampling_defaults` that come with the name; the files' own stand before them.
        """
        return msgspec.structs.replace(self, name=name, sampling_defaults={**recommended, **self.sampling_defaults})


class StepResult:
    """Samples of one step.

    Attributes:
        num_logits: L, the samples of the step; their int32 ids lie in the result buffer of the step's arena.
        logprobs: float32[L], log probability of each chosen token; None when no row of the step asked.
        top_ids: int32[L, M], the likeliest tokens, best first; M is the most any row of the step asked for, or 0.
        top_logprobs: float32[L, M].

    Rows that did not ask hold undefined values.
    """

    __slots__ = ("logprobs", "num_logits", "top_ids", "top_logprobs")

    def __init__(
        self,
        num_logits: int,
        logprobs: npt.NDArray[np.float32] | None = None,
        top_ids: npt.NDArray[np.int32] | None = None,
        top_logprobs: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self.num_logits = num_logits
        self.logprobs = logprobs
        self.top_ids = top_ids
        self.top_logprobs = top_logprobs


class Handle(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Wait until the step's samples lie in its result buffer."""
        ...


class Runner(Protocol):
    """Runs planned steps on one device.

    Attributes:
        info: what its model is.
        masks: once attached, an int32 [max_num_seqs, `mask_words`] array for each arena, to be filled before a step
            with `num_masks` is launched: row k holds the k-th of `mask_logits` to the tokens whose bits are set. A row
            that is left nothing gets the lowest token id.
    """

    info: ModelInfo
    masks: list[npt.NDArray[np.int32]]

    def attach(self, core: Core) -> None:
        """Allocate the arenas and result buffers `core` asks for and hand them over; once, before a step."""
        ...

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step; steps run in the order of their launch."""
        ...

    def close(self) -> None:
        """Give the device's memory back; no step may follow. Idempotent."""
        ...
