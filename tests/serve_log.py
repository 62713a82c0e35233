"""The JSON log of an `octavo serve` that a test has started with `stderr=subprocess.PIPE, text=True`."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

__all__ = ["ServeLog"]


class ServeLog:
    """Reads a process's standard error to its end, so that the process never waits for its reader.

    Attributes:
        text: what came so far.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.text = ""
        self._came = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                with self._came:
                    self.text += line
                    self._came.notify_all()
        with self._came:
            self._ended = True
            self._came.notify_all()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All lines, each of which is JSON."""
        return [json.loads(line) for line in self.text.splitlines()]

    def wait_for(self, message: str, seconds: float = 40.0) -> dict[str, Any]:
        """The first line with this message.

        Raises:
            AssertionError: the process ended without, or it did not come in time.
        """

        def find() -> dict[str, Any] | None:
            # The last may have come in part.
            whole = self.text[: self.text.rfind("\n") + 1].splitlines()
            found = [json.loads(line) for line in whole if f'"msg":"{message}"' in line]
            return found[0] if found else None

        with self._came:
            self._came.wait_for(lambda: self._ended or find() is not None, seconds)
            line = find()
        assert line is not None, f"no line `{message}`:\n{self.text}"
        return line

    def address(self, seconds: float = 40.0) -> str:
        """Where the server answers, once it is ready.

        Raises:
            AssertionError: it does not become ready.
        """
        return str(self.wait_for("ready", seconds)["address"])

    def end(self) -> str:
        """All of it, once the process and its children have ended."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.text
