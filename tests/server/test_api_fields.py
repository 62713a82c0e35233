"""Fields of OpenAI's API beyond the usual, and pitfalls that other servers fell into."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pydantic
import pytest
from octavo.engine.outputs import OutputDelta, TokenLogprobs
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.server.settings import ServerSettings
from server_fakes import FakeEngine, answer
from server_harness import Running

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def post(server: Running, path: str, **body: Any) -> Any:
    done = httpx.post(server.url + path, json=body, timeout=20)
    assert done.status_code == 200, done.text
    return done.json()


def chunks(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    done = httpx.post(server.url + path, json=body | {"stream": True}, timeout=20)
    assert done.status_code == 200, done.text
    lines = [line.removeprefix("data: ") for line in done.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_no_tokens_at_all(server: Running) -> None:
    for path, given in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "Hi"})):
        body = {**given, "max_tokens": 0, "n": 2}
        done = post(server, path, **body)
        assert [choice["finish_reason"] for choice in done["choices"]] == ["length"] * 2
        assert done["usage"]["completion_tokens"] == 0
        assert done["usage"]["prompt_tokens"] > 0
        streamed = chunks(server, path, **body, stream_options={"include_usage": True})
        assert streamed[-1]["choices"] == []
        assert [chunk["choices"][0]["finish_reason"] for chunk in streamed[-3:-1]] == ["length"] * 2
    echoed = post(server, COMPLETIONS, prompt=["Hi", "Ho"], max_tokens=0, echo=True)
    assert [choice["text"] for choice in echoed["choices"]] == ["Hi", "Ho"]
    assert server.engine.prompts == []


def test_token_ids(server: Running) -> None:
    prompt = [ord(character) for character in "<user>Hi<assistant>"]
    made = [ord(character) for character in answer(3)]
    done = post(server, CHAT, messages=USER, max_tokens=3, return_token_ids=True)
    assert (done["prompt_token_ids"], done["choices"][0]["token_ids"]) == (prompt, made)
    streamed = chunks(server, CHAT, messages=USER, max_tokens=3, return_token_ids=True, n=2)
    assert [chunk.get("prompt_token_ids") for chunk in streamed] == [prompt] + [None] * (len(streamed) - 1)
    done = post(server, COMPLETIONS, prompt=[[65], [66]], max_tokens=3, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in done["choices"]] == [[65], [66]]
    assert [choice["token_ids"] for choice in done["choices"]] == [made, made]
    streamed = chunks(server, COMPLETIONS, prompt=[65], max_tokens=3, return_token_ids=True)
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in streamed] == [[65], None, None]
    assert [token for chunk in streamed for token in chunk["choices"][0]["token_ids"]] == made


def test_a_long_prompt_is_cut(server: Running) -> None:
    post(server, COMPLETIONS, prompt="x" * 300 + "end", max_tokens=2, truncate_prompt_tokens=5)
    post(server, COMPLETIONS, prompt="x" * 300 + "end", max_tokens=6, truncate_prompt_tokens=-1)
    post(
        server, COMPLETIONS, prompt="begin" + "x" * 300, max_tokens=2, truncate_prompt_tokens=6, truncation_side="right"
    )
    prompts = ["".join(map(chr, prompt)) for prompt in server.engine.prompts]
    assert prompts == ["xxend", "x" * 247 + "end", "\x01begin"]


class GradedEngine(FakeEngine):
    """The second of its answers is the likeliest, then the last."""

    def _delta(self, position: int, count: int, index: int, params: SamplingParams, cached: int) -> OutputDelta:
        delta = super()._delta(position, count, index, params, cached)
        delta.text = str(index)
        if delta.logprobs is not None:
            grade = (-3.0, -1.0, -2.5, -2.0)[index]
            delta.logprobs = [TokenLogprobs(delta.token_ids[0], grade, [])]
        return delta


def test_the_best_of_several(start: Callable[..., Running]) -> None:
    server = start(GradedEngine())
    done = post(server, COMPLETIONS, prompt=["a", "b"], max_tokens=2, best_of=4, n=2)
    assert [choice["text"] for choice in done["choices"]] == ["11", "33", "11", "33"]
    assert [choice["index"] for choice in done["choices"]] == [0, 1, 2, 3]
    assert done["choices"][0]["logprobs"] is None
    assert done["usage"]["completion_tokens"] == 2 * 4 * 2
    done = httpx.post(server.url + COMPLETIONS, json={"prompt": "a", "best_of": 2, "stream": True})
    assert (done.status_code, done.json()["error"]["param"]) == (400, "best_of")


def test_echo_of_a_chat(server: Running) -> None:
    messages = [*USER, {"role": "assistant", "content": "So: "}]
    body = {"messages": messages, "max_tokens": 3, "echo": True, "continue_final_message": True}
    assert post(server, CHAT, **body)["choices"][0]["message"]["content"] == "So: " + answer(3)
    streamed = chunks(server, CHAT, **body)
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in streamed) == "So: " + answer(3)


def test_what_templates_read(server: Running) -> None:
    seen: list[dict[str, Any]] = []
    tokenizer: Any = server.engine.tokenizer
    tokenizer.apply_chat_template = lambda messages, **arguments: seen.append(arguments) or "x"
    documents = [{"title": "a", "text": "b"}]
    post(server, CHAT, messages=USER, max_tokens=1, reasoning_effort="none", documents=documents)
    post(server, CHAT, messages=USER, max_tokens=1, reasoning_effort="high", chat_template_kwargs={"tools": 1, "x": 2})
    assert (seen[0]["enable_thinking"], seen[0]["reasoning_effort"], seen[0]["documents"]) == (False, "none", documents)
    assert (seen[1]["enable_thinking"], seen[1]["reasoning_effort"], seen[1]["x"]) == (True, "high", 2)
    assert "tools" not in seen[1]


def test_request_ids(server: Running) -> None:
    assert post(server, CHAT, messages=USER, max_tokens=1, request_id="mine-1")["id"] == "chatcmpl-mine-1"
    assert "\n" not in post(server, CHAT, messages=USER, max_tokens=1, request_id="a\nb")["id"]
    headers = {"X-Request-Id": "theirs"}
    body = {"prompt": "Hi", "request_id": "mine", "max_tokens": 1}
    assert httpx.post(server.url + COMPLETIONS, json=body, headers=headers).json()["id"] == "cmpl-theirs"


def test_defaults_by_precedence(server: Running) -> None:
    model = server.engine.model
    server.engine.model = msgspec.structs.replace(model, sampling_defaults={"temperature": 0.6, "top_k": 20})
    post(server, CHAT, messages=USER, max_tokens=1, temperature=None, top_k=None)
    post(server, CHAT, messages=USER, max_tokens=1, temperature=0, top_k=-1)
    asked = [(params.temperature, params.top_k, params.top_p) for params in server.engine.params]
    assert asked == [(0.6, 20, 1.0), (0.0, -1, 1.0)]


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_parse_where_the_engine_constrains(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(reply='{"name": "Ada", "age": 36}', constrains_output=True))
    with server.client() as client:
        done = client.chat.completions.parse(model="fake", messages=USER, response_format=Person)
        assert done.choices[0].message.parsed == Person(name="Ada", age=36)
        assert server.engine.params[0].structured_outputs["json"]["required"] == ["name", "age"]
        with client.chat.completions.stream(model="fake", messages=USER, response_format=Person) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == Person(name="Ada", age=36)
        reply = client.responses.parse(model="fake", input="Hi", text_format=Person)
        assert reply.output_parsed == Person(name="Ada", age=36)
        for extra, spec in (
            ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
            ({"guided_json": '{"type": "object"}'}, {"json": {"type": "object"}}),
            ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
            ({"response_format": {"type": "json_object"}}, {"json_object": True}),
            ({"response_format": {"type": "text"}}, None),
        ):
            client.chat.completions.create(model="fake", messages=USER, extra_body=extra)
            assert server.engine.params[-1].structured_outputs == spec


def test_parse_is_refused_where_it_does_not(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format: 'json_schema' is not supported") as refused:
        client.chat.completions.parse(model="fake", messages=USER, response_format=Person)
    assert refused.value.param == "response_format"


def test_octavos_own_engine_says_that_it_can() -> None:
    from octavo.engine.async_engine import AsyncEngine

    assert AsyncEngine.constrains_output


def test_a_schema_too_deep(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(constrains_output=True))
    schema: dict[str, Any] = {}
    for _ in range(65):
        schema = {"items": schema}
    done = httpx.post(server.url + CHAT, json={"messages": USER, "guided_json": schema})
    assert done.status_code == 400, done.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_a_silent_stream_shows_life(start: Callable[..., Running], path: str) -> None:
    server = start(FakeEngine(delay=0.12), sse_keep_alive_seconds=0.03)
    body = {"prompt": "Hi"} if path == COMPLETIONS else {"input": "Hi"} if "responses" in path else {"messages": USER}
    limit = {"max_output_tokens": 3} if "responses" in path else {"max_tokens": 3}
    text = httpx.post(server.url + path, json=body | limit | {"stream": True}, timeout=20).text
    frames = text.split("\n\n")
    assert frames[0] == ": keep-alive"
    assert frames.count(": keep-alive") >= 6
    assert all(frame.startswith((": keep-alive", "data: ", "event: ")) for frame in frames[:-1])
    events = [frame for frame in frames if frame and not frame.startswith(":")]
    if path == CHAT:
        assert '"role":"assistant"' in events[0]
    assert "".join(json.loads(f"[{part}]")[0] for part in _texts(events)) == answer(3)


def _texts(events: list[str]) -> list[str]:
    found = []
    for event in events:
        data = event.split("data: ", 1)[1]
        if data == "[DONE]":
            continue
        value = json.loads(data)
        delta = value.get("delta")
        text = (
            value["choices"][0].get("text") or value["choices"][0].get("delta", {}).get("content")
            if value.get("choices")
            else delta
            if isinstance(delta, str)
            else (delta or {}).get("text")
        )
        if text:
            found.append(json.dumps(text))
    return found


def test_an_error_after_signs_of_life_is_an_event(start: Callable[..., Running]) -> None:
    engine = FakeEngine(delay=0.2)
    server = start(engine, sse_keep_alive_seconds=0.03)
    body = {"messages": USER, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=20) as done:
        assert done.status_code == 200
        lines = done.iter_lines()
        assert next(lines) == ": keep-alive"
        engine.dead = True
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[0].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert rest[1:] == ["data: [DONE]"]


def test_without_comments(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.05), sse_keep_alive_seconds=0)
    body = {"messages": USER, "stream": True, "max_tokens": 2}
    assert ": keep-alive" not in httpx.post(server.url + CHAT, json=body, timeout=20).text


class BrokenEngine(FakeEngine):
    """Its log probabilities are no numbers."""

    def _delta(self, position: int, count: int, index: int, params: SamplingParams, cached: int) -> OutputDelta:
        delta = super()._delta(position, count, index, params, cached)
        if delta.logprobs is not None:
            delta.logprobs = [TokenLogprobs(delta.token_ids[0], float("nan"), [])]
        return delta


def test_no_answer_holds_what_is_no_number(start: Callable[..., Running]) -> None:
    server = start(BrokenEngine())
    done = httpx.post(server.url + COMPLETIONS, json={"prompt": "Hi", "max_tokens": 2, "logprobs": 1})
    assert done.status_code == 500
    assert "NaN" not in done.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"1e999",
        b"{",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"n": 1' + b"0" * 5000 + b"}",
        b'{"x":' * 5000,
        b'{"messages": [{"role": "user", "content": "\\udfff"}], "max_tokens": 2}',
        b'{"messages": [{"role": "user", "content": ' + b"[" * 30 + b"]" * 30 + b'}], "max_tokens": 2}',
    ],
)
def test_malformed_bodies(server: Running, path: str, body: bytes) -> None:
    done = httpx.post(server.url + path, content=body, headers={"content-type": "application/json"}, timeout=20)
    assert done.status_code == 400, done.text
    assert done.json()["error"]["message"]


def test_the_servers_own_defaults_stand_between(start: Callable[..., Running]) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.9}
    for options, expected in (
        ({}, (0.6, 0.9, -1)),
        ({"override_generation_config": '{"temperature": 0.2, "top_k": 7}'}, (0.2, 0.9, 7)),
        ({"generation_config": "vllm"}, (1.0, 1.0, -1)),
        ({"generation_config": "vllm", "override_generation_config": '{"top_p": 0.5}'}, (1.0, 0.5, -1)),
    ):
        server = start(**options)
        server.engine.model = msgspec.structs.replace(server.engine.model, sampling_defaults=recommended)
        post(server, CHAT, messages=USER, max_tokens=1)
        post(server, COMPLETIONS, prompt="Hi", max_tokens=1)
        post(server, "/v1/responses", input="Hi", max_output_tokens=1)
        post(server, "/v1/messages", messages=USER, max_tokens=1)
        post(server, "/api/chat", model="fake", messages=USER, stream=False)
        asked = {(params.temperature, params.top_p, params.top_k) for params in server.engine.params}
        assert asked == {expected}
        post(server, CHAT, messages=USER, max_tokens=1, temperature=0.1)
        assert server.engine.params[-1].temperature == 0.1


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": -1}', '{"max_tokens": 5}', '{"top_k": "x"}'])
def test_overrides_that_cannot_work(text: str) -> None:
    with pytest.raises(ConfigError, match="override_generation_config"):
        ServerSettings(override_generation_config=text)
