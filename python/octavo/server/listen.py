"""A port, taken before anything long begins."""

from __future__ import annotations

import errno
import socket

from octavo.errors import ConfigError

__all__ = ["BACKLOG", "bind"]

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Listen on a port.

    Args:
        host: an address or name of this machine.
        port: 0 for any free one.

    Raises:
        ConfigError: in use, not allowed, or no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"host: {host!r} port {port} is no address of this machine ({error})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port: {port} is in use on {host}; choose another with --port, or 0 for any") from None
        field = "host" if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL else "port"
        raise ConfigError(f"{field}: {host} port {port} cannot be bound ({error})") from None
    listener.setblocking(False)
    return listener
