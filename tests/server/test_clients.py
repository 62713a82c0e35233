"""The server as `langchain-openai` and `litellm` see it, and the `openai` package over a real engine process."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from octavo.text.fake_tokenizer import PASSAGE
from server_fakes import FakeEngine, answer
from server_harness import Running

USER = [{"role": "user", "content": "Hi"}]


class City(pydantic.BaseModel):
    name: str


class Place(pydantic.BaseModel):
    capital: bool


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def langchain(server: Running, **options: Any) -> Any:
    module = pytest.importorskip("langchain_openai")
    return module.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="fake", max_retries=0, **options)


def test_langchain(server: Running, quiet: None) -> None:
    model = langchain(server, max_tokens=12, stream_usage=True, temperature=0.3)
    reply = model.invoke([("system", "Be brief"), ("user", "Hi")])
    assert reply.content == answer(12)
    assert reply.usage_metadata["output_tokens"] == 12
    assert reply.response_metadata["finish_reason"] == "length"
    # ChatOpenAI says max_completion_tokens where it was told max_tokens.
    assert (server.engine.params[0].max_tokens, server.engine.params[0].temperature) == (12, 0.3)
    parts = list(model.stream("Hi"))
    assert "".join(part.content for part in parts) == answer(12)
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == 12
    assert [reply.content for reply in model.batch(["a", "b", "c"])] == [answer(12)] * 3


def test_langchain_async_and_completions(server: Running, quiet: None) -> None:
    model = langchain(server, max_tokens=5)

    async def main() -> tuple[str, str]:
        reply = await model.ainvoke("Hi")
        return reply.content, "".join([part.content async for part in model.astream("Hi")])

    assert asyncio.run(main()) == (answer(5), answer(5))
    module = pytest.importorskip("langchain_openai")
    plain = module.OpenAI(base_url=f"{server.url}/v1", api_key="none", model="fake", max_tokens=7)
    assert plain.invoke("Hi") == answer(7)
    assert "".join(plain.stream("Hi")) == answer(7)


def test_langchain_structured_output(start: Callable[..., Running], quiet: None) -> None:
    server = start(FakeEngine(reply='{"name": "Bern"}', constrains_output=True))
    model = langchain(server).with_structured_output(City, method="json_schema")
    assert model.invoke("Capital of Switzerland?") == City(name="Bern")


def test_langchain_by_responses(server: Running, quiet: None) -> None:
    model = langchain(server, use_responses_api=True, max_tokens=9)
    assert model.invoke("Hi").text == answer(9)
    assert "".join(part.text for part in model.stream("Hi")) == answer(9)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(server: Running, quiet: None, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    options: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", "max_tokens": 10, "max_retries": 0}
    done = litellm.completion(f"{provider}/fake", USER, **options)
    assert done.choices[0].message.content == answer(10)
    assert done.usage.completion_tokens == 10
    stream = litellm.completion(
        f"{provider}/fake", USER, stream=True, stream_options={"include_usage": True}, **options
    )
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == answer(10)

    async def main() -> str:
        done = await litellm.acompletion(f"{provider}/fake", USER, **options)
        return str(done.choices[0].message.content)

    assert asyncio.run(main()) == answer(10)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(f"{provider}/fake", [{"role": "user", "content": "x" * 400}], **options)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(f"{provider}/other", USER, **options)


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    """An engine process with the real core, tokenizer and template, and a model that writes a passage."""

    async def starting() -> AsyncEngine:
        return await AsyncEngine.start(EngineConfig(model="fake?end_after=40", load_format="fake", max_model_len=512))

    server = Running(None, ServerState(ServerSettings()), starting=starting)
    yield server
    server.stop()


def test_openai_over_a_real_engine(real: Running) -> None:
    with real.client() as client:
        done = client.chat.completions.create(model="fake", messages=USER, temperature=0, n=2)
        text = done.choices[0].message.content
        assert text in PASSAGE * 2
        assert text == done.choices[1].message.content
        assert done.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(model="fake", messages=USER, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content for chunk in stream) == text
        assert client.responses.create(model="fake", input="Hi", temperature=0).output_text == text
        stop = text.split()[3]
        cut = client.chat.completions.create(model="fake", messages=USER, temperature=0, stop=stop).choices[0]
        assert cut.message.content == text[: text.index(stop)]
        assert cut.stop_reason == stop
        entries = (
            client.chat.completions.create(
                model="fake", messages=USER, temperature=0, max_tokens=9, logprobs=True, top_logprobs=2
            )
            .choices[0]
            .logprobs.content
        )
        assert text.encode().startswith(b"".join(bytes(entry.bytes) for entry in entries))
        assert [len(entry.top_logprobs) for entry in entries] == [2] * 9
        # The greedy token is the likeliest.
        assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
        for form in (Place, City):
            held = client.chat.completions.parse(model="fake", messages=USER, response_format=form, temperature=0)
            assert isinstance(held.choices[0].message.parsed, form)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="fake", messages=USER, extra_body={"guided_regex": "(a"})
        assert refused.value.param == "guided_regex"


def test_tokens_over_a_real_engine(real: Running) -> None:
    with real.client() as client:
        text = "Grüße aus 東京 <|im_end|> 🎉"
        post: Any = client.post
        done = post("/../tokenize", body={"prompt": text}, cast_to=object)
        assert post("/../detokenize", body={"tokens": done["tokens"]}, cast_to=object)["prompt"] == text
        rendered = post("/../tokenize", body={"messages": USER}, cast_to=object)["tokens"]
        shown = post("/../detokenize", body={"tokens": rendered}, cast_to=object)["prompt"]
        assert shown == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_anthropic_over_a_real_engine(real: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0) as client:
        done = client.messages.create(model="fake", max_tokens=200, messages=USER)
        assert done.stop_reason == "end_turn"
        counted = client.messages.count_tokens(model="fake", messages=USER)
        assert counted.input_tokens == done.usage.input_tokens + done.usage.cache_read_input_tokens
