"""The loop with answers that are held to something: real grammars, real core, a runner without a model."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from octavo._core import TokenTable
from octavo.config import EngineConfig
from octavo.engine.collect import RequestState, apply
from octavo.engine.loop import EngineLoop
from octavo.engine.loop_builder import build_loop
from octavo.engine.protocol import Constraint
from octavo.engine.requests import RequestMaker
from octavo.errors import InvalidRequest
from octavo.runner.fake import FakeRunner, fake_model_info
from octavo.runner.interface import StepResult
from octavo.sampling_params import SamplingParams

EOS = 256
INFO = fake_model_info(vocab_size=257, num_blocks=256, max_model_len=512)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OUTPUTS: list[dict[str, Any] | None] = [
    None,
    {"json": SCHEMA},
    {"regex": "[a-f]{3,20}x"},
    None,
    {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'start: "(" /[0-9]{1,20}/ ")" | "none"'},
]


class Recorder(FakeRunner):
    """Notes what is launched and when its result is asked for."""

    def __init__(self, num_blocks: int) -> None:
        info = fake_model_info(vocab_size=257, num_blocks=num_blocks, max_model_len=512)
        super().__init__(type(info)(**{**as_dict(info), "eos_token_ids": (EOS,)}))
        self.events: list[tuple[str, int, int]] = []

    def attach(self, core: Any) -> None:
        super().attach(core)
        self._core = core

    def launch(self, plan: Any) -> Any:
        self.events.append(("launch", plan.step, plan.num_masks))
        # As runners do that count tokens for penalties.
        for slot in self._views[plan.arena]["param_slots"][: plan.num_param_updates].tolist():
            assert self._core.history(slot)
        handle, events = super().launch(plan), self.events

        class Noted:
            def result(self) -> StepResult:
                events.append(("result", plan.step, plan.num_masks))
                return handle.result()

        return Noted()


def as_dict(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__struct_fields__}


def make_loop(num_blocks: int = 256, **settings: Any) -> EngineLoop:
    runner = Recorder(num_blocks)
    table = TokenTable([bytes([byte]) for byte in range(256)] + [b""], bytes(256) + b"\1")
    config = EngineConfig(model="fake", num_blocks=num_blocks, **{"max_num_seqs": 32, **settings})
    info = msgspec.structs.replace(runner.info, max_num_seqs=config.sequence_counts("cpu")[0])
    return build_loop(config, runner, info, table)


def add(loop: EngineLoop, number: int, prompt: list[int], params: SamplingParams) -> RequestState:
    request = RequestMaker(INFO, 0).check(number, prompt, params)
    constraint = request.constraint
    loop.submit(request, number, None if constraint is None else loop.constraints.compile(constraint))
    return RequestState(str(number), None, prompt, params)


def run(loop: EngineLoop, states: dict[int, RequestState]) -> None:
    for _ in range(100_000):
        if not loop.has_work():
            break
        outputs = loop.step()
        if outputs is not None:
            apply(outputs, states)
        loop.core.check_invariants()
    assert not loop.has_work()
    assert len(loop.constraints) == 0
    followed = loop.constraints._followed
    assert followed is None or len(followed) == 0
    assert loop.core.stats()["blocks_used"] == 0


def check(outputs: dict[str, Any], text: str) -> None:
    if "json" in outputs:
        value = json.loads(text)
        assert list(value) == ["name", "age"]
        assert len(value["name"]) <= 8
        assert 0 <= value["age"] <= 99
    elif "regex" in outputs:
        assert re.fullmatch(outputs["regex"], text)
    elif "choice" in outputs:
        assert text in outputs["choice"]
    else:
        assert re.fullmatch(r"\([0-9]+\)|none", text)


def answers(count: int = 30, n: int = 1, **settings: Any) -> tuple[list[list[tuple[list[int], str]]], EngineLoop]:
    loop = make_loop(**settings)
    rng = np.random.default_rng(0)
    states, asked = {}, {}
    for number in range(count):
        prompt = [7, 8, 9] * 12 + rng.integers(0, 256, rng.integers(1, 90)).tolist()
        asked[number] = OUTPUTS[number % len(OUTPUTS)]
        params = SamplingParams(n=n, max_tokens=250, structured_outputs=asked[number], ignore_eos=asked[number] is None)
        if asked[number] is None:
            params.max_tokens = 40 + number
        states[number] = add(loop, number, prompt, params)
    run(loop, states)
    for number, state in states.items():
        outputs = asked[number]
        for answer in state.output().outputs:
            if outputs is not None:
                assert (answer.finish_reason, answer.token_ids[-1]) == ("stop", EOS)
                check(outputs, answer.text)
    given = [[(answer.token_ids, answer.text) for answer in state.output().outputs] for state in states.values()]
    return given, loop


def test_answers_do_not_depend_on_overlap_budget_or_pool() -> None:
    expected, _ = answers(overlap=False)
    assert answers(overlap=True)[0] == expected
    assert answers(overlap=True, max_num_seqs=4, max_num_batched_tokens=16)[0] == expected
    assert answers(overlap=True, enable_prefix_caching=False)[0] == expected
    preempted, loop = answers(overlap=True, num_blocks=30)
    assert preempted == expected
    assert loop.core.stats()["preemptions"] > 0
    assert loop.core.stats()["prefix_hit_tokens"] > 0


def test_each_answer_of_a_prompt_is_followed_by_itself() -> None:
    expected, _ = answers(count=6, n=3, overlap=False)
    assert answers(count=6, n=3, overlap=True, num_blocks=30, max_num_seqs=6)[0] == expected


def test_a_masked_step_is_committed_before_the_next_and_others_overlap() -> None:
    loop = make_loop(overlap=True)
    states = {1: add(loop, 1, [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))}
    for _ in range(5):
        loop.step()
    states[2] = add(loop, 2, [4, 5], SamplingParams(structured_outputs={"regex": "[a-z]{9}"}))
    run(loop, states)
    assert isinstance(loop.runner, Recorder)
    open_steps: dict[int, int] = {}
    most, masked = 0, 0
    for kind, step, masks in loop.runner.events:
        if kind == "result":
            del open_steps[step]
            continue
        assert not any(open_steps.values()), "what may follow is not known yet"
        open_steps[step] = masks
        most, masked = max(most, len(open_steps)), masked + masks
    assert (most, masked) == (2, 10)


def test_tokens_of_a_masked_step_go_out_while_the_device_has_the_next() -> None:
    loop = make_loop(overlap=True)
    state = add(loop, 1, [4, 5], SamplingParams(structured_outputs={"regex": "[a-z]{9}"}))
    assert loop.step() is None
    assert isinstance(loop.runner, Recorder)
    for _ in range(9):
        outputs = loop.step()
        assert outputs is not None
        apply(outputs, {1: state})
        assert loop.runner.events[-1][0] == "launch"
    run(loop, {1: state})
    assert state.output().outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_forgets_the_matchers(overlap: bool) -> None:
    loop = make_loop(overlap=overlap)
    held = SamplingParams(n=2, max_tokens=400, structured_outputs={"regex": "[a-z]{300}"})
    states = {number: add(loop, number, [number], held) for number in range(1, 5)}
    for _ in range(6):
        loop.step()
    assert len(loop.constraints) == 4
    assert loop.abort(2)
    assert not loop.abort(2)
    assert not loop.abort(99)
    assert len(loop.constraints) == 3
    for number in (1, 3, 4):
        loop.abort(number)
    loop.drain()
    again = {7: add(loop, 7, [1], SamplingParams(structured_outputs={"regex": "[a-z]{4}"}))}
    run(loop, again)
    assert re.fullmatch("[a-z]{4}", again[7].output().outputs[0].text)
    assert all(state.num_unfinished == 2 for state in states.values())


class Failing:
    """Constraints of which one request's cannot be followed beyond some tokens."""

    def __init__(self, inner: Any, request_id: int, at: int, where: str) -> None:
        self._inner, self._request_id, self._left, self._where = inner, request_id, at, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def _fails(self, ids: list[int]) -> list[tuple[int, str]]:
        if self._request_id not in ids:
            return []
        self._left -= 1
        return [(ids.index(self._request_id), "too many states")] if self._left == 0 else []

    def fill(self, keys: bytes, address: int, row_words: int) -> list[tuple[int, str]]:
        assert self._inner.fill(keys, address, row_words) == []
        return self._fails(np.frombuffer(keys, np.int64)[::2].tolist()) if self._where == "fill" else []

    def advance(self, frame: Any) -> list[tuple[int, str]]:
        assert self._inner.advance(frame) == []
        return self._fails(np.frombuffer(frame.request_ids, np.int64).tolist()) if self._where == "advance" else []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("where", "at"), [("fill", 4), ("fill", 1), ("advance", 4)])
def test_an_answer_that_cannot_be_followed_ends_its_request_alone(where: str, at: int, overlap: bool) -> None:
    def drive(fail: bool) -> tuple[dict[int, RequestState], list[tuple[int, InvalidRequest]]]:
        loop = make_loop(overlap=overlap)
        held = SamplingParams(max_tokens=60, structured_outputs={"regex": "[a-z]{20}"})
        states = {number: add(loop, number, [number, 3], held) for number in range(1, 5)}
        states[5] = add(loop, 5, [5], SamplingParams(max_tokens=40, ignore_eos=True))
        failures = []
        if fail:
            loop.constraints._followed = Failing(loop.constraints._followed, 3, at, where)  # type: ignore[assignment]
        while loop.has_work():
            outputs = loop.step()
            if outputs is not None:
                apply(outputs, states)
            failures += loop.take_failures()
            loop.core.check_invariants()
        assert len(loop.constraints) == 0
        assert loop.core.stats()["blocks_used"] == 0
        return states, failures

    expected, none = drive(fail=False)
    assert none == []
    states, failures = drive(fail=True)
    ((request_id, error),) = failures
    assert request_id == 3
    assert error.field == "structured_outputs"
    assert "too many states" in str(error)
    assert states[3].num_unfinished == 1
    assert len(states[3].output().outputs[0].token_ids) == (at - 1 if where == "fill" else at)
    for number in (1, 2, 4, 5):
        assert states[number].output().outputs == expected[number].output().outputs


def test_allowed_tokens_and_bad_words() -> None:
    loop = make_loop(overlap=True)
    vowels = list(b"aeiou")
    states = {1: add(loop, 1, [1], SamplingParams(max_tokens=50, allowed_token_ids=[*vowels, EOS]))}
    request = RequestMaker(INFO, 0).check(2, [1], SamplingParams(max_tokens=60, allowed_token_ids=list(b"ab")))
    banned = Constraint(None, list(b"ab"), [[97, 98]])
    request = type(request)(**{**as_dict(request), "constraint": banned})
    loop.submit(request, 2, loop.constraints.compile(banned))
    states[2] = RequestState("2", None, [1], request.params)
    run(loop, states)
    assert set(states[1].output().outputs[0].text) <= set("aeiou")
    text = states[2].output().outputs[0].text
    assert len(text) == 60
    assert re.fullmatch("b*a*", text), "never an a and then a b"


def test_what_cannot_be_compiled_is_refused() -> None:
    loop = make_loop()
    for outputs in ({"regex": "("}, {"json": {"type": "no such type"}}, {"grammar": "start: ["}, {"json": "{"}):
        with pytest.raises(InvalidRequest) as caught:
            add(loop, 1, [1], SamplingParams(structured_outputs=outputs))
        assert caught.value.field == "structured_outputs"
        assert str(caught.value).count("structured_outputs: ") == 1
    assert not loop.has_work()
    bare = build_loop(EngineConfig(model="fake"), FakeRunner(INFO), INFO, None)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        add(bare, 1, [1], SamplingParams(structured_outputs={"regex": "a"}))
    with pytest.raises(InvalidRequest, match="allowed_token_ids: the model has no tokenizer"):
        add(bare, 1, [1], SamplingParams(allowed_token_ids=[5]))


def test_threads_end_with_their_engine() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "octavo-grammar"]

    before = len(threads())
    loop = make_loop()
    assert len(threads()) == before, "who asks for nothing pays nothing"
    constraint = Constraint(("regex", "[a-z]+"))
    distinct = [Constraint(("regex", f"[a-z]{{{count}}}")) for count in range(1, 9)]
    compiled = loop.constraints.compile_all([None, constraint, constraint, *distinct])
    assert compiled[0] is None
    assert compiled[1] is compiled[2]
    assert len(threads()) > before
    with pytest.raises(InvalidRequest, match="regular expression"):
        loop.constraints.compile_all([constraint, Constraint(("regex", "(")), *distinct])
    loop.close()
    loop.close()
    deadline = time.monotonic() + 5
    while len(threads()) > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
