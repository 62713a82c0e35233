"""Error messages with the flags of the command line in place of the names of settings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, InvalidRequest, OctavoError

if TYPE_CHECKING:
    from typer import Typer

__all__ = ["WrongOption", "in_flags", "reading_options", "wrong_value"]

# Settings whose option has another name, by the option's parameter.
_SETTINGS = {"num_blocks": "num_gpu_blocks_override"}
_EXPECTED = re.compile(r"Input should be (?P<what>[^,]*)")
_BEGINNING = re.compile(r"([a-z][a-z0-9_]*):")
# A setting's name of several words, outside paths, keys of files and quoted values.
_NAME = re.compile(r"(?<![\w./'\"-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w/'\"]|\.\w)")


class WrongOption(Exception):
    """The command line is invalid on any machine and for any model.

    Attributes:
        error: says why, by the name of the setting.
    """

    def __init__(self, error: OctavoError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def reading_options() -> Iterator[None]:
    """Errors raised inside are errors of the command line.

    Raises:
        WrongOption: in place of a `ConfigError` or `InvalidRequest`.
    """
    try:
        yield
    except (ConfigError, InvalidRequest) as error:
        raise WrongOption(error) from None


def wrong_value(error: Any, arguments: Sequence[str]) -> str | None:
    """The message for a value that typer refused: the flag, the value and what is expected.

    Args:
        error: typer's.
        arguments: of the command line.

    Returns:
        None where its own message says so, or it is about something else.
    """
    flags: Sequence[str] = getattr(getattr(error, "param", None), "opts", ())
    found = _EXPECTED.search(str(getattr(error, "message", "")))
    values = [value for flag in flags for value in _values(flag, arguments)]
    if found is None or not values:
        return None
    what = found["what"]
    default = error.param.default
    if what.startswith("a valid ") and isinstance(default, int | float):
        what += f", such as {default:g}"
    return f"{flags[0]}: {', '.join(map(repr, values))} should be {what}"


def _values(flag: str, arguments: Sequence[str]) -> list[str]:
    joined = [argument.removeprefix(f"{flag}=") for argument in arguments if argument.startswith(f"{flag}=")]
    return joined + [value for given, value in itertools.pairwise(arguments) if given == flag]


def in_flags(error: OctavoError, arguments: Sequence[str], app: Typer) -> str:
    """An error message with flags in place of settings and fields.

    Args:
        error: that the command ended with.
        arguments: of the command line, the command first.
        app: the command line, which knows the flags.
    """
    message = str(error)
    file = _file(arguments)
    if file is not None and message.startswith(f"{file}:"):
        return message  # of a file: its keys are the settings
    flags = _flags(arguments[:1], app)
    if isinstance(error, InvalidRequest) and "sampling_seed" in flags:
        flags = {**flags, "seed": flags["sampling_seed"]}
    if isinstance(error, ConfigError):
        message = _NAME.sub(lambda found: flags.get(found.group(), found.group()), message)
    found = _BEGINNING.match(message)
    if found and found.group(1) in flags:
        message = flags[found.group(1)] + message[found.end(1) :]
    return message


def _file(arguments: Sequence[str]) -> str | None:
    return next(iter(_values("--config", arguments)), None)


def _flags(command: Sequence[str], app: Typer) -> Mapping[str, str]:
    """The flags of a command, by setting."""
    from typer.main import get_command

    found = getattr(get_command(app), "commands", {}).get("".join(command))
    if found is None:
        return {}
    flags = {option.name: option.opts[0] for option in found.params if option.opts[0].startswith("--")}
    flags |= {name: flags[option] for name, option in _SETTINGS.items() if option in flags}
    return flags
