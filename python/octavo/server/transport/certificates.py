"""A certificate that is renewed while the server runs: new connections get it, those that are open stay."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from octavo.errors import ConfigError
from octavo.server.access.hosts import tls_context
from octavo.server.settings import ServerSettings

__all__ = ["watch_certificate"]

logger = logging.getLogger("octavo.server")

_State = tuple[tuple[int, int, int], ...]


async def watch_certificate(contexts: list[ssl.SSLContext], settings: ServerSettings, interval: float = 5.0) -> None:
    """Load the certificate and its key again whenever their files change, for ever; returns where there is none.

    Files that cannot be used (half of a pair, a key of another certificate) leave the old certificate in place, are
    logged once, and are tried again.

    Args:
        contexts: of the listeners.
        settings: with the files' names; of client certificates' authorities nothing is read again.
        interval: seconds between looks.
    """
    certificate = settings.ssl_certfile
    if certificate is None or not contexts:
        return
    files = [Path(certificate)] + ([] if settings.ssl_keyfile is None else [Path(settings.ssl_keyfile)])
    seen = await asyncio.to_thread(_state, files)
    refused: _State | None = None
    while True:
        await asyncio.sleep(interval)
        now = await asyncio.to_thread(_state, files)
        if now == seen:
            continue
        try:
            # A context that a pair was refused by may be left with half of it, so the pair is tried on another first.
            names = settings.ssl_certfile, settings.ssl_keyfile, None, settings.ssl_keyfile_password
            await asyncio.to_thread(tls_context, *names)
            _load(contexts, settings)
        except (ConfigError, OSError) as error:
            if now != refused:
                logger.error("the certificate stays as it was: %s", error)
            refused = now
        else:
            seen, refused = now, None
            logger.info("the certificate of %s is in use from now on", certificate)


def _state(files: list[Path]) -> _State:
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _load(contexts: list[ssl.SSLContext], settings: ServerSettings) -> None:
    """Two small files; in no thread, for a handshake of the event loop may begin with no half of a pair."""
    password = settings.ssl_keyfile_password
    assert settings.ssl_certfile is not None
    for context in contexts:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password or (lambda: ""))
