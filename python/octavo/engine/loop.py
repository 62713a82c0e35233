"""The loop: plan a step, launch it, commit the one before."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from octavo.engine.protocol import Logprobs, StepOutputs
from octavo.engine.pulse import Phase, Pulse
from octavo.engine.step_sizes import StepSizes

if TYPE_CHECKING:
    from octavo._core import Core, Frame
    from octavo.runner.interface import Handle, Runner, StepResult

__all__ = ["EngineLoop"]


class EngineLoop:
    """Steps a core and a runner.

    Args:
        core: owns the requests; the runner is attached to it here.
        runner: owns the device.
        overlap: plan and launch the next step before the last one's samples are there, so that a device never waits
            for the host. Tokens are the same either way.

    Attributes:
        pulse: where the loop notes what it does.
    """

    def __init__(self, core: Core, runner: Runner, *, overlap: bool) -> None:
        self.core = core
        self.runner = runner
        self.pulse = Pulse()
        self._sizes = StepSizes()
        self._depth = 1 if overlap else 0
        self._open: deque[tuple[int, Handle]] = deque()
        runner.attach(core)

    def has_work(self) -> bool:
        """True while a request waits, runs or is in flight."""
        return bool(self._open) or self.core.has_work()

    def step(self) -> StepOutputs | None:
        """Launch the next step and commit the one before (without overlap: the same).

        Returns:
            What the committed step gave; None when none was.
        """
        pulse = self.pulse
        pulse.enter(Phase.PLAN)
        plan = self.core.plan()
        if plan is not None:
            self._sizes.add(plan.num_tokens)
            pulse.enter(Phase.LAUNCH)
            self._open.append((plan.step, self.runner.launch(plan)))
            if len(self._open) <= self._depth:
                return None
        elif not self._open:
            if self.core.has_work():
                raise RuntimeError(f"the core has work but plans no step: {self.core.stats()}")
            return None
        step, handle = self._open.popleft()
        pulse.enter(Phase.WAIT)
        result = handle.result()
        pulse.enter(Phase.COMMIT)
        outputs = _outputs(self.core.commit(step), result)
        pulse.count_step()
        # What becomes of them is the caller's.
        pulse.enter(Phase.SEND)
        return outputs

    def stats(self) -> dict[str, int | float]:
        """The core's gauges and counters, the host's seconds by part of a step, and steps by their tokens."""
        return {**self.core.stats(), **self.pulse.stats(), **self._sizes.stats()}

    def drain(self) -> None:
        """Commit what is in flight and drop its outputs, after every request was aborted."""
        while self._open or self.core.has_work():
            self.step()

    def close(self) -> None:
        """Give the device's memory back; no step may follow."""
        self.runner.close()


def _outputs(frame: Frame, result: StepResult) -> StepOutputs:
    """A frame as a message, log probabilities beside it."""
    logprobs = None
    if result.logprobs is not None:
        rows = np.frombuffer(frame.logit_indices, dtype=np.int32)
        top_ids, top = result.top_ids, result.top_logprobs
        width = 0 if top_ids is None or top is None else top_ids.shape[1]
        logprobs = Logprobs(
            result.logprobs[rows].tobytes(),
            width,
            b"" if top_ids is None else top_ids[rows].tobytes(),
            b"" if top is None else top[rows].tobytes(),
        )
    return StepOutputs(
        frame.request_ids,
        frame.sample_indices,
        frame.token_ids,
        frame.text_ends,
        frame.text,
        frame.finish_reasons,
        frame.stop_reasons,
        frame.cached_tokens,
        logprobs,
    )
