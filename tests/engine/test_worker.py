"""The worker process in trouble: killed, orphaned, talked nonsense to, or not listened to."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop
from engine_fakes import COMMAND, fake_config
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.process import WorkerProcess
from octavo.engine.protocol import (
    Abort,
    Accepted,
    Fatal,
    FrameReader,
    FromWorker,
    Load,
    Ready,
    Rejected,
    Stats,
    StatsQuery,
    StepOutputs,
    Submit,
    encode_frame,
)
from octavo.engine.requests import RequestMaker, submissions
from octavo.errors import EngineDead
from octavo.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=None, ignore_eos=True)


class Client:
    """A worker and a plain blocking client."""

    def __init__(self, model: str = "fake", **settings: Any) -> None:
        self.process = WorkerProcess(COMMAND)
        self.socket = self.process.socket
        self.socket.settimeout(20)
        self.reader = FrameReader(FromWorker)
        self.messages: list[Any] = []
        self.send(Load(fake_config(model, **settings)))
        self.maker = RequestMaker(self.wait_for(Ready).info, 0)

    def send(self, message: Any) -> None:
        self.socket.sendall(encode_frame(message))

    def wait_for(self, kind: type) -> Any:
        while True:
            while self.messages:
                message = self.messages.pop(0)
                if isinstance(message, kind):
                    return message
            data = self.socket.recv(1 << 16)
            assert data, f"the worker closed its end before {kind.__name__}"
            self.messages += self.reader.feed(data)

    def submit(self, number: int, prompt: list[int], params: SamplingParams) -> None:
        for message in submissions([self.maker.make(number, prompt, params)]):
            self.send(message)

    def stats(self) -> dict[str, Any]:
        self.send(StatsQuery(1))
        return dict(self.wait_for(Stats).values)


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(*arguments: Any, **settings: Any) -> Client:
        clients.append(Client(*arguments, **settings))
        return clients[-1]

    yield make
    for client in clients:
        client.socket.close()
        client.process.stop()


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def gone(pid: int, within_s: float) -> bool:
    """Whether a process ends in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_an_idle_worker_sleeps(connect: Callable[..., Client]) -> None:
    client = connect()
    client.submit(1, [1, 2, 3], SamplingParams(max_tokens=5))
    client.wait_for(StepOutputs)
    time.sleep(0.3)
    before = cpu_seconds(client.process.pid)
    time.sleep(1)
    assert cpu_seconds(client.process.pid) - before <= 0.01


def test_a_worker_ends_when_its_client_closes(connect: Callable[..., Client]) -> None:
    for model in ("fake", "fake:step_s=0.05"):
        client = connect(model)
        client.submit(1, [1, 2, 3], LONG)
        client.wait_for(StepOutputs)
        client.socket.close()
        assert client.process.wait(5)
        assert client.process.epitaph().endswith("exit code 0")


def test_sigterm_ends_it_cleanly_idle_or_busy(connect: Callable[..., Client]) -> None:
    for busy in (False, True):
        client = connect("fake:step_s=0.01")
        if busy:
            client.submit(1, [1, 2, 3], LONG)
            client.wait_for(StepOutputs)
        client.process.send_signal(signal.SIGTERM)
        assert client.process.wait(5)
        assert client.process.epitaph().endswith("exit code 0")


def test_ctrl_c_in_the_terminal_is_not_for_the_worker(connect: Callable[..., Client]) -> None:
    client = connect()
    client.process.send_signal(signal.SIGINT)
    client.submit(1, [1, 2, 3], SamplingParams(max_tokens=5))
    client.wait_for(StepOutputs)


def test_ctrl_c_while_the_worker_starts_is_not_for_it() -> None:
    process = WorkerProcess((sys.executable, "-c", "import time; time.sleep(60)"))
    process.send_signal(signal.SIGINT)
    assert not process.wait(0.5)
    process.stop()
    process.socket.close()
    assert process.epitaph().endswith("SIGTERM")


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 5) + b"hello",
        struct.pack("<I", (1 << 32) - 1),
        encode_frame(Fatal("a worker's message")),
        encode_frame(Load(fake_config())),
    ],
    ids=["garbage", "too long", "wrong direction", "wrong time"],
)
def test_nonsense_on_the_socket_ends_the_worker_with_a_reason(
    connect: Callable[..., Client], data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    client = connect()
    client.socket.sendall(data)
    assert "ProtocolError" in client.wait_for(Fatal).message
    assert client.process.wait(5)
    assert client.process.epitaph().endswith("exit code 1")
    assert "Traceback" in capfd.readouterr().err


def test_a_client_that_stops_reading_stops_the_steps_and_not_the_engine(connect: Callable[..., Client]) -> None:
    client = connect(max_model_len=200_000, num_blocks=100_000, max_num_seqs=256)
    answers = SamplingParams(max_tokens=100_000, n=64, ignore_eos=True)
    for number in range(1, 5):
        client.submit(number, [number], answers)
    before, deadline = -1.0, time.monotonic() + 30
    while (seconds := cpu_seconds(client.process.pid)) != before:
        assert time.monotonic() < deadline, "it never stops stepping"
        before = seconds
        time.sleep(0.5)
    assert psutil.Process(client.process.pid).memory_info().rss < 200 << 20
    first = client.stats()
    assert first["running"] == 256, "it reads and answers, once it is listened to again"
    client.send(Abort([1, 2, 3, 4]))
    client.submit(9, [1], SamplingParams(max_tokens=5))
    while client.stats()["blocks_used"]:
        pass


def test_a_killed_worker_fails_every_stream_within_a_second(fake_engine: Any, run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with fake_engine("fake:step_s=0.002") as engine:
            streams = [engine.stream([number], LONG) for number in range(10)]
            for stream in streams:
                await anext(stream)
            waiting = asyncio.create_task(engine.generate([1], LONG))
            await asyncio.sleep(0.05)
            os.kill(engine._client.pid, signal.SIGKILL)
            begun = time.monotonic()
            for stream in streams:
                with pytest.raises(EngineDead, match="killed by SIGKILL"):
                    async for _ in stream:
                        pass
            with pytest.raises(EngineDead, match="SIGKILL"):
                await waiting
            assert time.monotonic() - begun < 1
            for call in (engine.generate([1]), engine.stats()):
                with pytest.raises(EngineDead, match="SIGKILL"):
                    await call
            with pytest.raises(EngineDead, match="SIGKILL"):
                engine.check_health()

    run(main())


def test_requests_between_a_workers_end_and_the_news_of_it(fake_engine: Any) -> None:
    async def main() -> None:
        async with fake_engine() as engine:
            engine._client._transport.close()
            for _ in range(3):
                # Their turns come while how the worker ended is not known yet.
                with pytest.raises(EngineDead):
                    await asyncio.wait_for(asyncio.gather(engine.generate([1], LONG), engine.stats()), 10)

    uvloop.run(main())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("fake:crash_at=5", "exit code 1: RuntimeError: the device is on fire"),
        ("fake:crash_at=5,close_raises=1", "exit code 1: RuntimeError: the device is on fire"),
        ("fake:exit_at=5", "exit code 7"),
        ("fake:garbage=1", "sent what is no message"),
    ],
)
def test_a_worker_that_fails_says_why(
    fake_engine: Any, run: Callable[..., Any], capfd: pytest.CaptureFixture[str], model: str, reason: str
) -> None:
    async def main() -> None:
        async with fake_engine(model) as engine:
            with pytest.raises(EngineDead, match=reason):
                await engine.generate([1], LONG)
            pid = engine._client.pid
            assert gone(pid, 2)

    run(main())
    if "crash" in model:
        assert "RuntimeError: the device is on fire" in capfd.readouterr().err


def test_a_cancelled_start_leaves_no_process(run: Callable[..., Any]) -> None:
    async def main() -> None:
        before = {child.pid for child in psutil.Process().children()}
        task = asyncio.create_task(AsyncEngine.start(fake_config("fake:load=hang"), worker_command=COMMAND))
        while not (started := {child.pid for child in psutil.Process().children()} - before):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(gone(pid, 2) for pid in started)

    run(main())


def submit_all(client: Client, requests: list[tuple[int, SamplingParams]], *, more: bool) -> None:
    made = [client.maker.make(number, [number, 3], params) for number, params in requests]
    client.send(Submit(made, batch=True, more=more))


def test_a_batch_that_is_not_whole_holds_nobody(connect: Callable[..., Client]) -> None:
    client = connect()
    submit_all(client, [(1, LONG), (2, LONG)], more=True)
    client.submit(3, [5], SamplingParams(max_tokens=4, ignore_eos=True))
    ids = [np.frombuffer(client.wait_for(StepOutputs).request_ids, np.int64).tolist() for _ in range(4)]
    assert ids == [[3]] * 4
    client.send(Abort([1]))
    submit_all(client, [(4, LONG)], more=False)
    client.wait_for(Accepted)
    assert np.frombuffer(client.wait_for(StepOutputs).request_ids, np.int64).tolist() == [2, 4]
    # The next batch is refused, and has nothing to do with this one.
    submit_all(client, [(5, LONG)], more=True)
    submit_all(client, [(2, LONG)], more=True)
    submit_all(client, [(6, LONG)], more=False)
    assert client.wait_for(Rejected).request_id == 2
    assert client.stats()["running"] == 2


def test_an_abort_finds_what_waits_in_a_batch(connect: Callable[..., Client]) -> None:
    client = connect("fake:eos=1,compile_s=0.3")
    slow = SamplingParams(structured_outputs={"choice": ["<7><3>"]})
    submit_all(client, [(1, LONG), (2, slow), (3, slow), (4, LONG)], more=False)
    client.send(Abort([1, 2]))
    client.submit(5, [5], SamplingParams(max_tokens=2, ignore_eos=True))
    assert np.frombuffer(client.wait_for(StepOutputs).request_ids, np.int64).tolist() == [5]
    client.wait_for(Accepted)
    assert np.frombuffer(client.wait_for(StepOutputs).request_ids, np.int64).tolist() == [3, 4]
    assert client.stats()["requests"] == 3
    # All that is left of one is aborted: it is over.
    submit_all(client, [(6, slow), (7, slow)], more=False)
    client.send(Abort([4, 6, 7]))
    client.wait_for(Accepted)
    deadline = time.monotonic() + 5
    while client.stats()["blocks_used"]:
        assert time.monotonic() < deadline
    assert client.stats()["requests"] == 3


PARENT = """
import asyncio, os, sys, threading
sys.path.insert(0, {tests!r})
from engine_fakes import COMMAND, fake_config
from octavo.engine.async_engine import AsyncEngine
from octavo.sampling_params import SamplingParams

async def main():
    engine = await AsyncEngine.start(fake_config({model!r}), worker_command=COMMAND)
    stream = engine.stream([1], SamplingParams(max_tokens=None, ignore_eos=True))
    await anext(stream)
    if {fork!r} and os.fork() == 0:
        import time
        time.sleep(30)  # holds a copy of the client's end of the socket
        os._exit(0)
    print(engine._client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("model", "fork"),
    [("fake", False), ("fake:stall_at=3", False), ("fake", True)],
    ids=["between steps", "in a step", "with the socket held by a fork"],
)
def test_a_worker_dies_with_its_parent(model: str, fork: bool) -> None:
    program = PARENT.format(tests=str(Path(__file__).parent), model=model, fork=fork)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    children = psutil.Process(parent.pid).children()
    assert worker in {child.pid for child in children}
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        assert gone(worker, 2)
    finally:
        for child in children:
            if child.is_running() and child.pid != worker:
                child.kill()


def test_a_worker_whose_parent_is_another_process_does_not_start() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "octavo.engine.worker", "--fd", "0", "--parent", "1"], capture_output=True, timeout=30
    )
    assert result.returncode == 1
