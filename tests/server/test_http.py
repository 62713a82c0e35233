"""Invalid requests, health, and clients that disconnect."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from octavo.server.transport.http_protocol import HttpProtocol
from server_fakes import BROKEN_TOKEN, FakeEngine, answer
from server_harness import Running

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def exchange(server: Running, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read one answer to its end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, body


def request(server: Running, method: str, path: str, body: bytes = b"", headers: str = "") -> tuple[int, Any]:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    status, _, received = exchange(server, head.encode() + body)
    return status, received


def post(server: Running, payload: Any, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    status, received = request(server, "POST", path, body, "Content-Type: application/json\r\n")
    return status, json.loads(received)


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"x"', None),
        (b"null", None),
        (b'{"model": "fake", "messages": [{"role": "user", "content": "\xff"}]}', None),
        (b'{"model": "fake", "temperature": NaN}', None),
        (b"[" * 100_000, None),
        (b'{"x": ' + b"[" * 100_000, None),
        (CHAT | {"temperature": "hot"}, "temperature"),
        (CHAT | {"temperature": -0.5}, "temperature"),
        (CHAT | {"top_p": -0.1}, "top_p"),
        (CHAT | {"max_tokens": -1}, "max_tokens"),
        (CHAT | {"max_tokens": 10**30}, "max_tokens"),
        (CHAT | {"max_completion_tokens": 257}, "max_completion_tokens"),
        (CHAT | {"n": 0}, "n"),
        (CHAT | {"n": 1000}, "n"),
        (CHAT | {"stop": [""]}, "stop[0]"),
        (CHAT | {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        (CHAT | {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT | {"seed": 1 << 70}, "seed"),
        (CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT | {"guided_regex": "a+"}, "guided_regex"),
        (CHAT | {"tools": [{"type": "function"}]}, "tools"),
        (CHAT | {"tools": []}, "tools"),
        (CHAT | {"tool_choice": "auto"}, "tool_choice"),
        (CHAT | {"functions": []}, "functions"),
        (CHAT | {"temperature": 2.5}, "temperature"),
        (CHAT | {"top_k": -2}, "top_k"),
        (CHAT | {"min_tokens": 5}, "min_tokens"),
        (CHAT | {"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        (CHAT | {"stop_token_ids": [1 << 30]}, "stop_token_ids"),
        (CHAT | {"logit_bias": {"5": 101}}, "logit_bias[...]"),
        (CHAT | {"logit_bias": {"5": 10}}, "logit_bias"),
        (CHAT | {"bad_words": ["no"]}, "bad_words"),
        (CHAT | {"allowed_token_ids": [5]}, "allowed_token_ids"),
        (CHAT | {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (CHAT | {"truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        (CHAT | {"chat_template": "{{ messages }}"}, "chat_template"),
        (CHAT | {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHAT | {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (CHAT | {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT | {"structured_outputs": {}}, "structured_outputs"),
        (CHAT | {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        (CHAT | {"guided_json": "{"}, "guided_json"),
        (CHAT | {"guided_choice": []}, "guided_choice"),
        (CHAT | {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        (CHAT | {"messages": []}, "messages"),
        (CHAT | {"messages": None}, "messages"),
        (CHAT | {"messages": "Hi"}, "messages"),
        (CHAT | {"messages": [1]}, "messages[0]"),
        (CHAT | {"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        (CHAT | {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT | {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            CHAT
            | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0]",
        ),
        (CHAT | {"chat_template_kwargs": {"refuse": True}}, "messages"),
    ],
)
def test_bad_chat_request(server: Running, payload: Any, field: str | None) -> None:
    status, answered = post(server, payload)
    assert status == 400, answered
    error = answered["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert field is None or error["message"].startswith(field.split("[")[0])
    # One bad request hurts only itself.
    assert post(server, CHAT)[0] == 200


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a", 1]},
        {"prompt": [[1], "a"]},
        {"prompt": {"a": 1}},
        {"prompt": [1.5]},
        {"prompt": ["a"] * 2000},
    ],
)
def test_bad_prompt(server: Running, payload: Any) -> None:
    status, answered = post(server, payload, "/v1/completions")
    assert status == 400
    assert answered["error"]["param"].startswith("prompt")


def test_null_is_absent_and_unknown_fields_are_ignored(server: Running) -> None:
    fields = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "user",
    )
    status, answered = post(server, CHAT | dict.fromkeys(fields) | {"model": None, "foo": {"bar": 1}})
    assert status == 200
    assert answered["choices"][0]["message"]["content"] == answer(4)


def test_parts_of_text(server: Running) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert post(server, CHAT | {"messages": [{"role": "developer", "content": parts}]})[0] == 200
    assert "".join(map(chr, server.engine.prompts[0])) == "<system>one\ntwo<assistant>"


def test_fields_of_a_chat_answer(server: Running) -> None:
    answered = post(server, CHAT)[1]
    assert list(answered)[:5] == ["id", "object", "created", "model", "choices"]
    nulls = ("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content")
    assert answered["choices"][0]["message"] == {"role": "assistant", "content": answer(4)} | dict.fromkeys(nulls)
    assert answered["choices"][0]["stop_reason"] is None
    assert answered["choices"][0]["token_ids"] is None
    assert answered["prompt_token_ids"] is None
    answered = post(server, CHAT | {"return_token_ids": True})[1]
    assert answered["choices"][0]["token_ids"] == [ord(character) for character in answer(4)]


def test_stream_bytes(server: Running) -> None:
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 2}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    status, headers, received = exchange(server, head.encode() + body)
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    events = [line for line in received.decode().split("\r\n") if line.startswith("data: ")]
    frames = "".join(events).split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "H"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "e"}, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    ]
    assert not any("usage" in chunk for chunk in chunks)


def test_wrong_routes_and_methods(server: Running) -> None:
    status, body = request(server, "GET", "/v1/nothing")
    assert status == 404
    error = json.loads(body)["error"]
    assert (error["code"], error["message"]) == ("not_found", "The path /v1/nothing does not exist.")
    for path, text in (
        ("/chat/completions", "The path /chat/completions does not exist; did you mean /v1/chat/completions?"),
        ("/v1/v1/completions", "The path /v1/v1/completions does not exist; did you mean /v1/completions?"),
        ("/v1/", "The path /v1/ does not exist."),
        ("/v1/embeddings", "The path /v1/embeddings does not exist: this server does not support embeddings."),
    ):
        status, body = request(server, "POST", path, b"{}")
        assert (status, json.loads(body)["error"]["message"]) == (404, text)
    status, body = request(server, "GET", "/v1/chat/completions")
    assert status == 405
    assert json.loads(body)["error"]["code"] == "method_not_allowed"
    assert request(server, "POST", "/health")[0] == 405


def test_wrong_content_type(server: Running) -> None:
    status, body = request(server, "POST", "/v1/completions", b"prompt=Hi", "Content-Type: text/plain\r\n")
    assert status == 415
    assert "application/json" in json.loads(body)["error"]["message"]


def test_bytes_that_are_not_http(server: Running) -> None:
    assert exchange(server, b"\x16\x03\x01\x02\x00garbage\r\n\r\n")[0] == 400
    assert post(server, CHAT)[0] == 200


def test_body_too_large(start: Callable[..., Running]) -> None:
    server = start(max_body_bytes=1000)
    status, answered = post(server, CHAT | {"user": "x" * 2000})
    assert status == 413
    assert answered["error"]["code"] == "body_too_large"
    # Without a declared length too.
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert exchange(server, head + b"800\r\n" + b"x" * 0x800 + b"\r\n0\r\n\r\n")[0] == 413
    assert post(server, CHAT)[0] == 200


def test_an_internal_error_is_500_without_details(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    status, answered = post(server, {"prompt": [BROKEN_TOKEN]}, "/v1/completions")
    assert status == 500
    assert answered["error"]["type"] == "server_error"
    assert "secret" not in answered["error"]["message"]
    assert "secret" in caplog.text
    assert post(server, CHAT)[0] == 200


def test_one_invalid_prompt_ends_the_whole_request(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.005))
    payload = {"prompt": [[65], [66] * 300, [67]], "max_tokens": 100}
    status, answered = post(server, payload, "/v1/completions")
    assert status == 400
    assert answered["error"]["code"] == "context_length_exceeded"
    assert server.engine.prompts == []
    # A fault that only the engine finds ends those that run already.
    payload = {"prompt": [[65], [66, BROKEN_TOKEN], [67]], "max_tokens": 100}
    assert post(server, payload, "/v1/completions")[0] == 500
    wait_until(lambda: server.engine.running == 0)
    assert server.engine.generated < 50


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_ends_its_request(start: Callable[..., Running], stream: bool, prompts: int) -> None:
    server = start(FakeEngine(delay=0.01))
    payload = {"prompt": [[65]] * prompts, "max_tokens": 200, "stream": stream}
    body = json.dumps(payload).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    wait_until(lambda: server.engine.generated > 3)
    connection.close()
    wait_until(lambda: server.engine.running == 0, 1.0)
    assert server.engine.aborted == prompts
    assert server.engine.generated < 100 * prompts
    assert b"octavo_client_disconnects_total 1.0" in request(server, "GET", "/metrics")[1]


def test_a_client_that_leaves_before_its_body_is_whole(server: Running) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    connection.close()
    assert post(server, CHAT)[0] == 200


@pytest.mark.parametrize("name", ["self", "messages", "text", "conversation"])
def test_template_variables_of_any_name(server: Running, name: str) -> None:
    assert post(server, CHAT | {"chat_template_kwargs": {name: 1}})[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 5000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]}),
    ],
)
def test_a_text_much_longer_than_the_context_is_not_tokenized(
    start: Callable[..., Running], path: str, body: dict[str, Any]
) -> None:
    server = start()
    texts: list[str] = []
    assert server.engine.tokenizer is not None
    server.engine.tokenizer.encode = lambda text, special=True: texts.append(text) or [1]  # type: ignore[method-assign]
    status, answered = post(server, body, path)
    assert (status, answered["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 256 tokens" in answered["error"]["message"]
    assert not texts


def test_a_long_model_name_is_not_echoed_whole(server: Running) -> None:
    status, answered = post(server, CHAT | {"model": "x" * 100_000})
    assert status == 404
    assert len(answered["error"]["message"]) < 300


@pytest.mark.parametrize("line", [b"X: a\r\n", b"a", b"X-Y: " + b"a" * 100])
def test_headers_without_end(server: Running, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: ")
        connection.sendall(line * (40_000 // len(line)))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 431 ")
    assert post(server, CHAT)[0] == 200


def test_a_large_body_is_not_taken_for_headers(server: Running) -> None:
    body = json.dumps(CHAT | {"user": "x" * 1_000_000}).encode()
    assert post(server, body)[0] == 200
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in json.dumps(CHAT | {"user": "x" * 50_000}).encode())
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert exchange(server, head + pieces + b"0\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    "begun", [b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_request_that_never_arrives(server: Running, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(HttpProtocol, "arrival_s", 0.2)
    status, headers, _ = exchange(server, begun)
    assert status == 408
    assert headers["connection"] == "close"
    # Nothing at all is nothing to answer.
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        assert connection.recv(1 << 16) == b""


def test_a_slow_completion_outlives_the_arrival_timeout(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpProtocol, "arrival_s", 0.1)
    server = start(FakeEngine(delay=0.1))
    assert post(server, CHAT)[1]["choices"][0]["message"]["content"] == answer(4)
    # Also when the head of a second request has come.
    body = json.dumps(CHAT).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    status, _, received = exchange(server, head + body + head + body[:-1])
    assert status == 200
    assert answer(4).encode() in received


def test_health(server: Running) -> None:
    assert request(server, "GET", "/health") == (200, b"")
    server.engine.dead = True
    status, body = request(server, "GET", "/health")
    assert status == 503
    assert json.loads(body)["error"]["code"] == "engine_dead"
    assert post(server, CHAT)[0] == 503
    # The other routes go on.
    assert request(server, "GET", "/metrics")[0] == 200
    assert request(server, "GET", "/v1/models")[0] == 200


def test_version(server: Running) -> None:
    from octavo import __version__

    assert json.loads(request(server, "GET", "/version")[1]) == {"version": __version__}


def test_model_without_tokenizer(start: Callable[..., Running]) -> None:
    engine = FakeEngine()
    engine.tokenizer = None
    server = start(engine)
    assert post(server, CHAT)[1]["error"]["param"] == "messages"
    assert post(server, {"prompt": "Hi"}, "/v1/completions")[1]["error"]["param"] == "prompt"
    assert post(server, {"prompt": [1, 2], "max_tokens": 3}, "/v1/completions")[1]["choices"][0]["text"] == answer(3)
