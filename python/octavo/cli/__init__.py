"""The command line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    A user's mistake is one line on standard error (of the log, where `octavo serve` logs JSON) and exit code 1, or 2
    where the command line itself is wrong, an option's value too; OCTAVO_DEBUG=1 shows the traceback.

    Args:
        arguments: without the program's name; those of the process when None.
    """
    _prepare_streams()
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _prepare_streams() -> None:
    """Open streams that the parent closed on the null device, before a socket gets their number.

    What the terminal's encoding lacks is printed as a question mark.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _run(arguments: list[str]) -> int:
    serves = arguments[:1] == ["serve"]
    try:
        from octavo.cli.app import app
        from octavo.cli.vllm_arguments import serve_arguments

        if serves:
            arguments = serve_arguments(arguments[1:])
        code = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # Whoever read our output has gone; nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if type(error).__name__ == "Abort":
            return 130
        if type(error).__name__ == "NoArgsIsHelpError":
            # No command at all: its message is the whole help, to be read as it is laid out.
            print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined] # noqa: T201
            return _USAGE
        lines, code = _explain(error, arguments)
        if serves and _logs_json(arguments):
            _log(lines, code, error if _debugging() else None)
        elif _debugging() and code != _USAGE:
            raise
        else:
            for line in lines:
                print(f"error: {' '.join(line.split())}", file=sys.stderr)  # noqa: T201
        return code


def _debugging() -> bool:
    return os.environ.get("OCTAVO_DEBUG", "") not in ("", "0")


def _explain(error: Exception, arguments: Sequence[str]) -> tuple[list[str], int]:
    """The message and the exit code of an error."""
    from octavo.cli.app import app
    from octavo.cli.flags import WrongOption, in_flags, wrong_value
    from octavo.cli.vllm_arguments import missing_flags
    from octavo.errors import OctavoError

    if isinstance(error, WrongOption):
        return [in_flags(error.error, arguments, app)], _USAGE
    if isinstance(error, OctavoError):
        return [in_flags(error, arguments, app)], 1
    # typer's own errors come from click, or from its copy of it.
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        missing = missing_flags(arguments) if arguments[:1] == ["serve"] and hasattr(error, "option_name") else []
        said = wrong_value(error, arguments) or format_message()
        return missing or [said], getattr(error, "exit_code", _USAGE)
    if isinstance(error, OSError):
        return [str(error)], 1
    return [f"{type(error).__name__}: {error} (a fault of Octavo; OCTAVO_DEBUG=1 shows where)"], 1


def _logs_json(arguments: Sequence[str]) -> bool:
    """Whether `octavo serve` logs JSON, or would, where it did not come so far."""
    from octavo.errors import ConfigError
    from octavo.log_format import current_format, resolve_format

    found = current_format()
    if found is None:
        words = [word for argument in arguments for word in argument.split("=", 1)]
        given = words[words.index("--log-format") + 1 :][:1] if "--log-format" in words else []
        try:
            found = resolve_format((given or ["auto"])[0])
        except ConfigError:
            found = resolve_format("auto")
    return found == "json"


def _log(lines: Sequence[str], code: int, error: Exception | None) -> None:
    import logging

    from octavo.log_format import JsonFormatter, current_handler

    handler = current_handler()
    info = None if error is None else (type(error), error, error.__traceback__)
    for line in lines:
        record = logging.LogRecord("octavo.server", logging.CRITICAL, "", 0, "%s", (line,), info)
        record.fields = {"exit_code": code}
        text = JsonFormatter().format(record)
        if handler is None:
            print(text, file=sys.stderr)  # noqa: T201
        else:
            handler.put(text)
    if handler is not None:
        # Waits a moment, not for ever: whoever reads the log may stand still.
        handler.flush()
