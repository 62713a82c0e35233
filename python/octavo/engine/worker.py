"""The engine worker: a process that owns the model and serves the process that started it over an inherited socket.

    python -m octavo.engine.worker --fd N --parent PID [--heartbeat N] [--invitations N]

More clients may be invited: their sockets come through one more inherited socket. The worker is single-threaded: drain
the sockets, step, send. Idle, it sleeps in `poll`. It ends when its first client's end of the socket closes, and the
kernel kills it when its parent dies, so it is never left behind. A fault in a step ends it with its requests told, a
traceback in its log (standard error) and exit code 1; a refused model gives exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.clients import ID_MASK, Client, Clients
from octavo.engine.connection import ClientGone, Connection
from octavo.engine.gc_policy import set_aside
from octavo.engine.heartbeat import Heartbeat, Phase
from octavo.engine.loop import EngineLoop
from octavo.engine.process import die_with
from octavo.engine.protocol import (
    Abort,
    ErrorRecord,
    Fatal,
    Load,
    LoadFailed,
    Progress,
    ProtocolError,
    Ready,
    Rejected,
    Stats,
    StatsQuery,
    Submit,
)
from octavo.engine.request_queue import RequestQueue
from octavo.errors import OctavoError
from octavo.log_format import configure_child
from octavo.runner.interface import ModelInfo

__all__ = ["LoadEngine", "Worker", "main"]

LoadEngine = Callable[[EngineConfig, Callable[[str, int, int], None]], "tuple[EngineLoop, ModelInfo, object]"]

_LOG = logging.getLogger("octavo.engine.worker")
_PROGRESS_INTERVAL_S = 0.05
_LAST_WORDS_S = 1.0


class Worker:
    """Serves clients until the first one leaves.

    Args:
        clients: of the worker.
        loop: the loaded engine.
        info: what it is, for clients that come later.
        wake: ends the sleep of `Clients.exchange`, from any thread.

    Attributes:
        stopping: set by a signal handler; `run` returns before the next step.
    """

    def __init__(self, clients: Clients, loop: EngineLoop, info: ModelInfo, wake: Callable[[], None]) -> None:
        self._clients = clients
        self._loop = loop
        self._requests = RequestQueue(clients, loop, wake)
        self._info = info
        self.stopping = False

    def run(self) -> None:
        """Serve. Messages are read before each step, so an abort reaches the core before the next plan.

        Raises:
            ClientGone: the first client has closed its end.
            ProtocolError: it sent what is no message.
            Exception: a step failed; the engine is of no use any more.
        """
        clients, loop, heartbeat = self._clients, self._loop, self._loop.heartbeat
        while not self.stopping:
            held = clients.held
            self._say_goodbye()
            block = held or not loop.has_work()
            if block:
                heartbeat.enter(Phase.HELD if held else Phase.IDLE)
            else:
                heartbeat.enter(Phase.RECEIVE)
            messages = clients.exchange(block=block)
            if block and messages:
                heartbeat.enter(Phase.RECEIVE)
            for client, message in messages:
                self._handle(client, message)
            self._requests.take_compiled()
            self._greet()
            self._say_goodbye()
            if clients.held:
                continue
            outputs = loop.step()
            if outputs is not None:
                clients.deliver(outputs)
            for request_id, error in loop.take_failures():
                self._tell(request_id, error)

    def _tell(self, core_id: int, error: OctavoError) -> None:
        """End an accepted request with an error."""
        client = self._clients.owner(core_id)
        if client is not None:
            client.unfinished.pop(core_id, None)
            self._clients.send(client, Rejected(core_id & ID_MASK, ErrorRecord.of(error)))

    def _greet(self) -> None:
        newcomers = self._clients.newcomers
        while newcomers:
            self._clients.send(newcomers.pop(), Ready(self._info))

    def _say_goodbye(self) -> None:
        leavers = self._clients.leavers
        while leavers:
            self._requests.leave(leavers.pop())

    def _handle(self, client: Client, message: Any) -> None:
        if client.gone:
            return
        try:
            if isinstance(message, Submit):
                self._requests.submit(client, message)
            elif isinstance(message, Abort):
                self._requests.abort(client, message.request_ids)
            elif isinstance(message, StatsQuery):
                values = self._loop.stats()
                values["deferred"] += self._requests.num_answers
                self._clients.send(client, Stats(message.query_id, values))
            else:
                raise ProtocolError(f"{type(message).__name__} is not expected here")
        except ProtocolError as error:
            self._clients.refuse(client, error)


class _ProgressSender:
    """Forwards progress, at a rate that a person can follow."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stage = ""
        self._sent_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or done == total or now - self._sent_at >= _PROGRESS_INTERVAL_S:
            self._stage, self._sent_at = stage, now
            self._connection.send(Progress(stage, done, total))


def main(arguments: list[str] | None = None, *, load: LoadEngine | None = None) -> int:
    """The worker process.

    Args:
        arguments: the command line.
        load: what loads the engine, for tests.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="octavo.engine.worker", description="Started by Octavo's own processes.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="the process to die with")
    parser.add_argument("--heartbeat", type=int, help="the inherited page of the heartbeat")
    parser.add_argument("--invitations", type=int, help="the inherited socket that brings more clients")
    options = parser.parse_args(arguments)
    die_with(options.parent)
    faulthandler.enable()
    configure_child("engine")
    # Ctrl-C in a terminal reaches every process of the group; what it means is the client's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    wake_read, wake_write = socket.socketpair()
    for end in (wake_read, wake_write):
        end.setblocking(False)
    connection = Connection(sock, wake_read.fileno())
    heartbeat = Heartbeat(options.heartbeat)
    invitations = None if options.invitations is None else socket.socket(fileno=options.invitations)
    try:
        return _serve(connection, wake_read.fileno(), wake_write.fileno(), load, heartbeat, invitations)
    except ClientGone:
        return 0
    except Exception as error:
        _LOG.exception("the engine failed; its requests are lost")
        with contextlib.suppress(ClientGone):
            connection.send(Fatal(f"{type(error).__name__}: {error}"))
            connection.flush(_LAST_WORDS_S)
        if load is None:
            # Not in order: to free what lies on a device that failed may abort this process, or hang.
            logging.shutdown()
            os._exit(1)
        return 1


def _serve(
    connection: Connection,
    wake_read: int,
    wake_write: int,
    load: LoadEngine | None,
    heartbeat: Heartbeat,
    invitations: socket.socket | None,
) -> int:
    build = load
    if build is None:
        # Imports take their time: meanwhile the client finds the model's files.
        import octavo.runner.runner  # noqa: F401
        from octavo.engine.loop_builder import build_engine

        build = build_engine
    config = _await_config(connection)
    heartbeat.enter(Phase.LOADING)
    try:
        loop, info, _ = build(config, _ProgressSender(connection))
    except OctavoError as error:
        connection.send(LoadFailed(ErrorRecord.of(error)))
        connection.flush(_LAST_WORDS_S)
        return 2
    set_aside()
    loop.heartbeat = heartbeat

    def wake() -> None:
        # Full, it wakes as well.
        with contextlib.suppress(BlockingIOError):
            os.write(wake_write, b"\0")

    worker = Worker(Clients(connection, wake_read, invitations), loop, info, wake)

    def stop(_number: int, _frame: object) -> None:
        worker.stopping = True

    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGTERM, stop)
    connection.send(Ready(info))
    try:
        worker.run()
    except ClientGone:
        loop.close()
        raise
    # After any other failure the client is told at once, and the memory goes with the process.
    loop.close()
    return 0


def _await_config(connection: Connection) -> EngineConfig:
    messages: list[Any] = []
    while not messages:
        messages = connection.exchange(block=True)
    if len(messages) != 1 or not isinstance(messages[0], Load):
        raise ProtocolError("the first message must be Load, alone")
    return messages[0].config


if __name__ == "__main__":
    sys.exit(main())
