"""`octavo serve --api-processes`: several processes on one port with one engine."""

from __future__ import annotations

import collections
import os
import re
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
from octavo.server.ipc import merge_metrics
from serve_log import ServeLog


class Serving:
    """The processes, and requests to whichever takes a connection."""

    def __init__(self, url: str, process: subprocess.Popen[str], log: ServeLog) -> None:
        self.url = url
        self.process = process
        self.log = log

    def children(self, module: str) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if module in child.cmdline()]

    def ask(self, **fields: Any) -> httpx.Response:
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "temperature": 0}
        # A connection of its own, so that the kernel chooses the process.
        return httpx.post(f"{self.url}/v1/chat/completions", json={**body, **fields}, timeout=20)

    def metric(self, pattern: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=20).text
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(pattern, line)]
        assert values, f"nothing matches {pattern}"
        return sum(values)

    def stopped(self) -> dict[str, Any]:
        """What the first process says of all at the end; the others tell of themselves."""
        self.log.end()
        (line,) = [line for line in self.log.lines if line["msg"] == "stopped" and "process" not in line]
        return line

    def wait_all_ready(self, count: int) -> None:
        deadline = time.monotonic() + 20
        seen = 0
        while seen < 8 * count:
            try:
                ready = httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200
            except httpx.TransportError:
                ready = False
            seen = seen + 1 if ready else 0
            assert time.monotonic() < deadline


@contextmanager
def serving(count: int, *options: str, model: str = "fake") -> Iterator[Serving]:
    command = [sys.executable, "-m", "octavo", "serve", model, "--load-format", "fake", "--port", "0"]
    command += ["--served-model-name", "fake", "--api-processes", str(count), "--drain-delay", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = ServeLog(process)
    try:
        server = Serving(log.address(), process, log)
        # From now on nobody is refused: whoever comes to a process that starts yet waits for it.
        assert {server.ask().status_code for _ in range(8)} == {200}
        server.wait_all_ready(count)
        yield server
        if process.poll() is not None:
            return
        everyone = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not [one for one in everyone if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        process.wait()
        log.end()


def connections(pid: int) -> int:
    return len([one for one in psutil.Process(pid).net_connections("tcp") if one.status == "ESTABLISHED"])


def test_processes_share_a_port_an_engine_and_their_metrics() -> None:
    with serving(3) as server:
        assert len(server.children("octavo.cli.api_process")) == 2
        assert len(server.children("octavo.engine.worker")) == 1
        served = [server.process.pid, *(child.pid for child in server.children("octavo.cli.api_process"))]
        before = server.metric(r"vllm:request_success_total")
        texts = {server.ask().json()["choices"][0]["message"]["content"] for _ in range(30)}
        assert len(texts) == 1
        assert server.metric(r"vllm:request_success_total") - before == 30
        # Whoever is asked says the same.
        assert len({server.metric(r"vllm:request_success_total") for _ in range(12)}) == 1
        assert len({server.metric(r"vllm:num_gpu_blocks|vllm:cache_config_info") for _ in range(12)}) == 1
        assert server.metric(r"vllm:kv_cache_usage_perc") == 0
        clients = [httpx.Client() for _ in range(48)]
        try:
            for client in clients:
                client.get(f"{server.url}/health")
            spread = collections.Counter({pid: connections(pid) for pid in served})
            assert sum(spread.values()) == 48
            assert min(spread.values()) >= 4, spread
        finally:
            for client in clients:
                client.close()


def test_a_process_that_dies_is_replaced_and_the_others_go_on() -> None:
    with serving(2, model="fake?step_ms=2") as server:
        (child,) = server.children("octavo.cli.api_process")
        outcomes: list[str] = []
        begun = threading.Semaphore(0)

        def stream() -> None:
            try:
                with httpx.stream(
                    "POST",
                    f"{server.url}/v1/completions",
                    json={"model": "fake", "prompt": "x", "max_tokens": 1500, "stream": True},
                    timeout=30,
                ) as response:
                    lines = response.iter_lines()
                    last = next(lines)
                    begun.release()
                    for line in lines:
                        last = line or last
                    outcomes.append("whole" if last == "data: [DONE]" else last)
            except httpx.TransportError:
                outcomes.append("lost")

        threads = [threading.Thread(target=stream) for _ in range(24)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=10)
        on_child = connections(child.pid)
        assert 0 < on_child < 24
        os.kill(child.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(30)
        assert collections.Counter(outcomes) == {"whole": 24 - on_child, "lost": on_child}
        deadline = time.monotonic() + 15
        while not (replaced := server.children("octavo.cli.api_process")) or replaced[0].pid == child.pid:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.wait_all_ready(2)
        assert server.metric(r"vllm:num_requests_running") == 0
        assert server.metric(r"octavo_kv_cache_blocks_used|vllm:kv_cache_usage_perc") == 0
        assert all(server.ask().status_code == 200 for _ in range(12))


def test_all_processes_outlive_the_engine() -> None:
    with serving(2) as server:
        (worker,) = server.children("octavo.engine.worker")
        os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 15
        good = 0
        while good < 16:
            assert time.monotonic() < deadline
            answer = server.ask()
            assert answer.status_code in (200, 503)
            good = good + 1 if answer.status_code == 200 else 0
        assert server.metric(r"octavo_engine_restarts_total") == 1
        # One of them says it for all.
        for said in ("it is started again in", "the engine serves again"):
            assert len([line for line in server.log.lines if said in line["msg"]]) == 1


def test_shutdown_lets_requests_of_every_process_finish() -> None:
    # Longer than a process takes to end that has nothing to answer.
    with serving(2, model="fake?step_ms=12") as server:
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(server.ask(max_tokens=800))) for _ in range(16)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 10
        while server.metric("vllm:num_requests_running") < 16:
            assert time.monotonic() < deadline
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(20)
        assert [answer.status_code for answer in answers] == [200] * 16
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {800}
        assert server.process.wait(20) == 0
        # Of all processes.
        assert server.log.wait_for("stopping")["running"] == 16
        assert server.log.wait_for("refusing new requests")["running"] == 16
        stopped = server.stopped()
        assert (stopped["finished"], stopped["aborted"]) == (16, 0)


def test_every_process_reports_all_running_requests() -> None:
    options = ("--drain-delay", "1.5", "--shutdown-timeout", "0.5")
    with serving(3, *options, model="fake?step_ms=12") as server:
        threads = [threading.Thread(target=lambda: server.ask(max_tokens=2000)) for _ in range(24)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 10
        while server.metric("vllm:num_requests_running") < 24:
            assert time.monotonic() < deadline
        server.process.send_signal(signal.SIGTERM)
        server.log.wait_for("stopping")
        told = [httpx.get(f"{server.url}/readyz", timeout=10) for _ in range(12)]
        assert {answer.status_code for answer in told} == {503}
        assert {answer.json()["running"] for answer in told} == {24}
        for thread in threads:
            thread.join(20)
        assert server.process.wait(20) == 0
        stopped = server.stopped()
        assert (stopped["finished"], stopped["aborted"]) == (0, 24)


def test_no_process_outlives_the_first() -> None:
    with serving(2) as server:
        others = psutil.Process(server.process.pid).children(recursive=True)
        assert len(others) == 2
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(others, timeout=5)
        assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_unsupported_options_with_several_processes() -> None:
    command = [sys.executable, "-m", "octavo", "serve", "fake", "--load-format", "fake", "--api-processes", "2"]
    result = subprocess.run([*command, "--admin-port", "0"], capture_output=True, text=True, timeout=30)
    assert result.returncode != 0
    assert "--admin-port" in result.stderr
    assert "--api-processes 2" in result.stderr


def test_metrics_are_summed_where_a_sum_makes_sense() -> None:
    first = (
        "# HELP a_total Of a.\n# TYPE a_total counter\n"
        'a_total{x="1 2"} 3\na_total{x="2"} 1.5\n'
        '# TYPE b_info gauge\nb_info{version="1"} 1\n'
        '# TYPE h histogram\nh_bucket{le="1"} 2\nh_bucket{le="+Inf"} 3\nh_sum 2.25\nh_count 3\n'
        "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1000.5\n"
    )
    second = (
        "# HELP a_total Of a.\n# TYPE a_total counter\n"
        'a_total{x="1 2"} 4\na_total{x="3"} 1\n'
        '# TYPE b_info gauge\nb_info{version="1"} 1\n'
        '# TYPE h histogram\nh_bucket{le="1"} 1\nh_bucket{le="+Inf"} 1\nh_sum 0.5\nh_count 1\n'
        "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 2000\n"
    )
    assert merge_metrics([first, second]) == (
        "# HELP a_total Of a.\n# TYPE a_total counter\n"
        'a_total{x="1 2"} 7\na_total{x="2"} 1.5\na_total{x="3"} 1\n'
        '# TYPE b_info gauge\nb_info{version="1"} 1\n'
        '# TYPE h histogram\nh_bucket{le="1"} 3\nh_bucket{le="+Inf"} 4\nh_sum 2.75\nh_count 4\n'
        "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1000.5\n"
    )
    with pytest.raises(ValueError):
        merge_metrics(["# TYPE a counter\na x\n"])
