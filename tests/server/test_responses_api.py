"""`/v1/responses` as the `openai` package sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from server_fakes import FakeEngine, answer
from server_harness import Running


def post(server: Running, payload: Any, path: str = "/v1/responses") -> httpx.Response:
    return httpx.post(server.url + path, json=payload, timeout=20)


def test_a_text(client: openai.OpenAI, server: Running) -> None:
    reply = client.responses.create(model="fake", input="Hi", instructions="Be brief", max_output_tokens=8)
    assert reply.output_text == answer(8)
    assert reply.id.startswith("resp_")
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.usage.output_tokens == 8
    assert reply.usage.total_tokens == reply.usage.input_tokens + 8
    assert reply.usage.input_tokens_details.cached_tokens == reply.usage.input_tokens // 16 * 16
    assert reply.store is False
    assert reply.output[0].content[0].annotations == []
    assert "".join(map(chr, server.engine.prompts[0])) == "<system>Be brief<user>Hi<assistant>"


def test_messages_of_parts_and_earlier_answers(client: openai.OpenAI, server: Running) -> None:
    first = client.responses.create(model="fake", input="One", max_output_tokens=2)
    client.responses.create(
        model="fake",
        max_output_tokens=2,
        input=[
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
            *[item.model_dump() for item in first.output],
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "role": "user", "content": "Two"},
        ],
    )
    assert "".join(map(chr, server.engine.prompts[1])) == (
        f"<system>Be brief<user>One<assistant>{answer(2)}<user>Two<assistant>"
    )


def test_stream_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="Hi", max_output_tokens=20, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer(20)
    assert events[-4].text == answer(20)
    assert events[0].response.status == "in_progress"
    assert events[0].response.id == events[-1].response.id
    assert events[-1].response.output_text == answer(20)
    assert events[-1].response.usage.output_tokens == 20


def test_an_answer_that_ends_is_completed(start: Any) -> None:
    server: Running = start(FakeEngine(reply='{"a": 1}'))
    with server.client() as client:
        reply = client.responses.create(model="fake", input="Hi")
        assert (reply.status, reply.incomplete_details, reply.output_text) == ("completed", None, '{"a": 1}')
        with client.responses.stream(model="fake", input="Hi") as stream:
            assert [event.type for event in stream][-1] == "response.completed"
            assert stream.get_final_response().output_text == '{"a": 1}'


def test_stream_bytes(server: Running) -> None:
    done = post(server, {"input": "Hi", "max_output_tokens": 2, "stream": True})
    assert done.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = done.text.split("\n\n")
    assert frames.pop() == ""
    for frame in frames:
        event, data = frame.split("\n")
        assert event == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in done.text


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model="fake", input="Hi", max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=1
    )
    content = reply.output[0].content[0]
    assert [entry.token for entry in content.logprobs] == list(answer(3))
    assert content.logprobs[0].top_logprobs[0].logprob == -0.5


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 257}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"n": 2}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"input": "x" * 400}, "input"),
    ],
)
def test_refusals(server: Running, fields: dict[str, Any], named: str) -> None:
    done = post(server, {"input": "Hi", "max_output_tokens": 4, **fields})
    assert done.status_code == 400, done.text
    assert done.json()["error"]["param"] == named, done.text


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="does not store responses"):
            call("resp_1")


def test_error_within_a_stream(start: Any) -> None:
    server: Running = start(FakeEngine(delay=0.01))
    with server.client() as client:
        stream = client.responses.create(model="fake", input="Hi", max_output_tokens=100, stream=True)
        next(iter(stream))
        server.engine.dead = True
        with pytest.raises(openai.APIError, match="the engine process ended"):
            list(stream)


def test_async(server: Running) -> None:
    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            text = ""
            async for event in await client.responses.create(
                model="fake", input="Hi", max_output_tokens=9, stream=True
            ):
                text += event.delta if event.type == "response.output_text.delta" else ""
            return text

    assert asyncio.run(main()) == answer(9)
