"""Whatever tokens come, however they are cut: a streamed answer is the whole one, and both are what a naive model says.

The engine is a process with the real core; its model says its prompt again (`echo_worker`).
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from echo_worker import COMMAND, END, MAX_MODEL_LEN, SHIFT, SPECIAL_IDS, TOKENS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.sampling_params import SamplingParams
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from server_harness import Running

SETTINGS = settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def echo() -> Iterator[Running]:
    async def starting() -> AsyncEngine:
        config = EngineConfig(model="echo", num_blocks=512, max_num_seqs=32)
        return await AsyncEngine.start(config, worker_command=COMMAND)

    server = Running(None, ServerState(ServerSettings()), starting=starting)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def http(echo: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=echo.url, timeout=30) as client:
        yield client


def ids(text: str | bytes) -> list[int]:
    """A text as tokens of a byte."""
    return list(text.encode() if isinstance(text, str) else text)


def naive(body: dict[str, Any], answer: int) -> tuple[str, str, str | None]:
    """(text, finish reason, stop text) of an answer: its text as Python decodes it, searched anew for every token."""
    prompt = body["prompt"]
    stops = body.get("stop") or []
    limit = min(body["max_tokens"], MAX_MODEL_LEN - len(prompt))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for count in range(limit):
        token = prompt[(count + answer * SHIFT) % len(prompt)]
        if token == END and not body.get("ignore_eos"):
            return text + decoder.decode(b"", True), "stop", None
        if token not in SPECIAL_IDS or not body.get("skip_special_tokens", True):
            text += decoder.decode(TOKENS[token])
        # What ends first, and of several that end at one place the longest.
        found = sorted((text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text)
        if found:
            end, length, stop = found[0]
            return text[: end if body.get("include_stop_str_in_output") else end + length], "stop", stop
    return text + decoder.decode(b"", True), "length", None


def streamed(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a streamed completion, joined."""
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        text = answer.read().decode()
        assert answer.status_code == 200, text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines.pop() == "[DONE]"
    joined: dict[int, dict[str, Any]] = {}
    for line in lines:
        (choice,) = json.loads(line)["choices"]
        one = joined.setdefault(choice["index"], {"text": "", "token_ids": [], "finish_reason": None})
        assert one["finish_reason"] is None, "something came after the end"
        one["text"] += choice["text"]
        one["token_ids"] += choice.get("token_ids") or []
        one["finish_reason"], one["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    return [joined[index] for index in sorted(joined)]


def check(http: httpx.Client, body: dict[str, Any], *, model: bool = True) -> None:
    whole = http.post("/v1/completions", json=body)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    parts = streamed(http, body)
    assert [(one["text"], one["finish_reason"], one["stop_reason"]) for one in parts] == [
        (one["text"], one["finish_reason"], one["stop_reason"]) for one in choices
    ]
    if body.get("return_token_ids"):
        assert [one["token_ids"] for one in parts] == [one["token_ids"] for one in choices]
    if model:
        assert [(one["text"], one["finish_reason"], one["stop_reason"]) for one in choices] == [
            naive(body, answer) for answer in range(body.get("n", 1))
        ]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    token = st.one_of(st.integers(0, len(TOKENS) - 1), st.integers(256, len(TOKENS) - 1), st.integers(97, 102))
    prompt = draw(st.lists(token, min_size=1, max_size=40))
    said = b"".join(TOKENS[token] for token in prompt if token not in SPECIAL_IDS).decode("utf-8", "ignore")
    stops = st.text(st.sampled_from("abcdef世🎉 <|"), min_size=1, max_size=4)
    if said:
        pieces = st.tuples(st.integers(0, len(said) - 1), st.integers(1, 6))
        stops = st.one_of(stops, pieces.map(lambda place: said[place[0] : place[0] + place[1]]))
    return {
        "prompt": prompt,
        "max_tokens": draw(st.integers(1, 60)),
        "n": draw(st.integers(1, 3)),
        "stop": draw(st.lists(stops, max_size=3, unique=True)),
        "include_stop_str_in_output": draw(st.booleans()),
        "return_token_ids": draw(st.booleans()),
    }


@SETTINGS
@given(body=requests())
@example(body={"prompt": ids("👩‍👩‍👧 e\u0301 世界 한국어"), "max_tokens": 60})
@example(body={"prompt": ids(b"ok \xff\xf0\x9f\x8e end \xe4\xb8"), "max_tokens": 16})
@example(body={"prompt": ids("aab"), "max_tokens": 9, "stop": ["aab"]})
@example(
    body={
        "prompt": [128, TOKENS.index("\N{REPLACEMENT CHARACTER}".encode())],
        "max_tokens": 1,
        "stop": ["\N{REPLACEMENT CHARACTER}"],
    }
)
@example(body={"prompt": ids("xEN"), "max_tokens": 3, "stop": ["END"]})
@example(body={"prompt": [*ids("one"), SPECIAL_IDS[0], *ids("two"), END], "max_tokens": 20, "stop": ["et"]})
@example(body={"prompt": ids("世世界"), "max_tokens": 30, "stop": ["界世世界世"], "n": 2})
def test_streams_are_whole(http: httpx.Client, body: dict[str, Any]) -> None:
    check(http, body)


@SETTINGS
@given(
    body=requests(),
    stop_ids=st.lists(st.integers(0, len(TOKENS) - 1), max_size=2),
    min_tokens=st.integers(0, 8),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_streams_are_whole_with_all_that_ends_an_answer(
    http: httpx.Client, body: dict[str, Any], stop_ids: list[int], min_tokens: int, flags: tuple[bool, bool]
) -> None:
    body |= {
        "stop_token_ids": stop_ids,
        "min_tokens": min(min_tokens, body["max_tokens"]),
        "skip_special_tokens": flags[0],
        "ignore_eos": flags[1],
    }
    check(http, body, model=False)


@settings(SETTINGS, max_examples=60)
@given(body=requests())
def test_the_engines_pieces_join_to_its_whole_answer(echo: Running, body: dict[str, Any]) -> None:
    params = SamplingParams(
        max_tokens=body["max_tokens"],
        n=body["n"],
        stop=body["stop"],
        include_stop_str_in_output=body["include_stop_str_in_output"],
    )

    async def both() -> tuple[list[str], list[str]]:
        whole = await echo.engine.generate(body["prompt"], params)
        texts = [""] * params.n
        async for delta in echo.engine.stream(body["prompt"], params):
            texts[delta.index] += delta.text
        return [output.text for output in whole.outputs], texts

    whole, joined = asyncio.run_coroutine_threadsafe(both(), echo.loop).result(30)
    assert whole == joined == [naive(body, answer)[0] for answer in range(params.n)]


@settings(SETTINGS, max_examples=40)
@given(bodies=st.lists(requests(), min_size=2, max_size=6))
def test_streams_at_once_do_not_mix(echo: Running, bodies: list[dict[str, Any]]) -> None:
    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
        answer = await client.post("/v1/completions", json=body | {"stream": True})
        texts = [""] * body["n"]
        for line in answer.text.split("\n\n"):
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
        return texts

    async def all_of_them() -> list[list[str]]:
        async with httpx.AsyncClient(base_url=echo.url, timeout=30) as client:
            return await asyncio.gather(*(one(client, body) for body in bodies))

    assert asyncio.run(all_of_them()) == [[naive(body, answer)[0] for answer in range(body["n"])] for body in bodies]
