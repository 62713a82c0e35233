"""Runs planned steps on a GPU: a graph replay a step, and nothing that waits but for the samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo._core import NUM_ARENAS, PARAM_LEN
from octavo.errors import EngineDead
from octavo.kernels.step import PlanLayout
from octavo.layers.backend import IntArray
from octavo.layers.backends.cuda_inputs import StepSize
from octavo.runner.cuda_step import CudaStep
from octavo.runner.device import WHOLE_DEVICE
from octavo.runner.graphs import StepGraphs, bucket_table, buckets, samples_bound
from octavo.runner.interface import ModelInfo, StepResult

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan

__all__ = ["CudaHandle", "CudaRunner", "MakeStep"]

MakeStep = Callable[[PlanLayout], CudaStep]

_FLAGS, _NUM_LOGPROBS, _PROMPT_LENGTH = 10, 11, 12
_HAS_PENALTIES, _WANTS_LOGPROBS = 1, 2


class CudaHandle:
    """A step on its way.

    Args:
        runner: that launched it.
        turn: its arena.
        num_logits: its samples.
        width: the most log probabilities a sample asked for beside the chosen token's; -1 where none asked.
    """

    __slots__ = ("_num_logits", "_runner", "_turn", "_width")

    def __init__(self, runner: CudaRunner, turn: int, num_logits: int, width: int) -> None:
        self._runner = runner
        self._turn = turn
        self._num_logits = num_logits
        self._width = width

    def result(self) -> StepResult:
        """Wait for the step's event; other threads run meanwhile.

        Raises:
            EngineDead: the device failed; no step may follow.
        """
        return self._runner.finish(self._turn, self._num_logits, self._width)


class CudaRunner:
    """A model on one GPU. Steps are launched in order on a stream of their own; two may be on their way.

    The stream is made current in the thread that launches, and stays so until `close`.

    On the CPU device everything is the same but for graphs and events: a launch returns when the step is done.

    Args:
        make_step: makes all that a step launches, once the plan's layout is known.
        info: what the model is.
        max_num_seqs: slots.
        max_tokens: of a step.
        device: where all of the model lies.
        on_close: called by `close`, once; puts settings of the process back.

    Attributes:
        arenas: int32 plan arenas, once attached.
        results: int32 result buffers, one an arena.
        masks: one an arena, once attached; as of `Runner`.
    """

    def __init__(
        self,
        make_step: MakeStep,
        info: ModelInfo,
        *,
        max_num_seqs: int,
        max_tokens: int,
        device: torch.device,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.info = info
        self.arenas: list[IntArray] = []
        self.results: list[IntArray] = []
        self.masks: list[IntArray] = []
        self._make_step: MakeStep | None = make_step
        self._step: CudaStep | None = None
        self._sizes = bucket_table(buckets(max_num_seqs, max_tokens))
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._on_close = on_close
        self._next_turn = 1
        self._open = 0
        self._stream: torch.cuda.Stream | None = None
        self._events: list[torch.cuda.Event] = []
        self._graphs: StepGraphs | None = None
        self._run: Callable[[StepSize], None]
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._events = [torch.cuda.Event() for _ in range(NUM_ARENAS)]  # type: ignore[no-untyped-call]

    def attach(self, core: Core) -> None:
        """As `Runner.attach`."""
        assert self._make_step is not None, "a runner is attached once"
        layout = PlanLayout.of(core.layout(), core.arena_len())
        step = self._make_step(layout)
        self._make_step = None
        if self._stream is None:
            self._run = step
        else:
            # What was made and loaded so far was launched on other streams.
            with WHOLE_DEVICE:
                torch.cuda.synchronize(self._device)
            self._graphs = StepGraphs(step)
            self._run = self._graphs.run
        self._step = step
        self._core = core
        self._staging: IntArray = step.staging.numpy()
        self.arenas = list(step.arenas.numpy())
        self.results = list(step.ring.ids.numpy())
        self.masks = list(step.masks.numpy())
        self._ring = [tensor.numpy() for tensor in (step.ring.logprobs, step.ring.top_ids, step.ring.top_logprobs)]
        self._slots = [layout.view(arena, "logits_slots").numpy() for arena in step.arenas]
        # Log probabilities that each slot asks for beside the chosen token's, and 1; 0 where it asks for none.
        self._wanted: IntArray = np.zeros(self._max_num_seqs, dtype=np.int32)
        self._any_wanted = False
        core.attach(
            [(arena.ctypes.data, arena.size) for arena in self.arenas],
            [(result.ctypes.data, result.size) for result in self.results],
            self,
        )

    def launch(self, plan: StepPlan) -> CudaHandle:
        """Start a step.

        Raises:
            EngineDead: the device failed; no step may follow.
        """
        assert self._step is not None, "a runner is attached before it is launched"
        turn, num_logits = plan.arena, plan.num_logits
        if turn != self._next_turn or self._open == NUM_ARENAS - 1:
            raise RuntimeError(
                f"step {plan.step} is out of turn: {self._open} steps are open, {self._next_turn} is next"
            )
        self._next_turn = (turn + 1) % NUM_ARENAS
        num_rows = plan.num_rows
        if num_rows == plan.num_decode_rows:
            tokens = self._sizes[num_rows]
            size = StepSize("grouped" if plan.num_groups else "decode", tokens, tokens)
        else:
            # One token may have several samples.
            tokens = self._sizes[max(plan.num_tokens, num_logits)]
            samples = samples_bound(num_logits, min(tokens, self._max_num_seqs))
            size = StepSize("mixed_grouped" if plan.num_groups else "mixed", tokens, samples)
        try:
            # Another engine's stream may be current in this thread, or another thread ask.
            if self._stream is not None and torch.cuda.current_stream(self._device) != self._stream:
                self._use_stream()
            if plan.num_param_updates:
                self._take_params(turn, plan.num_param_updates)
            if plan.num_block_copies:
                self._step.copy_blocks(turn)
            self._run(size)
            if self._stream is not None:
                self._events[turn].record(self._stream)
        except EngineDead:
            raise
        except RuntimeError as error:
            raise _dead("launching a step", error) from error
        self._open += 1
        width = int(self._wanted[self._slots[turn][:num_logits]].max()) - 1 if self._any_wanted and num_logits else -1
        return CudaHandle(self, turn, num_logits, width)

    def finish(self, turn: int, num_logits: int, width: int) -> StepResult:
        """Wait for the step of an arena, the oldest that is open; as `CudaHandle.result`."""
        if self._stream is not None:
            try:
                self._events[turn].synchronize()
            except RuntimeError as error:
                raise _dead("a step", error) from error
        self._open -= 1
        if width < 0:
            return StepResult(num_logits)
        logprobs, top_ids, top_logprobs = (array[turn, :num_logits] for array in self._ring)
        return StepResult(num_logits, logprobs, top_ids[:, :width], top_logprobs[:, :width])

    def close(self) -> None:
        """Let go of the model and its memory; the arenas stay, as the core may still look at them.

        Also after the device failed: nothing here waits for it or raises then.
        """
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()
            with contextlib.suppress(RuntimeError):
                if torch.cuda.current_stream(self._device) == self._stream:
                    torch.cuda.set_stream(torch.cuda.default_stream(self._device))
        if self._graphs is not None:
            self._graphs.close()
        self._step = self._graphs = self._make_step = None
        self._run = _closed
        if self._stream is not None:
            with WHOLE_DEVICE, contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
        on_close, self._on_close = self._on_close, lambda: None
        on_close()

    def _use_stream(self) -> None:
        """Make the steps' stream the current one of this thread."""
        assert self._stream is not None
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def _take_params(self, turn: int, count: int) -> None:
        """Note what new parameters ask of the host: log probabilities to give back, histories to count."""
        assert self._step is not None
        layout, arena = self._step.layout, self.arenas[turn]
        first = layout.offsets["param_slots"]
        slots = arena[first : first + count]
        first = layout.offsets["param_values"]
        values = arena[first : first + count * PARAM_LEN].reshape(count, PARAM_LEN)
        asks = (values[:, _FLAGS] & _WANTS_LOGPROBS) != 0
        self._wanted[slots] = np.where(asks, values[:, _NUM_LOGPROBS] + 1, 0)
        self._any_wanted = bool(self._wanted.any())
        penalized = np.flatnonzero(values[:, _FLAGS] & _HAS_PENALTIES)
        if penalized.size:
            chosen = zip(slots[penalized].tolist(), values[penalized, _PROMPT_LENGTH].tolist(), strict=True)
            self._count_histories(turn, list(chosen))

    def _count_histories(self, turn: int, chosen: list[tuple[int, int]]) -> None:
        """Count prompt and output so far of (slot, prompt length) each, for the penalties, before the step begins.

        The device reads the tokens where they are staged; an arena's staging is free again once its step is over.
        """
        assert self._step is not None
        start = 0
        for slot, prompt_length in chosen:
            tokens = np.frombuffer(self._core.history(slot), dtype=np.int32)
            if start + tokens.size > self._staging.shape[1]:
                if self._stream is not None:
                    self._stream.synchronize()
                start = 0
            # Pointers that kernels are made for begin at multiples of 16 bytes.
            end = start + tokens.size
            self._staging[turn, start:end] = tokens
            self._step.count_history(self._step.staging[turn, start:end], slot, prompt_length)
            start = -(-end // 4) * 4


def _closed(_size: StepSize) -> None:
    raise RuntimeError("the runner is closed")


def _dead(what: str, error: RuntimeError) -> EngineDead:
    return EngineDead(f"{what} failed on the GPU: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
