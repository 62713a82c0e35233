"""From flat arrays to requests: who gets what, merged how."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from octavo.engine.collect import RequestState, apply
from octavo.engine.outputs import OutputDelta, TokenLogprobs
from octavo.engine.protocol import Logprobs, StepOutputs
from octavo.sampling_params import SamplingParams

NO_REASON = -(1 << 31)


def step(*events: dict[str, Any], logprobs: Logprobs | None = None) -> StepOutputs:
    """Outputs of a step from events of (id, index, token, text, finish, stop)."""

    def column(name: str, default: Any, dtype: Any = np.int32) -> bytes:
        return np.array([event.get(name, default) for event in events], dtype).tobytes()

    texts = [event.get("text", "").encode() for event in events]
    return StepOutputs(
        column("id", 1, np.int64),
        column("index", 0),
        column("token", 0),
        np.cumsum([len(text) for text in texts]).astype(np.int32).tobytes(),
        b"".join(texts),
        column("finish", 0),
        column("stop", NO_REASON),
        column("cached", 0),
        logprobs,
    )


def state(**params: Any) -> RequestState:
    return RequestState("name", "prompt", [1, 2], SamplingParams(**params))


def test_events_go_to_their_requests_and_unknown_ones_nowhere() -> None:
    first, second = state(), state()
    touched = apply(
        step(
            {"id": 1, "token": 5, "text": "é"},
            {"id": 9, "token": 6, "text": "nobody's"},
            {"id": 2, "token": 7, "text": "日本", "cached": 16},
            {"id": 1 << 40, "token": 6},
        ),
        {1: first, 2: second},
    )
    assert touched == [(1, first), (2, second)]
    assert first.take() == [OutputDelta(text="é", token_ids=[5])]
    assert second.take() == [OutputDelta(text="日本", token_ids=[7], num_cached_tokens=16)]
    assert first.take() == []


def test_what_nobody_took_is_merged_an_answer_at_a_time() -> None:
    one = state(n=2)
    apply(step({"index": 1, "token": 1, "text": "a"}, {"index": 0, "token": 2, "text": "b"}), {1: one})
    apply(step({"index": 1, "token": 3, "text": "c", "finish": 2}), {1: one})
    assert one.num_unfinished == 1
    assert one.take() == [
        OutputDelta(index=1, text="ac", token_ids=[1, 3], finish_reason="length"),
        OutputDelta(index=0, text="b", token_ids=[2]),
    ]
    apply(step({"index": 0, "token": 4, "text": "d", "finish": 1}), {1: one})
    assert one.num_unfinished == 0
    assert one.take() == [OutputDelta(index=0, text="d", token_ids=[4], finish_reason="stop")]


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        (1, NO_REASON, ("stop", None)),
        (1, 42, ("stop", 42)),
        (1, 0, ("stop", 0)),
        (1, -1, ("stop", "first")),
        (1, -2, ("stop", "second")),
        (2, NO_REASON, ("length", None)),
    ],
)
def test_finish_and_stop_reasons(finish: int, stop: int, expected: tuple[str, int | str | None]) -> None:
    one = state(stop=["first", "second"])
    apply(step({"finish": finish, "stop": stop}), {1: one})
    output = one.output().outputs[0]
    assert (output.finish_reason, output.stop_reason) == expected


def test_ending_early_ends_the_answers_that_run() -> None:
    one = state(n=3)
    apply(step({"index": 0, "token": 1, "finish": 1}, {"index": 1, "token": 2, "text": "x"}), {1: one})
    one.take()
    apply(step({"index": 1, "token": 3, "text": "y"}), {1: one})
    one.finish_early("abort")
    assert one.take() == [
        OutputDelta(index=1, text="y", token_ids=[3], finish_reason="abort"),
        OutputDelta(index=2, finish_reason="abort"),
    ]


def test_log_probabilities_are_cut_to_what_each_request_asked_for() -> None:
    columns = Logprobs(
        np.array([-1, -2, -3], np.float32).tobytes(),
        2,
        np.array([[10, 11], [20, 21], [30, 31]], np.int32).tobytes(),
        np.array([[-0.5, -1], [-0.25, -2], [-0.125, -3]], np.float32).tobytes(),
    )
    requests = {1: state(logprobs=2), 2: state(), 3: state(logprobs=0)}
    apply(step({"id": 1, "token": 7}, {"id": 2, "token": 8}, {"id": 3, "token": 9}, logprobs=columns), requests)
    taken = [requests[request_id].take()[0].logprobs for request_id in (1, 2, 3)]
    assert [None if logprobs is None else [*logprobs] for logprobs in taken] == [
        [TokenLogprobs(7, -1.0, [(10, -0.5), (11, -1.0)])],
        None,
        [TokenLogprobs(9, -3.0, [])],
    ]


def test_the_whole_output_names_prompt_and_answers_in_order() -> None:
    one = state(n=2)
    apply(step({"index": 1, "token": 1, "text": "a", "finish": 2}, {"index": 0, "token": 2, "cached": 16}), {1: one})
    output = one.output()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("name", "prompt", [1, 2])
    assert [answer.index for answer in output.outputs] == [0, 1]
    assert output.outputs[1].text == "a"
    assert output.num_cached_tokens == 16


def test_a_sink_gets_text_until_it_refuses_or_an_answer_ends() -> None:
    one, taken = state(n=2), list[tuple[int, bytes]]()

    def sink(index: int, text: bytes) -> bool:
        taken.append((index, text))
        return text != b"no"

    one.sink = sink
    assert apply(step({"token": 1, "text": "é"}, {"index": 1, "token": 2}), {1: one}) == []
    assert taken == [(0, "é".encode()), (1, b"")]
    # An answer's end is its reader's business; the other answer goes on as before.
    assert apply(step({"token": 3, "text": "end", "finish": 2}, {"index": 1, "token": 4, "text": "on"}), {1: one}) == [
        (1, one)
    ]
    assert taken[2:] == [(1, b"on")]
    assert one.take() == [OutputDelta(text="end", token_ids=[3], finish_reason="length")]
    # What was refused, and all that follows, waits: nothing overtakes it.
    apply(step({"index": 1, "token": 5, "text": "no"}), {1: one})
    apply(step({"index": 1, "token": 6, "text": "yes"}), {1: one})
    assert taken[3:] == [(1, b"no")]
    assert one.take() == [OutputDelta(index=1, text="noyes", token_ids=[5, 6])]


def test_steps_that_waited_are_merged_past_the_sink() -> None:
    one, taken = state(), list[bytes]()

    def sink(index: int, text: bytes) -> bool:
        taken.append(text)
        return True

    one.sink = sink
    for token, text in ((1, "a"), (2, "b")):
        assert apply(step({"token": token, "text": text}), {1: one}, push=False) == [(1, one)]
    # Nor may the next step overtake them.
    apply(step({"token": 3, "text": "c"}), {1: one})
    assert taken == []
    assert one.take() == [OutputDelta(text="abc", token_ids=[1, 2, 3])]


def test_a_sink_that_raises_costs_no_other_request(caplog: pytest.LogCaptureFixture) -> None:
    first, second, taken = state(), state(), list[bytes]()

    def broken(index: int, text: bytes) -> bool:
        raise RuntimeError("the connection is in a bad way")

    def sound(index: int, text: bytes) -> bool:
        taken.append(text)
        return True

    first.sink, second.sink = broken, sound
    events = step({"id": 1, "token": 1, "text": "a"}, {"id": 2, "token": 2, "text": "b"})
    assert apply(events, {1: first, 2: second}) == [(1, first)]
    assert taken == [b"b"]
    assert first.take() == [OutputDelta(text="a", token_ids=[1])]
    assert "the connection is in a bad way" in caplog.text


def test_what_a_slow_reader_leaves_takes_little_memory() -> None:
    """The server holds it for each of hundreds of clients."""
    rng = np.random.default_rng(0)
    count, width = 1000, 5
    one = state(logprobs=width)
    chosen, top = rng.random((count, 1), np.float32), rng.random((count, width), np.float32)
    top_ids = rng.integers(300, 1 << 17, (count, width), np.int32)
    outputs = [
        step(
            {"token": 1000 + at, "text": "word "},
            logprobs=Logprobs(chosen[at].tobytes(), width, top_ids[at].tobytes(), top[at].tobytes()),
        )
        for at in range(count)
    ]
    tracemalloc.start()
    try:
        for output in outputs:
            apply(output, {1: one})
        (delta,) = one.take()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 150 * count
    assert delta.logprobs is not None
    assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
    assert [entry.logprob for entry in delta.logprobs] == chosen[:, 0].tolist()
    assert [[pair[0] for pair in entry.top] for entry in delta.logprobs] == top_ids.tolist()
    assert [[pair[1] for pair in entry.top] for entry in delta.logprobs] == top.tolist()
    assert delta.logprobs[-1] == delta.logprobs[count - 1]
    assert delta.logprobs[2:4] == [delta.logprobs[2], delta.logprobs[3]]
