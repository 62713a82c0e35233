"""Errors in the words of the command line: flags, where the settings behind them have other names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from octavo.errors import ConfigError, InvalidRequest, OctavoError

__all__ = ["in_flags"]

# Settings whose option is called otherwise, by the option's parameter.
_SETTINGS = {"num_blocks": "num_gpu_blocks_override"}
_BEGINNING = re.compile(r"([a-z][a-z0-9_]*):")
# A setting's name of several words; not a part of a path, a key of a file or a value in quotes.
_NAME = re.compile(r"(?<![\w./'\"-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w/'\"]|\.\w)")


def in_flags(error: OctavoError, arguments: Sequence[str]) -> str:
    """An error's message with the flags of the command in place of settings and fields.

    Args:
        error: that the command ended with.
        arguments: of the command line, the command first.
    """
    message = str(error)
    file = _file(arguments)
    if file is not None and message.startswith(f"{file}:"):
        return message  # of a file: its keys are the settings
    flags = _flags(arguments[:1])
    if isinstance(error, InvalidRequest) and "sampling_seed" in flags:
        flags = {**flags, "seed": flags["sampling_seed"]}
    if isinstance(error, ConfigError):
        message = _NAME.sub(lambda found: flags.get(found.group(), found.group()), message)
    found = _BEGINNING.match(message)
    if found and found.group(1) in flags:
        message = flags[found.group(1)] + message[found.end(1) :]
    return message


def _file(arguments: Sequence[str]) -> str | None:
    for place, argument in enumerate(arguments):
        if argument == "--config":
            return arguments[place + 1] if place + 1 < len(arguments) else None
        if argument.startswith("--config="):
            return argument.removeprefix("--config=")
    return None


def _flags(command: Sequence[str]) -> Mapping[str, str]:
    """The flags of a command by the settings they set; none of what is no command."""
    from typer.main import get_command

    from octavo.cli.app import app

    found = getattr(get_command(app), "commands", {}).get("".join(command))
    if found is None:
        return {}
    flags = {option.name: option.opts[0] for option in found.params if option.opts[0].startswith("--")}
    flags |= {name: flags[option] for name, option in _SETTINGS.items() if option in flags}
    return flags
