"""Listening sockets, bound before anything slow begins."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket

from octavo.errors import ConfigError

__all__ = ["BACKLOG", "allow_many_files", "bind", "bind_shared"]

BACKLOG = 2048
# The kernel closes the connection of a machine that vanished (a pulled cable) within a minute, if it is idle or if it
# has unsent data. Connections inherit this from their listener.
_KEEP_ALIVE_OPTIONS = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
_MAX_FILES = 1 << 16


def allow_many_files() -> None:
    """Raise the limit of open files to what the system allows: shells set 1024, which limits the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int, *, shared: bool = False, prefix: str = "") -> socket.socket:
    """Listen on a port.

    Args:
        host: an address or name of this machine.
        port: 0 for any free port.
        shared: other processes of this user may listen on it too; the kernel distributes connections.
        prefix: of the options for host and port in messages: `admin_`.

    Raises:
        ConfigError: the port is in use or not allowed, or the address is unknown.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"{prefix}host: {host!r} port {port} is not an address of this machine ({error})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE_OPTIONS.items():
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            option = f"--{prefix}port".replace("_", "-")
            raise ConfigError(
                f"{prefix}port: {port} is in use on {host}; choose another with {option}, or 0 for any"
            ) from None
        field = "host" if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL else "port"
        raise ConfigError(f"{prefix}{field}: {host} port {port} cannot be bound ({error})") from None
    listener.setblocking(False)
    return listener


def bind_shared(host: str, port: int, count: int) -> list[socket.socket]:
    """Several listeners on one port; the kernel distributes connections.

    Raises:
        ConfigError: as `bind`. A port that another program shares counts as in use.
    """
    if count == 1:
        return [bind(host, port)]
    # A shared bind alone would succeed on a port that another program shares.
    with bind(host, port) as probe:
        port = probe.getsockname()[1]
    return [bind(host, port, shared=True) for _ in range(count)]
