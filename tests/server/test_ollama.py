"""Ollama's API, through its own package, litellm, and byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import httpx
import ollama
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from octavo import __version__
from octavo.config import EngineConfig
from octavo.server.access.api_keys import KeyRing
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from server_fakes import BROKEN_TOKEN, FakeEngine, answer
from server_harness import Running

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def native(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def refusing() -> Iterator[Running]:
    """A server for requests that never reach its engine."""
    running = Running(FakeEngine(), ServerState())
    yield running
    running.stop()


def prompt_of(server: Running) -> str:
    return "".join(map(chr, server.engine.prompts[-1]))


def post(server: Running, path: str, payload: Any, **headers: str) -> httpx.Response:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return httpx.post(server.url + path, content=body, headers=headers, timeout=20)


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def check_durations(last: Any, prompt_tokens: int, tokens: int) -> None:
    assert last["prompt_eval_count"] == prompt_tokens
    assert last["eval_count"] == tokens
    parts = [last[f"{part}_duration"] for part in ("load", "prompt_eval", "eval")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= last["total_duration"]
    assert last["total_duration"] < 20e9


def test_chat(native: ollama.Client, server: Running) -> None:
    options = {"num_predict": 20, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3}
    options |= {"stop": ["x"], "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    done = native.chat("fake", USER, options=options | {"num_ctx": 100, "num_gpu": 1})
    assert done.message.role == "assistant"
    assert done.message.content == answer(20)
    assert (done.model, done.done, done.done_reason) == ("fake", True, "length")
    assert done.created_at is not None
    age = datetime.now(timezone.utc) - datetime.fromisoformat(done.created_at.replace("Z", "+00:00"))
    assert abs(age.total_seconds()) < 20
    check_durations(done, len("<user>Hi<assistant>"), 20)
    assert prompt_of(server) == "<user>Hi<assistant>"
    params = server.engine.params[0]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (20, 0.5, 7, 0.9)
    assert (params.min_p, params.seed, params.stop, params.repetition_penalty) == (0.1, 3, ["x"], 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)


def test_chat_streams_every_character_once(native: ollama.Client) -> None:
    parts = list(native.chat("fake", USER, stream=True, options={"num_predict": 60}))
    assert "".join(part.message.content or "" for part in parts) == answer(60)
    assert [part.done for part in parts] == [False] * 60 + [True]
    assert parts[-1].done_reason == "length"
    assert "done_reason" not in parts[0].model_fields_set
    check_durations(parts[-1], len("<user>Hi<assistant>"), 60)


def test_durations_are_of_real_times(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.02))
    payload = {"model": "fake", "prompt": "Hi", "stream": False, "options": {"num_predict": 5}}
    began = time.monotonic_ns()
    times = post(server, "/api/generate", payload).json()
    assert times["total_duration"] <= time.monotonic_ns() - began
    # A timer of uvloop may ring a millisecond early.
    assert times["prompt_eval_duration"] >= 0.018e9
    assert times["eval_duration"] >= 0.075e9
    check_durations(times, len("<user>Hi<assistant>"), 5)


def test_streams_by_default_as_lines(server: Running) -> None:
    done = post(server, "/api/chat", {"model": "fake", "messages": USER, "options": {"num_predict": 2}})
    assert done.headers["content-type"] == "application/x-ndjson"
    assert done.content.endswith(b"\n")
    lines = [json.loads(line) for line in done.content.splitlines()]
    assert [list(line) for line in lines[:2]] == [["model", "created_at", "message", "done"]] * 2
    assert lines[0]["message"] == {"role": "assistant", "content": "H"}
    assert list(lines[2]) == [
        "model",
        "created_at",
        "message",
        "done",
        "done_reason",
        "total_duration",
        "load_duration",
        "prompt_eval_count",
        "prompt_eval_duration",
        "eval_count",
        "eval_duration",
    ]


def test_null_stream_streams(server: Running) -> None:
    done = post(server, "/api/generate", {"model": "fake", "prompt": "Hi", "stream": None, "options": None})
    assert done.headers["content-type"] == "application/x-ndjson"


def test_generate(native: ollama.Client, server: Running) -> None:
    done = native.generate("fake", "Hi", system="Be brief", options={"num_predict": 30})
    assert done.response == answer(30)
    assert prompt_of(server) == "<system>Be brief<user>Hi<assistant>"
    check_durations(done, len("<system>Be brief<user>Hi<assistant>"), 30)
    parts = list(native.generate("fake", "Hi", stream=True, options={"num_predict": 30}))
    assert "".join(part.response or "" for part in parts) == answer(30)


def test_context_goes_on_with_the_conversation(native: ollama.Client, server: Running) -> None:
    first = native.generate("fake", "Hi", options={"num_predict": 3})
    assert first.context == [*server.engine.prompts[0], *map(ord, answer(3))]
    native.generate("fake", "More", context=first.context, options={"num_predict": 3})
    assert prompt_of(server) == "<user>Hi<assistant>" + answer(3) + "<user>More<assistant>"
    streamed = list(native.generate("fake", "Hi", stream=True, options={"num_predict": 3}))
    assert streamed[-1].context == first.context


def test_raw_prompt(native: ollama.Client, server: Running) -> None:
    done = native.generate("fake", "Hi", raw=True, options={"num_predict": 3})
    assert server.engine.prompts[-1] == [1, ord("H"), ord("i")]
    assert done.context is None


def test_a_begun_answer_is_continued(native: ollama.Client, server: Running) -> None:
    native.chat("fake", [*USER, {"role": "assistant", "content": "Hel"}], options={"num_predict": 3})
    assert prompt_of(server) == "<user>Hi<assistant>Hel"


@pytest.mark.parametrize(
    ("think", "expected"),
    [
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        (None, {}),
    ],
)
def test_think_reaches_the_template(native: ollama.Client, server: Running, think: Any, expected: Any) -> None:
    tokenizer: Any = server.engine.tokenizer
    seen: list[dict[str, Any]] = []
    plain = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **given: seen.append(given) or plain(messages, **given)
    native.chat("fake", USER, think=think, options={"num_predict": 1})
    native.generate("fake", "Hi", think=think, options={"num_predict": 1})
    assert seen == [{"add_generation_prompt": True, **expected}] * 2


def test_logprobs(native: ollama.Client) -> None:
    done = native.chat("fake", USER, logprobs=True, top_logprobs=2, options={"num_predict": 2})
    assert done.logprobs is not None
    assert [(entry.token, entry.logprob) for entry in done.logprobs] == [("H", -0.5), ("e", -0.5)]
    assert [top.token for top in done.logprobs[0].top_logprobs or ()] == ["H", "x"]
    streamed = list(native.generate("fake", "Hi", stream=True, logprobs=True, options={"num_predict": 2}))
    assert [part.logprobs[0].token for part in streamed if part.logprobs] == ["H", "e"]


def test_no_limit_is_the_context(native: ollama.Client, server: Running) -> None:
    for predict in (-1, -2, 0, 10_000, None):
        native.chat("fake", USER, options={"num_predict": predict})
        assert server.engine.params[-1].max_tokens is None


def test_whole_numbers_may_have_a_point(native: ollama.Client, server: Running) -> None:
    native.chat("fake", USER, options={"num_predict": 5.0, "top_k": 4.0, "seed": 2.0, "stop": "q"})
    params = server.engine.params[0]
    assert (params.max_tokens, params.top_k, params.seed, params.stop) == (5, 4, 2, ["q"])


@pytest.mark.parametrize(
    ("options", "penalties"),
    [
        # All tokens count: what is asked for, or what no window could change.
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, (1.5, 0)),
        ({"repeat_penalty": 1.5, "repeat_last_n": 256.0}, (1.5, 0)),
        ({"repeat_last_n": 64}, (1, 0)),
        ({"repeat_penalty": 1, "repeat_last_n": 64}, (1, 0)),
        ({"repeat_penalty": 1.5, "presence_penalty": 1, "repeat_last_n": 0}, (1, 0)),
    ],
)
def test_repeat_last_n(
    native: ollama.Client, server: Running, options: dict[str, Any], penalties: tuple[float, float]
) -> None:
    native.chat("fake", USER, options=options | {"num_predict": 1})
    params = server.engine.params[0]
    assert (params.repetition_penalty, params.presence_penalty) == penalties


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_signs_of_life_are_blanks_before_a_line(start: Callable[..., Running], path: str) -> None:
    server = start(FakeEngine(delay=0.12), sse_keep_alive_seconds=0.03)
    body = {"model": "fake", "messages": USER, "prompt": "Hi", "options": {"num_predict": 2}}
    done = post(server, path, body)
    assert done.headers["content-type"] == "application/x-ndjson"
    lines = done.text.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("  ") for line in lines[:2])
    assert all(json.loads(line)["model"] == "fake" for line in lines)
    whole = post(server, path, body | {"stream": False})
    assert (whole.text[0], whole.headers["content-type"]) == ("{", "application/json")
    with ollama.Client(server.url, timeout=20) as client:
        parts = list(client.chat("fake", USER, stream=True, options={"num_predict": 3}))
        assert "".join(part.message.content or "" for part in parts) == answer(3)


def test_an_error_after_signs_of_life_is_a_line(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.2), sse_keep_alive_seconds=0.03)
    with httpx.stream("POST", f"{server.url}/api/chat", json={"model": "fake", "messages": USER}, timeout=20) as done:
        assert done.status_code == 200
        pieces = done.iter_text()
        assert next(pieces) == " "
        server.engine.dead = True
        (line,) = "".join(pieces).splitlines()
    assert "ended" in json.loads(line)["error"]


def test_no_prompt_loads(native: ollama.Client, server: Running) -> None:
    for done in (native.generate("fake", keep_alive="5m"), native.chat("fake", [], keep_alive=-1)):
        assert (done.done, done.done_reason, done.model) == (True, "load", "fake")
    assert native.generate("fake", "").response == ""
    assert not server.engine.prompts
    with pytest.raises(ollama.ResponseError, match="not found"):
        native.generate("absent")


def test_latest_is_left_off(native: ollama.Client) -> None:
    done = native.chat("fake:latest", USER, options={"num_predict": 3})
    assert (done.model, done.message.content) == ("fake:latest", answer(3))
    assert native.show("org/alias:latest").capabilities == ["completion"]


def test_list_show_and_ps(native: ollama.Client, server: Running) -> None:
    models = native.list().models
    assert [model.model for model in models] == ["fake", "org/alias"]
    assert all(len(model.digest or "") == 64 and model.modified_at for model in models)
    shown = native.show("fake")
    assert shown.modelinfo is not None
    assert shown.details is not None
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == 256
    assert shown.details.quantization_level == "F32"
    running = native.ps().models
    assert [model.model for model in running] == ["fake", "org/alias"]
    assert (running[0].context_length, running[0].size_vram) == (256, 0)
    assert running[0].expires_at is not None
    # Older clients.
    assert post(server, "/api/show", {"name": "fake"}).status_code == 200


def test_async_client(server: Running) -> None:
    async def run() -> None:
        async with ollama.AsyncClient(server.url) as client:
            done = await client.chat("fake", USER, options={"num_predict": 8})
            assert done.message.content == answer(8)
            parts = await client.generate("fake", "Hi", stream=True, options={"num_predict": 40})
            assert "".join([part.response or "" async for part in parts]) == answer(40)

    asyncio.run(run())


@pytest.mark.parametrize("think", [None, False])
def test_litellm(server: Running, think: bool | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import litellm

        options: Any = {"api_base": server.url, "max_tokens": 30, "temperature": 0.5, "stop": ["Q"]}
        for provider in ("ollama_chat", "ollama"):
            done = litellm.completion(f"{provider}/fake", USER, **options)
            assert done.choices[0].message.content.strip() == answer(30).strip()
            assert done.usage.completion_tokens == 30
            stream = litellm.completion(f"{provider}/fake", USER, stream=True, **options)
            assert "".join(part.choices[0].delta.content or "" for part in stream) == answer(30)
    assert server.engine.params[0].max_tokens == 30


def test_unknown_model(native: ollama.Client) -> None:
    for call in (
        lambda: native.chat("absent", USER),
        lambda: native.generate("absent", "Hi"),
        lambda: native.show("absent"),
        lambda: list(native.chat("absent", USER, stream=True)),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == 404
        assert caught.value.error == "model 'absent' not found, try pulling it first"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_p": 2}}, "options.top_p"),
        ({"options": {"top_k": 1.5}}, "options.top_k"),
        ({"options": {"num_predict": "many"}}, "options.num_predict"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"presence_penalty": 0.5, "repeat_last_n": 255}}, "options.repeat_last_n"),
        ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"options": {"repeat_last_n": 1.5}}, "options.repeat_last_n"),
        ({"options": {"stop": 5}}, "options.stop"),
        ({"options": {"stop": [""]}}, "options.stop[0]"),
        ({"options": {"seed": 1e300}}, "options.seed"),
        ({"options": {"num_ctx": []}}, "options.num_ctx"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": 5}, "options"),
        ({"format": "json"}, "format"),
        ({"format": "xml"}, "format"),
        ({"format": {"type": "object"}}, "format"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": "5" + "0" * 400}, "keep_alive"),
        ({"keep_alive": "-"}, "keep_alive"),
        ({"think": "hardly"}, "think"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
    ],
)
def test_bad_fields_of_both(refusing: Running, fields: dict[str, Any], named: str) -> None:
    bodies = {"/api/chat": {"messages": USER}, "/api/generate": {"prompt": "Hi"}}
    for path, body in bodies.items():
        done = post(refusing, path, {"model": "fake", **body, **fields})
        assert done.status_code == 400, done.text
        assert list(done.json()) == ["error"]
        assert done.json()["error"].startswith(f"{named}: "), done.text
    assert not refusing.engine.prompts


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools"),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi", "images": ["aa"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/api/chat", {"messages": "Hi"}, "messages"),
        ("/api/generate", {"images": ["aa"]}, "images"),
        ("/api/generate", {"suffix": "end"}, "suffix"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"context": [-1]}, "context"),
        ("/api/generate", {"context": [1 << 40]}, "context"),
        ("/api/generate", {"context": ["a"]}, "context[0]"),
        ("/api/generate", {"raw": True, "system": "x"}, "system"),
        ("/api/generate", {"prompt": 5}, "prompt"),
    ],
)
def test_bad_fields_of_one(refusing: Running, path: str, fields: dict[str, Any], named: str) -> None:
    done = post(refusing, path, {"model": "fake", "messages": USER, "prompt": "Hi", **fields})
    assert done.status_code == 400
    assert done.json()["error"].startswith(f"{named}: "), done.text


def test_too_long(server: Running) -> None:
    for payload in ({"prompt": "a" * 300}, {"prompt": "a" * 100_000}, {"prompt": "a", "context": [65] * 300}):
        done = post(server, "/api/generate", {"model": "fake", **payload})
        assert done.status_code == 400
        assert "maximum context length is 256 tokens" in done.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"model": "\xff"}'])
def test_not_json(refusing: Running, body: bytes) -> None:
    for path in ("/api/chat", "/api/generate", "/api/show"):
        done = post(refusing, path, body)
        assert done.status_code == 400
        assert isinstance(done.json()["error"], str)


def test_any_content_type_but_not_from_a_web_page(server: Running) -> None:
    payload = {"model": "fake", "prompt": "Hi", "stream": False}
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert post(server, "/api/generate", payload, **form).status_code == 200
    done = post(server, "/api/generate", payload, **form, origin="http://evil.example")
    assert done.status_code == 415
    assert "Content-Type" in done.json()["error"]


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "embed", "embeddings"])
def test_refused(refusing: Running, path: str) -> None:
    done = post(refusing, f"/api/{path}", {"model": "fake"})
    assert done.status_code == 400
    assert done.json()["error"].startswith(f"{path}: ")


def test_delete_is_refused(native: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="cannot be changed"):
        native.delete("fake")


def test_a_fault_before_and_within_a_stream(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.02))
    done = post(server, "/api/generate", {"model": "fake", "prompt": chr(BROKEN_TOKEN), "raw": True})
    assert done.status_code == 500
    assert "secret" not in done.text
    with ollama.Client(server.url) as client:
        parts = client.generate("fake", "Hi", stream=True, options={"num_predict": 200})
        assert next(parts).response == "H"
        server.engine.dead = True
        with pytest.raises(ollama.ResponseError, match="ended"):
            list(parts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(start: Callable[..., Running], stream: bool) -> None:
    server = start(FakeEngine(delay=0.01))
    body = json.dumps({"model": "fake", "prompt": "Hi", "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /api/generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    wait_until(lambda: server.engine.generated > 3)
    connection.close()
    wait_until(lambda: server.engine.running == 0, 1.0)
    assert server.engine.aborted == 1
    assert server.engine.generated < 100


def test_index(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert client.head("/", headers={"user-agent": "ollama/0.20 (amd64 linux) Go/go1.25"}).status_code == 200
        assert client.get("/", headers={"user-agent": "ollama-python/0.6.3"}).text == "Ollama is running"
        assert client.get("/").json()["models"] == ["fake", "org/alias"]
        page = client.get("/", headers={"accept": "text/html"})
        assert page.headers["content-type"].startswith("text/html")
        assert "org/alias" in page.text
        assert client.get("/api/version").json() == {"version": __version__}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
option_names = st.sampled_from(
    [
        "num_predict",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "repeat_penalty",
        "repeat_last_n",
        "tfs_z",
    ]
)
fields = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("format", "keep_alive", "think", "tools", "images", "raw", "context", "suffix", "template", "system"), values
    )
    | {
        "model": st.just("fake") | values,
        "prompt": st.text(max_size=20) | values,
        "messages": st.lists(st.fixed_dictionaries({}, optional={"role": st.just("user") | values, "content": values})),
        "options": st.dictionaries(option_names, values, max_size=4),
        "stream": st.booleans() | values,
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(-3, 30),
    },
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(["/api/chat", "/api/generate", "/api/show"]), body=fields)
def test_no_body_is_answered_with_a_fault(server: Running, path: str, body: Any) -> None:
    done = post(server, path, {"model": "fake", "prompt": "Hi"} | body)
    assert done.status_code < 500, done.text
    last = json.loads(done.content.splitlines()[-1])
    assert "error" in last if done.status_code != 200 else "error" not in last


class Several:
    """A server with a model that is handed over and one, `other`, that is loaded when asked for."""

    def __init__(self, **options: Any) -> None:
        self.started: list[FakeEngine] = []
        self.keys = options.pop("keys", None)
        pinned = options.pop("pinned", False)
        state = ServerState(ServerSettings(**options), self._start, self.keys)
        self.running = Running(FakeEngine(), state)
        self.url = self.running.url
        config = EngineConfig(model="somewhere/other", load_format="fake")
        state.registry.register("other", config, pinned=pinned)

    async def _start(self, config: EngineConfig, progress: Any) -> FakeEngine:
        self.started.append(FakeEngine())
        return self.started[-1]


@pytest.fixture
def several() -> Iterator[Callable[..., Several]]:
    made: list[Several] = []

    def make(**options: Any) -> Several:
        made.append(Several(**options))
        return made[-1]

    yield make
    for server in made:
        server.running.stop()


def test_load_and_unload(several: Callable[..., Several]) -> None:
    server = several(idle_unload=1000.0)
    with ollama.Client(server.url) as client:
        assert [model.model for model in client.list().models] == ["fake", "other", "org/alias"]
        assert client.show("other").modelfile == "FROM somewhere/other\n"
        assert [model.model for model in client.ps().models] == ["fake", "org/alias"]
        assert not server.started
        assert client.generate("other").done_reason == "load"
        assert [model.model for model in client.ps().models] == ["fake", "other", "org/alias"]
        assert client.chat("other:latest", [], keep_alive=0).done_reason == "unload"
        assert server.started[0].closed
        assert [model.model for model in client.ps().models] == ["fake", "org/alias"]
        # The next request loads it again, and has waited for that.
        done = client.chat("other", USER, options={"num_predict": 3})
        assert done.message.content == answer(3)
        assert done.load_duration is not None
        assert done.load_duration > 0
        assert len(server.started) == 2


def test_what_cannot_be_loaded_again_stays(several: Callable[..., Several]) -> None:
    for options, name in (({}, "fake"), ({"pinned": True}, "other"), ({"autoload": False}, "other")):
        server = several(idle_unload=1000.0, **options)
        done = post(server, "/api/generate", {"model": name, "keep_alive": "0s"})
        assert done.status_code == 400
        assert done.json()["error"].startswith("keep_alive: ")
    assert post(server, "/api/generate", {"model": "absent", "keep_alive": 0}).status_code == 404


def test_keep_alive_sets_when_an_idle_model_goes(several: Callable[..., Several]) -> None:
    server = several(idle_unload=1000.0)
    with ollama.Client(server.url) as client:
        client.generate("other", "Hi", keep_alive="10m", options={"num_predict": 1})
        expires = client.ps().models[1].expires_at
        assert expires is not None
        assert 500 < (expires - datetime.now(timezone.utc)).total_seconds() <= 600
        client.generate("other", "Hi", keep_alive=0, options={"num_predict": 1})
        wait_until(lambda: server.started[0].closed)


def test_keep_alive_where_the_operator_keeps_models(several: Callable[..., Several]) -> None:
    server = several()
    with ollama.Client(server.url) as client:
        client.generate("other", "Hi", keep_alive=0, options={"num_predict": 1})
        with pytest.raises(ollama.ResponseError, match="--idle-unload") as caught:
            client.generate("other", keep_alive=0)
        assert caught.value.status_code == 403
        time.sleep(0.2)
        assert not server.started[0].closed
        assert client.ps().models[1].expires_at == datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)


def test_unloading_takes_an_admin(several: Callable[..., Several]) -> None:
    key = "a-key-of-no-great-power-0123456789"
    server = several(keys=KeyRing(arguments=(key,)))
    with ollama.Client(server.url, headers={"Authorization": f"Bearer {key}"}) as client:
        client.generate("other")
        with pytest.raises(ollama.ResponseError, match="admin") as caught:
            client.generate("other", keep_alive=0)
        assert caught.value.status_code == 403
    assert not server.started[0].closed
