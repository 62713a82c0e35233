"""Whole answers gathered from many steps: the same as step by step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from octavo.engine import gather
from octavo.engine.collect import RequestState, apply
from octavo.engine.gather import Gatherer
from octavo.engine.protocol import Logprobs, StepOutputs
from octavo.sampling_params import SamplingParams

NO_REASON = -(1 << 31)
FIRST_ID = 1 << 40
PIECES = ("", "", "a", "é", "日本", " and more")


def new_states(rng: random.Random, count: int) -> dict[int, RequestState]:
    states = {}
    for number in range(count):
        params = SamplingParams(
            n=rng.choice((1, 1, 3)), logprobs=rng.choice((None, None, 0, 2)), stop=["first", "second"]
        )
        states[FIRST_ID + number] = RequestState(str(number), None, [1], params)
    return states


def copies(states: dict[int, RequestState]) -> dict[int, RequestState]:
    made = {}
    for number, state in states.items():
        logprobs = None if state.num_logprobs < 0 else state.num_logprobs
        params = SamplingParams(n=state.num_unfinished, logprobs=logprobs, stop=state.stop_texts)
        made[number] = RequestState(state.name, None, [1], params)
    return made


def steps_of(rng: random.Random, states: dict[int, RequestState], *, text: bool) -> list[StepOutputs]:
    """Steps with random rows until every answer has ended; some events belong to a request nobody knows."""
    left = {
        (number, index): rng.randint(1, 12) for number, state in states.items() for index in range(state.num_unfinished)
    }
    steps = []
    while left:
        rows: list[tuple[int, int]] = rng.sample(sorted(left), rng.randint(1, len(left)))
        events: list[dict[str, Any]] = []
        for number, index in rows:
            left[number, index] -= 1
            event = {"id": number, "index": index, "finish": 0, "stop": NO_REASON}
            if not left[number, index]:
                del left[number, index]
                event["finish"] = rng.choice((1, 2))
                event["stop"] = rng.choice((NO_REASON, 7, 0, -1, -2)) if event["finish"] == 1 else NO_REASON
            events.append(event)
            if rng.random() < 0.1:
                events.append({"id": 5, "index": 0, "finish": 2, "stop": NO_REASON})
        steps.append(_step(rng, events, text=text))
    return steps


def _step(rng: random.Random, events: list[dict[str, Any]], *, text: bool) -> StepOutputs:
    count = len(events)
    texts = [(rng.choice(PIECES) if text else "").encode() for _ in events]
    floats = np.array([rng.uniform(-9, 0) for _ in range(count * 3)], np.float32)
    ids = np.array([rng.randrange(1000) for _ in range(count * 2)], np.int32)

    def column(values: list[int], dtype: Any = np.int32) -> bytes:
        return np.array(values, dtype).tobytes()

    return StepOutputs(
        column([event["id"] for event in events], np.int64),
        column([event["index"] for event in events]),
        column([rng.randrange(1 << 20) for _ in events]),
        column(np.cumsum([len(piece) for piece in texts]).tolist()),
        b"".join(texts),
        column([event["finish"] for event in events]),
        column([event["stop"] for event in events]),
        column([event["id"] % 97 for event in events]),
        Logprobs(floats[:count].tobytes(), 2, ids.tobytes(), floats[count:].tobytes()),
    )


@pytest.mark.parametrize("fold_events", [1, 40, 1 << 30])
@pytest.mark.parametrize("text", [True, False])
def test_as_step_by_step(monkeypatch: pytest.MonkeyPatch, fold_events: int, text: bool) -> None:
    monkeypatch.setattr(gather, "_FOLD_EVENTS", fold_events)
    for seed in range(20):
        rng = random.Random(seed)
        states = new_states(rng, rng.randint(1, 12))
        expected = copies(states)
        gatherer = Gatherer(states)
        steps = steps_of(rng, expected, text=text)
        for number, step in enumerate(steps, 1):
            apply(step, expected)
            gatherer.add(step)
            unfinished = [key for key, state in expected.items() if state.num_unfinished]
            assert gatherer.unfinished() == unfinished
            assert gatherer.num_unfinished == len(unfinished)
            assert (number == len(steps)) == (not unfinished)
        gatherer.fold()
        assert [state.output() for state in states.values()] == [state.output() for state in expected.values()]
        assert gatherer.num_tokens == sum(len(step.token_ids) // 4 for step in steps)


def test_answers_of_many_requests_far_apart() -> None:
    """More answers than 16 bits number."""
    states = {number: RequestState(str(number), None, [1], SamplingParams()) for number in (3, 1 << 20, 1 << 50)}
    expected = copies(states)
    gatherer = Gatherer(states)
    rng = random.Random(1)
    for step in steps_of(rng, expected, text=True):
        apply(step, expected)
        gatherer.add(step)
    gatherer.fold()
    assert [state.output() for state in states.values()] == [state.output() for state in expected.values()]


def test_nothing_to_gather() -> None:
    gatherer = Gatherer({})
    gatherer.fold()
    assert gatherer.num_unfinished == gatherer.num_tokens == 0
