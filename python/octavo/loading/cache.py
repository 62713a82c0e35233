"""Octavo's own cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cache_folder", "locked"]


def cache_folder() -> Path:
    """`OCTAVO_CACHE`, or `octavo` in `XDG_CACHE_HOME` or in `~/.cache`; not necessarily there yet.

    Raises:
        ConfigError: there is no home folder for it.
    """
    named = os.environ.get("OCTAVO_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser().absolute()
        return (Path(base).expanduser() if base else Path.home() / ".cache").absolute() / "octavo"
    except RuntimeError as error:
        raise ConfigError(f"the cache folder cannot be named ({error}); set OCTAVO_CACHE to a path") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; waits for other processes. The end of the process frees it too."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
