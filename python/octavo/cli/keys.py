"""API keys of the command line and the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from octavo.cli.flags import reading_options
from octavo.server.access.api_keys import KeyRing

__all__ = ["key_ring"]

_LOG = logging.getLogger("octavo.server")


def key_ring(file: str | None, arguments: Sequence[str] | None) -> KeyRing:
    """The keys of a file, of `OCTAVO_API_KEY` and of `--api-key`, together.

    Raises:
        WrongOption: one of the command line that cannot be used.
        ConfigError: another that cannot.
    """
    if arguments:
        with reading_options():
            KeyRing(arguments=tuple(arguments))
        _LOG.warning(
            "--api-key: everyone on this machine can read it in the list of processes; prefer --api-key-file, or "
            "OCTAVO_API_KEY in the environment"
        )
    # The engine's process has no use for them, and would show them in its own environment.
    return KeyRing(file, os.environ.pop("OCTAVO_API_KEY", None), tuple(arguments or ()))
