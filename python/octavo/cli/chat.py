"""`octavo chat`: a conversation in the terminal, or over pipes with one message a line."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from octavo.cli.session import Session, open_session
from octavo.config import EngineConfig
from octavo.errors import InvalidRequest

__all__ = ["Chat", "chat_command"]

_HELP = """\
/clear         forget the conversation
/system TEXT   set the system message and begin anew; without a text, remove it
/help          show this
/exit          leave (Ctrl-D too)
Ctrl-C stops a reply. A message that begins with \"\"\" goes on until \"\"\"."""
_QUOTES = '"""'


def chat_command(config: EngineConfig, system: str | None, sampling: Mapping[str, Any]) -> None:
    """Channel until the end of standard input.

    Args:
        config: the model.
        system: the system message.
        sampling: `SamplingParams` fields; None is absent.

    Raises:
        OctavoError: the model cannot be loaded, has no chat template, or its engine died.
    """
    # A loop of our own: lines are read outside of it, where Ctrl-C is Python's.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    manager = open_session(config, sampling)
    try:
        session = _open(loop, manager)
        try:
            if not session.can_chat:
                raise InvalidRequest("model: no chat template; use `octavo run --raw` to complete text")
            Chat(session, loop, system).run()
        finally:
            loop.run_until_complete(manager.__aexit__(None, None, None))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


def _open(loop: asyncio.AbstractEventLoop, manager: AbstractAsyncContextManager[Session]) -> Session:
    """Load the model.

    Raises:
        KeyboardInterrupt: Ctrl-C, once what was begun has ended; a second one does not wait for that.
    """

    def interrupt() -> None:
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)

    async def enter() -> Session:
        return await manager.__aenter__()

    task = loop.create_task(enter())
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return loop.run_until_complete(task)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class Chat:
    """The conversation.

    Args:
        session: the model.
        loop: runs its answers.
        system: the system message.
    """

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop, system: str | None) -> None:
        self._session = session
        self._loop = loop
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Read and answer messages until the end."""
        if self._terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() its history and editing
            self._note(f"{self._session.engine.model.name}: /help lists the commands, Ctrl-D leaves.")
        while (text := self._read()) is not None:
            if text.startswith("/"):
                if not self._command(text):
                    return
            elif text:
                self._answer(text)

    def _note(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _read(self) -> str | None:
        text = self._line(">>> ")
        if text is None or not text.startswith(_QUOTES):
            return text
        lines = [text.removeprefix(_QUOTES)]
        while not lines[-1].endswith(_QUOTES):
            line = self._line("... ")
            if line is None:
                break
            lines.append(line)
        return "\n".join(lines).removesuffix(_QUOTES).strip()

    def _line(self, prompt: str) -> str | None:
        """A line without its end, None at the end of input."""
        while True:
            try:
                if self._terminal:
                    return input(prompt).strip()
                line = sys.stdin.readline()
                return line.strip() if line else None
            except EOFError:
                self._note("")
                return None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                self._note("\n(Ctrl-D leaves)")

    def _command(self, text: str) -> bool:
        """Run a command; False to quit."""
        name, _, rest = text.partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/clear":
            self._messages.clear()
            self._note("(forgotten)")
        elif name == "/system":
            self._system = rest.strip() or None
            self._messages.clear()
            self._note("(system message set)" if self._system else "(no system message)")
        elif name == "/help":
            self._note(_HELP)
        else:
            self._note(f"{name}: no such command; /help lists them")
        return True

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        task = self._loop.create_task(self._print_answer(pieces))
        self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            self._note(" (stopped)")
        except InvalidRequest as error:
            self._messages.pop()
            self._note(f"error: {error} (/clear forgets the conversation)")
            return
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        self._messages.append({"role": "assistant", "content": "".join(pieces)})

    async def _print_answer(self, pieces: list[str]) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        stream: Any = self._session.reply([*system, *self._messages])
        async with contextlib.aclosing(stream):
            async for piece in stream:
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
