"""The loop over the real core and a runner without a model."""

from __future__ import annotations

import time

import numpy as np
import pytest
from engine_fakes import MAX_MODEL_LEN, VOCAB_SIZE, fake_config, fake_loop, text_of
from octavo.engine.collect import RequestState, apply
from octavo.engine.loop import EngineLoop
from octavo.engine.requests import RequestMaker
from octavo.runner.fake import fake_model_info
from octavo.sampling_params import SamplingParams

INFO = fake_model_info(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


def add(loop: EngineLoop, number: int, prompt: list[int], params: SamplingParams) -> RequestState:
    loop.submit(RequestMaker(INFO, 0).check(number, prompt, params), number)
    return RequestState(str(number), None, prompt, params)


def run(loop: EngineLoop, states: dict[int, RequestState]) -> int:
    """Step until every request is done; how many steps that took."""
    steps = 0
    while loop.has_work():
        outputs = loop.step()
        steps += 1
        if outputs is not None:
            apply(outputs, states)
        loop.core.check_invariants()
    assert all(state.num_unfinished == 0 for state in states.values())
    return steps


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB_SIZE, rng.integers(1, 90)).tolist() for _ in range(count)]


def answers(count: int = 40, **settings: object) -> list[tuple[list[int], str]]:
    loop = fake_loop(fake_config(**settings))
    states = {
        number: add(loop, number, prompt, SamplingParams(max_tokens=30 + number, ignore_eos=True))
        for number, prompt in enumerate(prompts(count))
    }
    run(loop, states)
    return [(state.output().outputs[0].token_ids, state.output().outputs[0].text) for state in states.values()]


def test_tokens_do_not_depend_on_overlap_budget_or_pool() -> None:
    expected = answers(overlap=False)
    assert [len(tokens) for tokens, _ in expected] == [30 + number for number in range(40)]
    assert all(text == text_of(tokens) for tokens, text in expected)
    assert answers(overlap=True) == expected
    assert answers(overlap=True, max_num_seqs=4, max_num_batched_tokens=16) == expected
    assert answers(overlap=False, max_num_batched_tokens=64, num_blocks=24) == expected
    assert answers(overlap=True, num_blocks=24) == expected
    assert answers(overlap=True, enable_prefix_caching=False) == expected


def test_a_pool_that_is_too_small_preempts() -> None:
    loop = fake_loop(fake_config(num_blocks=24))
    states = {
        number: add(loop, number, prompt, SamplingParams(max_tokens=60, ignore_eos=True))
        for number, prompt in enumerate(prompts(20))
    }
    run(loop, states)
    assert loop.core.stats()["preemptions"] > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_frees_its_blocks_within_a_step(overlap: bool) -> None:
    loop = fake_loop(fake_config(overlap=overlap))
    states = {number: add(loop, number, [1] * 64, SamplingParams(max_tokens=500)) for number in range(4)}
    for _ in range(5):
        loop.step()
    used = loop.core.stats()["blocks_used"]
    assert used > 0
    for number in states:
        assert loop.core.abort(number)
    loop.step()
    loop.step()
    loop.core.check_invariants()
    assert loop.core.stats()["blocks_used"] == 0
    assert not loop.has_work()
    assert not loop.core.abort(0), "an abort may come twice"


def test_drain_leaves_an_engine_that_answers() -> None:
    loop = fake_loop(fake_config(overlap=True))
    add(loop, 1, [1] * 64, SamplingParams(max_tokens=500))
    for _ in range(3):
        loop.step()
    loop.core.abort(1)
    loop.drain()
    assert not loop.has_work()
    state = add(loop, 2, [1, 2, 3], SamplingParams(max_tokens=7))
    run(loop, {2: state})
    assert len(state.output().outputs[0].token_ids) == 7


def test_an_idle_loop_does_nothing() -> None:
    loop = fake_loop(fake_config())
    assert not loop.has_work()
    assert loop.step() is None


def test_with_overlap_a_step_is_launched_before_the_last_is_committed() -> None:
    for overlap, depth in ((False, 0), (True, 1)):
        loop = fake_loop(fake_config(overlap=overlap))
        add(loop, 1, [1], SamplingParams(max_tokens=10))
        loop.step()
        assert len(loop._open) == depth


def test_several_answers_of_one_prompt() -> None:
    loop = fake_loop(fake_config())
    state = add(loop, 1, [5, 6, 7] * 11, SamplingParams(n=3, max_tokens=20))
    run(loop, {1: state})
    output = state.output()
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert all(answer.finish_reason == "length" and len(answer.token_ids) == 20 for answer in output.outputs)


def test_stop_tokens_and_stop_texts_end_an_answer() -> None:
    loop = fake_loop(fake_config())
    whole = add(loop, 1, [1, 2, 3], SamplingParams(max_tokens=12))
    run(loop, {1: whole})
    tokens = whole.output().outputs[0].token_ids
    assert len(set(tokens)) == 12, "the check below needs them to differ"
    by_token = add(loop, 2, [1, 2, 3], SamplingParams(max_tokens=12, stop_token_ids=[tokens[4]]))
    by_text = add(loop, 3, [1, 2, 3], SamplingParams(max_tokens=12, stop=["nothing", f"{tokens[6]}><{tokens[7]}"]))
    included = add(
        loop, 4, [1, 2, 3], SamplingParams(max_tokens=12, stop=[f"<{tokens[6]}"], include_stop_str_in_output=True)
    )
    run(loop, {2: by_token, 3: by_text, 4: included})
    first, second, third = (state.output().outputs[0] for state in (by_token, by_text, included))
    assert (first.finish_reason, first.stop_reason, first.token_ids) == ("stop", tokens[4], tokens[:5])
    assert (second.finish_reason, second.stop_reason) == ("stop", f"{tokens[6]}><{tokens[7]}")
    assert second.text == text_of(tokens[:6]) + "<"
    assert third.text == text_of(tokens[:6]) + f"<{tokens[6]}"


def test_steps_are_counted_by_their_tokens() -> None:
    loop = fake_loop(fake_config(overlap=False))
    states = {1: add(loop, 1, list(range(40)), SamplingParams(max_tokens=6, ignore_eos=True))}
    steps = run(loop, states)
    stats = loop.stats()
    assert steps == stats["steps"] == 6
    assert (stats["step_tokens_1"], stats["step_tokens_64"], stats["step_tokens"]) == (5, 1, 45)
    assert sum(value for name, value in stats.items() if name.startswith("step_tokens_")) == steps
    assert {name for name in stats if name.startswith("host_")} >= {"host_plan_seconds", "host_wait_seconds"}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_says_which_requests_waited_until_then(overlap: bool) -> None:
    loop = fake_loop(fake_config(overlap=overlap, max_num_seqs=2, max_num_batched_tokens=32))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    states = {number: add(loop, number, [number] * 70, params) for number in range(1, 7)}
    begun, started = time.monotonic(), {}
    while loop.has_work():
        outputs = loop.step()
        if outputs is None:
            continue
        for number in np.frombuffer(outputs.started, np.int64).tolist():
            assert number not in started
            started[number] = outputs.started_at
        first = {number for number, state in states.items() if state.num_unfinished and number not in started}
        apply(outputs, states)
        assert not any(states[number].take() for number in first), "it has begun and was not told of"
    assert list(started) == list(states)
    times = list(started.values())
    assert times == sorted(times)
    assert begun <= times[0]
    assert times[-1] <= time.monotonic()
    assert len(set(times)) >= 3, "two at a time"
    assert {number: state.started_at for number, state in states.items()} == started
