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

    A user's mistake is a line on standard error and exit code 1, or 2 where the command line itself is wrong;
    OCTAVO_DEBUG=1 shows the traceback.

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
    try:
        from octavo.cli.app import app
        from octavo.cli.vllm_arguments import serve_arguments

        if arguments[:1] == ["serve"]:
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
        from octavo.errors import OctavoError

        if isinstance(error, OctavoError) and not _debugging():
            from octavo.cli.flags import in_flags

            return _complain(in_flags(error, arguments), 1)
        # typer's own errors come from click, or from its copy of it.
        format_message = getattr(error, "format_message", None)
        if format_message is not None:
            if arguments[:1] == ["serve"] and hasattr(error, "option_name"):
                from octavo.cli.vllm_arguments import missing_flags

                lines = missing_flags(arguments)
                if lines:
                    return max(_complain(line, _USAGE) for line in lines)
            return _complain(format_message(), getattr(error, "exit_code", _USAGE))
        if type(error).__name__ == "Abort":
            return 130
        if _debugging():
            raise
        if isinstance(error, OSError):
            return _complain(str(error), 1)
        return _complain(f"{type(error).__name__}: {error} (a fault of Octavo; OCTAVO_DEBUG=1 shows where)", 1)


def _debugging() -> bool:
    return os.environ.get("OCTAVO_DEBUG", "") not in ("", "0")


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)  # noqa: T201
    return code
