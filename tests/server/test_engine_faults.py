"""`octavo serve` with an engine process that is killed, stopped or keeps failing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
from serve_log import ServeLog


class Serving:
    """`octavo serve` as a process of its own."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.client = httpx.Client(base_url=url, timeout=20)

    def worker(self) -> int:
        """The engine's process."""
        children = psutil.Process(self.pid).children()
        return next(child.pid for child in children if "octavo.engine.worker" in child.cmdline())

    def status(self, path: str) -> int:
        return self.client.get(path).status_code

    def wait_for(self, path: str, status: int, within_s: float) -> float:
        begun = time.monotonic()
        while self.status(path) != status:
            assert time.monotonic() - begun < within_s, f"{path} is not {status} within {within_s} s"
            time.sleep(0.02)
        return time.monotonic() - begun

    def metric(self, name: str) -> float:
        """Sum over the series of one metric."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"there is no metric {name}"
        return sum(values)

    def ask(self, **fields: Any) -> dict[str, Any]:
        return {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, **fields}


@contextmanager
def serving(model: str, *options: str) -> Iterator[Serving]:
    command = [
        sys.executable,
        "-m",
        "octavo",
        "serve",
        model,
        "--load-format",
        "fake",
        "--port",
        "0",
        "--served-model-name",
        "fake",
    ]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    log = ServeLog(process)
    try:
        server = Serving(log.address(), process.pid)
        with server.client:
            yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()
            log.end()


def read_to_the_end(server: Serving, began: threading.Semaphore, lines: list[str], max_tokens: int = 5000) -> None:
    ask = server.ask(stream=True, max_tokens=max_tokens)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=ask, timeout=30) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line:
                if len(lines) == 2:
                    began.release()
                lines.append(line)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_end_with_an_error_and_done_and_the_server_serves_again(number: signal.Signals) -> None:
    with serving("fake?step_ms=2") as server:
        server.client.post("/v1/chat/completions", json=server.ask()).raise_for_status()
        began = threading.Semaphore(0)
        streams: list[list[str]] = [[] for _ in range(12)]
        threads = [threading.Thread(target=read_to_the_end, args=(server, began, lines)) for lines in streams]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert began.acquire(timeout=10)
        worker = server.worker()
        os.kill(worker, number)
        assert server.wait_for("/readyz", 503, 5) < 4
        assert server.status("/livez") == 200
        for thread in threads:
            thread.join(10)
        for lines in streams:
            assert lines[-1] == "data: [DONE]"
            assert '"engine_restarting"' in lines[-2]
            assert number.name in lines[-2] or "stopped by a signal" in lines[-2]
        refused = server.client.post("/v1/chat/completions", json=server.ask())
        if refused.status_code != 200:
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "engine_restarting"
        server.wait_for("/readyz", 200, 15)
        assert server.worker() != worker
        assert not psutil.pid_exists(worker)
        answer = server.client.post("/v1/chat/completions", json=server.ask())
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert server.metric("octavo_engine_restarts_total") == 1
        assert server.metric("octavo_kv_cache_blocks_used") == 0


def test_a_signal_to_the_whole_group_lets_answers_finish() -> None:
    command = [sys.executable, "-m", "octavo", "serve", "fake?step_ms=5", "--load-format", "fake", "--port", "0"]
    command += ["--served-model-name", "fake", "--drain-delay", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    log = ServeLog(process)
    try:
        server = Serving(log.address(), process.pid)
        began = threading.Semaphore(0)
        lines: list[str] = []
        ask = {"max_tokens": 300}
        thread = threading.Thread(target=read_to_the_end, args=(server, began, lines), kwargs=ask)
        thread.start()
        assert began.acquire(timeout=10)
        os.killpg(process.pid, signal.SIGTERM)
        thread.join(20)
        assert lines[-1] == "data: [DONE]"
        assert not [line for line in lines if '"error"' in line]
        assert len(lines) > 250
        assert process.wait(20) == 0
        server.client.close()
    finally:
        process.kill()
        process.wait()
        log.end()


def test_an_engine_that_keeps_failing_is_given_up_and_livez_says_so() -> None:
    with serving("fake?fail_at=12", "--restart-limit", "2") as server:
        codes = set()
        deadline = time.monotonic() + 50
        while server.status("/livez") == 200:
            assert time.monotonic() < deadline
            answer = server.client.post("/v1/chat/completions", json=server.ask())
            if answer.status_code != 200:
                assert answer.status_code == 503
                codes.add(answer.json()["error"]["code"])
            time.sleep(0.05)
        assert "engine_restarting" in codes
        assert server.status("/readyz") == 503
        answer = server.client.post("/v1/chat/completions", json=server.ask())
        assert answer.status_code == 503
        assert "given up" in answer.json()["error"]["message"]
        assert "fake device failed" in answer.json()["error"]["message"]
