"""TGI's API, through huggingface_hub's clients and byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, OverloadedError, ValidationError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from octavo import __version__
from octavo.engine.outputs import OutputDelta, TokenLogprobs
from octavo.server.apis.tgi.routes import _Tokens
from octavo.server.state import ServerState
from server_fakes import BROKEN_TOKEN, FakeEngine, answer
from server_harness import Running


@pytest.fixture
def hub(server: Running) -> Iterator[InferenceClient]:
    with InferenceClient(server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def refusing() -> Iterator[Running]:
    """A server for requests that never reach its engine."""
    running = Running(FakeEngine(), ServerState())
    yield running
    running.stop()


def post(server: Running, path: str, payload: Any, **headers: str) -> httpx.Response:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return httpx.post(
        server.url + path, content=body, headers={"content-type": "application/json"} | headers, timeout=20
    )


def events_of(done: httpx.Response) -> list[Any]:
    frames = done.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data:") for frame in frames)
    return [json.loads(frame.removeprefix("data:")) for frame in frames]


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_text(hub: InferenceClient, server: Running) -> None:
    assert hub.text_generation("Hi", max_new_tokens=30) == answer(30)
    assert hub.text_generation("Hi", max_new_tokens=3, return_full_text=True) == "Hi" + answer(3)
    assert server.engine.prompts[0] == [1, ord("H"), ord("i")]
    params = server.engine.params[0]
    # The likeliest tokens unless something asks to draw; stop texts stay.
    assert (params.temperature, params.max_tokens, params.seed, params.logprobs) == (0.0, 30, None, None)
    assert params.include_stop_str_in_output


def test_parameters(hub: InferenceClient, server: Running) -> None:
    hub.text_generation(
        "Hi",
        do_sample=True,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        seed=7,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        stop=["q", "zz"],
        max_new_tokens=3,
        truncate=1,
    )
    params = server.engine.params[0]
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 5, 0.9, 7)
    assert (params.repetition_penalty, params.frequency_penalty, params.stop) == (1.25, 0.5, ["q", "zz"])
    assert server.engine.prompts[0] == [ord("i")]


@pytest.mark.parametrize("parameters", [{"do_sample": True}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_sampling_tells_its_seed(server: Running, parameters: dict[str, Any]) -> None:
    done = post(server, "/generate", {"inputs": "Hi", "parameters": parameters | {"details": True}})
    params = server.engine.params[0]
    assert params.temperature == 1.0
    assert done.json()["details"]["seed"] == params.seed is not None


def test_default_length(server: Running, start: Callable[..., Running]) -> None:
    post(server, "/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": None}})
    assert server.engine.params[0].max_tokens == 256 - 3
    roomy = start(FakeEngine(max_model_len=4096))
    post(roomy, "/generate", {"inputs": "Hi"})
    assert roomy.engine.params[0].max_tokens == 1024


def test_details(hub: InferenceClient) -> None:
    with pytest.warns(UserWarning, match="details"):
        hub.text_generation("Hi", decoder_input_details=True, max_new_tokens=1)
    done = hub.text_generation(
        "Hi", details=True, decoder_input_details=True, max_new_tokens=20, top_n_tokens=2, seed=None
    )
    assert done.generated_text == answer(20)
    details = done.details
    assert details is not None
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", 20, None)
    assert "".join(token.text for token in details.tokens) == answer(20)
    assert {(token.logprob, token.special) for token in details.tokens} == {(-0.5, False)}
    assert [(token.id, token.text) for token in details.prefill] == [(1, ""), (ord("H"), "H"), (ord("i"), "i")]
    assert details.top_tokens is not None
    tops: Any = details.top_tokens[0]
    assert [(top["text"], top["logprob"]) for top in tops] == [("H", -0.5), ("x", -9999.0)]


def test_fields_of_an_answer(server: Running) -> None:
    done = post(server, "/generate", {"inputs": "Hi", "parameters": {"details": True, "max_new_tokens": 2}}).json()
    assert list(done) == ["generated_text", "details"]
    assert list(done["details"]) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert list(done["details"]["tokens"][0]) == ["id", "text", "logprob", "special"]
    assert list(post(server, "/generate", {"inputs": "Hi"}).json()) == ["generated_text"]


def test_best_of(server: Running) -> None:
    plain = server.engine._delta

    def second_is_likelier(position: int, count: int, index: int, *rest: Any) -> OutputDelta:
        delta = plain(position, count, index, *rest)
        delta.text, delta.logprobs = "ab"[index], [TokenLogprobs(ord("ab"[index]), -2.0 + index)]
        return delta

    server.engine._delta = second_is_likelier  # type: ignore[method-assign]
    payload = {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True, "max_new_tokens": 2, "details": True}}
    done = post(server, "/generate", payload).json()
    assert done["generated_text"] == "bb"
    assert [other["generated_text"] for other in done["details"]["best_of_sequences"]] == ["aa"]
    assert done["details"]["tokens"][0]["logprob"] == -1.0


def test_headers(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.02))
    headers = post(server, "/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}).headers
    assert headers["x-compute-type"] == "cpu"
    assert (headers["x-compute-characters"], headers["x-prompt-tokens"], headers["x-generated-tokens"]) == (
        "2",
        "3",
        "5",
    )
    parts = [int(headers[f"x-{part}-time"]) for part in ("validation", "queue", "inference")]
    assert parts[2] >= 100
    assert sum(parts) <= int(headers["x-total-time"])
    assert float(headers["x-compute-time"]) == pytest.approx(int(headers["x-total-time"]) / 1000, abs=0.002)
    assert int(headers["x-time-per-token"]) == pytest.approx(parts[2] / 5, abs=1)
    streamed = post(server, "/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}).headers
    assert (streamed["x-compute-type"], streamed["x-accel-buffering"]) == ("cpu", "no")
    assert streamed["content-type"].startswith("text/event-stream")


def test_stream(hub: InferenceClient) -> None:
    assert "".join(hub.text_generation("Hi", stream=True, max_new_tokens=60)) == answer(60)
    parts = list(hub.text_generation("Hi", stream=True, details=True, max_new_tokens=40))
    assert [part.index for part in parts] == list(range(1, 41))
    assert all(part.details is None and part.generated_text is None for part in parts[:-1])
    last = parts[-1]
    assert last.generated_text == answer(40) == "".join(part.token.text for part in parts)
    assert last.details is not None
    assert (last.details.finish_reason, last.details.generated_tokens, last.details.input_length) == ("length", 40, 3)


def test_stream_bytes(server: Running) -> None:
    payload = {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "return_full_text": True}}
    events = events_of(post(server, "/generate_stream", payload))
    tokens = [{"id": ord(text), "text": text, "logprob": -0.5, "special": False} for text in "He"]
    assert events == [
        {"index": 1, "token": tokens[0], "generated_text": None, "details": None},
        {"index": 2, "token": tokens[1], "generated_text": "HiHe", "details": None},
    ]


def test_tokens_that_come_together(server: Running) -> None:
    """A character of several tokens, a special token, and text that is held back."""
    first = OutputDelta(
        text="aé", token_ids=[97, 0xC3, 0xA9], logprobs=[TokenLogprobs(token, -1.0) for token in (97, 0xC3, 0xA9)]
    )
    held = OutputDelta(text="", token_ids=[98], logprobs=[TokenLogprobs(98, -1.0)])
    end = OutputDelta(
        text="bc", token_ids=[99, 1], logprobs=[TokenLogprobs(99, -1.0), TokenLogprobs(1, -1.0)], finish_reason="stop"
    )

    async def stream(*arguments: Any, **named: Any) -> Any:
        for delta in (first, held, end):
            yield delta

    server.engine.stream = stream  # type: ignore[method-assign]
    tokenizer: Any = server.engine.tokenizer
    tokenizer.token_bytes = lambda token: b"" if token == 1 else bytes([token])
    payload = {"inputs": "Hi", "parameters": {"details": True}}
    events = events_of(post(server, "/generate_stream", payload))
    assert [event["token"]["text"] for event in events] == ["a", "", "é", "", "", "bc"]
    assert [event["token"]["special"] for event in events] == [False] * 5 + [True]
    assert events[-1]["generated_text"] == "aébc"
    assert events[-1]["details"]["finish_reason"] == "eos_token"
    whole = post(server, "/generate", payload).json()
    assert [token["text"] for token in whole["details"]["tokens"]] == ["a", "", "é", "b", "c", ""]
    assert whole["generated_text"] == "aébc"


@given(st.data())
def test_every_text_is_spread_whole(data: st.DataObject) -> None:
    """Over tokens cut anywhere, also within characters, whatever of it was held back."""
    raw = data.draw(st.text(min_size=1, max_size=30)).encode("utf-8", "ignore")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(raw) - 1, 1)), max_size=8)))
    pieces = [raw[start:end] for start, end in pairwise([0, *cuts, len(raw)])]
    tokens = _Tokens(lambda token: pieces[token], b"")
    text = raw.decode()
    text = text[data.draw(st.integers(0, 2)) : len(text) - data.draw(st.integers(0, 2))]
    spread = tokens.spread(text, range(len(pieces)))
    assert len(spread) == len(pieces)
    assert "".join(spread) == text


@pytest.mark.parametrize(
    ("reason", "stop", "shown"),
    [("stop", None, "eos_token"), ("stop", 2, "eos_token"), ("stop", "x", "stop_sequence"), ("length", None, "length")],
)
def test_finish_reasons(server: Running, reason: str, stop: Any, shown: str) -> None:
    async def stream(*arguments: Any, **named: Any) -> Any:
        yield OutputDelta(text="a", token_ids=[97], logprobs=[TokenLogprobs(97, -1.0)])
        yield OutputDelta(finish_reason=reason, stop_reason=stop)

    server.engine.stream = stream  # type: ignore[method-assign]
    payload = {"inputs": "Hi", "parameters": {"details": True}}
    assert post(server, "/generate", payload).json()["details"]["finish_reason"] == shown
    # An end without a token has an event all the same.
    events = events_of(post(server, "/generate_stream", payload))
    assert events[-1]["details"]["finish_reason"] == shown
    assert events[-1]["generated_text"] == "a"


def test_compatible_route(server: Running) -> None:
    payload: dict[str, Any] = {"inputs": "Hi", "parameters": {"max_new_tokens": 3}}
    assert post(server, "/", payload).json() == [{"generated_text": answer(3)}]
    assert len(events_of(post(server, "/", payload | {"stream": True}))) == 3


def test_async_client(server: Running) -> None:
    async def run() -> None:
        async with AsyncInferenceClient(server.url, timeout=20) as client:
            assert await client.text_generation("Hi", max_new_tokens=8) == answer(8)
            parts = await client.text_generation("Hi", max_new_tokens=40, stream=True)
            assert "".join([part async for part in parts]) == answer(40)

    asyncio.run(run())


def test_litellm(server: Running) -> None:
    """Its provider for TGI asks for chat completions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import litellm

        messages = [{"role": "user", "content": "Hi"}]
        done = litellm.completion("huggingface/fake", messages, api_base=server.url, api_key="x", max_tokens=20)
    assert done.choices[0].message.content == answer(20)


def test_info(server: Running) -> None:
    info = httpx.get(f"{server.url}/info").json()
    assert info["model_id"] == "fake"
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (255, 256)
    assert info["version"] == __version__
    server.engine.dead = True
    done = httpx.get(f"{server.url}/info")
    assert (done.status_code, done.json()["error_type"]) == (503, "overloaded")


def test_info_tells_the_limits_that_hold(start: Callable[..., Running]) -> None:
    server = start(max_stops=2, max_answers=3, max_engine_requests=5, max_queue_requests=7)
    info = httpx.get(f"{server.url}/info").json()
    assert (info["max_stop_sequences"], info["max_best_of"], info["max_concurrent_requests"]) == (2, 3, 12)
    for most, parameters in (
        (info["max_stop_sequences"], {"stop": ["a", "b", "c"]}),
        (info["max_best_of"], {"do_sample": True}),
    ):
        for count, status in ((most, 200), (most + 1, 422)):
            own = {"stop": parameters["stop"][:count]} if "stop" in parameters else parameters | {"best_of": count}
            assert post(server, "/generate", {"inputs": "Hi", "parameters": own}).status_code == status
    longest = info["max_input_tokens"] - 1  # the start token is one
    for text, status in (("a" * longest, 200), ("a" * (longest + 1), 422)):
        assert post(server, "/generate", {"inputs": text}).status_code == status
    default = httpx.get(f"{start().url}/info").json()
    assert (default["max_stop_sequences"], default["max_best_of"], default["max_concurrent_requests"]) == (
        16,
        128,
        256 + 64 + 2048,
    )
    assert httpx.get(f"{start(max_concurrency=9).url}/info").json()["max_concurrent_requests"] == 9


def test_a_silent_stream_shows_life(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.12), sse_keep_alive_seconds=0.03)
    done = post(server, "/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 3}})
    assert done.text.startswith(": keep-alive\n\n")
    assert (done.headers["x-compute-type"], done.headers["x-accel-buffering"]) == ("cpu", "no")
    with InferenceClient(server.url, timeout=20) as client:
        assert "".join(client.text_generation("Hi", stream=True, max_new_tokens=3)) == answer(3)


def test_model_of_several(server: Running) -> None:
    assert post(server, "/generate", {"inputs": "Hi", "model": "org/alias"}).status_code == 200
    done = post(server, "/generate", {"inputs": "Hi", "model": "absent"})
    assert (done.status_code, done.json()["error_type"]) == (422, "validation")


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"temperature": 0}, "temperature"),
        ({"temperature": "hot"}, "parameters.temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 1.0}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"typical_p": 1.5}, "typical_p"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 254}, "max_new_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"truncate": 0}, "truncate"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64, "do_sample": True}, "seed"),
        ({"top_n_tokens": 6}, "top_n_tokens"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129, "do_sample": True}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "seed"),
        ({"watermark": True}, "watermark"),
        ({"adapter_id": "x"}, "adapter_id"),
        ({"grammar": {"type": "regex", "value": "a+"}}, "grammar"),
        ({"grammar": {"type": "json", "value": {"properties": {}}}}, "grammar"),
        ({"grammar": {"type": "regex", "value": None}}, "grammar"),
        ({"grammar": {"type": "lark", "value": "x"}}, "grammar"),
        ({"grammar": "x"}, "parameters.grammar"),
        (5, "parameters"),
    ],
)
def test_bad_parameters(refusing: Running, parameters: Any, named: str) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        done = post(refusing, path, {"inputs": "Hi", "parameters": parameters})
        assert done.status_code == 422, done.text
        assert done.json()["error_type"] == "validation"
        assert done.json()["error"].startswith(f"Input validation error: {named}: "), done.text
    assert not refusing.engine.prompts


def test_not_in_a_stream(refusing: Running) -> None:
    for parameters in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True}):
        done = post(refusing, "/generate_stream", {"inputs": "Hi", "parameters": parameters})
        assert (done.status_code, done.json()["error_type"]) == (422, "validation")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"{}", b'{"inputs": ""}', b'{"inputs": 5}', b"[" * 100_000]
)
def test_bad_bodies(refusing: Running, body: bytes) -> None:
    done = post(refusing, "/generate", body)
    assert (done.status_code, done.json()["error_type"]) == (422, "validation")


def test_too_long(server: Running) -> None:
    for inputs in ("a" * 300, "a" * 100_000):
        done = post(server, "/generate", {"inputs": inputs})
        assert done.status_code == 422
        assert "maximum context length is 256 tokens" in done.json()["error"]


def test_errors_in_the_client(hub: InferenceClient, start: Callable[..., Running]) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        hub.text_generation("Hi", temperature=0)
    with pytest.raises(GenerationError) as caught:
        hub.text_generation(chr(BROKEN_TOKEN))
    assert "secret" not in str(caught.value)
    server = start(FakeEngine(delay=0.02))
    with InferenceClient(server.url) as client:
        parts = iter(client.text_generation("Hi", stream=True, max_new_tokens=200))
        assert next(parts) == "H"
        server.engine.dead = True
        with pytest.raises(GenerationError, match="ended"):
            list(parts)


def test_a_full_queue(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.01), max_engine_requests=1, max_queue_requests=1)
    assert httpx.get(f"{server.url}/info").json()["max_concurrent_requests"] == 2

    async def run() -> list[Any]:
        async with AsyncInferenceClient(server.url, timeout=20) as client:
            asked = [client.text_generation("Hi", max_new_tokens=20) for _ in range(6)]
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(run())
    assert answers.count(answer(20)) == 2
    refused = [error for error in answers if error != answer(20)]
    assert all(isinstance(error, OverloadedError) for error in refused), refused


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_a_client_that_leaves_ends_its_request(start: Callable[..., Running], path: str) -> None:
    server = start(FakeEngine(delay=0.01))
    body = json.dumps({"inputs": "Hi", "parameters": {"max_new_tokens": 200}}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
    )
    wait_until(lambda: server.engine.generated > 3)
    connection.close()
    wait_until(lambda: server.engine.running == 0, 1.0)
    assert server.engine.aborted == 1
    assert server.engine.generated < 100


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
numbers = st.integers(-2, 300) | st.floats(-1, 3) | values
parameter_values = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("best_of", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p"), numbers
    )
    | dict.fromkeys(("max_new_tokens", "truncate", "seed", "top_n_tokens"), numbers)
    | dict.fromkeys(("do_sample", "return_full_text", "details", "decoder_input_details"), st.booleans())
    | {"stop": st.lists(st.text(max_size=3), max_size=5) | values, "grammar": values, "adapter_id": values},
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/generate", "/generate_stream", "/"]),
    inputs=st.text(min_size=1, max_size=20) | values,
    parameters=parameter_values,
    stream=st.booleans(),
)
def test_no_body_is_answered_with_a_fault(
    server: Running, path: str, inputs: Any, parameters: Any, stream: bool
) -> None:
    done = post(server, path, {"inputs": inputs, "parameters": parameters, "stream": stream})
    assert done.status_code in (200, 422), done.text
    if done.status_code == 200 and done.headers["content-type"].startswith("text/event-stream"):
        assert events_of(done)[-1]["generated_text"] is not None
