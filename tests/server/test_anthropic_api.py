"""Anthropic's API as the `anthropic` package sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from server_fakes import FakeEngine, answer
from server_harness import Running

anthropic = pytest.importorskip("anthropic")

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def claude(server: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_message(claude: Any, server: Running) -> None:
    reply = claude.messages.create(
        model="fake",
        max_tokens=9,
        system="Be brief",
        messages=USER,
        stop_sequences=["END"],
        extra_body={"temperature": 0.5, "top_k": 3},
    )
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "fake")
    assert reply.content[0].text == answer(9)
    assert (reply.stop_reason, reply.stop_sequence) == ("max_tokens", None)
    length = len("<system>Be brief<user>Hi<assistant>")
    assert reply.usage.cache_read_input_tokens == length // 16 * 16
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == length
    assert reply.usage.output_tokens == 9
    assert reply._request_id == reply.id.removeprefix("msg_")
    params = server.engine.params[0]
    assert (params.temperature, params.top_k, params.stop) == (0.5, 3, ["END"])
    assert "".join(map(chr, server.engine.prompts[0])) == "<system>Be brief<user>Hi<assistant>"


def test_blocks_of_text(claude: Any, server: Running) -> None:
    claude.messages.create(
        model="fake",
        max_tokens=2,
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "c"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "?"}, {"type": "text", "text": "d"}]},
            *USER,
        ],
    )
    assert "".join(map(chr, server.engine.prompts[0])) == "<system>a\nb<user>c<assistant>d<user>Hi<assistant>"


def test_an_answer_that_has_begun_is_gone_on_with(claude: Any, server: Running) -> None:
    claude.messages.create(
        model="fake", max_tokens=2, messages=[*USER, {"role": "assistant", "content": "The answer is"}]
    )
    assert "".join(map(chr, server.engine.prompts[0])) == "<user>Hi<assistant>The answer is"


def test_stop_reasons(start: Callable[..., Running]) -> None:
    for engine, expected in (
        (FakeEngine(reply="Yes."), ("end_turn", None)),
        (FakeEngine(reply="Yes.", stop_reason="END"), ("stop_sequence", "END")),
    ):
        server = start(engine)
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            reply = client.messages.create(model="fake", max_tokens=100, messages=USER)
            assert (reply.stop_reason, reply.stop_sequence) == expected
            with client.messages.stream(model="fake", max_tokens=100, messages=USER) as stream:
                final = stream.get_final_message()
            assert (final.stop_reason, final.stop_sequence, final.content[0].text) == (*expected, "Yes.")


def test_stream(claude: Any, server: Running) -> None:
    events = list(claude.messages.create(model="fake", max_tokens=5, messages=USER, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event.delta.text for event in events[2:-3]) == answer(5)
    assert events[-2].usage.output_tokens == 5
    with claude.messages.stream(model="fake", max_tokens=30, messages=USER) as stream:
        assert "".join(stream.text_stream) == answer(30)
        final = stream.get_final_message()
    assert final.content[0].text == answer(30)
    assert final.usage.output_tokens == 30
    body = {"model": "fake", "max_tokens": 2, "messages": USER, "stream": True}
    raw = httpx.post(f"{server.url}/v1/messages", json=body).text
    assert "event: ping\n" in raw
    assert "[DONE]" not in raw


def test_count_tokens(claude: Any) -> None:
    counted = claude.messages.count_tokens(model="fake", system="Be brief", messages=USER)
    assert counted.input_tokens == len("<system>Be brief<user>Hi<assistant>")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"max_tokens": 1000}, "max_tokens: 1000"),
        ({"messages": []}, "messages: the list is empty"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": [{"role": "user", "content": [None]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content"),
        ({"system": [{"type": "image"}]}, r"system\[0\]"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\]"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "maximum context length is 256 tokens"),
    ],
)
def test_refusals(claude: Any, fields: dict[str, Any], text: str) -> None:
    body = {"model": "fake", "max_tokens": 4, "messages": USER, **fields}
    with pytest.raises(anthropic.BadRequestError, match=text) as refused:
        claude.post("/v1/messages", body=body, cast_to=object)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_errors_of_other_kinds(claude: Any, start: Callable[..., Running]) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="other", max_tokens=2, messages=USER)
    assert missing.value.body["error"]["type"] == "not_found_error"
    server = start(FakeEngine(delay=0.01))
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        stream = client.messages.create(model="fake", max_tokens=100, messages=USER, stream=True)
        next(iter(stream))
        server.engine.dead = True
        with pytest.raises(anthropic.APIStatusError, match="the engine process ended"):
            list(stream)
        with pytest.raises(anthropic.InternalServerError) as dead:
            client.messages.create(model="fake", max_tokens=100, messages=USER)
        assert dead.value.status_code == 503
        assert dead.value.body["error"]["type"] == "overloaded_error"


def test_async(server: Running) -> None:
    async def main() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client,
            client.messages.stream(model="fake", max_tokens=12, messages=USER) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(main()) == answer(12)
