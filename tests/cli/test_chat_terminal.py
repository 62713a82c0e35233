"""`octavo chat` on a terminal: prompts, Ctrl-C, Ctrl-D."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

FAKES = str(Path(__file__).with_name("cli_fakes.py"))


def test_ctrl_c_while_the_model_loads() -> None:
    process = subprocess.Popen(
        [sys.executable, FAKES, "chat", "fake"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FAKE_ENGINE_LOADING": "60"},
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "[loading]\n"
        process.send_signal(signal.SIGINT)
        printed, complaint = process.communicate(timeout=10)
        assert (process.returncode, printed, complaint) == (130, "", "[loading ended]\n")
    finally:
        process.kill()
        process.communicate()


class Terminal:
    """A chat whose standard streams are a terminal."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self._unread = b""
        environment = {**os.environ, "FAKE_ENGINE_DELAY": "0.01", "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, FAKES, "chat", "fake", "--max-model-len", "100000"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )
        os.close(slave)

    def expect(self, text: str, again: str = "") -> None:
        """Read up to the end of `text`; type `again` for every second that it does not come."""
        end = time.monotonic() + 30
        typed = time.monotonic()
        while text.encode() not in self._unread:
            assert time.monotonic() < end, self._unread
            if again and time.monotonic() > typed + 1:
                self.type(again)
                typed = time.monotonic()
            if select.select([self._master], [], [], 0.1)[0]:
                self._unread += os.read(self._master, 1 << 16)
        self._unread = self._unread.split(text.encode(), 1)[1]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves() -> None:
    terminal = Terminal()
    try:
        terminal.expect("Ctrl-D leaves")
        terminal.expect(">>> ")
        terminal.type("Hi\n")
        terminal.expect("Hello, w")
        terminal.type("\x03")
        terminal.expect("(stopped)")
        terminal.expect(">>> ")
        terminal.type("\x03")
        # Between writing its prompt and waiting for a key, readline is deaf to a signal until the next one.
        terminal.expect("(Ctrl-D leaves)", again="\x03")
        terminal.expect(">>> ")
        terminal.type("Again\n")
        # What was said before the stop is part of the conversation.
        terminal.expect("<user>Again<assistant>")
        terminal.expect("Hello, w")
        terminal.type("\x03")
        terminal.expect(">>> ")
        terminal.type("\x04")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
