"""The server as the `openai` package sees it."""

from __future__ import annotations

import asyncio

import msgspec
import openai
import pytest
from server_fakes import FakeEngine, answer
from server_harness import Running

USER = [{"role": "user", "content": "Hi"}]


def test_chat(client: openai.OpenAI, server: Running) -> None:
    reply = client.chat.completions.create(model="fake", messages=USER, max_tokens=20, temperature=0)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "fake"
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == answer(20)
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "length"
    # "<user>Hi<assistant>", no start token: the template writes its own.
    assert reply.usage.prompt_tokens == len("<user>Hi<assistant>")
    assert reply.usage.completion_tokens == 20
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 20
    assert reply.usage.prompt_tokens_details.cached_tokens == 16
    assert server.engine.params[0].temperature == 0


def test_chat_runs_to_the_end_of_the_context_when_no_limit_is_given(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=USER)
    assert reply.usage.total_tokens == 256


def test_chat_stream_order(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=USER, max_completion_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == answer(5)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


def test_stream_without_usage_always_has_choices(client: openai.OpenAI) -> None:
    for chunk in client.chat.completions.create(model="fake", messages=USER, max_tokens=3, stream=True):
        assert len(chunk.choices) == 1


def test_continuous_usage(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="fake",
        messages=USER,
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 1, 2, 3, 3]


def test_several_answers(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=USER, max_tokens=7, n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert {choice.message.content for choice in reply.choices} == {answer(7)}
    assert reply.usage.completion_tokens == 21
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model="fake", messages=USER, max_tokens=7, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert texts == [answer(7)] * 3


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [72, 105], [[72, 105]]])
def test_every_kind_of_prompt(client: openai.OpenAI, server: Running, prompt: object) -> None:
    reply = client.completions.create(model="fake", prompt=prompt, max_tokens=4)  # type: ignore[call-overload]
    assert reply.object == "text_completion"
    assert reply.choices[0].text == answer(4)
    text = prompt in ("Hi", ["Hi"])
    # A text gets the tokenizer's start token, ids are taken as they are.
    assert server.engine.prompts == [[1, 72, 105] if text else [72, 105]]


def test_several_prompts_number_their_choices(client: openai.OpenAI, server: Running) -> None:
    reply = client.completions.create(model="fake", prompt=["a", "bc", "def"], max_tokens=2, n=2, echo=True)
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert [choice.text for choice in reply.choices] == [p + answer(2) for p in ("a", "a", "bc", "bc", "def", "def")]
    assert reply.usage.prompt_tokens == 2 + 3 + 4
    assert reply.usage.completion_tokens == 12
    texts = [""] * 6
    for chunk in client.completions.create(
        model="fake", prompt=["a", "bc", "def"], max_tokens=2, n=2, echo=True, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in reply.choices]


def test_completion_default_is_16_tokens(client: openai.OpenAI) -> None:
    assert client.completions.create(model="fake", prompt="Hi").usage.completion_tokens == 16


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="Hi", max_tokens=60).choices[0].text
    stream = client.completions.create(model="fake", prompt="Hi", max_tokens=60, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole == answer(60)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    request = {"model": "fake", "messages": USER, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    content = client.chat.completions.create(**request).choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer(9)
    assert content[8].token == "ö"
    assert content[8].bytes == [0xC3, 0xB6]
    assert content[7].token.encode() == bytes(content[7].bytes)
    assert content[0].logprob == -0.5
    assert [top.token for top in content[0].top_logprobs] == ["H", "x"]
    # Minus infinity is no JSON.
    assert content[0].top_logprobs[1].logprob == -9999.0
    streamed = []
    for chunk in client.chat.completions.create(**request, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == content


def test_completion_logprobs(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="fake", prompt="Hi", max_tokens=3, logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["H", "e", "l"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"H": -0.5}, {"e": -0.5}, {"l": -0.5}]
    offsets = []
    for chunk in client.completions.create(model="fake", prompt="Hi", max_tokens=3, logprobs=1, stream=True):
        offsets += chunk.choices[0].logprobs.text_offset
    assert offsets == [0, 1, 2]


def test_extras_reach_the_engine(client: openai.OpenAI, server: Running) -> None:
    client.chat.completions.create(
        model="fake",
        messages=USER,
        max_tokens=8,
        stop="END",
        seed=-1,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [7],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "priority": -3,
            "cache_salt": "tenant",
        },
    )
    params = server.engine.params[0]
    assert (params.stop, params.seed, params.temperature, params.top_p) == (["END"], None, 0.5, 0.9)
    assert (params.presence_penalty, params.frequency_penalty, params.top_k, params.min_p) == (0.25, -0.5, 5, 0.1)
    assert (params.repetition_penalty, params.min_tokens, params.ignore_eos) == (1.5, 2, True)
    assert (params.stop_token_ids, params.include_stop_str_in_output) == ([7], True)
    assert (params.skip_special_tokens, params.priority, params.cache_salt) == (False, -3, "tenant")


def test_the_models_recommended_sampling_fills_in(client: openai.OpenAI, server: Running) -> None:
    model = server.engine.model
    server.engine.model = msgspec.structs.replace(model, sampling_defaults={"temperature": 0.6, "top_p": 0.9})
    client.chat.completions.create(model="fake", messages=USER, max_tokens=2)
    client.completions.create(model="fake", prompt="Hi", max_tokens=2, temperature=0.1)
    asked = [(params.temperature, params.top_p) for params in server.engine.params]
    assert asked == [(0.6, 0.9), (0.1, 0.9)]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "org/alias"]
    model = client.models.retrieve("org/alias")
    assert model.id == "org/alias"
    assert model.max_model_len == 256
    # The name that was asked for; which model answered is told apart from it.
    answered = client.completions.create(model="org/alias", prompt="Hi")
    assert (answered.model, answered.system_fingerprint) == ("org/alias", "fake")
    for stream in (
        client.chat.completions.create(model="org/alias", messages=USER, max_tokens=2, stream=True),
        client.completions.create(model="org/alias", prompt="Hi", max_tokens=2, stream=True),
    ):
        assert {chunk.system_fingerprint for chunk in stream} == {"fake"}
    with pytest.raises(openai.NotFoundError, match=r"`other` does not exist; this server has `fake`, `org/alias`"):
        client.models.retrieve("other")


def test_errors_by_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist") as unknown:
        client.chat.completions.create(model="other", messages=USER)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as long:
        client.completions.create(model="fake", prompt="x" * 400)
    assert long.value.code == "context_length_exceeded"
    assert long.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 400}])
    assert long.value.code == "context_length_exceeded"
    assert long.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="temperature") as hot:
        client.completions.create(model="fake", prompt="Hi", temperature=-1)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="max_tokens: -5"):
        client.completions.create(model="fake", prompt="Hi", max_tokens=-5)
    # In a stream too: until the first output an error has its own status.
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        client.completions.create(model="fake", prompt="x" * 400, stream=True)


def test_error_within_a_stream(start: object) -> None:
    server: Running = start(FakeEngine(delay=0.01))  # type: ignore[operator]
    with server.client() as client:
        stream = client.chat.completions.create(model="fake", messages=USER, max_tokens=100, stream=True)
        next(iter(stream))
        server.engine.dead = True
        with pytest.raises(openai.APIError, match="the engine process ended"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as dead:
            client.chat.completions.create(model="fake", messages=USER)
        assert dead.value.status_code == 503
        assert dead.value.code == "engine_dead"


def test_tokens_without_text_have_their_chunks(client: openai.OpenAI, server: Running) -> None:
    server.engine.silent = True
    chunks = list(client.completions.create(model="fake", prompt=[72], max_tokens=5, stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == [""] * 5
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["length"]
    stream = client.chat.completions.create(model="fake", messages=USER, max_tokens=5, stream=True)
    assert len(list(stream)) == 6


def test_raw_response_carries_the_request_id(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="fake", prompt="Hi", extra_headers={"X-Request-Id": "abc-1"}
    )
    assert raw.headers["x-request-id"] == "abc-1"
    assert raw.parse().id == "cmpl-abc-1"
    bad = client.completions.with_raw_response.create(model="fake", prompt="Hi", extra_headers={"X-Request-Id": "a b"})
    assert bad.headers["x-request-id"] != "a b"


def test_many_at_once(start: object) -> None:
    server: Running = start(FakeEngine(delay=0.001))  # type: ignore[operator]

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(model="fake", prompt=[100 + number], max_tokens=30, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(100)))

    assert asyncio.run(all_of_them()) == [answer(30)] * 100
    assert server.engine.running == 0
    assert server.engine.aborted == 0
