"""A runner without a model: for what the host costs alone, and for leaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.runner.interface import NUM_ARENAS, ModelInfo, StepResult

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan

__all__ = ["FakeHandle", "FakeRunner", "fake_model_info"]

_TOKEN_FACTOR = np.uint32(2654435761)
_POSITION_FACTOR = np.uint32(2246822519)
_SHIFT = np.uint32(15)


def fake_model_info(
    *, vocab_size: int = 32000, num_blocks: int = 4096, block_size: int = 16, max_model_len: int = 4096
) -> ModelInfo:
    """What a fake runner claims to be."""
    return ModelInfo(
        name="fake",
        architecture="Fake",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype="float32",
        device="cpu",
        weights_bytes=0,
        kv_bytes=0,
    )


class FakeHandle:
    """A step that was over as soon as it was launched."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """The step's samples."""
        return self._result


class FakeRunner:
    """Samples a hash of the last token and its position: equal prompts get equal answers in any batch.

    Args:
        info: vocabulary size and limits to go by.

    Attributes:
        num_steps: steps launched.
        arenas: int32 plan arenas, once attached.
        results: int32 result buffers, one an arena.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.num_steps = 0
        self.arenas: list[npt.NDArray[np.int32]] = []
        self.results: list[npt.NDArray[np.int32]] = []
        self._views: list[dict[str, npt.NDArray[np.int32]]] = []
        self._last_token = np.zeros(0, dtype=np.int32)

    def attach(self, core: Core) -> None:
        """Allocate the arenas and result buffers and hand them to `core`."""
        layout = core.layout()
        sizes = {name: size for name, _, size in layout}
        self.arenas = [np.zeros(core.arena_len(), dtype=np.int32) for _ in range(NUM_ARENAS)]
        self.results = [np.zeros(sizes["logits_rows"], dtype=np.int32) for _ in range(NUM_ARENAS)]
        self._views = [{name: arena[offset : offset + size] for name, offset, size in layout} for arena in self.arenas]
        self._last_token = np.zeros(sizes["rows"], dtype=np.int32)
        core.attach(
            [(arena.ctypes.data, arena.size) for arena in self.arenas],
            [(result.ctypes.data, result.size) for result in self.results],
            self,
        )

    def launch(self, plan: StepPlan) -> FakeHandle:
        """Sample at once."""
        self.num_steps += 1
        num_logits = plan.num_logits
        view = self._views[plan.arena]
        num_decode_rows = plan.num_decode_rows
        decoded = view["token_ids"][:num_decode_rows]
        np.copyto(decoded, self._last_token[view["rows"][:num_decode_rows]], where=decoded < 0)
        logits_rows = view["logits_rows"][:num_logits]
        mixed = view["token_ids"][logits_rows].astype(np.uint32) * _TOKEN_FACTOR
        mixed ^= view["positions"][logits_rows].astype(np.uint32) * _POSITION_FACTOR
        mixed ^= mixed >> _SHIFT
        mixed *= _POSITION_FACTOR
        mixed ^= mixed >> _SHIFT
        sampled = (mixed % np.uint32(self.info.vocab_size)).astype(np.int32)
        self.results[plan.arena][:num_logits] = sampled
        self._last_token[view["logits_slots"][:num_logits]] = sampled
        return FakeHandle(StepResult(num_logits))

    def close(self) -> None:
        """Nothing is held."""
