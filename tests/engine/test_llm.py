"""LLM over engines without a model, in this process and in a worker."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from engine_fakes import COMMAND, fake_config, load, text_of
from octavo import LLM
from octavo.engine.backend import LocalBackend, WorkerBackend
from octavo.errors import CapacityExceeded, ConfigError, EngineDead, InvalidRequest
from octavo.sampling_params import SamplingParams

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(params=["local", "worker"])
def make_llm(request: pytest.FixtureRequest) -> Iterator[MakeLLM]:
    """Makes an `LLM` with a fake model, where the test's parameter says."""
    made: list[LLM] = []

    def make(model: str = "fake", **settings: Any) -> LLM:
        config = fake_config(model, **settings)
        if request.param == "local":
            made.append(LLM.from_backend(config, LocalBackend(*load(config, lambda *_: None))))
        else:
            made.append(LLM.from_backend(config, WorkerBackend.load(config, lambda *_: None, COMMAND)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_outputs_come_in_the_prompts_order(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompts = [[number, 3] for number in range(30)]
    params = [SamplingParams(max_tokens=40 - number) for number in range(30)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(40, 10, -1))
    assert all(output.outputs[0].text == text_of(output.outputs[0].token_ids) for output in outputs)
    assert llm.generate(prompts[7], params[7])[0].outputs == outputs[7].outputs, "alone and in company"


def test_every_shape_of_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for one in ([1, 2], (1, 2), np.array([1, 2]), {"prompt_token_ids": [1, 2]}):
        assert [output.prompt_token_ids for output in llm.generate(one, GREEDY)] == [[1, 2]]
    for many in (
        [[1, 2], [3]],
        [{"prompt_token_ids": [1, 2], "prompt": "seen"}, {"prompt_token_ids": [3]}],
        [np.array([1, 2]), [3]],
        ([1, 2], (3,)),
    ):
        outputs = llm.generate(many, GREEDY)  # type: ignore[arg-type]
        assert [output.prompt_token_ids for output in outputs] == [[1, 2], [3]]
    assert llm.generate([{"prompt_token_ids": [1], "prompt": "seen"}], GREEDY)[0].prompt == "seen"
    assert llm.generate([], GREEDY) == []


def test_one_bad_prompt_and_none_is_run(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=8, max_num_seqs=4)
    long = [1] * 500
    for bad, kind in (
        ([[1], []], InvalidRequest),
        ([[1], [600]], InvalidRequest),
        ([[1], long], CapacityExceeded),
        ([long, [1]], CapacityExceeded),
        ([[1], "text"], InvalidRequest),
        ([[1], {"text": 1}], InvalidRequest),
    ):
        with pytest.raises(kind):
            llm.generate(bad, GREEDY)  # type: ignore[arg-type]
        stats = llm.stats()
        assert stats["blocks_used"] == stats["waiting"] == stats["running"] == 0
        assert stats["generated_tokens"] == 0
    with pytest.raises(InvalidRequest, match="sampling_params: 1 for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY])
    assert len(llm.generate([[1], [2]], GREEDY)) == 2, "and the engine goes on"


def test_ctrl_c_aborts_and_leaves_a_usable_engine(make_llm: MakeLLM) -> None:
    llm = make_llm("fake:step_s=0.01", overlap=True)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], SamplingParams(max_tokens=1000))
    timer.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    outputs = llm.generate([[1], [2]], GREEDY)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
    assert llm.stats()["blocks_used"] == 0


def test_a_failed_engine_says_so_from_then_on(make_llm: MakeLLM) -> None:
    llm = make_llm("fake:crash_at=3")
    with pytest.raises(RuntimeError, match="the device is on fire"):
        llm.generate([1], SamplingParams(max_tokens=100))
    with pytest.raises(EngineDead, match="the device is on fire"):
        llm.generate([1], GREEDY)


def test_an_engine_in_this_process_puts_settings_back_once() -> None:
    restored: list[int] = []
    backend = LocalBackend(*load(fake_config("fake"), lambda *_: None), lambda: restored.append(1))
    backend.close()
    backend.close()
    assert restored == [1]


def test_a_closed_engine_refuses(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        llm.generate([1], GREEDY)
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([1], GREEDY)
    with pytest.raises(EngineDead, match="closed"):
        llm.stats()


def test_an_engine_nobody_holds_ends_its_worker() -> None:
    config = fake_config()
    backend = WorkerBackend.load(config, lambda *_: None, COMMAND)
    llm = LLM.from_backend(config, backend)
    assert len(llm.generate([[1]], GREEDY)) == 1
    process = backend._process
    del llm, backend
    gc.collect()
    assert process.wait(5)


def test_more_prompts_than_a_frame_holds(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompts = [[number % 500] * 1000 for number in range(1500)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1))
    assert [output.prompt_token_ids[0] for output in outputs] == [prompt[0] for prompt in prompts]


def test_text_without_a_tokenizer_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "Hi"}])):
        with pytest.raises(InvalidRequest, match="tokenizer"):
            call()


def test_a_setting_that_does_not_exist_is_refused_before_anything_loads() -> None:
    with pytest.raises(ConfigError, match="max_batch"):
        LLM("demo", max_batch=3)


def test_threads_share_one_engine(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=20)
    expected = [llm.generate([number, 3], params)[0].outputs[0].token_ids for number in range(6)]
    found: list[list[list[int]]] = [[] for _ in range(6)]

    def work(number: int) -> None:
        for _ in range(10):
            found[number].append(llm.generate([number, 3], params)[0].outputs[0].token_ids)
            assert llm.stats()["blocks_total"] > 0

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [[tokens] * 10 for tokens in expected]


@pytest.mark.parametrize("prompts", [None, 5, [[1], None]])
def test_what_is_no_prompt_is_refused_by_name(make_llm: MakeLLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="no prompt"):
        make_llm().generate(prompts, GREEDY)
