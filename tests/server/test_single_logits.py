"""`logit_bias`, `allowed_token_ids`, `bad_words`, and what is refused of them and of constraints, by a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from constrained_server import USER, start_constrained
from server_harness import Running

SETTINGS = {"max_constraint_bytes": 2000, "max_logit_bias": 40, "max_bad_words": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start_constrained(tmp_path_factory.mktemp("models") / "tiny", **SETTINGS)
    yield running
    running.stop()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def tokens(server: Running, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    found: list[int] = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    return found


def texts(client: openai.OpenAI, **fields: Any) -> list[str]:
    """Of a chat and of a completion."""
    fields = {"max_tokens": 12, "seed": 1, **fields}
    chat = client.chat.completions.create(model="fake", messages=USER, **fields)
    plain = client.completions.create(model="fake", prompt="Order", **fields)
    return [chat.choices[0].message.content or "", plain.choices[0].text]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_bias_forces_and_bans(client: openai.OpenAI, server: Running, temperature: float) -> None:
    (a,) = tokens(server, "a")
    assert texts(client, temperature=temperature, logit_bias={str(a): 100}) == ["a" * 12] * 2
    letters = {str(id): 50 for id in tokens(server, "abc")}
    for text in texts(client, temperature=temperature, logit_bias=letters | {str(a): -100}):
        assert set(text) <= {"b", "c"}
    # A bias is no ban of all else: a small one leaves the likeliest as it is.
    assert texts(client, temperature=0, logit_bias={str(a): 1e-6}) == texts(client, temperature=0)


@pytest.mark.parametrize("temperature", [0, 1])
def test_allowed_token_ids(client: openai.OpenAI, server: Running, temperature: float) -> None:
    extra = {"allowed_token_ids": tokens(server, "xyz"), "ignore_eos": True}
    for text in texts(client, temperature=temperature, extra_body=extra):
        assert set(text) <= set("xyz")
        assert text


def test_bad_words(client: openai.OpenAI, server: Running) -> None:
    extra: dict[str, Any] = {"allowed_token_ids": tokens(server, "xyz "), "ignore_eos": True}
    for index, text in enumerate(texts(client, temperature=0, extra_body=extra, max_tokens=30)):
        for word in (text[3:5], text[0:3]):
            if word.strip() == word:
                other = texts(client, temperature=0, extra_body=extra | {"bad_words": [word]}, max_tokens=30)[index]
                assert word in text
                assert word not in other
                assert len(other) == len(text)


def schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": fields}}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (schema(type="frob"), "response_format", "frob"),
    (schema(**{"not": {"type": "string"}}), "response_format", '"not"'),
    (schema(**{"$ref": "http://example.com/schema"}), "response_format", "http://example.com"),
    (schema(enum=["x" * 3000]), "response_format", "max_constraint_bytes is 2000"),
    ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs", ""),
    ({"guided_json": {"type": "frob"}}, "guided_json", "frob"),
    ({"json_schema": {"type": "frob"}}, "json_schema", "frob"),
    ({"json_schema": 5}, "json_schema", "not a int"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
    ({"regex": "a(?=b)b"}, "regex", "look-ahead"),
    ({"guided_grammar": "start: ("}, "guided_grammar", ""),
    ({"grammar": "root ::= missing"}, "grammar", "missing"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "not supported"),
    ({"response_format": {"type": "regex"}}, "response_format.value", "requires a string"),
    ({"response_format": {"type": "json", "value": 5}}, "response_format.value", "requires a JSON schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "not supported"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", ""),
    ({"guided_regex": "a", **schema(type="object")}, "guided_regex", "response_format and guided_regex"),
    ({"grammar": 'start: "a"', "ebnf": 'start: "a"'}, "ebnf", "grammar and ebnf"),
    ({"min_tokens": 2, "max_tokens": 5, "guided_regex": "a"}, "min_tokens", "together with guided_regex"),
    ({"min_tokens": 2, "max_tokens": 5, "allowed_token_ids": [5]}, "min_tokens", "allowed_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is not a token id"),
    ({"logit_bias": {"259": 1}}, "logit_bias", "259 is outside the vocabulary"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]", "101"),
    ({"logit_bias": {str(id): 1 for id in range(41)}}, "logit_bias", "max_logit_bias is 40"),
    ({"allowed_token_ids": []}, "allowed_token_ids", ""),
    ({"allowed_token_ids": [3, 259]}, "allowed_token_ids", "259 is outside the vocabulary"),
    ({"bad_words": ["a", "b", "c", "d"]}, "bad_words", "max_bad_words is 3"),
    ({"bad_words": [" "]}, "bad_words", ""),
]


@pytest.mark.parametrize(("fields", "param", "text"), REFUSED)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_refused(server: Running, path: str, fields: dict[str, Any], param: str, text: str) -> None:
    body = {"messages": USER} if path.startswith("chat") else {"prompt": "Order"}
    for stream in (False, True):
        # A second time it is known.
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/{path}", json=body | fields | {"stream": stream}, timeout=60)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_value", param)
            assert error["message"].startswith(f"{param}: ")
            assert text in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"model": "fake", "messages": USER, "format": {"type": "frob"}}, 400, '{"error":"format: '),
        ("/api/generate", {"model": "fake", "prompt": "x", "format": {"type": "frob"}}, 400, '{"error":"format: '),
        (
            "/generate",
            {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "(a"}}},
            422,
            '{"error":"Input validation error: grammar: ',
        ),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "frob"}}}},
            400,
            '{"error":{"message":"text.format: ',
        ),
    ],
)
def test_refused_by_the_field_of_each_api(
    server: Running, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert (answer.status_code, answer.text[: len(text)]) == (status, text)


def test_what_is_refused_costs_others_nothing(client: openai.OpenAI) -> None:
    for fields, _, _ in REFUSED:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="fake", messages=USER, extra_body=fields)
    assert client.completions.create(model="fake", prompt="Order", max_tokens=3, temperature=0).choices[0].text


def test_an_answer_that_comes_to_a_dead_end(server: Running, client: openai.OpenAI) -> None:
    """After three letters only b may come, and only a is allowed."""
    body = {"prompt": "Order", "guided_regex": "a{3}b", "allowed_token_ids": tokens(server, "a"), "max_tokens": 9}
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert whole.status_code == 400, whole.text
    stream = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60)
    assert stream.status_code == 200
    *pieces, last, done = [line for line in stream.text.splitlines() if line]
    assert "".join(json.loads(piece[6:])["choices"][0]["text"] for piece in pieces) == "aaa"
    assert done == "data: [DONE]"
    for error in (whole.json()["error"], json.loads(last[6:])["error"]):
        assert error["param"] == "guided_regex"
        assert error["message"].startswith("guided_regex: ")
    exposed = httpx.get(f"{server.url}/metrics").text
    # Their answers had begun, so both are counted: one by one, not as those that were refused.
    assert re.search(r'^vllm:request_success_total\{.*finished_reason="error"\} 2(\.0)?$', exposed, re.MULTILINE)
    assert client.completions.create(model="fake", prompt="Order", max_tokens=3, temperature=0).choices[0].text
