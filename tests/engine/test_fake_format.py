"""`load_format` `fake`, end to end: no model, everything else as always."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from octavo import LLM
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.loop_builder import build_engine
from octavo.errors import ConfigError, EngineDead
from octavo.sampling_params import SamplingParams
from octavo.text.fake_tokenizer import PASSAGE, fake_tokenizer
from serve_log import ServeLog

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def in_passage(text: str) -> bool:
    return text in PASSAGE * 4


@contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    """`octavo serve` as a process of its own; its address."""
    command = [sys.executable, "-m", "octavo", "serve", model, "--load-format", "fake", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = ServeLog(process)
    try:
        yield log.address()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log.end()


def test_its_text_is_the_passage_and_a_stream_joins_to_it(run: Callable[..., Any]) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(EngineConfig(model="anything", load_format="fake"))
        try:
            assert engine.model.name == "anything"
            params = SamplingParams(max_tokens=1000, **GREEDY)
            whole = (await engine.generate("Hello", params)).outputs[0]
            assert len(whole.token_ids) == 1000
            assert whole.finish_reason == "length"
            assert whole.text.startswith(" ")
            assert in_passage(whole.text.rstrip("\ufffd"))
            assert {"é", "東", "🐳", "€"} <= set(whole.text)
            deltas = [delta async for delta in engine.stream("Hello", params)]
            assert "".join(delta.text for delta in deltas) == whole.text
            others = await asyncio.gather(*(engine.generate(f"Hello {n}", params) for n in range(40)))
            assert len({other.outputs[0].text for other in others}) > 20
            again = await engine.generate("Hello 7", params)
            assert again.outputs[0].text == others[7].outputs[0].text
            stats = await engine.stats()
            assert (stats["blocks_used"], stats["running"]) == (0, 0)
        finally:
            await engine.close()

    run(main())


def test_answers_survive_preemption_and_chunked_prompts() -> None:
    small = {"num_blocks": 40, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    prompts = [f"prompt number {number} of a few" for number in range(8)]
    params = SamplingParams(max_tokens=120, **GREEDY)
    texts = []
    for settings in ({}, small, {**small, "overlap": True}):
        with LLM("fake", load_format="fake", **settings) as llm:
            texts.append([output.outputs[0].text for output in llm.generate(prompts, params)])
            if settings:
                assert llm.stats()["preemptions"] > 0
    assert texts[0] == texts[1] == texts[2]


def test_options_end_answers_delay_steps_and_fail() -> None:
    with LLM("name?end_after=7&step_ms=20", load_format="fake", worker=True) as llm:
        assert llm.model.name == "name"
        begun = time.monotonic()
        answer, longer = llm.generate(["x"] * 2, [SamplingParams(), SamplingParams(min_tokens=9, max_tokens=12)])
        assert time.monotonic() - begun >= 0.18
        assert (len(answer.outputs[0].token_ids), answer.outputs[0].finish_reason) == (10, "stop")
        assert len(longer.outputs[0].token_ids) > 9
        assert in_passage(answer.outputs[0].text)
    with (
        LLM("fake?fail_at=3", load_format="fake", worker=True) as llm,
        pytest.raises(EngineDead, match="fake device failed at step 3"),
    ):
        llm.generate(["x"], SamplingParams(max_tokens=9))
    for wrong in ("fake?stepms=5", "fake?step_ms=soon", "fake?step_ms=-1"):
        with pytest.raises(ConfigError, match="step"):
            build_engine(EngineConfig(model=wrong, load_format="fake"), lambda *_: None)


def test_sampled_answers_differ_by_index_and_seed_and_carry_logprobs() -> None:
    with LLM("fake", load_format="fake") as llm:
        params = SamplingParams(n=8, seed=3, max_tokens=30, logprobs=2)
        first, again = llm.generate(["x", "x"], params)
        assert len({answer.text for answer in first.outputs}) > 4
        assert [answer.text for answer in first.outputs] == [answer.text for answer in again.outputs]
        logprobs = first.outputs[0].logprobs
        assert logprobs is not None
        assert [entry.token_id for entry in logprobs] == first.outputs[0].token_ids
        assert logprobs[0].top[0] == (logprobs[0].token_id, pytest.approx(-0.6931, abs=1e-3))
        assert len(logprobs[0].top) == 2
        greedy = llm.generate(["x"], SamplingParams(n=3, temperature=0, max_tokens=30))[0]
        assert len({answer.text for answer in greedy.outputs}) == 1


def test_its_tokenizer_gives_every_text_back() -> None:
    tokenizer = fake_tokenizer()
    for text in (PASSAGE, "Grüße, 世界! \U0001f469\u200d\U0001f680 e\u0301\n\t\0", "", " the"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" lighthouse keeper")) == 2
    assert tokenizer.vocab_size < 2000
    assert len(tokenizer.encode(PASSAGE)) < len(PASSAGE) / 2


def test_the_server_serves_it_whole_and_streaming() -> None:
    with serving("fake") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)
        with client:
            ask: dict[str, Any] = {
                "model": "fake",
                "messages": [{"role": "user", "content": "Tell me"}],
                "max_tokens": 300,
                "temperature": 0,
            }
            whole = client.chat.completions.create(**ask).choices[0].message.content
            assert whole is not None
            assert in_passage(whole.rstrip("\ufffd"))
            chunks = client.chat.completions.create(**ask, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
            text = client.completions.create(model="fake", prompt="Once", max_tokens=20, logprobs=1)
            assert text.usage is not None
            assert text.usage.completion_tokens == 20
        assert httpx.get(f"{url}/health").status_code == 200
