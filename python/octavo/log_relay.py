"""Standard error of another process, as lines of this process's JSON log.

Its own log lines pass as they are. Whatever else comes (a crash's stack, a library's print, a compiler's warning) is
put into lines of the log too, so that a reader of JSON meets nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from typing import Any

from octavo.log_format import LineHandler, current_handler, is_json

__all__ = ["StandardError", "relayed"]

_LOG = logging.getLogger("octavo.output")
_OWN_LINE = b'{"ts":"'
_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 18
_MAX_PLAIN_BYTES = 8000
# A crash's report comes in many writes, and is to be one line.
_GATHER_MS = 100
# Of a child that has ended; a process of its own may hold its standard error open for longer.
_LAST_WORDS_S = 1.0


class StandardError:
    """The destination of a child's standard error.

    Attributes:
        descriptor: for the child.
    """

    def __init__(self, reading: int | None, descriptor: int) -> None:
        self._reading = reading
        self._thread: threading.Thread | None = None
        self.descriptor = descriptor

    def started(self, process: str, pid: int) -> None:
        """The child has its descriptor: close ours, and read in a thread until the child and all of its own have ended.

        Args:
            process: what to call it in lines that it did not make.
            pid: its process id.
        """
        if self._reading is None:
            return
        os.close(self.descriptor)
        relay = _Relay(self._reading, {"process": process, "pid": pid})
        self._thread = threading.Thread(target=relay.run, name=f"octavo-log-{process}", daemon=True)
        self._thread.start()

    def ended(self, seconds: float = _LAST_WORDS_S) -> None:
        """The child has ended: wait until what it said last is in the log, or so long. Blocks."""
        if self._thread is not None:
            self._thread.join(seconds)

    def abandoned(self) -> None:
        """There is no child."""
        if self._reading is not None:
            os.close(self.descriptor)
            os.close(self._reading)


def relayed() -> StandardError:
    """A pipe where this process logs JSON; else this process's own standard error."""
    handler = current_handler()
    if handler is None or not is_json(handler):
        return StandardError(None, 2)
    reading, writing = os.pipe()
    return StandardError(reading, writing)


class _Relay:
    def __init__(self, descriptor: int, fields: dict[str, Any]) -> None:
        self._descriptor = descriptor
        self._fields = fields
        self._plain: list[bytes] = []

    def run(self) -> None:
        rest = b""
        # `select` takes no descriptor above 1023, and a server has thousands of connections.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        try:
            while True:
                if self._plain and not poll.poll(_GATHER_MS):
                    self._say()
                data = os.read(self._descriptor, _READ_BYTES)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._take(line)
            self._take(rest)
            self._say()
        finally:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)

    def _take(self, line: bytes) -> None:
        if line.startswith(_OWN_LINE) and line.endswith(b"}"):
            self._say()
            handler: LineHandler | None = current_handler()
            if handler is not None:
                handler.put(line.decode("utf-8", "replace"))
        elif line.strip():
            self._plain.append(line)
            if sum(map(len, self._plain)) > _MAX_PLAIN_BYTES:
                self._say()

    def _say(self) -> None:
        if self._plain:
            text = b"\n".join(self._plain).decode("utf-8", "replace")
            self._plain.clear()
            _LOG.warning("%s", text, extra={"fields": self._fields})
