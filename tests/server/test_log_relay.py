"""Relay of what child processes write to standard error."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo.log_format import JsonFormatter, LineHandler
from octavo.log_relay import _Relay, relayed


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Any]:
    """Gives the lines that were logged as JSON since the test's begin."""
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    handler = LineHandler(descriptor)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    before = list(root.handlers)
    root.handlers[:] = [handler]

    def read() -> list[dict[str, Any]]:
        handler.flush()
        return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    yield read
    root.handlers[:] = before
    handler.flush()
    os.close(descriptor)


def test_a_server_of_thousands_of_connections_relays_too(log: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this process may not have so many files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    try:
        reading, writing = os.pipe()
        high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.close(reading)
    thread = threading.Thread(target=_Relay(high, {"process": "engine"}).run)
    thread.start()
    for text in (b"a crash of ", b"many writes\n"):
        os.write(writing, text)
        time.sleep(0.02)
    os.write(writing, b'{"ts":"own line"}\n')
    os.close(writing)
    thread.join(10)
    assert not thread.is_alive()
    plain, own = log()
    assert (plain["msg"], plain["process"]) == ("a crash of many writes", "engine")
    assert own == {"ts": "own line"}


def test_the_last_lines_of_a_child_are_logged_before_its_end_is_known(log: Any) -> None:
    for number in range(20):
        output = relayed()
        code = f"import os; os.write(2, b'x' * 70000 + b'\\nlast words {number}'); os._exit(1)"
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stderr=output.descriptor)
        output.started("child", process.pid)
        assert process.wait(20) == 1
        output.ended(20)
        assert log()[-1]["msg"].endswith(f"last words {number}")


def test_a_grandchild_that_lives_on_delays_nothing(log: Any) -> None:
    output = relayed()
    process = subprocess.Popen(["/bin/sh", "-c", "sleep 3 & echo gone >&2"], stderr=output.descriptor)
    output.started("child", process.pid)
    assert process.wait(20) == 0
    began = time.monotonic()
    output.ended(0.3)
    assert time.monotonic() - began < 2
    assert log()[-1]["msg"] == "gone"
