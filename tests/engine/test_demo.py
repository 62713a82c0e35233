"""The three doors to one engine, on the demo model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest
from octavo import LLM, AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from octavo._core import cpu_info
from octavo.errors import ContextLengthExceeded

# In one process: what the tests share takes long to make.
pytestmark = [pytest.mark.demo, pytest.mark.xdist_group("demo_engine")]

SETTINGS = {"max_model_len": 512, "num_blocks": 128, "max_num_seqs": 16}
PROMPTS = ["The capital of France is", "東京は", "🙂🙂🙂", "1, 2, 3, 4, 5,"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=3),
    SamplingParams(temperature=0.8, max_tokens=24, seed=11),
    SamplingParams(temperature=1.2, top_p=0.9, max_tokens=24, n=2),
    SamplingParams(temperature=0, max_tokens=24, stop=["8,"]),
]
CHAT = [{"role": "user", "content": "What is the capital of Italy?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS)


def answers(outputs: list[RequestOutput]) -> list[list[tuple[list[int], str, str | None]]]:
    return [[(answer.token_ids, answer.text, answer.finish_reason) for answer in output.outputs] for output in outputs]


def test_answers_are_their_tokens_text(llm: LLM, outputs: list[RequestOutput]) -> None:
    assert [output.prompt for output in outputs] == PROMPTS
    assert outputs[0].outputs[0].text.startswith(" Paris")
    assert llm.tokenizer is not None
    for output in outputs[:3]:
        for answer in output.outputs:
            assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert outputs[2].outputs[0].token_ids != outputs[2].outputs[1].token_ids
    assert (outputs[3].outputs[0].finish_reason, outputs[3].outputs[0].stop_reason) == ("stop", "8,")
    assert outputs[3].outputs[0].text == " 6, 7, "


def test_log_probabilities_are_ordered_and_the_greedy_choice_leads(outputs: list[RequestOutput]) -> None:
    logprobs = outputs[0].outputs[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == outputs[0].outputs[0].token_ids
    for entry in logprobs:
        values = [value for _, value in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert sum(math.exp(value) for value in values) <= 1 + 1e-4
    assert outputs[1].outputs[0].logprobs is None


@pytest.fixture(scope="module")
def greedy_chat(llm: LLM) -> str:
    """What the model says when it is told to be greedy; which words these are depends on the processor."""
    return llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text


def test_a_worker_process_gives_the_same_answers(outputs: list[RequestOutput], greedy_chat: str) -> None:
    with LLM("demo", worker=True, **SETTINGS) as llm:
        assert llm.model.name == "demo"
        assert answers(llm.generate(PROMPTS, PARAMS)) == answers(outputs)
        # Greedy, without being told: the demo's name brings its sampling along.
        assert llm.chat(CHAT)[0].outputs[0].text == greedy_chat


def test_streams_give_the_same_answers(outputs: list[RequestOutput], greedy_chat: str) -> None:
    async def stream(engine: AsyncEngine, prompt: str, params: SamplingParams) -> list[tuple[list[int], str]]:
        parts = [delta async for delta in engine.stream(prompt, params)]
        return [
            (
                [token for delta in parts if delta.index == index for token in delta.token_ids],
                "".join(delta.text for delta in parts if delta.index == index),
            )
            for index in range(params.n)
        ]

    async def main() -> None:
        stages = set()
        engine = await AsyncEngine.start(
            EngineConfig(model="demo", **SETTINGS), progress=lambda stage, done, total: stages.add(stage)
        )
        async with engine:
            assert stages, "loading tells how far it is"
            # One after the other, so that seeds are drawn in the order of the list.
            got = [await stream(engine, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
            assert got == [[(tokens, text) for tokens, text, _ in answer] for answer in answers(outputs)]
            chat = await engine.chat(CHAT)
            assert chat.outputs[0].text == greedy_chat
            assert (await engine.stats())["blocks_used"] == 0

    asyncio.run(main())


def test_a_prompt_longer_than_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"\d+ tokens .* 512 tokens"):
        llm.generate("word " * 600)


def test_an_answer_ends_with_the_context(llm: LLM) -> None:
    output = llm.generate([[5] * 500], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"


def test_closing_puts_the_number_of_threads_back() -> None:
    before = cpu_info()["num_threads"]
    with LLM("demo", num_threads=before + 1, **SETTINGS):
        assert cpu_info()["num_threads"] == before + 1
    assert cpu_info()["num_threads"] == before
