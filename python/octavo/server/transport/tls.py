"""TLS of the listener, and renewal of its certificate while the server runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from octavo.errors import ConfigError
from octavo.server.settings import ServerSettings

__all__ = ["tls_context", "watch_certificate"]

logger = logging.getLogger("octavo.server")

_State = tuple[tuple[int, int, int], ...]


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the settings' certificate; None without a certificate.

    Raises:
        ConfigError: files that cannot be used, or a key without a certificate.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None or settings.ssl_ca_certs is not None:
            raise ConfigError("ssl_certfile: a certificate is missing; --ssl-keyfile and --ssl-ca-certs need one")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        _load(context, settings)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile: {certificate} with key {key or certificate} cannot be used ({error})"
        ) from None
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_ca_certs: {settings.ssl_ca_certs} cannot be used ({error})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def watch_certificate(contexts: list[ssl.SSLContext], settings: ServerSettings, interval: float = 5.0) -> None:
    """Load the certificate and its key again whenever their files change, until cancelled.

    New connections use the new certificate; open ones keep theirs. Files that cannot be used (one of a pair, a key of
    another certificate) leave the old certificate in place, are logged once, and are tried again.

    Args:
        contexts: of the listeners.
        settings: name the files. The authorities of client certificates are not read again.
        interval: seconds between checks.
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
            # A refused pair may leave half of it in a context, so another context tries the pair first.
            await asyncio.to_thread(_load, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings)
            # Two small files, loaded outside a thread: no handshake of the event loop sees half of a pair.
            for context in contexts:
                _load(context, settings)
        except (OSError, ValueError) as error:
            if now != refused:
                logger.error(
                    "the old certificate stays in use: %s with key %s cannot be used (%s)",
                    certificate,
                    settings.ssl_keyfile or certificate,
                    error,
                )
            refused = now
        else:
            seen, refused = now, None
            logger.info("the new certificate in %s is in use", certificate)


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


def _load(context: ssl.SSLContext, settings: ServerSettings) -> None:
    assert settings.ssl_certfile is not None
    # A password function stops OpenSSL from asking on the terminal, which would block a service.
    password = settings.ssl_keyfile_password or (lambda: "")
    context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password)
