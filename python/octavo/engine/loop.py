"""The engine loop: plan a step, launch it, commit the previous one."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from octavo.engine.constraints import Compiled, Failure, OutputConstraints
from octavo.engine.heartbeat import Heartbeat, Phase
from octavo.engine.protocol import Logprobs, StepOutputs
from octavo.engine.requests import CheckedRequest, submit_checked
from octavo.engine.step_sizes import StepSizes

if TYPE_CHECKING:
    from octavo._core import Core, StepOutput, StepPlan
    from octavo.runner.interface import Handle, Runner, StepResult

__all__ = ["EngineLoop"]


class EngineLoop:
    """Steps a core and a runner.

    Args:
        core: owns the requests; the runner is attached to it here.
        runner: owns the device.
        overlap: plan and launch the next step before the last one's samples are there, so that a device never waits
            for the host. Tokens are the same either way. A step with a sample that is held to a set of tokens is
            committed before the next is planned, for what may follow depends on it.
        constraints: what such samples are held to; None where there will be none.

    Attributes:
        heartbeat: where the loop notes what it does.
        constraints: as given.
    """

    def __init__(
        self, core: Core, runner: Runner, *, overlap: bool, constraints: OutputConstraints | None = None
    ) -> None:
        self.core = core
        self.runner = runner
        self.heartbeat = Heartbeat()
        self.constraints = OutputConstraints(None, (), 1) if constraints is None else constraints
        self._sizes = StepSizes()
        self._depth = 1 if overlap else 0
        self._open: deque[tuple[int, Handle, float]] = deque()
        # The newest open step, if it has masks.
        self._masked_step = 0
        self._failures: list[Failure] = []
        runner.attach(core)

    def submit(self, request: CheckedRequest, arrival_us: int, compiled: Compiled | None = None) -> None:
        """Queue a request.

        Args:
            request: as its client made it.
            arrival_us: when.
            compiled: of its constraint, if it has one.

        Raises:
            InvalidRequest, ContextLengthExceeded, CapacityExceeded: the request is not queued.
        """
        assert (request.constraint is None) == (compiled is None), "a constraint is compiled before"
        submit_checked(self.core, request, arrival_us)
        if compiled is not None:
            try:
                self.constraints.add(request.request_id, request.params.n, compiled)
            except BaseException:
                self.core.abort(request.request_id)
                raise

    def abort(self, request_id: int) -> bool:
        """End a request without an event; False if it is unknown or has ended."""
        self.constraints.remove(request_id)
        return self.core.abort(request_id)

    def take_failures(self) -> list[Failure]:
        """Requests that ended with an error since the last call; they have no further output."""
        failures, self._failures = self._failures, []
        return failures

    def has_work(self) -> bool:
        """Whether a request waits, runs or is in flight."""
        return bool(self._open) or self.core.has_work()

    def step(self) -> StepOutputs | None:
        """Launch the next step and commit the previous one (without overlap, the same one).

        Returns:
            The outputs of the committed step; None without one.
        """
        outputs = None
        if self._masked_step:
            # The next plan depends on these samples. They are sent once the device has its next step.
            outputs = self._commit()
        launched = self._launch()
        if outputs is None and self._open and not (launched and len(self._open) <= self._depth):
            outputs = self._commit()
        if outputs is not None:
            # What becomes of them is the caller's.
            self.heartbeat.enter(Phase.SEND)
        return outputs

    def _launch(self) -> bool:
        """Plan and launch the next step, if there is work."""
        heartbeat = self.heartbeat
        heartbeat.enter(Phase.PLAN)
        plan = self.core.plan()
        if plan is None:
            if not self._open and self.core.has_work():
                raise RuntimeError(f"the core has work but plans no step: {self.core.stats()}")
            return False
        planned_at = time.monotonic()
        self._sizes.add(plan.num_tokens)
        failures = self._fill_masks(plan) if plan.num_masks else []
        heartbeat.enter(Phase.LAUNCH)
        self._open.append((plan.step, self.runner.launch(plan), planned_at))
        # Only now: a launch may ask the core about all rows of its plan. What those that failed draw is dropped.
        self._fail(failures)
        return True

    def _commit(self) -> StepOutputs:
        """Wait for the oldest open step and commit its samples."""
        heartbeat = self.heartbeat
        step, handle, planned_at = self._open.popleft()
        heartbeat.enter(Phase.WAIT)
        result = handle.result()
        heartbeat.enter(Phase.COMMIT)
        frame = self.core.commit(step)
        outputs = _outputs(frame, result, planned_at)
        if step == self._masked_step:
            self._masked_step = 0
            self._fail(self.constraints.advance(frame))
        heartbeat.count_step()
        return outputs

    def _fill_masks(self, plan: StepPlan) -> list[Failure]:
        self._masked_step = plan.step
        return self.constraints.fill(self.core.masked(), self.runner.masks[plan.arena])

    def _fail(self, failures: list[Failure]) -> None:
        for request_id, _ in failures:
            self.abort(request_id)
        self._failures += failures

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters of the core, host seconds by phase of a step, and steps by number of tokens."""
        return {**self.core.stats(), **self.heartbeat.stats(), **self._sizes.stats()}

    def drain(self) -> None:
        """Commit the steps in flight and drop their outputs; every request was aborted before."""
        while self._open or self.core.has_work():
            self.step()

    def close(self) -> None:
        """Release the device's memory; no step may follow."""
        self.constraints.close()
        self.runner.close()


def _outputs(frame: StepOutput, result: StepResult, planned_at: float) -> StepOutputs:
    """A step's output as a message, with log probabilities."""
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
        frame.started,
        planned_at if frame.started else 0.0,
    )
