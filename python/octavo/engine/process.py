"""The life of an engine worker process, seen from its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from octavo.errors import EngineDead

__all__ = ["WORKER_COMMAND", "WorkerProcess"]

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
        command: program and arguments; `--fd` and `--parent` are appended.
        on_exit: called in the waiting thread once the worker has ended.

    Attributes:
        socket: this process's end.

    Raises:
        EngineDead: the program cannot be started.
    """

    def __init__(self, command: Sequence[str] = WORKER_COMMAND, *, on_exit: Callable[[], None] | None = None) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._started = threading.Event()
        self._ended = threading.Event()
        self._error: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._on_exit = on_exit
        thread = threading.Thread(
            target=self._run, args=(list(command), theirs), name="octavo-worker-watch", daemon=True
        )
        thread.start()
        self._started.wait()
        if self._process is None:
            self.socket.close()
            raise EngineDead(f"the engine process cannot be started: {self._error}")

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    def _run(self, command: list[str], theirs: socket.socket) -> None:
        arguments = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        # The worker inherits it: a Ctrl-C in the terminal must not reach it before it can say that it ignores it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # Standard output belongs to the program; what the worker prints goes to standard error.
            self._process = subprocess.Popen(  # noqa: S603
                command + arguments, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=2
            )
        except OSError as error:
            self._error = error
            return
        finally:
            theirs.close()
            self._started.set()
        self._process.wait()
        self._ended.set()
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
        """How the worker ended, in words."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "the engine process closed its connection"
        if code < 0:
            try:
                return f"the engine process was killed by {signal.Signals(-code).name}"
            except ValueError:
                return f"the engine process was killed by signal {-code}"
        return f"the engine process ended with exit code {code}"
