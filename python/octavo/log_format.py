"""Log lines as JSON or for a terminal, of the server's process and the engine's alike.

A line is made where the event is and written by a thread: whoever reads the log may be slow, and no request waits for
that. What users send can end up in a message, so no character of it can end a line, move a cursor or pose as a field.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import msgspec

from octavo.errors import ConfigError

__all__ = [
    "FORMATS",
    "LEVELS",
    "ConsoleFormatter",
    "JsonFormatter",
    "LineHandler",
    "child_settings",
    "configure",
    "configure_child",
    "current_format",
    "current_handler",
    "for_people",
    "is_json",
    "log_complaints",
    "printable",
    "resolve_format",
]

FORMATS = ("auto", "json", "console")
LEVELS = ("critical", "error", "warning", "info", "debug")
_CHILD = "OCTAVO_LOG"
_MAX_MESSAGE = 8192
_MAX_EXCEPTION = 32768
_MAX_QUEUED_LINES = 8192
_BATCH_LINES = 4096
_FLUSH_S = 2.0
_GATHER_S = 0.01
# Libraries that tell of each request that they make.
_TALKATIVE = ("httpx", "httpcore", "urllib3", "filelock")
# What moves a cursor, ends a line or turns the direction of writing. JSON escapes the first 32 by itself.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")

Fields = Callable[[], Mapping[str, Any]]


def printable(text: str) -> str:
    """`text` without any character that a terminal or a line-based reader takes for more than a character."""
    return text if text.isprintable() else _UNSAFE.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def _json_safe(text: str) -> str:
    # Line ends are escaped by the encoder; a reader gets them back, in one string.
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda match: match[0] if match[0] in "\n\t" else _escape(match[0]), text)


def _no_fields() -> Mapping[str, Any]:
    return {}


class _Formatter(logging.Formatter):
    """Base of both formats.

    Args:
        fields: gives what every line of the running request carries.
        constant: on every line.
    """

    def __init__(self, fields: Fields = _no_fields, constant: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._fields = fields
        self._constant = dict(constant or {})
        self._second = -1
        self._second_text = ""

    def _time(self, created: float, form: str) -> str:
        second = int(created)
        if second != self._second:
            self._second, self._second_text = second, time.strftime(form, time.gmtime(second))
        return f"{self._second_text}.{int((created - second) * 1000):03d}"

    def _all_fields(self, record: logging.LogRecord) -> dict[str, Any]:
        own: Mapping[str, Any] = getattr(record, "fields", None) or {}
        return {**self._constant, **self._fields(), **own}

    def _message(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}... ({len(message)} characters)"

    def _exception(self, record: logging.LogRecord) -> str | None:
        if not record.exc_info or record.exc_info[0] is None:
            return None
        return self.formatException(record.exc_info)[-_MAX_EXCEPTION:]


class JsonFormatter(_Formatter):
    """One JSON object a line: `ts`, `level`, `logger`, `msg`, then the fields."""

    _encoder = msgspec.json.Encoder()

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "ts": self._time(record.created, "%Y-%m-%dT%H:%M:%S") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": self._message(record),
        }
        for name, value in self._all_fields(record).items():
            if value is not None:
                line[name] = value
        exception = self._exception(record)
        if exception is not None:
            line["exception"] = exception
        try:
            encoded = self._encoder.encode(line)
            if encoded.isascii() and b"\x7f" not in encoded:
                return encoded.decode()
        except UnicodeEncodeError:
            pass  # half of a surrogate pair
        safe = {name: _json_safe(value) if isinstance(value, str) else value for name, value in line.items()}
        return self._encoder.encode(safe).decode()


class ConsoleFormatter(_Formatter):
    """A line for people.

    Args:
        colour: mark warnings and errors.
    """

    _COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[1;31m"}  # noqa: RUF012

    def __init__(
        self, fields: Fields = _no_fields, constant: Mapping[str, Any] | None = None, *, colour: bool = False
    ) -> None:
        super().__init__(fields, constant)
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end; an exception's lines are indented, so that none can pose as a line of the log."""
        words = [f"{name}={_word(value)}" for name, value in self._all_fields(record).items() if value is not None]
        level = f"{record.levelname:<8}"
        if self._colour and record.levelname in self._COLOURS:
            level = f"{self._COLOURS[record.levelname]}{level}\x1b[0m"
        head = f"{self._time(record.created, '%H:%M:%S')} {level} {record.name}: {printable(self._message(record))}"
        line = " ".join([head, *words])
        exception = self._exception(record)
        if exception is not None:
            line += "".join(f"\n  | {printable(part)}" for part in exception.split("\n"))
        return line


def _word(value: Any) -> str:
    text = printable(value if isinstance(value, str) else str(value))
    return f'"{text}"' if not text or " " in text or "=" in text or '"' in text else text


class LineHandler(logging.Handler):
    """Writes lines to a file descriptor, in a thread, in order.

    Args:
        descriptor: where to.

    Attributes:
        dropped: lines lost because the reader was slower than the log for too long, or has gone, or its disk is full.
    """

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="octavo-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue a line that is made already, without its end."""
        if self._lines.qsize() >= _MAX_QUEUED_LINES:
            self.dropped += 1
        else:
            self._lines.put(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line."""
        if self._lines.qsize() >= _MAX_QUEUED_LINES:
            self.dropped += 1
            return
        try:
            line = self.format(record)
        except Exception:
            # A message and arguments that do not fit each other: a fault, but no request's.
            message = f"a log line could not be made, from {record.pathname}:{record.lineno}"
            line = self.format(logging.LogRecord(record.name, logging.ERROR, "", 0, message, None, None))
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until what was queued is written, or a moment."""
        if self._thread.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(_FLUSH_S)

    def close(self) -> None:
        """Flush."""
        self.flush()
        super().close()

    def _write(self) -> None:
        while True:
            items = [self._lines.get()]
            # What comes within a moment is written as one, and the threads that log are not interrupted a line.
            time.sleep(_GATHER_S)
            with contextlib.suppress(Empty):
                while len(items) < _BATCH_LINES:
                    items.append(self._lines.get_nowait())
            whole = bytearray()
            for item in items:
                if isinstance(item, str):
                    line = f"{item}\n".encode("utf-8", "backslashreplace")
                    if len(whole) + len(line) > select.PIPE_BUF:
                        self._write_whole(whole)
                        whole = bytearray()
                    whole += line
            self._write_whole(whole)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()

    def _write_whole(self, data: bytearray) -> None:
        # Other processes write to the same pipe: up to PIPE_BUF bytes none can come between.
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                # The reader has gone, or its disk is full: the lines are lost, the server is not.
                self.dropped += bytes(rest).count(b"\n")
                return


def resolve_format(format: str) -> str:
    """`json` or `console`.

    Raises:
        ConfigError: no such format.
    """
    if format not in FORMATS:
        raise ConfigError(f"log_format: {format!r} is not one of {', '.join(FORMATS)}")
    return ("console" if os.isatty(2) else "json") if format == "auto" else format


def _resolve(format: str, level: str) -> str:
    if level not in LEVELS:
        raise ConfigError(f"log_level: {level!r} is not one of {', '.join(LEVELS)}")
    return resolve_format(format)


def configure(
    format: str = "auto",
    level: str = "info",
    *,
    fields: Fields = _no_fields,
    constant: Mapping[str, Any] | None = None,
) -> LineHandler:
    """Send all logging of this process to standard error.

    Args:
        format: `json`, `console`, or `auto`: console on a terminal, else JSON.
        level: the least that is logged.
        fields: gives what every line of the running request carries.
        constant: on every line.

    Returns:
        The handler, which the root logger has now instead of any other.

    Raises:
        ConfigError: no such format or level.
    """
    format = _resolve(format, level)
    handler = LineHandler(2)
    if format == "json":
        handler.setFormatter(JsonFormatter(fields, constant))
    else:
        colour = os.isatty(2) and "NO_COLOR" not in os.environ
        handler.setFormatter(ConsoleFormatter(fields, constant, colour=colour))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
    return handler


def current_format() -> str | None:
    """`json` or `console`, as this process logs; None where `configure` was not called."""
    handler = current_handler()
    if handler is None:
        return None
    return "json" if is_json(handler) else "console"


def for_people() -> bool:
    """Whether standard error is a terminal, and no log of JSON lines goes there: bars that move may be shown."""
    return sys.stderr.isatty() and current_format() != "json"


def current_handler() -> LineHandler | None:
    """The handler of this process's log; None before `configure`."""
    return next((handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)), None)


def is_json(handler: LineHandler) -> bool:
    """Whether a handler's lines are JSON."""
    return isinstance(handler.formatter, JsonFormatter)


def log_complaints() -> None:
    """Have the log carry what Python would write to standard error: warnings, and exceptions that nobody caught."""
    log = logging.getLogger("octavo.uncaught")

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.critical("an exception ends the process", exc_info=(kind, error, trace))

    def in_thread(what: threading.ExceptHookArgs) -> None:
        if what.exc_value is not None and what.exc_type is not SystemExit:
            name = "a thread" if what.thread is None else f"the thread {what.thread.name}"
            log.error("an exception ends %s", name, exc_info=(what.exc_type, what.exc_value, what.exc_traceback))

    def unraisable(what: sys.UnraisableHookArgs) -> None:
        info = None if what.exc_value is None else (what.exc_type, what.exc_value, what.exc_traceback)
        log.error("%s: %r", what.err_msg or "an exception was ignored in", what.object, exc_info=info)

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, in_thread, unraisable
    logging.captureWarnings(True)


def child_settings(format: str, level: str) -> None:
    """Let processes that this one starts write their lines alike."""
    os.environ[_CHILD] = f"{_resolve(format, level)}:{level}"


def configure_child(process: str) -> None:
    """Log as the process that started this one asked for; in a form for people where none did.

    Args:
        process: what to call this one, on every line.
    """
    format, _, level = os.environ.get(_CHILD, "console:info").partition(":")
    try:
        configure(format, level, constant={"process": process, "pid": os.getpid()})
    except ConfigError:
        configure("console", "info", constant={"process": process, "pid": os.getpid()})
        logging.getLogger("octavo").warning("the environment's %s is not FORMAT:LEVEL", _CHILD)
    log_complaints()
    sys.stderr.flush()
