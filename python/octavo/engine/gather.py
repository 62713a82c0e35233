"""From many steps' arrays to whole requests, for callers that wait for the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.engine.collect import FINISH_REASONS, RequestState, stop_reason
from octavo.engine.protocol import Logprobs, StepOutputs
from octavo.errors import OctavoError

__all__ = ["Gatherer"]

# So few that sorting them takes little time and memory compared with a step.
_FOLD_EVENTS = 8192
# Arrays of which the value at a completion's last event counts.
_OF_LAST = ("cached_tokens", "finish_reasons", "stop_reasons")


class Gatherer:
    """Collects steps and distributes many at once, so that a step creates no Python object per event.

    Args:
        states: the requests by id; events of others (aborted ones) are dropped.

    Attributes:
        num_unfinished: requests with an answer still running; ahead of what `fold` has handed on.
        num_tokens: events taken.
    """

    def __init__(self, states: Mapping[int, RequestState]) -> None:
        self._states = states
        self._steps: list[StepOutputs] = []
        self._pending = 0
        self.num_unfinished = len(states)
        self.num_tokens = 0

    def add(self, outputs: StepOutputs) -> None:
        """Take a step's events."""
        self._steps.append(outputs)
        finish = np.frombuffer(outputs.finish_reasons, np.int32)
        self._pending += finish.size
        self.num_tokens += finish.size
        finished = finish.nonzero()[0]
        if finished.size:
            for request_id in np.frombuffer(outputs.request_ids, np.int64)[finished].tolist():
                state = self._states.get(request_id)
                if state is not None:
                    state.num_unfinished -= 1
                    self.num_unfinished -= state.num_unfinished == 0
        if self._pending >= _FOLD_EVENTS:
            self.fold()

    def fail(self, request_id: int, error: OctavoError) -> None:
        """End a request with an error, and keep what it has."""
        self.fold()
        state = self._states.get(request_id)
        if state is not None and state.num_unfinished:
            state.finish_early("error")
            state.error = error
            self.num_unfinished -= 1

    def unfinished(self) -> list[int]:
        """Ids of the requests with an answer still running."""
        return [request_id for request_id, state in self._states.items() if state.num_unfinished]

    def fold(self) -> None:
        """Distribute the events taken so far."""
        steps, self._steps, self._pending = self._steps, [], 0
        if not steps:
            return
        request_ids = _joined(steps, "request_ids", np.int64)
        samples = _joined(steps, "sample_indices", np.int32)
        keys, order = _order(request_ids, samples)
        begins = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        lasts = order[np.r_[begins[1:], order.size] - 1]
        token_ids = _joined(steps, "token_ids", np.int32)[order]
        texts = _texts(steps, order, begins)
        logprobs = _LogprobEvents(steps) if any(step.logprobs is not None for step in steps) else None
        begins_and_end = [*begins.tolist(), order.size]
        of_last = (request_ids, samples, *(_joined(steps, name, np.int32) for name in _OF_LAST))
        for group, (request_id, index, cached, finish, reason) in enumerate(
            zip(*(array[lasts].tolist() for array in of_last), strict=True)
        ):
            state = self._states.get(request_id)
            if state is None:
                continue
            begin, end = begins_and_end[group : group + 2]
            answer = state.add(index, token_ids[begin:end].tobytes(), texts[group] if texts else b"", cached)
            if finish:
                answer.finish_reason = FINISH_REASONS[finish]
                answer.stop_reason = stop_reason(finish, reason, state.stop_texts)
            if logprobs is not None and answer.logprobs is not None:
                places = logprobs.find(order[begin:end])
                for (columns, event), token_id in zip(places, token_ids[begin:end].tolist(), strict=True):
                    answer.logprobs.add(columns, event, token_id, state.num_logprobs)


class _LogprobEvents:
    """Finds the log probabilities of events of several steps."""

    def __init__(self, steps: list[StepOutputs]) -> None:
        self._steps = steps
        self._ends = np.cumsum([len(step.token_ids) // 4 for step in steps])

    def find(self, events: npt.NDArray[np.int64]) -> Iterator[tuple[Logprobs | None, int]]:
        """The step of each event and its place in it, by its place in all steps."""
        steps = np.searchsorted(self._ends, events, side="right")
        places = events - np.r_[0, self._ends[:-1]][steps]
        for step, place in zip(steps.tolist(), places.tolist(), strict=True):
            yield self._steps[step].logprobs, place


def _joined(steps: list[StepOutputs], name: str, dtype: Any) -> npt.NDArray[Any]:
    """One array of all steps' events."""
    return np.frombuffer(b"".join([getattr(step, name) for step in steps]), dtype)


def _order(
    request_ids: npt.NDArray[np.int64], samples: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """A key for each completion, sorted, and the events in that order; events of one completion keep their order."""
    keys = (request_ids - request_ids.min()) * (int(samples.max()) + 1) + samples
    if int(keys.max()) < 1 << 16:
        # numpy sorts 16-bit numbers digit by digit.
        keys = keys.astype(np.uint16)
    order = np.argsort(keys, kind="stable")
    return keys[order], order


def _texts(steps: list[StepOutputs], order: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]) -> list[bytes]:
    """The text of each run of `order` that begins at `begins`; empty if no event has text."""
    text = b"".join([step.text for step in steps])
    if not text:
        return []
    lengths = np.concatenate([np.diff(np.frombuffer(step.text_ends, np.int32), prepend=0) for step in steps])
    sources = np.cumsum(lengths) - lengths
    lengths, sources = lengths[order], sources[order]
    ends = np.cumsum(lengths)
    # Byte i of the sorted text is byte i - (where its event begins there) of the event.
    places = np.repeat(sources - (ends - lengths), lengths) + np.arange(ends[-1])
    ordered = np.frombuffer(text, np.uint8)[places].tobytes()
    bounds = [*(ends - lengths)[begins].tolist(), len(ordered)]
    return [ordered[begin:end] for begin, end in itertools.pairwise(bounds)]
