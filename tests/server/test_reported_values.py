"""Values that clients send and that such servers have refused or read wrongly."""

from __future__ import annotations

import codecs
import json
from typing import Any

import httpx
import pytest
from octavo.engine.outputs import TokenLogprobs
from octavo.server.apis.openai.responses import CompletionLogprobs, CompletionLogprobWriter
from server_fakes import answer
from server_harness import Running

USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 5.0, "n": 2.0, "seed": 3.0, "top_k": 4.0},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 5.0, "logprobs": 0.0, "stop_token_ids": [7.0]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 5.0},
    "/v1/messages": {"messages": USER, "max_tokens": 5.0, "model": "fake"},
    "/generate": {"inputs": "Hi", "parameters": {"max_new_tokens": 5.0, "top_k": 4.0}},
    "/api/generate": {"model": "fake", "prompt": "Hi", "stream": False, "options": {"num_predict": 5.0}},
}


@pytest.mark.parametrize("path", BODIES)
def test_whole_numbers_may_be_written_as_floats(server: Running, path: str) -> None:
    done = httpx.post(server.url + path, json=BODIES[path], timeout=20)
    assert done.status_code == 200, done.text
    assert server.engine.params[-1].max_tokens == 5
    assert isinstance(server.engine.params[-1].max_tokens, int)


def test_other_floats_are_still_refused(server: Running) -> None:
    for value in (5.5, 1e300, "5"):
        done = httpx.post(server.url + COMPLETIONS, json={"prompt": "Hi", "max_tokens": value}, timeout=20)
        assert done.status_code == 400
        assert done.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_top_p_of_zero_is_taken(server: Running, path: str) -> None:
    body = {key: BODIES[path][key] for key in ("messages", "prompt") if key in BODIES[path]}
    assert httpx.post(server.url + path, json=body | {"top_p": 0, "max_tokens": 2}, timeout=20).status_code == 200


def test_a_byte_order_mark_is_skipped(server: Running) -> None:
    body = codecs.BOM_UTF8 + json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json"}
    done = httpx.post(server.url + COMPLETIONS, content=body, headers=headers, timeout=20)
    assert done.json()["choices"][0]["text"] == answer(2)


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "Hi"})])
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"return_token_ids": True}])
def test_chunks_before_the_usage_say_null(server: Running, path: str, body: Any, more: dict[str, Any]) -> None:
    if path == CHAT and "logprobs" in more:
        more = {"logprobs": True}
    asked = {**body, **more, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    done = httpx.post(server.url + path, json=asked, timeout=20)
    events = [line.removeprefix("data: ") for line in done.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    # Without the option there is no such key.
    del asked["stream_options"]
    assert '"usage"' not in httpx.post(server.url + path, json=asked, timeout=20).text


# A vocabulary of bytes, pieces of characters and words.
TOKENS = [b"Hi", "😀".encode()[:2], "😀".encode()[2:], " é".encode(), b"</s>", b"\xf0\x9f", b"Hi", b"\x98\x80"]
SPECIAL = 4


def logprobs_of(ids: list[int], tops: list[list[int]] | None = None, **options: Any) -> CompletionLogprobs:
    convert = CompletionLogprobWriter(
        lambda token: TOKENS[token], options.pop("as_ids", False), lambda t: t == SPECIAL, **options
    )
    tops = tops or [[] for _ in ids]
    return convert([TokenLogprobs(i, -1.0, [(t, -2.0 - t) for t in top]) for i, top in zip(ids, tops, strict=True)])


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_index_the_text(as_ids: bool) -> None:
    ids = [0, 1, 2, 3, 4, 0]
    text = b"".join(TOKENS[token] for token in ids if token != SPECIAL).decode()
    offsets = logprobs_of(ids, as_ids=as_ids).text_offset
    assert offsets == [0, 2, 2, 3, 5, 5]
    assert [text[offsets[0] : offsets[1]], text[offsets[2] : offsets[3]], text[offsets[3] : offsets[4]]] == [
        "Hi",
        "😀",
        " é",
    ]
    assert text[offsets[5] :] == "Hi"


def test_tokens_that_are_not_text_are_written_as_bytes() -> None:
    made = logprobs_of([1], [[5, 7, 2]])
    assert made.tokens == ["bytes:\\xf0\\x9f"]
    # 1 and 5 have the same bytes and are two tokens all the same.
    assert set(made.top_logprobs[0]) == {"bytes:\\xf0\\x9f", "token_id:5", "bytes:\\x98\\x80", "token_id:2"}


def test_tokens_of_one_text_stay_two() -> None:
    made = logprobs_of([0], [[0, 6, 3]])
    assert made.top_logprobs == [{"Hi": -1.0, " é": -5.0, "token_id:6": -8.0}]
