"""The log of `octavo serve` without a terminal: JSON from the first line to the last."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from octavo.cli import announce
from octavo.server.state import ServerState
from serve_log import ServeLog

SECRET = "my secret prompt"
COMMAND = (sys.executable, "-m", "octavo", "serve", "--load-format", "fake", "--port", "0", "--drain-delay", "0")


@contextmanager
def serving(
    *options: str, model: str = "any", **environment: str
) -> Iterator[tuple[subprocess.Popen[str], ServeLog, httpx.Client]]:
    """A server that is ready, its log, and a client of it."""
    process = subprocess.Popen(
        [*COMMAND, model, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    log = ServeLog(process)
    try:
        with httpx.Client(base_url=log.address(), timeout=30) as client:
            yield process, log, client
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "", "what is printed is for people"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        log.end()


def ask(client: httpx.Client, max_tokens: int = 20, **fields: Any) -> httpx.Response:
    return client.post(
        "/v1/completions", json={"prompt": SECRET, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    )


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    (worker,) = (
        one for one in psutil.Process(process.pid).children() if "octavo.engine.worker" in " ".join(one.cmdline())
    )
    return worker


def wait_for(what: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            if what():
                return
        assert time.monotonic() < end
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("level", ["info", "debug"])
def test_every_line_is_json_and_tells_the_servers_life(level: str) -> None:
    with serving("--log-format", "json", "--log-level", level) as (process, log, client):
        assert ask(client).status_code == 200
    assert SECRET not in log.text
    lines = log.lines
    starting, model, ready = (log.wait_for(message) for message in ("starting", "model ready", "ready"))
    assert lines[0] == starting
    assert starting["version"]
    assert starting["models"] == ready["models"] == ["any"]
    assert starting["address"] == ready["address"] == f"http://127.0.0.1:{client.base_url.port}"
    assert starting["pid"] == process.pid
    assert (model["model"], model["device"], model["max_model_len"]) == ("any", "cpu", 8192)
    assert 0 < ready["seconds"] < 40
    (request,) = [line for line in lines if line["msg"] == "request" and line["level"] == "info"]
    assert (request["completion_tokens"], request["finish_reason"], request["model"]) == (20, "length", "any")
    assert 0 < request["ttft_ms"] <= request["e2e_ms"]
    stopping, stopped = log.wait_for("stopping"), log.wait_for("stopped")
    assert (stopping["signal"], stopping["running"], stopping["shutdown_timeout"]) == ("SIGTERM", 0, 30)
    assert (stopped["finished"], stopped["aborted"]) == (0, 0)
    assert [line for line in lines if line["logger"].startswith("octavo")][-1] == stopped


def test_the_end_counts_what_finished_and_what_was_cut_short() -> None:
    options = ("--shutdown-timeout", "1", "--no-access-log")
    with serving(*options, model="slow=fake?step_ms=10") as (process, log, client):
        threads = [threading.Thread(target=ask, args=(client, tokens)) for tokens in (60, 60, 4000)]
        for thread in threads:
            thread.start()
        wait_for(lambda: 'vllm:num_requests_running{model_name="slow",engine="0"} 3.0' in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: "refusing new requests" in log.text)
        # Is not counted: it did not run.
        assert ask(client).json()["error"]["code"] == "server_stopping"
        for thread in threads:
            thread.join(20)
        assert process.wait(20) == 0
    assert log.wait_for("stopping")["running"] == 3
    assert log.wait_for("refusing new requests")["running"] == 3
    stopped = log.wait_for("stopped")
    assert (stopped["finished"], stopped["aborted"]) == (2, 1)
    assert 0.9 < stopped["seconds"] < 10


def test_a_received_response_counts_as_finished_at_a_later_signal() -> None:
    async def main() -> None:
        state = ServerState()
        loop = asyncio.get_running_loop()
        seen: asyncio.Future[tuple[int, int]] = loop.create_future()

        def signal_comes() -> None:
            seen.set_result((state.num_running, state.num_ended))

        async def answers() -> None:
            await asyncio.sleep(0)
            # The last bytes leave when this turn of the loop ends; whoever has read them sends the signal.
            loop.call_soon(loop.call_soon, signal_comes)

        async def receive() -> Any:
            await asyncio.Event().wait()

        assert await state.run(answers(), receive)
        assert await seen == (0, 1)

    asyncio.run(main())


def test_a_crash_of_the_engine_is_told_in_json_too() -> None:
    """The interpreter writes the stack of a crash to standard error as it is."""
    with serving() as (process, log, client):
        worker = worker_of(process)
        worker.send_signal(signal.SIGSEGV)
        wait_for(lambda: "serves again" in log.text)
        assert ask(client).status_code == 200
    (crash,) = [line for line in log.lines if line["logger"] == "octavo.output"]
    assert crash["msg"].startswith("Fatal Python error: Segmentation fault\n")
    assert "octavo/engine/worker.py" in crash["msg"]
    assert (crash["process"], crash["pid"]) == ("engine", worker.pid)


def test_a_crash_of_an_api_process_is_told_in_json_too() -> None:
    with serving("--api-processes", "2") as (process, log, client):

        def is_up() -> bool:
            with httpx.Client(base_url=client.base_url, timeout=30) as other:
                return ask(other).status_code == 200 and '"process":"api-1"' in log.text

        # Connections are spread.
        wait_for(is_up)
        (child,) = (
            one for one in psutil.Process(process.pid).children() if "octavo.cli.api_process" in " ".join(one.cmdline())
        )
        child.send_signal(signal.SIGSEGV)
        wait_for(lambda: "API process 1 ended (-11)" in log.text)
    (crash,) = [line for line in log.lines if line["logger"] == "octavo.output"]
    assert crash["msg"].startswith("Fatal Python error: Segmentation fault\n")
    assert (crash["process"], crash["pid"]) == ("api-1", child.pid)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--no-such-option"], 2, "No such option: --no-such-option"),
        (["--port", "70000"], 2, "--port"),
        (["--log-format", "xml"], 2, "--log-format: 'xml' is not one of auto, json, console"),
        (["--block-size", "7"], 2, "--block-size: 7"),
        (["--host", "0.0.0.0"], 1, "no API key is set"),
        (["--config", "/no/such.toml"], 1, "config: /no/such.toml cannot be read"),
        (["other=fake?nonsense=1"], 1, "nonsense"),
    ],
)
def test_a_refusal_is_a_line_of_the_log_and_an_exit_code(options: list[str], code: int, text: str) -> None:
    command = [*COMMAND, "any", *([] if "--log-format" in options else ["--log-format", "json"]), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stdout == ""
    *_, last = map(json.loads, done.stderr.splitlines())
    assert (last["level"], last["logger"], last["exit_code"]) == ("critical", "octavo.server", code)
    assert text in last["msg"]


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*COMMAND, "any", "--port", port], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    (line,) = map(json.loads, done.stderr.splitlines())
    assert line["msg"] == f"--port: {port} is in use on 127.0.0.1; choose another with --port, or 0 for any"


@pytest.mark.parametrize("kind", ["stands still", "has gone", "has a full disk"])
def test_a_blocked_log_reader_delays_nothing(kind: str) -> None:
    port = free_port()
    reading, writing = os.pipe()
    if kind == "has a full disk":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    command = [*COMMAND, "fake", "--port", str(port), "--log-level", "debug", "--shutdown-timeout", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writing)
    try:
        os.close(writing)
        if kind != "stands still":
            os.close(reading)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            wait_for(lambda: client.get("/readyz").status_code == 200)
            # Far more than a pipe holds, and than is kept for a reader.
            for _ in range(40):
                assert ask(client, 1, prompt=["x"] * 2).status_code == 200
            for _ in range(400):
                assert client.get("/v1/models", headers={"x-request-id": "i" * 128}).status_code == 200
            dropped = re.search(r"^octavo_log_lines_dropped_total (\S+)", client.get("/metrics").text, re.MULTILINE)
            assert dropped is not None
            assert (float(dropped[1]) > 0) == (kind != "stands still")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.wait()
        if kind == "stands still":
            os.close(reading)


def test_a_failed_start_ends_with_a_blocked_log_reader() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    process = subprocess.Popen([*COMMAND, "any=fake?nonsense=1"], stderr=writing)
    try:
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.wait()
        for end in (reading, writing):
            os.close(end)


@pytest.fixture
def hangups() -> Iterator[None]:
    """Have servers that are started meanwhile hear of hang-ups, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
def test_sighup_reloads_the_keys_and_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("me first-key\n")
    file.chmod(0o600)
    with serving("--api-key-file", str(file)) as (process, log, client):
        file.write_text("me another-key\n")
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: "1 API keys were read from the key file" in log.text)
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: "SIGHUP: the API keys have not changed" in log.text)
        assert ask(client).status_code == 401
        client.headers["authorization"] = "Bearer another-key"
        assert ask(client).status_code == 200


@pytest.mark.usefixtures("hangups")
def test_a_terminal_that_is_closed_ends_the_server() -> None:
    port = free_port()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "fake", "--port", str(port)], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    try:
        os.close(theirs)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            wait_for(lambda: client.get("/readyz").status_code == 200)
        process.send_signal(signal.SIGHUP)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_json_on_a_terminal_is_json_only() -> None:
    """No bars, no colours, no text with calls to copy."""
    ours, theirs = pty.openpty()
    command = [*COMMAND, "any=fake?load_ms=300", "--log-format", "json"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        with os.fdopen(ours, encoding="utf-8", newline="\n") as terminal:
            lines = []
            with contextlib.suppress(OSError):  # the other end is closed
                for line in terminal:
                    lines.append(json.loads(line))
                    if lines[-1]["msg"] == "ready":
                        process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert [line["msg"] for line in lines] == ["starting", "model ready", "ready", "stopping", "stopped"]


def test_systemd_is_notified_of_every_state(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(20)
        with serving(NOTIFY_SOCKET=str(path), WATCHDOG_USEC="200000") as (_, log, _client):
            address = log.address()
            said = [manager.recv(1000).decode() for _ in range(5)]
        manager.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                said.append(manager.recv(1000).decode())
    assert f"READY=1\nSTATUS=serving any at {address}" in said
    assert said.count("WATCHDOG=1") >= 3
    assert "STOPPING=1\nSTATUS=stopping: 0 running answers" in said
    assert said.index(f"READY=1\nSTATUS=serving any at {address}") < said.index(
        "STOPPING=1\nSTATUS=stopping: 0 running answers"
    )


def test_the_watchdog_is_not_notified_by_a_dead_server(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        options = ("--restart-limit", "0")
        environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "100000"}
        with serving(*options, model="any=fake?fail_at=12", **environment) as (_, log, client):
            manager.settimeout(20)
            while manager.recv(1000) != b"WATCHDOG=1":
                pass
            ask(client)
            wait_for(lambda: client.get("/livez").status_code == 503)
            manager.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    manager.recv(1000)
            manager.settimeout(0.5)
            with pytest.raises(TimeoutError):
                manager.recv(1000)
            assert "the engine is given up" in log.text


def test_a_long_load_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notify"
    announcer = announce.Announcer("http://x", None, 30, needs_key=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, caplog.at_level(logging.INFO):
        manager.bind(str(path))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        announcer.loading("weights", 1, 4)
        assert caplog.records == [], "a short load is not worth a line"
        monkeypatch.setattr(announce, "_LOADING_INTERVAL_S", 0.0)
        announcer.loading("weights", 2, 4)
        announcer.loading("kernels", 7, 0)
        said = [manager.recv(1000).decode() for _ in range(2)]
    assert said == [
        "EXTEND_TIMEOUT_USEC=120000000\nSTATUS=loading: weights 50 %",
        "EXTEND_TIMEOUT_USEC=120000000\nSTATUS=loading: kernels",
    ]
    assert [record.message for record in caplog.records] == ["loading", "loading"]
    assert [record.fields["progress"] for record in caplog.records] == [0.5, None]


def test_several_processes_log_a_restart_once_and_their_own_ends() -> None:
    with serving("--api-processes", "3", model="any=fake?step_ms=5") as (process, log, client):
        wait_for(lambda: len(psutil.Process(process.pid).children()) == 3)
        for _ in range(8):
            with httpx.Client(base_url=client.base_url, timeout=30) as other:
                wait_for(lambda other=other: ask(other, 2).status_code == 200)
        worker_of(process).kill()
        wait_for(lambda: "serves again" in log.text)
        # The others have had time to say it too.
        for _ in range(8):
            with httpx.Client(base_url=client.base_url, timeout=30) as other:
                wait_for(lambda other=other: ask(other, 2).status_code == 200)
    restarts = [line for line in log.lines if line["logger"] == "octavo.engine.supervisor"]
    assert [line["level"] for line in restarts] == ["error", "warning"]
    stopped = [line.get("process") for line in log.lines if line["msg"] == "stopped"]
    assert sorted(map(str, stopped)) == ["None", "api-1", "api-2"]
    told = {line.get("process") for line in log.lines if line["msg"] == "request"}
    assert "api-1" in told or "api-2" in told
