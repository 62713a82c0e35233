"""The life of an engine worker process, seen from its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from octavo.engine.heartbeat import Heartbeat
from octavo.errors import EngineDead
from octavo.log_relay import relayed

__all__ = ["WORKER_COMMAND", "WorkerProcess", "die_with"]

_PR_SET_PDEATHSIG = 1
WORKER_COMMAND = (sys.executable, "-m", "octavo.engine.worker")


class WorkerProcess:
    """Starts a worker and watches it.

    The two are joined by a socket pair whose worker end is inherited: there is no path in the file system to protect
    or to clean up, and no other process can connect. The worker is started with `exec` and not forked, so it shares no
    state with this process.

    The worker never outlives this process: the kernel kills it when the thread that started it ends (see
    `octavo.engine.worker`), and it ends by itself when the socket closes. That thread is one of our own, which does
    nothing but wait for the worker.

    Args:
        command: program and arguments; `--fd`, `--parent`, `--heartbeat` and `--invitations` are appended.
        on_exit: called in the waiting thread once the worker has ended.

    Attributes:
        socket: this process's end.
        heartbeat: what the worker is doing.

    Raises:
        EngineDead: the program cannot be started.
    """

    def __init__(self, command: Sequence[str] = WORKER_COMMAND, *, on_exit: Callable[[], None] | None = None) -> None:
        self._started = threading.Event()
        self._ended = threading.Event()
        self._error: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._on_exit = on_exit
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                self.socket, own_socket = _pair(socket.SOCK_STREAM, ours, theirs)
                self._invitations, invitations = _pair(socket.SOCK_SEQPACKET, ours, theirs)
                self.heartbeat, heartbeat = Heartbeat.create()
            except OSError as error:
                raise _cannot_start(error) from None
            theirs.callback(os.close, heartbeat)
            descriptors = {"--fd": own_socket.fileno(), "--heartbeat": heartbeat, "--invitations": invitations.fileno()}
            thread = threading.Thread(
                target=self._run, args=(list(command), descriptors), name="octavo-worker-watch", daemon=True
            )
            thread.start()
            self._started.wait()
            if self._error is not None:
                raise _cannot_start(self._error)
            ours.pop_all()

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    def invite(self) -> socket.socket:
        """A connection for one more client, which the worker takes in once its model is loaded.

        The first message on it is `Ready`. When it closes, its requests end and the others' go on.

        Raises:
            EngineDead: the worker has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            socket.send_fds(self._invitations, [b"+"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise EngineDead(self.epitaph()) from None
        finally:
            theirs.close()
        return ours

    def _run(self, command: list[str], descriptors: dict[str, int]) -> None:
        arguments = ["--parent", str(os.getpid())]
        for option, descriptor in descriptors.items():
            arguments += [option, str(descriptor)]
        # The worker inherits it: a Ctrl-C in the terminal must not reach it before it can say that it ignores it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        output = None
        try:
            output = relayed()
            # Standard output belongs to the program; what the worker prints goes to the log.
            # In a session of its own: signals to this process's group (`timeout`, Ctrl-Z, `kill %1`) are for this
            # process, which may have answers to finish.
            self._process = subprocess.Popen(  # noqa: S603
                command + arguments,
                pass_fds=tuple(descriptors.values()),
                stdin=subprocess.DEVNULL,
                stdout=output.descriptor,
                stderr=output.descriptor,
                start_new_session=True,
            )
            output.started("engine", self._process.pid)
        except OSError as error:
            self._error = error
            if output is not None:
                output.abandoned()
            return
        finally:
            self._started.set()
        self._process.wait()
        output.ended()
        self._ended.set()
        self._invitations.close()
        if self._on_exit is not None:
            self._on_exit()

    def wait(self, timeout: float) -> bool:
        """Wait for the worker's end, at most so many seconds; whether it has ended."""
        return self._ended.wait(timeout)

    @property
    def alive(self) -> bool:
        """Whether the worker still runs."""
        return not self._ended.is_set()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the worker has ended."""
        if self._process is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def stop(self, timeout: float = 5.0) -> None:
        """Ask the worker to end, then make it: SIGTERM, and SIGKILL after the timeout. Blocks."""
        self.send_signal(signal.SIGTERM)
        if not self.wait(timeout):
            self.send_signal(signal.SIGKILL)
            self.wait(timeout)

    def epitaph(self) -> str:
        """A description of how the worker ended."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "the engine process closed its connection"
        if code < 0:
            try:
                return f"the engine process was killed by {signal.Signals(-code).name}"
            except ValueError:
                return f"the engine process was killed by signal {-code}"
        return f"the engine process ended with exit code {code}"


def _pair(
    kind: socket.SocketKind, ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    """Two ends, one to be closed with each of the stacks."""
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    return ours.enter_context(one), theirs.enter_context(other)


def _cannot_start(error: OSError) -> EngineDead:
    return EngineDead(f"the engine process cannot be started: {error}")


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent's thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        sys.exit(1)
