"""The log: fields of requests, and safety against forged lines."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.log_format import ConsoleFormatter, JsonFormatter, LineHandler, printable
from octavo.server.observability.logs import request_fields
from server_fakes import BROKEN_TOKEN, FakeEngine
from server_harness import Running

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
SECRET = "my secret prompt"

Lines = Callable[[], list[dict[str, Any]]]


def record(message: str, *arguments: object, error: BaseException | None = None, **fields: Any) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("octavo.test", logging.INFO, __file__, 1, message, arguments, info)
    made.fields = fields
    return made


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    """What was logged as JSON since the test's begin."""
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    handler = LineHandler(descriptor)
    handler.setFormatter(JsonFormatter(request_fields))
    root, access = logging.getLogger(), logging.getLogger("octavo.access")
    root.addHandler(handler)
    access.setLevel(logging.INFO)

    def read() -> list[dict[str, Any]]:
        handler.flush()
        return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]

    yield read
    root.removeHandler(handler)
    access.setLevel(logging.NOTSET)
    handler.flush()
    os.close(descriptor)


def access(lines: Lines, count: int = 1) -> list[dict[str, Any]]:
    """The access lines, once there are so many."""
    for _ in range(300):
        found = [line for line in lines() if line["logger"] == "octavo.access"]
        if len(found) >= count:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{len(found)} access lines, not {count}")


def raw(server: Running, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        return connection.recv(65536)


# ------------------------------------------------------------ what a request leaves


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_success(server: Running, lines: Lines, stream: bool) -> None:
    with server.client() as client:
        messages = [{"role": "user", "content": SECRET * 4}]
        answer = client.chat.completions.create(
            model="fake", messages=messages, max_tokens=9, stream=stream, extra_headers={"x-request-id": "mine-1"}
        )
        if stream:
            assert len(list(answer)) > 9
    (line,) = access(lines)
    assert line["level"] == "info"
    assert line["request_id"] == "mine-1"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["model"], line["client"]) == ("fake", "127.0.0.1")
    prompt = 1 + len("<user><assistant>") + len(SECRET * 4) - 1
    assert abs(line["prompt_tokens"] - prompt) <= 1
    assert (line["completion_tokens"], line["cached_tokens"]) == (9, line["prompt_tokens"] // 16 * 16)
    assert line["finish_reason"] == "length"
    assert 0 < line["ttft_ms"] <= line["e2e_ms"]
    assert 0 < line["tpot_ms"] < line["e2e_ms"]
    assert "error" not in line
    assert "disconnected" not in line
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["ts"])
    assert SECRET not in json.dumps(lines())


def test_the_line_of_a_refusal_and_of_a_fault(server: Running, lines: Lines) -> None:
    with server.client() as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="none", prompt=[72])
        with pytest.raises(openai.InternalServerError) as fault:
            client.completions.create(model="fake", prompt=[BROKEN_TOKEN])
    refused, failed = access(lines, 2)
    assert (refused["status"], refused["error"]) == (404, "model_not_found")
    assert "model" not in refused
    assert (failed["status"], failed["error"], failed["finish_reason"]) == (500, "internal_error", "error")
    (traced,) = [line for line in lines() if "exception" in line]
    assert "secret path" in traced["exception"]
    # The line that says why carries the id that the client was given.
    assert traced["request_id"] == failed["request_id"] == fault.value.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_client_that_leaves(start: Callable[..., Running], lines: Lines, stream: bool) -> None:
    server = start(FakeEngine(delay=0.01))
    body = json.dumps({"prompt": [65], "max_tokens": 200, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while server.engine.generated < 4:
            time.sleep(0.01)
    (line,) = access(lines)
    assert line["disconnected"] is True
    assert line["finish_reason"] == "abort"
    assert line["status"] == (200 if stream else 499)
    assert 3 <= line["completion_tokens"] < 200


def test_every_line_of_a_request_names_its_trace(server: Running, lines: Lines) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [BROKEN_TOKEN]}, headers=headers)
    assert answer.status_code == 500
    access(lines)
    found = [line for line in lines() if line.get("request_id") == answer.headers["x-request-id"]]
    assert {line["logger"] for line in found} == {"octavo.server", "octavo.access"}
    for line in found:
        assert line["trace_id"] == trace
        assert f"00-{trace}-{line['span_id']}-01" == answer.headers["traceresponse"]


def test_probes_and_scrapes_are_not_logged(server: Running, lines: Lines) -> None:
    for path in (b"/health", b"/metrics", b"/version"):
        raw(server, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
    (line,) = access(lines)
    assert line["path"] == "/version"


def test_lines_of_requests_at_once_do_not_mix(server: Running, lines: Lines) -> None:
    def ask(number: int) -> None:
        with server.client() as client:
            client.completions.create(
                model="fake", prompt=[72] * (number + 1), max_tokens=5, extra_headers={"x-request-id": f"r{number}"}
            )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {line["request_id"]: line["prompt_tokens"] for line in access(lines, 8)}
    assert found == {f"r{number}": number + 1 for number in range(8)}


def test_prompts_are_logged_only_when_asked_for(start: Callable[..., Running], lines: Lines) -> None:
    server = start(log_prompts=60)
    with server.client() as client:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hé\n\x1b[2J" + "x" * 99}])
    (line,) = access(lines)
    assert len(line["body"]) == 60
    assert line["body"].startswith('{"')
    assert not UNSAFE.search(json.dumps(line, ensure_ascii=False))


def test_the_access_log_can_be_turned_off(start: Callable[..., Running], lines: Lines) -> None:
    server = start(access_log=False)
    raw(server, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert [line for line in lines() if line["logger"] == "octavo.access"] == []


# ------------------------------------------------------------ forging

FORGED = '{"level":"info","msg":"forged"}'


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (b"/nope%0d%0a%7B%22msg%22%3A%22forged%22%7D", b""),
        (b"/nope%1b%5b31m%1b%5d0;title%07", b""),
        (b"/%c2%9b31m%e2%80%ae%e2%80%a8", b""),
        (b"/%ff%fe%ed%a0%80", b""),
        (b"/version", b"X-Request-Id: a\x1b[31mb\r\n"),
        (b"/version", b"X-Request-Id: {\"msg\":\"forged\"}\r\n"),
        (b"/version", b"Traceparent: 00-\x1b[31m\r\n"),
        (b"/" + b"x" * 5000, b""),
    ],
)  # fmt: skip
def test_client_input_stays_within_its_line(server: Running, lines: Lines, target: bytes, headers: bytes) -> None:
    raw(server, b"GET %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (target, headers))
    (line,) = access(lines)
    assert line["msg"] == "request"
    text = json.dumps(line, ensure_ascii=False)
    assert not UNSAFE.search(text)
    assert len(text) < 1000
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", line["request_id"])


def test_a_model_name_cannot_forge_a_line(server: Running, lines: Lines) -> None:
    name = f"x\n{FORGED}\r\x1b[2K\u2028"
    with server.client() as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model=name, prompt=[72])
    assert all(line["msg"] != "forged" for line in lines())
    assert len(access(lines)) == 1


@settings(max_examples=200, deadline=None)
@given(st.text(), st.dictionaries(st.sampled_from("abc"), st.text() | st.integers() | st.floats()))
def test_a_json_line_is_one_line_that_parses(text: str, fields: dict[str, Any]) -> None:
    line = JsonFormatter().format(record("%s", text, **fields))
    assert "\n" not in line
    assert not UNSAFE.search(line)
    parsed = json.loads(line)
    assert parsed["logger"] == "octavo.test"
    if text.isprintable():
        assert parsed["msg"] == text


@settings(max_examples=200, deadline=None)
@given(st.text(), st.dictionaries(st.sampled_from("abc"), st.text()))
def test_a_console_line_is_one_line_of_visible_characters(text: str, fields: dict[str, Any]) -> None:
    line = ConsoleFormatter().format(record("%s", text, **fields))
    assert "\n" not in line
    assert "\t" not in line
    assert not UNSAFE.search(line)


def test_an_exception_cannot_pose_as_a_line() -> None:
    error = ValueError(f"bad\n{FORGED}\n12:00:00.000 INFO     octavo.access: request\x1b[1A")
    console = ConsoleFormatter().format(record("failed", error=error)).split("\n")
    assert all(line.startswith("  | ") for line in console[1:])
    assert not UNSAFE.search("".join(console))
    assert json.loads(JsonFormatter().format(record("failed", error=error)))["exception"].count("\n") >= 2


def test_colours_only_on_a_terminal() -> None:
    made = record("x")
    made.levelno, made.levelname = logging.ERROR, "ERROR"
    assert "\x1b[31m" in ConsoleFormatter(colour=True).format(made)
    assert "\x1b" not in ConsoleFormatter().format(made)


def test_long_messages_are_cut() -> None:
    assert len(JsonFormatter().format(record("x" * 100_000))) < 10_000


def test_printable() -> None:
    assert printable("naïve 数据 🎉") == "naïve 数据 🎉"
    assert printable("a\nb\x1b\x9b\u202e") == "a\\x0ab\\x1b\\x9b\\u202e"


# ------------------------------------------------------------ who reads it


def test_a_blocked_reader_delays_nothing() -> None:
    reading, writing = os.pipe()
    handler = LineHandler(writing)
    handler.setFormatter(JsonFormatter())
    began = time.monotonic()
    for number in range(20_000):
        handler.emit(record("number %d", number))
    assert time.monotonic() - began < 10
    assert handler.dropped > 0
    data = b""
    os.set_blocking(reading, False)
    while select.select([reading], [], [], 0.3)[0]:
        data += os.read(reading, 1 << 20)
    numbers = [int(json.loads(line)["msg"].split()[1]) for line in data.decode().splitlines()]
    assert len(numbers) + handler.dropped == 20_000
    assert numbers == sorted(numbers)
    for end in (reading, writing):
        os.close(end)


def test_a_line_that_cannot_be_formatted_is_logged_anyway(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    handler = LineHandler(descriptor)
    handler.setFormatter(JsonFormatter())
    handler.emit(record("%d", "no number"))
    handler.emit(record("a value that is none of JSON's", field=object()))
    handler.flush()
    os.close(descriptor)
    made = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    place = f"{__file__}:1"
    assert [line["msg"] for line in made] == [f"a log line could not be made, from {place}"] * 2
    assert {(line["level"], line["logger"]) for line in made} == {("error", "octavo.test")}


@pytest.mark.parametrize("form", ["json", "console"])
def test_the_engines_lines_look_like_the_servers(form: str) -> None:
    code = (
        "import logging, os, subprocess, sys\n"
        "from octavo.server.observability.logs import configure_logging\n"
        f"configure_logging({form!r}, 'info')\n"
        "logging.getLogger('octavo.here').info('of the server')\n"
        "child = 'import logging; from octavo.log_format import configure_child; configure_child(\"engine\");'\n"
        'child += \'logging.getLogger("octavo.there").warning("of the engine")\'\n'
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    server, engine = done.stderr.splitlines()
    if form == "json":
        assert json.loads(server)["msg"] == "of the server"
        assert json.loads(engine)["msg"] == "of the engine"
        assert json.loads(engine)["process"] == "engine"
    else:
        assert re.fullmatch(r"[\d:.]{12} INFO     octavo\.here: of the server", server)
        assert re.fullmatch(r"[\d:.]{12} WARNING  octavo\.there: of the engine process=engine pid=\d+", engine)


def test_lines_of_several_processes_do_not_mix() -> None:
    reading, writing = os.pipe()
    code = (
        "import logging, sys\n"
        "from octavo.log_format import configure\n"
        "configure('json', 'info')\n"
        "for number in range(3000):\n"
        "    logging.getLogger('x').info('%s %d %s', sys.argv[1], number, 'x' * (number % 300))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, name], stderr=writing) for name in ("a", "b", "c")]
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        lines = [json.loads(line)["msg"].split() for line in pipe]
    for writer in writers:
        assert writer.wait(20) == 0
    for name in ("a", "b", "c"):
        assert [int(line[1]) for line in lines if line[0] == name] == list(range(3000))
