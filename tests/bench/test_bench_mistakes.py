"""What a bench refuses, and how it says so: options, files, contexts, and a server's own refusals."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from octavo.bench import client, command, offline_engine
from octavo.bench.client import Endpoint, Key, find_key
from octavo.bench.command import BENCHES, BenchOptions, run_bench
from octavo.bench.server_process import server_process
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from octavo.server.access.api_keys import KeyRing
from octavo.server.state import ServerState
from server_fakes import FakeEngine
from server_harness import Running

KEY, OTHER_KEY = "the-bench-key", "the-other-key"
MODELS = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"data": [{"id": "peer"}, {"id": "second"}]}'
PAGE = b"<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>"
ENVIRONMENT = ("OCTAVO_API_KEY", "OPENAI_API_KEY")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, standard output, lines of standard error."""
    with pytest.raises(SystemExit) as exited:
        main(["bench", *arguments])
    printed = capsys.readouterr()
    assert isinstance(exited.value.code, int)
    return exited.value.code, printed.out, printed.err.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """The one line that a mistake is told in."""
    found, out, lines = bench(capsys, *arguments)
    assert (found, out, len(lines)) == (code, "", 1), lines
    assert lines[0].startswith("error: ")
    assert "a fault of Octavo" not in lines[0]
    return lines[0].removeprefix("error: ")


class Peer:
    """Listens on 127.0.0.1 and gives each request the next of some bytes, the last one ever after; None: silence."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._silent: list[socket.socket] = []
        self._closing = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._closing:
                connection.close()
                return
            # A client that has been cancelled is gone in the middle.
            with contextlib.suppress(OSError):
                self._answer(connection)
            if connection not in self._silent:
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            head = b""
            while (line := lines.readline()) not in (b"", b"\r\n"):
                head += line
            size = re.search(rb"Content-Length: (\d+)", head)
            if size is None:
                return
            self.requests.append(head + b"\r\n" + lines.read(int(size[1])))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            self._silent.append(connection)
        else:
            connection.sendall(answer)

    def close(self) -> None:
        self._closing = True
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join(10)
        assert not self._thread.is_alive()
        for held in (*self._silent, self._listener):
            held.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def make(max_model_len: int = 4096, keys: KeyRing | None = None) -> Running:
        running.append(Running(FakeEngine(0.0001, max_model_len), ServerState(keys=keys)))
        return running[-1]

    yield make
    for server in running:
        server.stop()


def answer(status: str, body: bytes, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


def stream(*chunks: str) -> bytes:
    body = "".join(f"data: {chunk}\n\n" for chunk in chunks).encode()
    return answer("200 OK", body, "Content-Type: text/event-stream")


TOKEN = '{"choices": [{"text": "a"}]}'


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (answer("401 Unauthorized", b'{"error": {"message": "No key."}}'), "401 Unauthorized: No key; give a key with"),
        (answer("404 Not Found", PAGE), "404 Not Found; --base-url is to be the address of an OpenAI endpoint"),
        (answer("400 Bad Request", b'{"detail": "too long"}'), "400 Bad Request: too long; the workload does not suit"),
        (answer("429 Slow Down", b"slow\n  down"), "429 Too Many Requests: slow down; it takes no more for now"),
        (answer("500 Oh", b'{"error": "boom"}'), "500 Internal Server Error: boom; see its log"),
        (answer("302 Found", b"", "Location: http://there/v1"), "points to, http://there/v1"),
        (answer("599 Odd", b"x" * 1000), f"599: {'x' * 300}...; see its log"),
        (answer("200 OK", PAGE), "no list of models; --base-url is"),
        (answer("200 OK", b'{"data": [{}]}'), "no list of models"),
        (answer("200 OK", b'{"data": []}'), "lists no model; load one"),
        (b"220 mail.example ESMTP\r\n", "what is no HTTP"),
        (b"", "closed the connection before the end"),
        (MODELS.replace(b"\r\n\r\n", b"\r\nContent-Length: 900\r\n\r\n"), "closed the connection before the end"),
    ],
)
def test_an_answer_that_is_no_list_of_models(
    told: bytes, expected: str, peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.answers = [told]
    line = refused(capsys, "W4", "--base-url", peer.url)
    assert line.startswith(f"{peer.url}/v1/models ")
    assert expected in line
    assert "<" not in line
    assert len(line) < 600


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (answer("503 Busy", b'{"message": "full"}'), "503 Service Unavailable: full; it takes no more for now"),
        (answer("400 Bad", b'{"error": {"message": "id 9 is too high"}}'), "400 Bad Request: id 9 is too high; the"),
        (answer("200 OK", PAGE), "without a stream of completion chunks"),
        (stream("{oops"), "no stream of JSON"),
        (stream(TOKEN), "streamed no `usage`"),
        (stream(TOKEN, '{"usage": {"completion_tokens": 3}}'), "gave 3 tokens instead of 8; the bench needs"),
        (
            stream(TOKEN, '{"error": {"message": "engine died"}}'),
            "in the middle of an answer: engine died; see its log",
        ),
    ],
)
def test_an_answer_that_is_no_completion(
    told: bytes, expected: str, peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.answers = [MODELS, told]
    line = refused(capsys, "W4", "--base-url", peer.url)
    assert line.startswith(f"{peer.url}/v1/completions ")
    assert expected in line


def test_silence_ends(peer: Peer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LIST_SECONDS", 0.2)
    peer.answers = [None]
    assert "said nothing for 0.2 s" in refused(capsys, "W4", "--base-url", peer.url)


def test_one_refusal_of_many_ends_the_run(peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
    whole = stream(TOKEN, '{"usage": {"completion_tokens": 8}}')
    peer.answers = [MODELS, whole, answer("429 Slow Down", b"")]
    code, out, lines = bench(capsys, "W4", "--base-url", peer.url, "--concurrency", "16")
    assert (code, out, len(lines)) == (1, "", 2)
    assert lines[0].startswith("W4: concurrency 16, run 1 of 3")
    assert "429 Too Many Requests" in lines[1]


def test_a_server_with_keys(
    start: Callable[..., Running], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(keys=KeyRing(arguments=[KEY]))
    command_line = ("W4", "--base-url", server.url, "--runs", "1", "--num-prompts", "2", "--json")
    line = refused(capsys, *command_line)
    assert "401 Unauthorized" in line
    assert line.endswith("give a key with --api-key, or in OCTAVO_API_KEY or OPENAI_API_KEY in the environment")
    monkeypatch.setenv("OPENAI_API_KEY", OTHER_KEY)
    assert "the key of OPENAI_API_KEY" in refused(capsys, *command_line)
    assert OTHER_KEY not in refused(capsys, *command_line)
    monkeypatch.setenv("OCTAVO_API_KEY", f"{KEY},{OTHER_KEY}")
    assert json.loads(bench(capsys, *command_line)[1])["results"]
    monkeypatch.delenv("OCTAVO_API_KEY")
    assert json.loads(bench(capsys, *command_line, "--api-key", KEY)[1])["results"]


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_key(None) is None
    assert find_key(f" {KEY}\n") == Key(KEY, "--api-key")
    assert KEY not in repr(find_key(KEY))
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\r\nX-Evil: 1")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY holds") as caught:
        find_key(None)
    assert KEY not in str(caught.value)


def test_the_server_of_a_bench_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", KEY)
    with server_process(EngineConfig(model="fake", load_format="fake")) as server:
        assert list(asyncio.run(Endpoint(server.base_url).models())) == ["fake"]


def test_the_report_names_what_answered(start: Callable[..., Running], capsys: pytest.CaptureFixture[str]) -> None:
    server = start()
    command_line = ("W4", "--base-url", server.url, "--runs", "1", "--num-prompts", "2")
    first = json.loads(bench(capsys, *command_line, "--json")[1])
    assert (first["model"], first["config"]) == ("fake", None)
    named = bench(capsys, *command_line, "--model", "org/alias")[1]
    assert "org/alias" in " ".join(named.split())
    line = refused(capsys, *command_line, "--model", "demo")
    assert line == f"--model: 'demo' is not served at {server.url}; there are fake, org/alias"


def test_the_model_that_was_named_is_asked_for(peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
    peer.answers = [MODELS, answer("400 Bad", b"")]
    refused(capsys, "W4", "--base-url", peer.url, "--model", "second")
    assert json.loads(peer.requests[1].partition(b"\r\n\r\n")[2])["model"] == "second"


def test_the_context_of_a_server_is_checked_first(
    start: Callable[..., Running], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(max_model_len=256)
    line = refused(capsys, "serve", "--base-url", server.url)
    assert "context of 256 tokens, the longest request of serve has 1935" in line
    assert server.engine.prompts == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["W2", "--concurrency", "7"], "--concurrency: W2 does not take it; serve and W4 do"),
        (["demo-latency", "--base-url", "http://x"], "--base-url: demo-latency does not take it; serve and W4 do"),
        (["serve", "--batch", "3"], "--batch: serve does not take it; latency does"),
        (["offline", "--ttft-slo-ms", "3"], "--ttft-slo-ms: offline does not take it; serve and W4 do"),
        (["memory", "--runs", "3"], "--runs: memory does not take it; offline"),
        (["step", "--model", "demo"], "--model: step does not take it; offline"),
        (["step", "--dtype", "float32"], "--dtype: step runs without a model"),
        (["list", "--json"], "--json: `octavo bench list` takes no options"),
        (
            ["serve", "--base-url", "http://x", "--max-model-len", "9"],
            "--max-model-len: does not apply to the running server",
        ),
        (["serve", "--api-key", KEY], "--api-key: only for a server at --base-url"),
        (["W4", "--num-prompts", "49"], "--num-prompts: 49 is more than the 48 requests of the workload"),
        (["serve", "--max-model-len", "256"], "--max-model-len: 256 is too small for serve, whose longest request has"),
        (["latency", "--max-model-len", "512"], "--max-model-len: 512 is too small for latency, whose longest request"),
        (["start", "--max-model-len", "128"], "--max-model-len: 128 is too small for start"),
        (["memory", "--max-model-len", "128"], "--max-model-len: 128 is too small for memory"),
        (["W2", "--plot", "x.gif"], "--plot: 'x.gif' does not end in .png, .svg or .pdf"),
        (["W2", "--plot", "/no/folder/x.png"], "--plot: there is no folder '/no/folder'"),
        (["W2", "--plot", "/proc/x.png"], "--plot: '/proc/x.png' cannot be written"),
        (["nothing"], "`octavo bench list` says"),
    ],
)
def test_refused_before_anything_is_loaded(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_engine, "LLM", lambda *_, **__: pytest.fail("a model was loaded"))
    line = refused(capsys, *arguments)
    assert expected in line
    assert "shorten" not in line


def test_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`octavo bench list` says" in refused(capsys, code=2)


class EchoLLM:
    """Answers as long as asked."""

    max_model_len = 8192

    def __init__(self, model: str, **settings: Any) -> None:
        self.model = SimpleNamespace(max_model_len=settings["max_model_len"] or self.max_model_len, device="cpu")

    def __enter__(self) -> EchoLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def generate(self, prompts: list[list[int]], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        for prompt, one in zip(prompts, params, strict=True):
            assert len(prompt) + one.max_tokens <= self.model.max_model_len
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * one.max_tokens)]) for one in params]


@pytest.mark.parametrize("name", ["offline", "latency", "prefill", "shared", "short", "W1", "W2", "W3"])
def test_the_least_context_that_is_named_works(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_engine, "LLM", EchoLLM)
    options = BenchOptions(runs=1)
    with pytest.raises(ConfigError, match=f"too small for {name}") as caught:
        run_bench(name, EngineConfig(model="echo", max_model_len=16), options)
    least = int(re.findall(r"give (\d+) or more", str(caught.value))[0])
    assert least == BENCHES[name].context(options)
    assert run_bench(name, EngineConfig(model="echo", max_model_len=least), options)["results"]
    with pytest.raises(ConfigError, match=f"{least - 1} is too small for {name}"):
        run_bench(name, EngineConfig(model="echo", max_model_len=least - 1), options)


def test_a_model_of_a_short_context_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_engine, "LLM", EchoLLM)
    monkeypatch.setattr(EchoLLM, "max_model_len", 1000)
    with pytest.raises(ConfigError, match=r"max_model_len: 1000 is too small for latency, .*give 1153 or more"):
        run_bench("latency", EngineConfig(model="echo"), BenchOptions())


def test_every_run_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_engine, "LLM", EchoLLM)
    code, out, lines = bench(capsys, "W3", "--runs", "2", "--json")
    assert code == 0
    assert json.loads(out)["bench"] == "W3"
    assert lines == [
        "warming up",
        "W3: run 1 of 2, 32 requests, 33792 + 1024 tokens",
        "W3: run 2 of 2, 32 requests, 33792 + 1024 tokens",
    ]


def test_a_terminal_shows_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(offline_engine, "LLM", EchoLLM)
    run_bench("W2", EngineConfig(model="echo"), BenchOptions(runs=2))
    command.note("beside it")
    *shown, last = terminal.getvalue().split("\r\x1b[K")
    assert shown == ["", "warming up", "W2: run 1 of 2, 1 r", "W2: run 2 of 2, 1 r", ""]
    assert last == "beside it\n"


@pytest.mark.parametrize(("name", "begin"), [("a.PNG", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_ending_says_what_is_drawn(
    name: str, begin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_engine, "LLM", EchoLLM)
    picture = tmp_path / name
    assert bench(capsys, "W2", "--runs", "1", "--plot", str(picture))[0] == 0
    assert picture.read_bytes().startswith(begin)
    assert [path.name for path in tmp_path.iterdir()] == [name]
